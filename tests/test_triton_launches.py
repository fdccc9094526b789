"""The launches of the Triton backend: how many, by how many programs, and what they rely on."""

from functools import partial

import pytest
import torch
from accuracy import assert_same
from helpers import INTERPRETED, KERNELS, case_with_sets, make_case, run_kernel
from launches import LAUNCHES, CountLaunches
from many_tokens import check_log_probs, tokens
from operands import call, options_of, tokens_of
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from bapo_kernels import BAPOConfig, bapo_linear_loss, bapo_loss, linear_log_probs, log_probs
from bapo_kernels.backends import triton as backend
from bapo_kernels.config import SURROGATES

pytestmark = pytest.mark.skipif(
    "triton" not in KERNELS or not INTERPRETED, reason="needs Triton's interpreter"
)
OF_SETS = {name for name in LAUNCHES if "sets" in name or name == "find_labels"}


@pytest.fixture
def launches(monkeypatch):
    """Launches of every call of an operator by its name, kernels of ATen included."""
    from triton.runtime.interpreter import GridExecutor

    counts, kernels, run_grid = {}, [], GridExecutor.__call__

    def run_and_count(executor, *arguments, **named):
        kernels.append(executor.fn.__name__)
        with _disable_current_modes():  # the interpreter copies its arguments
            return run_grid(executor, *arguments, **named)

    def run(name, operator, *arguments):
        kernels.clear()
        with CountLaunches() as aten:
            operator(*arguments)
        counts.setdefault(name, []).append(len(kernels) + aten.total())

    monkeypatch.setattr(GridExecutor, "__call__", run_and_count)
    for name, operator in backend._operators().items():
        monkeypatch.setitem(backend._operators(), name, partial(run, name, operator))
    return counts


def test_every_operator(launches, monkeypatch):
    """At most as many as in the table, by which the launches of a call are counted."""
    from bapo_kernels.backends.triton import prepare

    case, found = make_case((2, 6), 33, staleness=0.4), (torch.empty(2), torch.empty(6).double())
    run_kernel(case, "triton")
    logits = case.logits.clone().requires_grad_().clone()
    bapo_loss(logits, *case.arguments(), backend="triton", inplace=True).loss.backward()
    bapo_loss(case.logits, *case.arguments(), backend="triton")
    run_kernel(case, "triton", config=BAPOConfig(ratio_level="sequence"))
    searched = zip(("tokens", "present"), tokens_of(12, advantages=torch.ones(12)), strict=True)
    known = dict(searched, log_probs=torch.zeros(12).double(), counted=torch.ones(12).bool())
    ops, table = torch.ops.bapo_kernels_triton, torch.empty(1, 54).double()
    call(ops, "contributions", known, rank=0, table=table)
    torch.ops.bapo_kernels_triton.solve(torch.rand(2, 54).double(), options_of(), *found)
    monkeypatch.setattr(prepare, "ALONE", 0)
    bapo_loss(case.logits, *case.arguments(), backend="triton")

    assert launches["prepare"] == [1, 1, 1, 1, 3]
    most = {name: max(counts) for name, counts in launches.items()}
    assert most == {name: LAUNCHES[name] for name in most}
    assert LAUNCHES.keys() - most.keys() <= {"row_gradient_", "sample_rows", *OF_SETS}


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_launches_of_surrogates(launches, surrogate):
    """The ratio of a sequence takes two more; a gradient that nothing is spread of, one."""
    case, totals = make_case((2, 6), 33, staleness=0.4), []
    for level in ("token", "sequence"):
        launches.clear()
        config = BAPOConfig(surrogate=surrogate, ratio_level=level)
        logits = case.logits.clone().requires_grad_()
        bapo_loss(logits, *case.arguments(), config=config, backend="triton")
        totals.append(sum(map(sum, launches.values())))
    assert totals == dict(clip=[6, 8], cispo=[6, 7], sapo=[3, 6], mask=[6, 8])[surrogate]


def test_every_operator_on_sets(launches):
    case, mask = case_with_sets((2, 6), 33, staleness=0.4)
    given = dict(sampling_mask=mask, backend="triton")
    hidden, weight = (torch.randn(*shape, requires_grad=True) for shape in ((2, 6, 5), (33, 5)))
    run_kernel(case, **given)
    bapo_linear_loss(hidden, weight, *case.arguments(), **given).loss.backward()
    linear_log_probs(hidden, weight, case.labels, **given)[0].sum().backward()
    bapo_loss(case.logits, *case.arguments(), **given)
    linear_log_probs(hidden, weight, case.labels, backend="triton", gradient_samples=8)
    assert launches["sample_rows"] == [1]
    most = {name: max(launches[name]) for name in OF_SETS}
    without_long_ones = {"head_sets_pass": 3, "sets_dhidden": 1, "sets_dweight": 1}
    assert most == {name: LAUNCHES[name] for name in OF_SETS} | without_long_ones


def test_several_labels(launches):
    """One launch before the second pass and one after it."""
    case, mask = case_with_sets((2, 6), 33)
    labels = case.labels[..., None].expand(2, 6, 3)
    for given in ({}, dict(sampling_mask=mask)):
        logits = case.logits.clone().requires_grad_()
        log_probs(logits, labels, backend="triton", **given)[0].sum().backward()
    assert set(launches["row_statistics"]) == {1}
    hidden, weight = (torch.randn(*shape, requires_grad=True) for shape in ((2, 6, 5), (33, 5)))
    linear_log_probs(hidden, weight, labels, backend="triton")[0].sum().backward()
    assert set(launches["row_gradient"] + launches["row_gradient_"]) == {3}


def test_nothing_is_counted_where_the_divisor_is_given(launches, monkeypatch):
    from bapo_kernels.backends.triton import prepare

    monkeypatch.setattr(prepare, "ALONE", 0)
    case, given = make_case((2, 6), 33), {"batch_num_tokens": 12, "global_batch_size": 2}
    for mode, of_prepare in {
        "token-sum": [1, 1],
        "token-mean": [3, 1],
        "seq-mean-token-sum": [3, 1],
        "seq-mean-token-mean": [3, 3],  # needs the length of every sequence
    }.items():
        launches.clear()
        for options in ({}, given):
            options = options | dict(config=BAPOConfig(loss_agg_mode=mode), backend="triton")
            bapo_loss(case.logits, *case.arguments(), **options)
        assert launches["prepare"] == of_prepare


@pytest.fixture
def few_programs(monkeypatch):
    """So that each of them takes several steps, the last of them in part."""
    from bapo_kernels.backends.triton import launch, token_loss

    assert token_loss.MAX_PROGRAMS == launch.MAX_PROGRAMS  # imported before the change
    monkeypatch.setattr(launch, "MAX_PROGRAMS", 3)


POLICIES = {
    "clip": dict(target=0.5, clip_ratio_c=3.0, kl_loss_coef=0.1),
    "gradient": dict(contribution="gradient", token_weight="uniform", raise_first="lower"),
    "cispo": dict(surrogate="cispo", target=0.5),
    "sapo": dict(surrogate="sapo", sapo_tau_pos=0.75, sapo_tau_neg=1.625),
    "mask": dict(surrogate="mask", target=0.5),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_many_tokens(few_programs, name, level):
    """With a search, and with bounds of tokens; the last program to finish reports for all."""
    config, batch = BAPOConfig(ratio_level=level, **POLICIES[name]), tokens(4, 250)
    own = 1 - 0.4 * torch.rand(4, 250), 1 + torch.rand(4, 250)
    for bounds in (None, own) if config.has_bounds else (None,):
        options = dict(config=config, bounds=bounds, ref_log_probs=batch[1] + 0.1)
        check_log_probs("triton", *batch, **options)


def test_arguments_are_checked_after_those_of_another_call():
    """Only what has passed is remembered."""
    x, factor = torch.ones(1, 2, 8), torch.tensor(2.0)
    torch.ops.bapo_kernels_triton.scale_(x, factor)
    for wrong in (factor.double(), torch.ones(2)):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="factor must be"):
                torch.ops.bapo_kernels_triton.scale_(x, wrong)
    table, found = torch.rand(1, 54).double(), (torch.empty(2), torch.empty(6).double())
    torch.ops.bapo_kernels_triton.solve(table, options_of(), *found)
    with pytest.raises(RuntimeError, match=r"table must have shape \(ranks, 55\)"):
        torch.ops.bapo_kernels_triton.solve(table, options_of(lower_max=0.92), *found)


def test_what_has_no_memory_is_waited_for(monkeypatch):
    """The result of a collective that may still run has no address that a kernel could take."""
    taken = []

    def run(operator, *arguments):
        taken.extend(tree_leaves(arguments))
        operator(*arguments)

    for name, operator in backend._operators().items():
        monkeypatch.setitem(backend._operators(), name, partial(run, operator))
    case = make_case((2, 6), 33, staleness=0.4)
    wrapped = [AsyncCollectiveTensor(values) for values in (case.logits, *case.arguments())]
    assert {values.data_ptr() for values in wrapped} == {0}
    out = bapo_loss(*wrapped, backend="triton")
    assert_same(out.loss, bapo_loss(case.logits, *case.arguments(), backend="triton").loss)
    assert {type(each) for each in taken if isinstance(each, torch.Tensor)} == {torch.Tensor}


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_launches_get_what_triton_gathers_for_them(name):
    import triton

    from bapo_kernels.backends.triton.kernel import Kernel

    class Compiled:
        def __getitem__(self, grid):
            return lambda *values: launched.append((grid, values))

    launched, chain = [], getattr(triton.knobs.runtime, name)
    chain.add(print)
    try:
        Kernel.run(Compiled(), (3, 1, 1), [2, 5])
    finally:
        chain.remove(print)
    assert launched == [((3, 1, 1), (2, 5))]


@pytest.mark.parametrize(("value", "interprets"), [("true", True), ("on", True), ("0", False)])
def test_what_the_variable_of_triton_means(monkeypatch, value, interprets):
    """As for Triton: the backend then takes tensors of the CPU."""
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert backend._is_interpreted() == interprets
