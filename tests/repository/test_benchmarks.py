"""Benchmarks: all methods compute the same, only correct ones are timed, records say what was."""

import itertools
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import INTERPRETED, KERNELS, assert_within_budget, needs_native
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from bapo_kernels import bapo_loss, empty_cache, reference
from bapo_kernels.core import autograd, memory, prepare, rows, tokens
from bapo_kernels.tools.budget import in_some_orders
from benchmarks import gate, records, run, targets, timing
from benchmarks.__main__ import app
from benchmarks.cases import (
    DISTILLATION,
    HEAD,
    POLICIES,
    SAMPLING_MASK,
    WHOLE_VOCABULARY,
    Batch,
    Case,
)
from benchmarks.floor import floor
from benchmarks.methods import Method, methods
from benchmarks.sets import LONG, ZIPF

METHODS = {f"{method.name}, {method.level}": method for method in methods()}
TASKS = ["loss", *POLICIES, "log_probs"]
LAYOUTS = ["dense", "padded", "packed", "zero advantage"]
LEVELS = [("logits", False), ("hidden", False), ("hidden", True)]  # and whether the head is frozen


def small(level, task="loss", **options):
    return replace(Case.of(level, task, "Qwen3-0.6B", 24, **options), V=1_003, H=128)


of_head = partial(small, "hidden", sweep=HEAD)
with_mask = partial(small, sweep=SAMPLING_MASK)


# Also one that is measured on a GPU alone.
ON_A_CPU = [
    name
    for name, method in METHODS.items()
    if (
        "cpu" in method.devices
        and method.sweep != SAMPLING_MASK
        and {*method.tasks} & {*TASKS, "search"}
    )
    or method.name == "PyTorch linear_cross_entropy"
]


@needs_native
@pytest.mark.parametrize("name", ON_A_CPU)
def test_every_method_computes_the_same(name):
    every_case = {"everywhere": True, "sweep": None, "dtypes": ("float32",), "devices": ("cpu",)}
    method = replace(METHODS[name], **every_case, float32_logits=False)
    if method.package is not None and method.version is None:
        pytest.skip(f"{method.package} is not installed")
    if method.module is not None:
        pytest.importorskip(method.module)  # torch has linear_cross_entropy since 2.13
    if "compiled" in name:
        pytest.skip("compiles for minutes; it is checked before it is timed")
    options = {"dtype": "float32", "data": "very stale"}
    if method.level == "tokens":
        case = Case("tokens", "search", "at the maximum bounds", 512, 1, 1, **options)
        assert gate.check(method, case, "cpu") == (0.0, 0.0)
        return
    every = itertools.product(TASKS, LAYOUTS)
    cases = [small(method.level, task, layout=layout, **options) for task, layout in every]
    cases = [case for case in cases if method.takes(case) and method.why_not(case, "cpu") is None]
    assert cases
    for case in cases:
        assert max(gate.check(method, case, "cpu")) < 2e-5


# Some of those that every machine has.
OF_SWEEPS = {
    HEAD: {
        "PyTorch cross_entropy",
        "bapo_kernels cpu",
        "bapo_kernels cpu, live",
        "bapo_kernels cpu, chunk_tokens = N/4",
        "bapo_kernels cpu, live, chunk_tokens = N/4",
        "bapo_kernels cpu, log-probs, then loss",
    },
    SAMPLING_MASK: {"PyTorch masked_fill", "PyTorch gather", "bapo_kernels cpu"},
    WHOLE_VOCABULARY: {"bapo_kernels cpu"},
}


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("sweep", "level", "frozen"),
    [(s, *level) for s in OF_SWEEPS for level in LEVELS if s != HEAD or level[0] == "hidden"],
)
def test_every_method_of_a_sweep_computes_the_same(sweep, level, frozen, dtype):
    """Without a mask, in the sweep over sampling masks, ours only."""
    options = {"sweep": sweep, "dtype": dtype, "frozen": frozen}
    cases = [small(level, data="very stale", **options)]
    if sweep == HEAD:
        cases = [small(level, layout=layout, **options) for layout in ("dense", "zero advantage")]
    checked = set()
    for case in cases:
        for method in run.selected(case, "cpu", without=["compiled"])[0]:
            errors = gate.check(method, case, "cpu")
            assert sweep == HEAD or dtype == "bfloat16" or max(errors) < 2e-5
            grads = method.step(batch := Batch(case, "cpu"))[1]
            assert [grad is None for grad in grads] == [False, frozen][: len(grads)], method.name
            assert not frozen or batch.inputs[1].grad is None
            checked.add(method.name)
    assert checked >= OF_SWEEPS[sweep]
    assert sweep != WHOLE_VOCABULARY or all(name.startswith("bapo") for name in checked)


of_teacher = partial(small, sweep=DISTILLATION, dtype="float32")
VJP, TOP_K = of_teacher("logits", "vjp", K=5), of_teacher("hidden", "forward_kl_topk", K=5)
WITH_LOSS = replace(TOP_K, task="loss + forward_kl_topk")
WHOLE = replace(TOP_K, task="forward_kl")
OF_TOP_K = {"bapo_kernels cpu", "PyTorch log_softmax"}
OF_TEACHERS = {
    VJP: OF_TOP_K,
    TOP_K: OF_TOP_K,
    replace(TOP_K, frozen=True): OF_TOP_K,
    WITH_LOSS: OF_TOP_K | {"bapo_kernels cpu, two passes"},
    WHOLE: set(),  # packages alone
    replace(WHOLE, frozen=True): set(),
}


@needs_native
@pytest.mark.parametrize("case", OF_TEACHERS, ids=lambda case: case.title)
def test_every_method_of_a_distillation_computes_the_same(case):
    expected = OF_TEACHERS[case]
    batch = Batch(case, "cpu")
    value = gate.value_at_full_size(batch, torch.float32)
    checked = set()
    for one in run.selected(case, "cpu", without=["compiled"])[0]:
        assert max(gate.check(one, case, "cpu")) < 2e-5, one.name
        gate.check_value(one.step(batch)[0], value, batch, torch.float32)
        assert not case.frozen or batch.inputs[1].grad is None
        checked.add(one.name)
    assert checked >= expected
    assert expected or not any(name.startswith("bapo") for name in checked)


@needs_native
def test_one_label_is_the_yardstick_of_several():
    batch = Batch(VJP, "cpu")
    (copy, _), (one, call) = run._yardsticks(batch).values()
    call()
    got, logits = batch.inputs[0].grad.double(), batch.inputs[0].detach().double()
    logp = reference.log_probs(logits.requires_grad_(), batch.labels)[0]
    (expected,) = torch.autograd.grad(logp.sum(), logits)
    assert gate.distance(got, expected) < 1e-6
    assert one.bytes == 1.5 * copy.bytes == floor(VJP, batch.shares()).bytes


def without_others(student, teacher):
    return (teacher.exp() * (teacher - student)).sum(-1)


def renormalised(student, teacher):
    return without_others(student.log_softmax(-1), teacher.log_softmax(-1))


def of_columns(batch):
    function = reference.log_probs if batch.case.level == "logits" else reference.linear_log_probs
    return function(*batch.inputs, batch.columns)[0]


def of_columns_with_other_gradients(batch):
    logp = of_columns(batch)
    others = logp.roll(1, dims=-1)
    return logp.detach() + others - others.detach()


@pytest.mark.parametrize("case", [TOP_K, WITH_LOSS], ids=lambda case: case.task)
@pytest.mark.parametrize("loss", [without_others, renormalised, lambda s, t: s.sum(-1)])
def test_another_divergence_is_not_timed(monkeypatch, case, loss):
    right = Method("right", "hidden", log_probs=of_columns)
    gate.check(right, case, "cpu")
    monkeypatch.setattr("benchmarks.methods.method.forward_kl", loss)
    with pytest.raises(gate.WrongAnswerError, match="off by"):
        gate.check(right, case, "cpu")


def test_gradients_of_other_labels_are_not_timed():
    gate.check(Method("right", "logits", log_probs=of_columns), VJP, "cpu")
    wrong = Method("wrong", "logits", log_probs=of_columns_with_other_gradients)
    with pytest.raises(gate.WrongAnswerError, match="gradient off by"):
        gate.check(wrong, VJP, "cpu")


SETS = [(layout, 512, V) for layout in ("dense", *LONG, ZIPF) for V in (10, 2_048)]


@pytest.mark.parametrize(
    ("layout", "N", "V"), [("dense", 512, 151_936), ("dense", 24, 1_003), *SETS]
)
def test_the_sets_that_are_measured(layout, N, V):
    """Distinct ids, ascending, with the label; in the dense layout 64 on average, 512 at most."""
    batch = Batch(replace(with_mask("tokens", layout=layout), N=N, V=V), "cpu")
    mask, labels = batch.sampling_mask, batch.labels.flatten()
    sizes = mask.offsets.diff()
    for ids, label in zip(mask.token_ids.split(sizes.tolist()), labels, strict=True):
        assert (ids.diff() > 0).all()
        assert 0 <= ids[0] <= ids[-1] < V
        assert label in ids
    occurrences = mask.token_ids.long().bincount().max()
    assert (occurrences > 400) == (layout == ZIPF or V == 10)
    assert batch.shares()["allowed"] == sizes.sum().item() / (N * V)
    places = batch.places
    assert torch.equal(places.ids[mask.offsets[:-1] + places.labels], labels)
    assert torch.equal(Batch(batch.case, "cpu").sampling_mask.token_ids, mask.token_ids)
    if (layout, V) == ("dense", 151_936):
        assert sizes.double().mean().item() == pytest.approx(64, abs=2)
        assert 1 <= sizes.min() < 10
        assert sizes.max() == 512
        assert sizes.double().log().std().item() == pytest.approx(1.0, abs=0.1)


@needs_native
@pytest.mark.parametrize(
    ("level", "frozen", "sweep", "expected"),
    [
        ("logits", False, SAMPLING_MASK, {"copy": 2, "zeros": 1}),
        ("hidden", True, SAMPLING_MASK, {"copy": 2}),
        # In one chunk and in four.
        ("hidden", False, HEAD, {"three matrix products": 6}),
        ("hidden", True, HEAD, {"two matrix products": 4}),
    ],
)
def test_yardsticks(quick, level, frozen, sweep, expected):
    """In memory that exists; the first one is the unit of all rates."""
    case = small(level, sweep=sweep, frozen=frozen, dtype="float32")
    size = 4 * case.V * (case.N if level == "logits" else case.H)
    first = next(iter(expected))
    if sweep == HEAD:
        expected = expected | {f"{first}, four chunks": expected[first]}
    yardsticks = run._yardsticks(Batch(case, "cpu"))
    assert list(yardsticks) == list(expected)
    for name, (need, call) in yardsticks.items():
        flops = expected[name] * case.N * case.V * case.H
        needed = (0, flops) if sweep == HEAD else (expected[name] * size, 0)
        assert (need, timing.CPUClock().peak_bytes(call)) == (needed, 0)
        with FlopCounterMode(display=False) as counter:
            call()
        assert counter.get_total_flops() == needed[1]
    got = {r["method"]: r for r in run.measure(case, "cpu", []) if r["status"] == "measured"}
    assert got[first]["share"] == 1.0
    assert {(r["yardstick"], r["frozen"]) for r in got.values()} == {(first, frozen)}


@needs_native
def test_float32_logits_have_a_tolerance_of_their_own():
    """A method that says so and rounds its logits to bfloat16 is wrong, small and at full size."""
    case = of_head(dtype="bfloat16")
    narrow, wide = (METHODS[f"bapo_kernels cpu{form}, hidden"] for form in ("", ", float32 logits"))
    lying = replace(narrow, float32_logits=True)
    batch, dtype = Batch(case, "cpu"), torch.float32
    expected = gate.value_at_full_size(batch, dtype)
    assert gate.check(wide, case, "cpu")[0] < 1e-4
    assert gate.check_value(wide.step(batch)[0], expected, batch, dtype) < 1e-5
    gate.check(narrow, case, "cpu")
    with pytest.raises(gate.WrongAnswerError, match="value off by"):
        gate.check(lying, case, "cpu")
    with pytest.raises(gate.WrongAnswerError, match="value off by"):
        gate.check_value(narrow.step(batch)[0], expected, batch, dtype)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU they are checked before they are timed")
@pytest.mark.parametrize("name", ["TRL Triton", "Liger cross entropy", "Liger GRPO"])
def test_adapters_of_triton_kernels_are_correct_in_the_interpreter(name):
    method = METHODS[f"{name}, logits"]
    if method.package is not None and method.version is None:
        pytest.skip(f"{method.package} is not installed")
    for layout in method.layouts:
        case = small("logits", "clip", layout=layout, dtype="float32")
        assert max(gate.check(method, case, "cpu")) < 2e-5


def right(batch):
    return reference.log_probs(*batch.inputs, batch.labels)[0]


def loss_and_gradient(batch):
    arguments = right(batch), batch.old, batch.A, batch.mask
    loss = reference.bapo_loss_from_log_probs(*arguments, **batch.options).loss
    return loss.detach(), torch.autograd.grad(loss, batch.inputs)[0]


def overwriting(batch):
    loss, gradient = loss_and_gradient(batch)
    batch.inputs[0].detach().copy_(gradient)
    return loss, (batch.inputs[0].detach(),)


def wrong_in_part(batch, of_loss=1.0, of_gradient=1.0):
    loss, gradient = loss_and_gradient(batch)
    return of_loss * loss, (of_gradient * gradient,)


def broken(batch):
    raise RuntimeError("out of order")


def fails_later():
    calls = itertools.count()
    return lambda batch: right(batch) if next(calls) < 4 else broken(batch)


TIMED = replace(
    small("logits", dtype="float32"), N=48
)  # twice as many as those that are checked first
MADE_UP = {
    "overwriting": {"train": overwriting, "overwrites": True},
    "right": {"log_probs": right},
    "wrong": {"log_probs": lambda batch: 1.1 * right(batch)},
    "wrong gradient": {"train": partial(wrong_in_part, of_gradient=1.5)},
    "wrong at full size": {"train": lambda b: wrong_in_part(b, 2.0 if b.case.N == TIMED.N else 1)},
    "broken": {"log_probs": broken},
    "not installed": {"log_probs": right, "package": "an-unknown-package"},
    "GPU only": {"log_probs": right, "devices": ("cuda",)},
}


@pytest.fixture
def quick(monkeypatch):
    def made_up():
        made = MADE_UP | {"fails later": {"log_probs": fails_later()}}
        yield from (Method(name, "logits", **options) for name, options in made.items())

    monkeypatch.setattr(run, "methods", made_up)
    monkeypatch.setattr(run.clock_of("cpu").__class__, "SECONDS", 0.0)


def recorded(folder, monkeypatch, cases=1):
    """The result of ``benchmarks run``, and its records by method."""
    monkeypatch.setattr("benchmarks.__main__.cpu_suite", lambda: iter([TIMED] * cases))
    path = folder / "cpu.jsonl"
    result = CliRunner().invoke(app, ["run", "--out", str(path)])
    return result, {r["method"]: r for r in records.load(path)}


@needs_native
def test_only_correct_methods_are_timed(quick, tmp_path, monkeypatch):
    """What cannot run has no record, and what fails does not stop the others."""
    result, got = recorded(tmp_path, monkeypatch)
    assert result.exit_code == 0, result.output
    assert {method: record["status"] for method, record in got.items()} == {
        **dict.fromkeys(["copy", "right", "overwriting"], "measured"),
        **dict.fromkeys(["wrong", "wrong gradient", "wrong at full size"], "wrong"),
        **dict.fromkeys(["broken", "fails later"], "failed"),
    }
    assert "value off by" in got["wrong"]["why"]
    assert got["broken"]["why"] == got["fails later"]["why"] == "RuntimeError: out of order"
    assert all("ms" not in r for r in got.values() if r["status"] != "measured")
    mine, copy = got["right"], got["copy"]
    expected = {"machine", "torch", "commit", "date", "ms", "ms_20", "ms_80", "repetitions"}
    assert expected <= mine.keys()
    assert mine["repetitions"] == run.ROUNDS
    assert mine["bytes"] == floor(TIMED, mine["shares"]).bytes
    assert mine["GB_per_s"] == pytest.approx(mine["bytes"] / mine["ms"] / 1e6)
    assert mine["share"] == pytest.approx(mine["GB_per_s"] / copy["GB_per_s"])
    first_call = partial(Method("right", "logits", log_probs=right).step, Batch(TIMED, "cpu"))
    assert mine["peak_bytes"] == timing.CPUClock().peak_bytes(first_call)
    of_gradients = {name: got[name]["gradient_bytes"] for name in ("right", "overwriting")}
    assert of_gradients == {"right": 4 * TIMED.N * TIMED.V, "overwriting": 0}, "beside the logits"


@needs_native
@pytest.mark.parametrize("turns", [0, 1])
def test_an_interrupt_keeps_the_records(quick, tmp_path, monkeypatch, turns):
    """Methods that are ready have one turn; later, the turns that are complete count."""
    calls = itertools.count(1)

    def stops(batch):
        if turns == 0 or next(calls) == 5:  # small check, full size, peak memory, first turn
            raise KeyboardInterrupt
        return right(batch)

    chosen = {"right": right, "stops": stops}
    made = [Method(name, "logits", log_probs=function) for name, function in chosen.items()]
    monkeypatch.setattr(run, "methods", lambda: iter(made))
    result, got = recorded(tmp_path, monkeypatch, cases=2)
    assert result.exit_code != 0
    assert got["right"]["status"] == got["copy"]["status"] == "measured"
    assert got["right"]["repetitions"] == turns + 1
    assert ("stops" in got) == (turns > 0)


def test_the_data_does_not_come_from_the_kernels_under_test(monkeypatch):
    """Kernels that are wrong, or hang, do not compute the data."""
    for module in (prepare, rows, tokens, autograd):
        monkeypatch.setattr(module, "ops_of", None)
    for level, sweep in itertools.product(("logits", "hidden"), (None, SAMPLING_MASK)):
        batch = Batch(small(level, sweep=sweep), "cpu")
        truth = reference.log_probs if level == "logits" else reference.linear_log_probs
        given = dict(labels=batch.labels, sampling_mask=batch.sampling_mask)
        same = [x.detach() for x, _ in in_some_orders(partial(truth, *batch.inputs, **given))]
        exact = truth(*(x.detach().double() for x in batch.inputs), **given)[0]
        assert (batch.sampling_mask is None) == (sweep is None)
        assert_within_budget("log_probs", batch.logp, same, exact)
        assert batch.shares()["unmasked"] == 1


@pytest.mark.parametrize("N", [64, 8_192])
def test_mixed_rows_have_the_shares_of_the_targets(N):
    shares = Batch(replace(small("tokens", layout="mixed", data="on-policy"), N=N), "cpu").shares()
    error = {"abs": 2 / N**0.5 / 4}
    assert shares["unmasked"] == pytest.approx(0.75, **error)
    assert shares["active"] == pytest.approx(0.75 * 0.6, **error)
    assert shares["undecided"] == pytest.approx(0.03, abs=0.5 / N)
    assert 0 < shares["gradient"] < shares["active"]


def test_targets():
    """0.9 of a copy meets 0.93 and misses 0.79; a method without a record says why."""
    _, mixed, live, probs = targets.targets("logits", 64, 100, 1, "bfloat16")
    copy = {"method": "copy", "ms": 2.0}
    ours = {"method": "bapo_kernels cuda", "ms": 1.8, "yardstick": "copy", "GB_per_s": 1.0}
    lines = [copy, ours, ours | {"method": "bapo_kernels cuda, live"}]
    assert mixed.result("cuda", lines, {})["met"]
    missed = live.result("cuda", lines, {})
    assert (missed["ratio"], missed["most"], missed["met"]) == (0.9, 0.79, False)
    assert probs.result("cuda", lines, {})["ratio"] == 1.8  # of a read, half of a copy
    result = mixed.result("triton", [copy], {"bapo_kernels triton": "no GPU"})
    assert (result["status"], result["why"]) == ("not measured", "no GPU")
    assert "missed: mixed rows, live; failed: mixed rows" in targets.verdict([missed, result])


@pytest.mark.parametrize(
    ("device", "capability", "name"),
    [("cpu", "AVX512", "cpu"), ("cpu", "AVX2", "cpu_avx2"), ("cuda", "AVX2", "cuda")],
)
def test_a_processor_without_avx512_has_records_of_its_own(monkeypatch, device, capability, name):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert records.file_of(device) == records.RESULTS / f"{name}.jsonl"
    assert capability in records.processor()


def test_costs_are_those_of_the_call():
    def call():
        a = torch.empty(1_000_000)
        b = a.to(torch.bfloat16)
        del a
        return b, torch.empty(500_000)

    assert timing.CPUClock().peak_bytes(call) == 6_000_000


@needs_native
def test_peak_memory_of_a_later_call():
    """Memory that the call before has left for the gradient counts as well."""
    logits = torch.zeros(1, memory.KEPT_FROM_BYTES // 4)
    labels, advantages = torch.zeros(1, dtype=torch.int64), torch.ones(1)

    def call():
        leaf = logits.detach().requires_grad_()
        bapo_loss(leaf, labels, None, advantages, backend="cpu").loss.backward()

    call()
    assert memory.LOGITS.last
    assert timing.CPUClock().peak_bytes(call) >= logits.nbytes
    empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["logits", "hidden"])
@pytest.mark.parametrize("sweep", [None, SAMPLING_MASK])
def test_on_a_gpu(level, sweep):
    case = replace(small(level, sweep=sweep), N=64)
    got = {r["method"]: r for r in run.measure(case, "cuda", [])}
    for backend in {"cuda", "triton"} & set(KERNELS):
        assert got[f"bapo_kernels {backend}"]["status"] == "measured"
    baseline = "PyTorch gather" if sweep else "PyTorch cross_entropy"
    assert got[baseline]["status"] == "measured"
    assert json.dumps(list(got.values()))
