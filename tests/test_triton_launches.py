"""The launches of the Triton backend: how many, by how many programs, and what they rely on."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from accuracy import assert_rounded, assert_sums
from helpers import INTERPRETED, KERNELS, case_with_sets, make_case, run_kernel
from launches import LAUNCHES, CountLaunches
from operands import options_of, tokens_of
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from bapo_kernels import BAPOConfig, bapo_linear_loss, bapo_loss, linear_log_probs, log_probs
from bapo_kernels.backends import triton as backend
from bapo_kernels.config import SURROGATES
from bapo_kernels.core.operators import torch_ops_of

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

    case, searched = make_case((2, 6), 33, staleness=0.4), (*searched_tokens(12), options_of())
    found = torch.empty(2), torch.empty(6, dtype=torch.float64)
    run_kernel(case, "triton")
    logits = case.logits.clone().requires_grad_().clone()
    bapo_loss(logits, *case.arguments(), backend="triton", inplace=True).loss.backward()
    bapo_loss(case.logits, *case.arguments(), backend="triton")
    run_kernel(case, "triton", config=BAPOConfig(ratio_level="sequence"))
    torch_ops_of("triton").contributions(*searched, 0, torch.empty(1, 54, dtype=torch.float64))
    torch_ops_of("triton").solve(torch.rand(2, 54).double(), options_of(), *found)
    monkeypatch.setattr(prepare, "ALONE", 0)
    bapo_loss(case.logits, *case.arguments(), backend="triton")

    assert launches["prepare"] == [1, 1, 1, 1, 3]
    most = {name: max(counts) for name, counts in launches.items()}
    assert most == {name: LAUNCHES[name] for name in most}
    assert LAUNCHES.keys() - most.keys() <= {"row_gradient_", *OF_SETS}


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


def searched_tokens(N, of_sequences=False):
    """What the search takes of tokens."""
    g = torch.Generator().manual_seed(N)
    log_probs = -3 * torch.rand(N, generator=g, dtype=torch.float64)
    old = log_probs.float() + 0.4 * torch.randn(N, generator=g)
    counted = torch.rand(N, generator=g) < 0.8
    log_ratios = None
    if of_sequences:
        log_ratios = torch.randn(N, generator=g, dtype=torch.float64) * 0.3
        log_ratios[::50], log_ratios[1::50] = -30.0, 21.0
    fields = dict(advantages=torch.randn(N, generator=g), old_log_probs=old)
    return log_probs, counted, log_ratios, *tokens_of(N, **fields)


@pytest.fixture
def few_programs(monkeypatch):
    """So that each of them takes several steps, the last of them in part."""
    from bapo_kernels.backends.triton import launch, token_loss

    assert token_loss.MAX_PROGRAMS == launch.MAX_PROGRAMS  # imported before the change
    monkeypatch.setattr(launch, "MAX_PROGRAMS", 3)


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("unclipped_only", [False, True])
@pytest.mark.parametrize("of_sequences", [False, True])
def test_search_of_many_tokens(few_programs, uniform, unclipped_only, of_sequences):
    """As on the CPU, and the other ranks' rows of the table are 0."""
    searched = searched_tokens(1_000, of_sequences)
    chosen = dict(uniform_weight=uniform, unclipped_only=unclipped_only)
    results, target = [], 0.5
    for ops in map(torch_ops_of, ("cpu", "triton")):
        table = torch.full((3, 54), torch.nan, dtype=torch.float64)
        ops.contributions(*searched, options_of(**chosen), 1, table)
        assert not table[::2].any()
        if not results:  # reached between the third and the fourth upper point
            neg, pos = table[1, 0], table[1, 18:20]
            target = (pos / (neg + pos)).mean().item()
        bounds, masses = torch.empty(2), torch.empty(6, dtype=torch.float64)
        ops.search(*searched, options_of(**chosen, target=target), bounds, masses)
        results.append((table, bounds, masses))
    for got, expected in zip(*results, strict=True):
        assert_sums(got, expected, 1_000)
    assert results[0][1][1] == torch.tensor(1.35)


@pytest.mark.parametrize("given_masses", [False, True])
@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("own_bounds", [False, True])
@pytest.mark.parametrize("of_sequences", [False, True])
def test_loss_of_many_tokens(few_programs, given_masses, surrogate, own_bounds, of_sequences):
    """The last program to finish reports for all, and leaves the ticket at 0 for the next call."""
    N = 1_000
    log_probs, counted, log_ratios, tokens, _ = searched_tokens(N, of_sequences)
    fields = dict(advantages=tokens[0], old_log_probs=tokens[1], ref_log_probs=tokens[1] + 0.1)
    bounds = torch.tensor([0.8, 1.3])
    if own_bounds:
        own = (bounds[:, None] + 0.4 * torch.rand(2, N) - 0.2).where(counted, torch.nan)
        fields |= dict(lower=own[0], upper=own[1])
    # Float32 represents tau, which the interpreter rounds to it.
    terms = dict(clip_ratio_c=3.0, sapo_tau_pos=0.75, sapo_tau_neg=1.625, kl_loss_coef=0.1)
    options = options_of(surrogate=SURROGATES[surrogate], entropy_coef=0.01, **terms)
    entropy, weights = -log_probs, torch.rand(N, dtype=torch.float64)
    masses = torch.rand(6, dtype=torch.float64) if given_masses else None
    results = []
    for name in ("triton", "triton", "cpu"):
        ticket = torch.zeros(1, dtype=torch.int32)
        made = [torch.full((N,), torch.nan, dtype=torch.float64) for _ in range(3)]
        made += [torch.full((15,), torch.nan), torch.full((2, N), -1.0)]
        dlog_probs, dentropy, dlog_ratios, report, outputs = made
        torch_ops_of(name).token_loss(
            *(log_probs, entropy, counted, torch.ones_like(counted), weights, log_ratios),
            *(*tokens_of(N, **fields), None if own_bounds else bounds, masses, options),
            *(ticket, report, dlog_probs, dentropy, outputs, dlog_ratios if of_sequences else None),
        )
        assert ticket.item() == 0
        results.append(made)
    torch.testing.assert_close(*results[:2], rtol=0, atol=0, equal_nan=True)
    # In float32 the last one, in float64 exp and three products, on either side.
    for got, expected in zip(*results[1:], strict=True):
        assert_rounded(got, expected, 2 if got.dtype == torch.float32 else 8)


def test_arguments_are_checked_after_those_of_another_call():
    """Only what has passed is remembered."""
    x, factor = torch.ones(1, 2, 8), torch.tensor(2.0)
    torch_ops_of("triton").scale_(x, factor)
    for wrong in (factor.double(), torch.ones(2)):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="factor must be"):
                torch_ops_of("triton").scale_(x, wrong)
    table, found = torch.rand(1, 54).double(), (torch.empty(2), torch.empty(6).double())
    torch_ops_of("triton").solve(table, options_of(), *found)
    with pytest.raises(RuntimeError, match=r"table must have shape \(ranks, 55\)"):
        torch_ops_of("triton").solve(table, options_of(lower_max=0.92), *found)


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
    assert torch.equal(out.loss, bapo_loss(case.logits, *case.arguments(), backend="triton").loss)
    assert {type(each) for each in taken if isinstance(each, torch.Tensor)} == {torch.Tensor}


def test_checked_calls_are_forgotten(monkeypatch):
    from bapo_kernels.backends.triton import checks

    monkeypatch.setattr(checks, "_MAX_KNOWN", 4)
    for rows in range(1, 20):
        torch_ops_of("triton").scale_(torch.ones(1, rows, 2), torch.tensor(1.0))
    assert len(checks._known) <= 4


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


@pytest.mark.slow
@pytest.mark.parametrize(("value", "interprets"), [("true", True), ("on", True), ("0", False)])
def test_what_the_variable_of_triton_means(value, interprets):
    """As for Triton: the backend then takes tensors of the CPU."""
    program = "from bapo_kernels.backends.triton import INTERPRETED, launch as at\n"
    program += "print(INTERPRETED, at.INTERPRETED)"
    environment = os.environ | {"TRITON_INTERPRET": value}
    output = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert output.split() == [str(interprets)] * 2
