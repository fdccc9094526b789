"""The CUDA kernels, compiled to PTX that is executed on the CPU (tests/cuda_on_host, tests/ptx).

An adversary chooses which warp runs next and when stores and copies arrive; its seed fixes the
schedule. ``make emulate SEEDS=100`` runs many schedules, and ``make emulate FIRST=17 SEEDS=1`` one
of them again.
"""

import os
import re
import shutil
from itertools import product

import pytest
import set_operators
import torch
from accuracy import assert_rounded, assert_same, assert_sums
from cuda_on_host.build import NVCC
from cuda_on_host.emulated import CALLERS, DEVICES, EVERYWHERE, SEEDS
from cuda_on_host.library import Counted
from far_apart import rows_far_apart
from helpers import (
    check_against_reference,
    exhaustive_unless,
    make_case,
    needs_native,
    per_token,
    run_kernel,
    unmasked_tokens,
)
from launches import LAUNCHES
from many_tokens import (
    SEQUENCE_CONFIGS,
    SEQUENCES,
    batch_of_sequences,
    check_log_probs,
    sequence_options,
    tokens,
)
from operands import call as call_operator
from operands import tokens_of
from prepared import MODES, check_prepared, packed_arguments, padded_arguments
from ptx import executor
from test_labels import check_labels
from test_loss import OPTIONS, build_config

from bapo_kernels import BAPOConfig, ClipBounds, bapo_loss, bapo_loss_from_log_probs, log_probs
from bapo_kernels.backends import self_check
from bapo_kernels.config import SURROGATES
from bapo_kernels.core import rows
from bapo_kernels.core.arguments import single
from bapo_kernels.core.arguments.prepare import prepared
from bapo_kernels.core.arguments.together import loss_arguments
from bapo_kernels.core.call import Call
from bapo_kernels.core.tokens import contributions, loss_of_log_probs, solve
from bapo_kernels.reference.search import contribution_table, solve_table

pytest_plugins = ("cuda_on_host.fixtures",)
pytestmark = [
    needs_native,
    pytest.mark.slow,
    pytest.mark.xdist_group("on_host"),  # one worker builds the library
    pytest.mark.skipif(shutil.which(NVCC[0]) is None, reason="needs nvcc"),
]


@pytest.mark.parametrize("on_host", DEVICES, indirect=True)
def test_rows_lie_in_clusters_of_the_expected_size(on_host, library):
    """float32 rows of 40 KB. Otherwise the tests below would cover less than they seem to."""
    run_kernel(make_case((1, 2), 10_007), "cpu")
    assert library.last_cluster() == DEVICES[on_host][1]
    library.device(*DEVICES[on_host][0], reserved=1024)  # if a driver counts what nvcc reserves
    run_kernel(make_case((1, 2), 10_007), "cpu")
    assert library.last_cluster() == DEVICES[on_host][1]
    library.device(*DEVICES[on_host][0], 80)  # a library for `8.0+PTX` alone
    run_kernel(make_case((1, 2), 10_007), "cpu")
    assert library.last_cluster() == 0


def test_launches_are_on_the_current_stream_of_the_tensors_device(on_host, library):
    """runtime.cpp refuses others. What the first device was asked for holds on no other."""
    case, short = make_case((1, 3), 10_007), make_case((1, 3), 1_001)
    for handle, device in ((0x1234, 0), (0x5678, 1)):
        library.stream(handle, device=device)
        run_kernel(case, "cpu", scale=2.0)
        assert library.last_cluster() == DEVICES[on_host][1]
        run_kernel(short, "cpu")
    library.stream(0x1234, status=1)
    with pytest.raises(RuntimeError, match="torch did not tell the current stream"):
        run_kernel(case, "cpu")
    assert library.launches() == 0


@pytest.mark.parametrize(
    "on_host",
    exhaustive_unless("H100".__eq__, ["H100", "A100", "B200, four blocks"]),
    indirect=True,
)
@pytest.mark.parametrize(
    ("K", "name", "dtype"),
    [
        (1, "plain", torch.bfloat16),
        (7, "sets, soft cap", torch.float32),
        (64, "temperatures", torch.bfloat16),
        (64, "soft cap", torch.float16),
        (1_000, "sets", torch.bfloat16),
    ],
)
def test_several_labels(on_host, library, K, name, dtype):
    library.unwritten = "sets" in name  # the values of rows that are not counted
    check_labels("cpu", "cpu", dtype, K, name)


INVALID_VALUE, INVALID_CONFIGURATION, OUT_OF_RESOURCES, INVALID_CLUSTER = 1, 9, 701, 912


@pytest.mark.parametrize("on_host", ["H100"], indirect=True)
@pytest.mark.parametrize(
    ("error", "calls"),  # that succeed before it: the query of occupancy is the first
    [(INVALID_VALUE, 0), (INVALID_CONFIGURATION, 1), (OUT_OF_RESOURCES, 1), (INVALID_CLUSTER, 1)],
)
def test_refused_clusters(on_host, library, error, calls):
    """One warning; the generic row pass runs instead, from then on."""
    logits, labels = torch.randn(3, 10_007), torch.tensor([5, 10_006, 0])
    library.device(*DEVICES["A100"][0])
    expected = log_probs(logits, labels, backend="cpu")
    library.device(*DEVICES[on_host][0])
    library.fail_launch(error, calls + 1)  # the tokens are prepared before
    refuses = r"a slower row pass runs instead: .*\d blocks of \d+ .*row_pass_cluster_kernel"
    with pytest.warns(UserWarning, match=refuses) as warned:
        got = [log_probs(logits, labels, backend="cpu") for _ in range(2)]
    assert len(warned) == 1
    for each in got:
        assert_same(each, expected)
    assert library.last_cluster() == 0


@pytest.mark.parametrize("on_host", ["H100"], indirect=True)
@pytest.mark.parametrize(
    ("V", "calls", "kernel"), [(10_007, 2, "row_pass_cluster"), (7, 1, "row_pass")]
)
def test_other_errors_of_a_launch(on_host, library, V, calls, kernel):
    """They name the kernel; the next call runs as if nothing had been."""
    logits, labels = torch.randn(3, V), torch.tensor([5, 6, 0])
    expected = log_probs(logits, labels, backend="cpu")
    library.device(*DEVICES[on_host][0])
    library.fail_launch(INVALID_VALUE, calls)
    with pytest.raises(RuntimeError, match=rf"invalid argument \(\d blocks of .*{kernel}_kernel"):
        log_probs(logits, labels, backend="cpu")
    assert_same(log_probs(logits, labels, backend="cpu"), expected)


@pytest.mark.parametrize("on_host", ["H100"], indirect=True)
def test_clusters_turned_off(on_host, library, monkeypatch):
    for value, size in (("1", 0), ("0", 2), ("", 2)):
        monkeypatch.setenv("BAPO_NO_CLUSTERS", value)
        assert library.planned_cluster(10_007) == size


@pytest.mark.parametrize("on_host", ["H100"], indirect=True)
def test_self_check(on_host, library, monkeypatch):
    """It passes, names a kernel that is refused, and has rows for clusters of every size."""
    planned = {library.planned_cluster(V * t.itemsize // 4) for V, t in self_check.ROWS}  # float32
    assert planned == {0, 1, 2, 4, 8, 16}
    monkeypatch.setattr(self_check, "ROWS", [(257, torch.bfloat16), (10_000, torch.float32)])
    device = torch.device("cpu")
    assert self_check.first_failure(library, device) is None
    assert library.last_cluster() > 0
    library.fail_launch(INVALID_VALUE, library.launches() - 1)
    failure = self_check.first_failure(library, device)
    assert re.match(r"rows of 10,000 columns in float32: .*row_pass_cluster_kernel", failure)


def spread_out(rows, shift, gap):
    """The same rows in other memory: ``shift`` elements from its start, ``gap`` elements apart."""
    memory = torch.full((*rows.shape[:-1], rows.shape[-1] + gap), torch.nan, dtype=rows.dtype)
    return memory, memory[..., shift : shift + rows.shape[-1]].copy_(rows)


ALL_OPTIONS = BAPOConfig.recipe(
    entropy_coef=0.01, kl_loss_coef=0.1, temperature=0.8, final_logit_softcapping=9.0
)
# Rows of about 40 KB: columns beyond 10_008 float32, elements from an aligned start and between
# rows, options.
ROWS = {
    "aligned": (0, 0, 8, BAPOConfig()),
    "aligned, all options": (0, 0, 8, ALL_OPTIONS),
    "unaligned gradient": (3, 0, 5, BAPOConfig()),
    "unaligned, all options": (-1, 3, 5, ALL_OPTIONS),
    "aligned and unaligned": (0, 0, 5, BAPOConfig()),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALL = [*product(EVERYWHERE, ROWS, DTYPES)]
FEW = ALL[2::17]  # every device, rows and dtype; every second combination has all pairs of them
EVERY = ALL if "EMULATE_FIRST" in os.environ else [*dict.fromkeys(FEW + ALL[::2])]


@pytest.mark.parametrize(
    ("on_host", "rows", "dtype"),
    exhaustive_unless(lambda *case: case in FEW, EVERY),
    indirect=["on_host"],
    ids=str,
)
def test_any_schedule(on_host, library, rows, dtype):
    """The same bits, within the error budget, with enough rows to fill each stage many times.

    Skipped, idle, decided and undecided rows alternate; out of place and in place, where nothing
    outside rows changes. Rows that are aligned share no 16 bytes with another.
    """
    more, shift, gap, config = ROWS[rows]
    V = 10_008 * 4 // dtype.itemsize + more
    extra = {}
    if config.kl_loss_coef:
        extra = dict(ref_log_probs=per_token((2, 45)), temperature=per_token((2, 45), 1, 0.4, 2.0))
    case = make_case((2, 45), V, dtype, config=config, staleness=0.4, **extra)
    expected = check_against_reference(case, "cpu")
    for seed in SEEDS:
        again = f"schedule {seed}, repeated by `make emulate FIRST={seed} SEEDS=1`"
        inplace = (seed + V) % 2 == 1
        memory, logits = spread_out(case.logits, shift, gap)
        library.relied = executor.Relied()
        x = logits if inplace else logits.requires_grad_()
        library.seed = seed
        try:
            got = bapo_loss(x, *case.arguments(), **case.options, inplace=inplace, backend="cpu")
            if not inplace:
                got.loss.backward()
        except RuntimeError as error:
            pytest.fail(f"{again}: {error}")
        foreign, beyond, order = library.relied
        size = library.last_cluster()
        assert foreign == 0 or (inplace and gap % 8 and size > 0), again
        assert (beyond, order > 0) == (0, size > 1), again
        for name in ("log_probs", "entropy", "loss"):
            assert_same(getattr(got, name), getattr(expected.output, name), again)
        assert_same(logits if inplace else logits.grad, expected.gradient, again)
        if inplace:
            logits.fill_(torch.nan)
            assert memory.isnan().all(), again


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [1, 7, 4_099, 10_007])
def test_against_reference(on_host, dtype, V):
    check_against_reference(make_case((2, 6), V, dtype, staleness=0.4), "cpu")


@pytest.mark.parametrize("on_host", ["H100"], indirect=True)
@pytest.mark.parametrize("V", [257, 10_007])
def test_operands_beyond_32_bits(on_host, library, V):
    with rows_far_apart(lambda backend: library):
        check_against_reference(make_case((2, 3), V, torch.bfloat16, staleness=0.4), "cpu")


@pytest.mark.parametrize("on_host", ["A100"], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_more_than_128_KB_have_wider_blocks(on_host, dtype):
    V = 140_000 // dtype.itemsize + 3
    ref = dict(ref_log_probs=per_token((1, 4)))
    case = make_case((1, 4), V, dtype, staleness=0.4, config=ALL_OPTIONS, **ref)
    check_against_reference(case, "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [257, 10_007])
def test_temperatures_of_rows(on_host, dtype, V):
    """Equal ones have the bits of one for all; a bad one makes its row NaN, and no other."""
    T = per_token((2, 6), 3, 0.4, 2.0)
    case = make_case((2, 6), V, dtype, staleness=0.4, temperature=T)
    expected = check_against_reference(case, "cpu")
    place = tuple((unmasked_tokens(case) & (case.advantages != 0)).nonzero()[1].tolist())
    case.options["temperature"][place] = -1.0
    got = run_kernel(case, "cpu")
    assert got.output.loss.isnan()
    assert got.gradient[place].isnan().all()
    expected.output.log_probs[place] = torch.nan
    assert_same(got.output.log_probs.nan_to_num(7), expected.output.log_probs.nan_to_num(7))
    one = run_kernel(case, "cpu", config=BAPOConfig(temperature=0.75), temperature=None)
    same = run_kernel(case, "cpu", temperature=torch.tensor(0.75))
    assert_same(same.gradient, one.gradient)
    assert_same(same.output.loss, one.output.loss)


def test_bad_values_do_not_hang(on_host):
    """NaN logits in rows that should need no second pass, labels out of range, -inf."""
    case = make_case((1, 12), 10_001, torch.bfloat16, poison=False, idle=0.5)
    case.logits[0, 0, 5] = torch.nan
    case.logits[0, 1] = -torch.inf
    case.logits[0, 2, 9_000:] = -torch.inf
    case.logits[0, 3, 17] = torch.inf
    case.labels[0, 4] = 10_001
    case.labels[0, 5] = -7
    case.advantages[0, :2] = 0.0
    case.old_log_probs[0, 6] = torch.nan
    case.response_mask[:] = True
    got = run_kernel(case, "cpu")
    assert got.output.loss.isnan()
    assert got.gradient[0, 0].isnan().all()  # idle, so already released, but not zero
    assert got.gradient[0, 7:].isfinite().all()
    assert got.output.log_probs[0, 2].isfinite() or case.labels[0, 2] >= 9_000


@pytest.mark.exhaustive
@pytest.mark.parametrize("on_host", ["one block"], indirect=True)
def test_shortest_and_longest_rows_of_each_cluster(on_host, library):
    """With too few stages for its rows a cluster would wait for ever."""
    chunk = 512  # elements of 2 KB
    planned = [library.planned_cluster(chunk * n) for n in range(1, 2_000)]
    longest = [n for n in range(1, len(planned)) if planned[n - 1] != planned[n]]
    assert {*planned} == {0, 1, 2, 4, 8, 16}
    for n in sorted({*longest, *(n + 1 for n in longest)}):
        library.stream(1)
        case = make_case((1, 3), chunk * n - n % 4, staleness=0.4)
        check_against_reference(case, "cpu")
        assert library.last_cluster() == planned[n - 1], n


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gap", [6.9, 16.0])
def test_gradient_at_a_likely_label(on_host, dtype, gap):
    """1 - p keeps the digits that a float sum of both logits, which one thread has, would lose."""
    x, label = torch.full((1, 10_001), -torch.inf, dtype=dtype), torch.tensor([4_000])
    x[0, 4_000:4_002] = torch.tensor([gap, 0.0])
    bapo_loss(x.requires_grad_(), label, None, torch.ones(1), backend="cpu").loss.backward()
    p = torch.softmax(x.detach().double(), -1)
    assert_rounded(x.grad[0, 4_000], -p[0, 4_001], gap + 4)  # exponent, exp, sum, quotient, product


POLICIES = ["own_bounds", "cispo", "cispo_own_bounds", "sapo", "mask", "mask_own_bounds"]
POLICIES += ["sequence", "sequence_cispo", "sequence_sapo"]
POLICIES += ["sequence, together", "temperatures, together"]


@pytest.mark.parametrize(
    ("policy", "dtype"), [*product(["together"], DTYPES), *product(POLICIES, [torch.float32])]
)
def test_policies(on_host, policy, dtype):
    config, options = OPTIONS[policy]
    given = dict(config=build_config(config), staleness=0.4, **options)
    case = make_case((3, 7), 10_007, dtype, **given)
    check_against_reference(case, "cpu")
    check_against_reference(case, "cpu", statistics="live")
    if policy == "together":
        check_against_reference(case, "cpu", bounds=(0.7, 1.3))


def test_many_tokens(on_host):
    """Several blocks of tokens, the last one partly filled."""
    batch = tokens(1_100)
    own = ClipBounds(1 - 0.4 * torch.rand(1_100), 1 + torch.rand(1_100))
    check_log_probs("cpu", *batch, config=BAPOConfig(target=0.6))
    check_log_probs("cpu", *batch, config=BAPOConfig.recipe(clip_ratio_c=1.5))
    for surrogate in SURROGATES:
        options = {} if surrogate == "sapo" else dict(bounds=own)
        check_log_probs("cpu", *batch, config=BAPOConfig(surrogate=surrogate), **options)


@pytest.mark.parametrize("name", exhaustive_unless(("search", "kl").__contains__, SEQUENCE_CONFIGS))
@pytest.mark.parametrize("of", SEQUENCES)
@pytest.mark.parametrize("on_host", ["H100"], indirect=True)
def test_ratios_of_sequences(on_host, library, of, name):
    batch = batch_of_sequences(SEQUENCES[of])
    options = sequence_options(name, of, batch[0].shape)
    for statistics in ("all", "live"):
        results = []
        for seed in (0, *SEEDS):
            library.seed = seed
            got, gradient = check_log_probs("cpu", *batch, **options, statistics=statistics)
            results.append((got.loss, gradient))
        for each in results:
            assert_same(each, results[0], "loss, gradient")


@pytest.mark.parametrize("on_host", ["H100"], indirect=True)
def test_more_sequences_than_blocks(on_host, library, monkeypatch):
    """The first 4 of 6 blocks take two: one of a token for each thread, and one of one token."""
    launch = executor.launch

    def few(kernel, grid, *arguments, **options):  # of 1,024 blocks a launch takes 16 s
        return launch(kernel, (6, 1, 1), *arguments, **options)

    monkeypatch.setattr(executor, "launch", few)
    lengths = torch.tensor([512] * 4 + [1] * 6)
    N = int(lengths.sum())
    cu_seqlens = torch.cat([torch.zeros(1).long(), lengths.cumsum(0)])
    old, logp = torch.rand(N), torch.randn(N).double()
    out, counted = torch.empty_like(logp), torch.ones(N, dtype=torch.bool)
    library.seed = SEEDS[0]
    given = logp, counted, *tokens_of(N, old_log_probs=old)
    library.sequence_log_ratios(*given, 0, cu_seqlens, out)

    def means(values):
        pieces = values.split(lengths.tolist())
        return torch.cat([piece.mean().expand(piece.shape) for piece in pieces])

    assert_sums(out, means(logp - old), 512, of=means((logp - old).abs()))


@pytest.mark.parametrize(
    "offsets", [(0, 900, 300, 1_100), (0, -5, 600), (3, 500, 1_100), (0, 600, 1 << 40)], ids=str
)
@pytest.mark.parametrize("on_host", ["H100"], indirect=True)
def test_broken_offsets_of_sequences(on_host, library, offsets, monkeypatch):
    """The loss is NaN; nothing is read or written outside of the tokens."""
    monkeypatch.setattr(single, "is_readable", lambda offsets: False)  # as of a GPU
    N, cu_seqlens = 1_100, torch.tensor(offsets)
    logp, old, A, _ = tokens(N)
    options = dict(config=BAPOConfig(ratio_level="sequence"), cu_seqlens=cu_seqlens, backend="cpu")
    assert bapo_loss_from_log_probs(logp, old, A, None, **options).loss.isnan()

    def guarded(values, guard=torch.nan):
        memory = torch.full((3 * N,), guard, dtype=values.dtype)
        memory[N : 2 * N] = values
        return memory, memory[N : 2 * N]

    given = guarded(logp.double())[1], guarded(torch.ones(N, dtype=torch.bool), True)[1]
    fields = tokens_of(N, old_log_probs=old)
    for name, more in ("sequence_log_ratios", fields), ("add_sequence_means_", ()):
        memory, out = guarded(torch.zeros(N).double())
        getattr(library, name)(*given, *more, 0, cu_seqlens, out)
        assert (out.isfinite() & (out != 0)).all(), name
        out.fill_(torch.nan)
        assert memory.isnan().all(), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("on_host", ["H100"], indirect=True)
def test_prepare(on_host, library, mode):
    """In one launch, and in three; sequences within a warp and across many blocks."""
    long = (0, 1, 4, 5, 5, 37, 8_000, 8_001, 8_033, 9_900)
    for seed in SEEDS:
        library.seed = seed
        for shape in ((5, 33), (3, 2, 5), (0, 3), (3, 2_800)):
            check_prepared(padded_arguments(shape, mode, True), "cpu")
        for offsets in ((0, 3, 3, 64, 300), tuple(range(301)), (0, 5, 3), (0, 301)):
            check_prepared(packed_arguments(300, offsets, mode, True), "cpu")
        check_prepared(packed_arguments(10_000, long, mode, False), "cpu")


@pytest.mark.exhaustive
@pytest.mark.parametrize("on_host", ["H100"], indirect=True)
def test_launches(on_host, library, monkeypatch):
    """Of every operator; test_launches.py adds those of ATen and of a process group."""
    counted = Counted(library)
    for module in CALLERS:
        monkeypatch.setattr(module, "ops_of", lambda backend: counted)
    run_kernel(make_case((1, 3), 3), "cpu", config=BAPOConfig(ratio_level="sequence"))
    for N in (3, 8_200):
        case = make_case((1, N), 3, staleness=0.4)
        run_kernel(case, "cpu")
        call = prepared("cpu", loss_arguments(case.labels, *case.arguments()[1:]))
        solve("cpu", contributions(call, torch.zeros(N).double()), call.options)
        logp, _ = log_probs(case.logits.requires_grad_(), case.labels, backend="cpu")
        logp.sum().backward()
        bapo_loss(case.logits.detach(), *case.arguments(), inplace=True, backend="cpu")
    of_sets = set_operators.OPERATORS  # test_sets_on_host.py
    assert counted.most == {name: n for name, n in LAUNCHES.items() if name not in of_sets}


# Two warps in a block; and all lanes of a warp share their bins, and some take two tokens.
MANY_BINS = [(8_300, {}), (8_300, dict(ratio_lower_step=0.0005, ratio_upper_step=0.002))]


@pytest.mark.parametrize(
    ("N", "grids"), exhaustive_unless(lambda N, _: N == 1_100, [(1_100, {}), *MANY_BINS])
)
@pytest.mark.parametrize("on_host", ["H100"], indirect=True)
def test_masses_have_the_same_bits_in_any_schedule(on_host, library, N, grids):
    """Terms of all sizes, so that another order of additions shows."""
    logp, old, config = -torch.rand(N, dtype=torch.float64), -torch.rand(N), BAPOConfig(**grids)
    A = torch.randn(N) * 10.0 ** torch.randint(-6, 6, (N,))
    call = prepared("cpu", loss_arguments(logp.float(), old, A, None, config=config))
    tables = []
    for seed in range(4):
        library.seed = seed
        tables.append(contributions(call, logp))
    assert_same(tables, tables[:1] * 4)
    expected = contribution_table(config, logp, old, A, None)
    assert_sums(tables[0].flatten(), expected.flatten(), N)


@pytest.mark.parametrize("on_host", ["H100"], indirect=True)
def test_grids_of_all_sizes(on_host):
    """Each has the shared memory that it needs, and takes none from a thread with a larger one."""
    batch = tokens(50)
    for points in (1_000, 20, 300):
        steps = dict(ratio_lower_step=0.3 / (points - 1), ratio_upper_step=1.8 / (points - 1))
        check_log_probs("cpu", *batch, config=BAPOConfig(target=0.6, **steps))


def test_solution_in_any_schedule(on_host, library):
    """The search stops at its first step, in the middle and at its end."""
    old = -3 * torch.rand(1_100)
    logp = old + 0.4 * torch.randn(1_100)
    A = torch.where(torch.rand(1_100) < 0.4, 1.0, -1.0)
    call = prepared("cpu", loss_arguments(logp, old, A, None, config=BAPOConfig()))
    table = contributions(call, logp.double()).repeat(3, 1)
    uppers = set()
    for target in (0.3, 0.35, 0.4, 0.45, 0.9):
        config = BAPOConfig(target=target)
        expected = solve_table(config, table.sum(0))
        uppers.add(expected[0][1].item())
        for seed in range(4):
            library.seed = seed
            found = solve("cpu", table, config.options)
            assert_same(found, expected, f"target {target}")
    assert len(uppers) >= 3, uppers


def test_ticket_is_ready_for_the_next_call(on_host):
    logp, A = -torch.rand(1_100), torch.randn(1_100)
    call = prepared("cpu", loss_arguments(logp, None, A, None))
    loss_of_log_probs(call, logp.double(), None)
    assert call.ticket.item() == 0


@pytest.mark.parametrize("on_host", ["H100"], indirect=True)
def test_scaled_tensors_of_any_form(on_host, library):
    """Dimensions of size 1 may have any stride; nothing beside the tensor changes."""
    memory = torch.ones(400)
    forms = {
        "four dimensions": memory[:105].view(1, 3, 5, 7).transpose(0, 1),
        "rows apart": memory[:200].view(2, 10, 10)[:, :7, :9],
        "one row": memory[:7],
        "no dimension": memory[0],
    }
    for name, x in forms.items():
        memory.fill_(1)
        library.scale_(x, torch.tensor(2.0))
        assert (x == 2).all(), name
        assert memory.sum() == 400 + x.numel(), name


def test_empty_shard(on_host, library):
    """Rows without columns: there is nothing to sum and nothing to write."""
    logits, labels = torch.zeros(1, 3, 0), torch.full((3,), -1)
    counted = torch.tensor([True, False, True])
    call = Call(BAPOConfig().options, "cpu", labels.shape, counted, counted, labels=labels)
    results = rows.row_statistics(call, rows.logit_rows(call, logits))
    assert results.stats[counted].tolist() == [[-torch.inf, 0.0]] * 2
    nothing = torch.zeros(3, dtype=torch.float64)
    given = dict(logits=logits, labels=labels, stats=results.stats)
    call_operator(library, "row_gradient_", **given, entropy=nothing, dlog_probs=nothing + 1)
