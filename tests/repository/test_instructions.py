"""Executed instructions of the row passes, and their budget."""

import importlib.util

import numpy as np
import pytest
from helpers import exhaustive_unless, needs_machine_code

pytest.importorskip("tabulate")

from benchmarks.instructions import launch
from benchmarks.instructions.__main__ import ARCHITECTURES, triton
from benchmarks.instructions.cuda import Row, kernels
from benchmarks.instructions.machine import to_double
from benchmarks.instructions.sass import cuobjdump

pytestmark = [
    pytest.mark.skipif(
        cuobjdump() is None or importlib.util.find_spec("triton") is None,
        reason="needs cuobjdump and Triton",
    ),
    pytest.mark.xdist_group("instructions"),  # one worker disassembles
]
# The most executed instructions per element on sm_90: of both passes, of all phases, and of a row
# without a gradient.
BUDGET = {
    (151_936, "bfloat16"): (18.0, 22.0, 13.6),
    (18_992, "bfloat16"): (18.0, 22.5, 14.5),
    (4_096, "bfloat16"): (21.3, 23.0, 13.8),
    (151_936, "float32"): (20.5, 28.2, 19.0),
}
# In the loops of Triton's passes, in every dtype.
OF_TRITON = {"first pass": 10.5, "second pass": 7.0, "log-probs alone": 10.5}


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), exhaustive_unless(lambda *case: case == (151_936, "bfloat16"), BUDGET)
)
def test_budget(vocabulary, dtype):
    needs_machine_code("sm_90")
    rows = (Row("sm_90", vocabulary, dtype, gradient) for gradient in (True, False))
    counts, alone = (row.counts() for row in rows)
    assert (counts["loads"] > 0) == (vocabulary > 8_192), "clusters have a warp that loads"
    found = {
        "both passes": counts["first pass"] + counts["second pass"],
        "all phases": counts["all"],
        "log-probs alone": alone["all"],
    }
    for (what, number), most in zip(found.items(), BUDGET[vocabulary, dtype], strict=True):
        assert number <= most, f"{what}: {number:.2f} instructions per element"


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_executed_log_prob(arch):
    """Of 4,096 equal logits, by one warp: all of its 32 lanes add the sums of the whole row."""
    needs_machine_code(arch)
    row = Row(arch, 4_096)
    plan, parameters = launch.launch(4_096, "bfloat16", arch)
    memory = {}
    launch.traces(kernels(row.library, arch)[False, "bfloat16"], arch, plan, parameters, memory)
    place = (launch.LOG_PROBS << 32) // 4
    assert to_double(memory[place] | memory[place + 1] << 32) == pytest.approx(-np.log(32 * 4_096))


@pytest.mark.exhaustive
def test_triton_budget():
    needs_machine_code("sm_90")
    found = triton("sm_90")
    assert set(found.index) == {"bfloat16", "float16", "float32"}
    assert [of for of in found if found[of].max() > OF_TRITON.get(of, 9.5)] == []
