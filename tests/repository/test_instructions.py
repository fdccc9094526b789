"""Executed instructions of the row passes, and the page with the times that follow from them."""

import importlib.util
import re

import pytest
from helpers import needs_machine_code

pytest.importorskip("tabulate")

from benchmarks.instructions import page
from benchmarks.instructions.cuda import Row
from benchmarks.instructions.sass import cuobjdump
from benchmarks.tables import markdown

pytestmark = [
    pytest.mark.skipif(
        cuobjdump() is None or importlib.util.find_spec("triton") is None,
        reason="needs cuobjdump and Triton",
    ),
    pytest.mark.xdist_group("instructions"),  # one worker disassembles
]
# The most executed instructions per element on sm_90, with gradient and for log-probs alone.
BUDGET = {
    (151_936, "bfloat16"): (22.0, 13.6),
    (18_992, "bfloat16"): (22.5, 14.5),
    (4_096, "bfloat16"): (23.0, 13.8),
    (151_936, "float32"): (28.2, 19.0),
}
# In the loops of Triton's passes, in every dtype.
OF_TRITON = {"first pass": 10.5, "second pass": 7.0, "log-probs alone": 10.5}


@pytest.mark.parametrize(("vocabulary", "dtype"), BUDGET)
def test_budget(vocabulary, dtype):
    needs_machine_code("sm_90")
    rows = (Row("sm_90", vocabulary, dtype, gradient) for gradient in (True, False))
    found = [row.counts()["all"] for row in rows]
    assert all(f <= most for f, most in zip(found, BUDGET[vocabulary, dtype], strict=True)), found


def test_triton_budget():
    needs_machine_code("sm_90")
    found = page.triton("sm_90")
    assert set(found.index) == {"bfloat16", "float16", "float32"}
    assert [of for of in found if found[of].max() > OF_TRITON.get(of, 9.5)] == []
    text = page.PAGE.read_text()
    if page.versions() in text:
        assert markdown(found.map("{:.2f}".format)) in text


def test_page_has_the_predictions():
    """After a change of the kernels: ``python -m benchmarks.instructions --write``."""
    needs_machine_code("sm_90")
    text = page.PAGE.read_text()
    assert page.assumptions() in text
    for value, least, most in re.findall(r"([\d,.]+)(?: \w+| %)? \(([\d,.]+)-([\d,.]+)\)", text):
        low, middle, high = (float(each.replace(",", "")) for each in (least, value, most))
        assert low <= middle <= high, value
    if page.versions() not in text:
        pytest.skip("built by other compilers than the page's")
    cells = {cell.strip() for cell in text.split("|")}
    for line in page.of_length((4_096, "bfloat16")).values():
        assert set(line.values()) <= cells
