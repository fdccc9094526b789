"""bapo_loss of every backend against the float64 reference."""

from functools import partial
from itertools import product
from typing import get_args

import pytest
import torch
from accuracy import assert_as_reference, assert_rounded, assert_same
from helpers import (
    Case,
    Result,
    case_with_sets,
    check_against_reference,
    check_result,
    check_with_sets,
    make_case,
    per_token,
    plain_result,
    real_in_turns,
    run_kernel,
    run_reference,
    unmasked_tokens,
)
from hypothesis import Phase
from torch import Tensor
from torch.utils._pytree import tree_map_only

from bapo_kernels import (
    BAPOConfig,
    BAPOLoss,
    ClipBounds,
    ClipBoundSearch,
    bapo_loss,
    bapo_loss_from_log_probs,
    reference,
)
from bapo_kernels.config import LossAggMode, Surrogate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CU = torch.tensor([0, 0, 5, 5, 12, 20, 20])  # of packed sequences, of which three are empty
SEQ_MEAN, NORM = "seq-mean-token-mean", "seq-mean-token-sum-norm"

TEMPERATURES = per_token(seed=5, low=0.4, high=2.5)
OWN_BOUNDS = ClipBounds(per_token(low=0.7, high=1.0), per_token(seed=1, low=1.0, high=1.3))
REF = dict(ref_log_probs=per_token())
WEIGHTS = dict(rollout_is_weights=per_token(low=0.2, high=2.0))
OPTIONS = {
    "paper": ({}, {}),
    "recipe": (dict(preset="recipe"), {}),
    "fixed": (dict(preset="fixed"), {}),
    "temperature": (dict(temperature=30.0), dict(temperature=0.7)),
    "temperatures": (dict(temperature=30.0), dict(temperature=TEMPERATURES)),
    "logit_scale": (dict(logit_scale=1.7), {}),
    "softcap": (dict(final_logit_softcapping=5.0), {}),
    "dual_clip": (dict(clip_ratio_c=1.1), {}),
    "k1": (dict(kl_loss_coef=0.1, kl_loss_type="k1"), REF),
    "k2": (dict(kl_loss_coef=0.1, kl_loss_type="k2"), REF),
    "k3": (dict(kl_loss_coef=0.1, kl_loss_type="k3"), REF),
    "kl_metric_only": ({}, REF),
    "entropy": (dict(entropy_coef=0.05), {}),
    "is_weights": ({}, WEIGHTS),
    "rollout": ({}, dict(rollout_log_probs=per_token())),
    "uniform": (dict(token_weight="uniform"), {}),
    "gradient_contribution": (dict(contribution="gradient"), {}),
    "bounds": ({}, dict(bounds=ClipBounds(torch.tensor(0.85), torch.tensor(1.15)))),
    "own_bounds": ({}, dict(bounds=OWN_BOUNDS)),
    "cispo": (dict(surrogate="cispo", target=0.5), {}),
    "cispo_own_bounds": (dict(surrogate="cispo", kl_loss_coef=0.1), dict(bounds=OWN_BOUNDS) | REF),
    "sapo": (dict(surrogate="sapo", sapo_tau_neg=1.5), {}),
    "mask": (dict(surrogate="mask", target=0.5), {}),
    "mask_own_bounds": (dict(surrogate="mask", entropy_coef=0.05), dict(bounds=OWN_BOUNDS) | REF),
    "sequence": (dict(ratio_level="sequence", target=0.5), {}),
    "sequence_cispo": (dict(ratio_level="sequence", surrogate="cispo", target=0.5), {}),
    "sequence_sapo": (dict(ratio_level="sequence", surrogate="sapo", entropy_coef=0.05), {}),
    "token_sum": (dict(loss_agg_mode="token-sum"), {}),
    "seq_sum": (dict(loss_agg_mode="seq-mean-token-sum"), {}),
    "seq_norm": (dict(loss_agg_mode=NORM), {}),
    "seq_norm_factor": (dict(loss_agg_mode=NORM, loss_scale_factor=11.0), {}),
    "seq_mean": (dict(loss_agg_mode=SEQ_MEAN), {}),
    "global_tokens": ({}, dict(batch_num_tokens=100, dp_size=4)),
    "global_sequences": (
        dict(loss_agg_mode=SEQ_MEAN),
        dict(global_batch_size=torch.tensor(1), dp_size=2),
    ),
    "temperatures, together": (
        dict(entropy_coef=0.05, kl_loss_coef=0.1, final_logit_softcapping=5.0, logit_scale=1.7),
        dict(temperature=TEMPERATURES) | REF,
    ),
    "sequence, together": (
        dict(ratio_level="sequence", contribution="gradient", loss_agg_mode=SEQ_MEAN)
        | dict(clip_ratio_c=1.05, kl_loss_coef=0.05, entropy_coef=0.01),
        dict(bounds=OWN_BOUNDS) | WEIGHTS | REF,
    ),
    "together": (
        dict(preset="recipe", loss_agg_mode=SEQ_MEAN, kl_loss_coef=0.05, entropy_coef=0.01)
        | dict(temperature=0.9, final_logit_softcapping=20.0),
        dict(rollout_log_probs=per_token(seed=2)) | WEIGHTS | REF,
    ),
}


def build_config(options):
    options = dict(options)
    preset = options.pop("preset", "paper")
    if preset == "fixed":
        return BAPOConfig.fixed(0.8, 1.2, **options)
    return getattr(BAPOConfig, preset)(**options)


def case_of(sets, *of_case, statistics="all", **options):
    """A case, and a function that checks it; with ``sets`` its rows have sets of tokens."""
    if not sets:
        case = make_case(*of_case, **options)
        return case, partial(check_against_reference, case, statistics=statistics)
    config = options.get("config") or BAPOConfig()
    options["outside"] = config.kl_loss_type not in (
        "k1",
        "k2",
    )  # a label outside makes it infinite
    case, mask = case_with_sets(*of_case, **options)
    return case, partial(check_with_sets, case, mask, statistics=statistics)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "sets", "statistics"),
    [
        (torch.float32, False, "all"),
        (torch.float32, False, "live"),
        (torch.float32, True, "all"),
        (torch.bfloat16, False, "all"),
        (torch.bfloat16, True, "live"),
        (torch.float16, False, "live"),
    ],
)
def test_options(backend, device, dtype, sets, statistics, name):
    config_options, options = OPTIONS[name]
    real = real_in_turns(OPTIONS, name, statistics == "live")
    given = dict(dtype=dtype, device=device, config=build_config(config_options), **options)
    case, check = case_of(sets, statistics=statistics, real=real, **given)
    inplace = bool(([*OPTIONS].index(name) + DTYPES.index(dtype) + sets) % 2)
    check(backend, inplace=inplace)
    if inplace and not sets:
        assert_same(run_kernel(case, "reference", inplace=True), run_reference(case))


# One token, less than a vector, primes, a vector and a block and their neighbours, unaligned rows
# of several tiles, a shard of a large vocabulary.
SIZES = 1, 2, 3, 15, 16, 17, 31, 33, 127, 1009, 4095, 4096, 4097, 8191, 16399, 18992


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("V", "sets"), [*product(SIZES, [False]), *product((1, 2, 33, 4097), [True])]
)
def test_vocabulary_sizes(backend, device, dtype, V, sets):
    options = dict(masked=0.0, config=BAPOConfig(entropy_coef=0.01))
    case_of(sets, (2, 7 if sets else 3), V, dtype, device, **options)[1](backend)


@pytest.mark.parametrize(  # Qwen3, an odd slice of it, Llama 3 and Gemma 3
    ("V", "dtype"),
    [(151_936, torch.bfloat16), (151_669, torch.float16), (128_256, torch.bfloat16)]
    + [(262_208, torch.float32)],
)
def test_real_vocabularies(backend, device, dtype, V):
    for config in BAPOConfig(), BAPOConfig(entropy_coef=0.01, temperature=0.9):
        options = dict(config=config, masked=0.0, idle=0.0)
        check_against_reference(make_case((1, 4), V, dtype, device, **options), backend)


@pytest.mark.parametrize("staleness", [0.0, 0.02, 0.3, 3.0, 60.0, None])  # .. past the clamp
@pytest.mark.parametrize("preset", ["paper", "recipe"])
@pytest.mark.parametrize("sets", [False, True])
def test_staleness(backend, device, staleness, preset, sets):
    """Kept, clipped and undecided rows; the last ones are on policy."""
    config = build_config(dict(preset=preset))
    options = dict(device=device, config=config, staleness=staleness or 0.0)
    case, check = case_of(sets, (4, 16), 65, **options)
    if staleness is None:
        case.old_log_probs = None
    metrics = check(backend).output.metrics
    if staleness is None and not sets:
        assert metrics["pg_clipfrac"] == metrics["ppo_kl"] == 0


@pytest.mark.parametrize(("N", "per_sequence"), [(24, True), (20, False)])
@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_packed_batches(backend, device, mode, per_sequence, N):
    """Tokens after the last sequence are masked, and full of NaN here."""
    of_sequences = [dict(surrogate=name, ratio_level="sequence") for name in get_args(Surrogate)]
    for policy in ({}, *of_sequences):
        config = BAPOConfig(loss_agg_mode=mode, loss_scale_factor=11.0, **policy)
        cu = CU.to(device, torch.int32 if N == 20 else torch.int64)
        case = make_case((N,), 65, device=device, config=config, cu_seqlens=cu)
        case.response_mask[20:] = True
        case.labels[20:], case.logits[20:] = 0, torch.nan
        if per_sequence:
            A = [torch.nan, 0.5, 2.0, -1.0, 0.7, torch.nan]
            case.advantages = torch.tensor(A, device=device)
        got = check_against_reference(case, backend)
        assert not got.gradient[20:].any()


def test_packed_equals_padded(backend, device):
    """The same tokens with and without padding."""
    for mode in ("seq-mean-token-sum", SEQ_MEAN):
        config = BAPOConfig(loss_agg_mode=mode)
        case = make_case((3, 6), 33, device=device, config=config, poison=False)
        lengths = torch.tensor([6, 2, 4])
        inside = (torch.arange(6) < lengths[:, None]).to(device)
        case.response_mask = case.response_mask & inside
        padded = run_kernel(case, backend)
        cu = torch.tensor([0, 6, 8, 12], device=device)
        packed = run_kernel(part_of(case, inside), backend, cu_seqlens=cu)
        assert_same(packed, Result(padded.output, (padded.gradient[inside],)))


def test_advantages_per_sequence(backend, device):
    """They belong to the first size, whatever the others are; a masked one may be NaN."""
    for shape, A in (
        ((3, 7), [0.5, 0.0, -1.0]),
        ((3, 7), [0.5, torch.nan, -1.0]),
        ((2, 2, 3), [1.0, -2.0]),
        ((2, 4, 3), [1.0, -2.0]),
    ):
        case = make_case(shape, 33, device=device)
        case.advantages = torch.tensor(A, device=device)
        masked = case.advantages.isnan()
        case.response_mask[masked] = False
        got = check_against_reference(case, backend)
        assert got.output.loss.isfinite()
        assert not got.gradient[masked].any()


def part_of(case, rows):
    return Case(case.logits[rows], *(t[rows] for t in case.arguments()), case.options)


def test_the_mean_over_ranks_is_undone(backend, device):
    """Of the reference too, which takes the same arguments."""
    logp, A = torch.randn(2, 3, 4, device=device)
    for name in (backend, "reference"):
        counts = dict(batch_num_tokens=100, backend=name)
        one, four = (bapo_loss_from_log_probs(logp, None, A, dp_size=n, **counts) for n in (1, 4))
        assert four.loss == 4 * one.loss != 0


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", SEQ_MEAN])
def test_micro_batches_add_up(backend, device, interpreted, mode):
    """Eight micro-batches with global counts and shared bounds add up to one batch."""
    B = 8 if interpreted else 16
    case = make_case((B, 5), 33, device=device, config=BAPOConfig(loss_agg_mode=mode))
    whole = run_kernel(case, backend)
    unmasked = unmasked_tokens(case)
    counts = dict(
        batch_num_tokens=unmasked.sum(),
        global_batch_size=unmasked.any(-1).sum(),
        bounds=whole.output.bounds,
    )
    parts = torch.arange(B).chunk(8)
    results = [run_kernel(part_of(case, rows), backend, **counts) for rows in parts]
    total = whole.output._replace(loss=sum(result.output.loss for result in results))
    check_result(case, Result(total, (torch.cat([result.gradient for result in results]),)))


def test_live_statistics_skip_inactive_tokens(backend, device):
    """Their rows may be full of NaN."""
    case = make_case(device=device)
    everything, live = (run_kernel(case, backend, statistics=s) for s in ("all", "live"))
    inactive = unmasked_tokens(case) & (case.advantages == 0)
    case.logits[case.advantages == 0] = torch.nan
    of_nan = run_kernel(case, backend, statistics="live")
    for got in (live, of_nan):
        assert_same(got, everything)
        assert_same(got.output.log_probs.isnan(), inactive, "log-probs of NaN")
        assert got.output.metrics["live_tokens"] == (unmasked_tokens(case) & ~inactive).sum()
    assert "live_tokens" not in everything.output.metrics


def test_undecided_rows_are_finished_with_the_final_bounds(backend, device, interpreted):
    """The bounds of the search and the same bounds given lead to the same gradient."""
    shape, seed = ((4, 16), 5) if interpreted else ((8, 32), 0)
    case = make_case(shape, 65, device=device, staleness=0.4, seed=seed)
    searched = run_kernel(case, backend)
    assert searched.output.bounds.upper > 1.2, "the case must need a search"
    given_bounds = run_kernel(case, backend, bounds=searched.output.bounds)
    assert_same(searched, given_bounds)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_equal_temperatures_have_the_bits_of_one_number(backend, device, dtype, softcap, inplace):
    """In any shape and any floating dtype; 0.75 is one of every dtype. And the number itself."""
    B, S = 2, 3
    config = BAPOConfig(final_logit_softcapping=softcap, entropy_coef=0.05, temperature=0.75)
    case = make_case((B, S), 65, dtype, device, config=config, staleness=0.4)
    logits = case.logits.clone() if inplace else case.logits.requires_grad_()
    plain = bapo_loss(logits, *case.arguments(), **case.options, backend=backend, inplace=inplace)
    expected = logits if inplace else torch.autograd.grad(plain.loss, logits)[0]
    ignored = BAPOConfig(final_logit_softcapping=softcap, entropy_coef=0.05, temperature=9.0)
    kinds = {(): torch.float64, (B,): torch.bfloat16, (B, S): torch.float32, (S, B): torch.float16}
    equal = [torch.full(shape, 0.75, dtype=kind, device=device) for shape, kind in kinds.items()]
    for T in (0.75, *equal[:-1], equal[-1].T):
        x = case.logits.detach().clone().requires_grad_(not inplace)
        options = dict(config=ignored, temperature=T, backend=backend, inplace=inplace)
        got = bapo_loss(x, *case.arguments(), **options)
        gradient = x if inplace else torch.autograd.grad(got.loss, x)[0]
        assert_same(Result(got, (gradient,)), Result(plain, (expected,)))
        assert_same(got.entropy, plain.entropy, "entropy")


@pytest.mark.parametrize("sets", [False, True])
def test_temperatures_of_packed_sequences(backend, device, sets):
    """One per sequence, of empty ones any; tokens after the last sequence are masked."""
    cu = CU.to(device)
    case, check = case_of(sets, (24,), 65, device=device, cu_seqlens=cu)
    T = torch.tensor([0.0, 0.5, torch.nan, 1.25, 2.0, -1.0], device=device)
    got = check(backend, temperature=T)
    per_token = torch.cat([T.repeat_interleave(cu.diff()), T.new_zeros(4)])
    expected = check(backend, temperature=per_token)
    assert_same(got, expected)
    case.advantages = torch.tensor([9.0, 0.5, 2.0, -1.0, 0.7, 9.0], device=device)
    check(backend, temperature=T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # gradient in forward, backward
@pytest.mark.parametrize("bad", [0.0, -0.5, torch.inf, torch.nan])
def test_bad_temperature_makes_its_token_nan(backend, device, dtype, bad):
    case = make_case((2, 4), 65, dtype, device, poison=False)
    unmasked = unmasked_tokens(case)
    T = torch.full((2, 4), 0.75, device=device)
    expected = run_kernel(case, backend, temperature=T)
    got = run_kernel(case, backend, temperature=T.masked_fill(~unmasked, bad))
    assert_same(got, expected)
    place = tuple(unmasked.nonzero()[2].tolist())
    T[place] = bad
    for result in run_kernel(case, backend, temperature=T), run_reference(case, temperature=T):
        assert result.output.loss.isnan()
        for values in (result.output.log_probs, result.output.entropy):
            assert values.isnan().nonzero().tolist() == [list(place)]
    case.advantages[place] = 0.0  # then it cannot change the loss
    live = run_kernel(case, backend, temperature=T, statistics="live")
    assert live.output.loss.isfinite()
    assert live.gradient.isfinite().all()


@pytest.mark.parametrize("pair", [(1.2, 0.8), (-0.1, 1.2), (torch.nan, 1.2), (0.8, torch.nan)])
def test_tensor_bounds_that_break_their_rule_make_the_loss_nan(backend, device, pair):
    """Unless no token is counted. Numbers raise."""
    case = make_case(device=device, poison=False)
    unmasked, bounds = unmasked_tokens(case), torch.tensor(pair, device=device).unbind()
    for got in run_kernel(case, backend, bounds=bounds), run_reference(case, bounds=bounds):
        assert got.output.loss.isnan()
        assert got.gradient[unmasked].isnan().any()
        assert (got.gradient[~unmasked] == 0).all()
    case.response_mask[:] = False
    for got in run_kernel(case, backend, bounds=bounds), run_reference(case, bounds=bounds):
        assert got.output.loss == 0


def test_shares_at_given_bounds(backend, device):
    """They are those of the float32 bounds, as the loss is: 1.2 is 1.2000000477 there."""
    labels = torch.zeros(2, dtype=torch.long, device=device)
    A = torch.tensor([1.0, -1.0], device=device)
    old = torch.tensor([-1.0, 0.5], device=device)  # ratios e and e^-0.5 of a vocabulary of one
    upper, lower = torch.tensor(1.2).double(), torch.tensor(0.8).double()
    pos, neg = torch.e**-1.0 * upper, torch.e**0.5 * lower
    kernel = partial(bapo_loss, backend=backend)
    truth = reference.bapo_loss
    # In float64 exp and product of both masses, their sum and quotient round, here and there.
    for function, dtype, roundings in ((kernel, torch.float32, 1), (truth, torch.float64, 12)):
        logits = torch.zeros(2, 1, dtype=dtype, device=device)
        share = function(logits, labels, old, A, bounds=(0.8, 1.2)).metrics["bapo_pos_share"]
        assert_rounded(share.cpu(), pos / (pos + neg), roundings)


def test_module(backend, device):
    """With options of its own, and with those of a search."""
    case, recipe = make_case(device=device), BAPOConfig.recipe()
    module = BAPOLoss(recipe, backend=backend, statistics="live")
    calls = [(module, {}, dict(config=recipe, statistics="live"))]
    for scope in ("call", "lagged"):
        options = ClipBoundSearch(recipe, scope).options
        calls.append((BAPOLoss(backend=backend), options, options))
    for loss, of_call, options in calls:
        got = loss(case.logits, *case.arguments(), **of_call)
        expected = bapo_loss(case.logits, *case.arguments(), backend=backend, **options)
        assert got.loss == expected.loss
    assert "recipe" not in repr(module)
    assert "statistics='live'" in repr(module)


# Shrinking thousands of interpreted rows would take an hour.
NO_EXPLANATION = [Phase.explicit, Phase.reuse, Phase.generate]


def scalars(results):
    """Loss and metrics, each of all results as one tensor."""
    of_each = ([r.output.loss, *r.output.metrics.values()] for r in results)
    return [torch.stack(of_all) for of_all in zip(*of_each, strict=True)]


@pytest.mark.parametrize(
    ("dtype", "name"),  # sums over tokens do not depend on the dtype of the logits
    [*((dtype, "together") for dtype in DTYPES)]
    + [(torch.float32, name) for name in ("paper", "recipe", "bounds", "entropy", "seq_mean")],
)
def test_scalars_are_within_the_plain_budget(backend, device, interpreted, dtype, name):
    """No allowance for operands is needed, because the reference is not right by luck in all
    batches."""
    config_options, call_options = OPTIONS[name]
    config = build_config(config_options)
    options = dict(dtype=dtype, device=device, config=config, **call_options)
    cases = [make_case(seed=seed, **options) for seed in range(6 if interpreted else 16)]
    got = scalars(run_kernel(case, backend) for case in cases)
    assert_as_reference(got, lambda kind: scalars(run_reference(x, kind) for x in cases), dtype)


OF_LOGITS = "temperature", "temperatures", "temperatures, together", "logit_scale", "softcap"
FROM_LOG_PROBS = [name for name in OPTIONS if name not in OF_LOGITS]


@pytest.mark.parametrize("name", FROM_LOG_PROBS)
@pytest.mark.parametrize(
    ("dtype", "statistics"),
    [(torch.float32, "live"), (torch.bfloat16, "all"), (torch.float16, "all")],
)
def test_options_of_loss_from_log_probs(backend, device, dtype, statistics, name):
    """Every option, from log-probs and entropies that are NaN wherever masked."""
    config_options, options = OPTIONS[name]
    options = dict(options, config=build_config(config_options), statistics=statistics)
    case = make_case(staleness=0.0, device=device)
    unmasked = unmasked_tokens(case)
    logp = (case.old_log_probs + 0.3 * torch.randn(3, 7).to(device)).to(dtype)
    entropy = per_token(low=0.0, high=3.0).to(device, dtype).masked_fill(~unmasked, torch.nan)
    masked = ~unmasked.cpu()

    def given(value):
        return (value.masked_fill(masked, torch.inf) if value.ndim == 2 else value).to(device)

    options = tree_map_only(Tensor, given, options)

    def values(kind, function=reference.bapo_loss_from_log_probs):
        """Gradients, log-probs, entropies, loss and metrics; bounds."""
        leaves = [t.detach().clone().to(kind).requires_grad_() for t in (logp, entropy)]
        arguments = (leaves[0], case.old_log_probs, case.advantages, unmasked)
        out = function(*arguments, entropy=leaves[1], **options)
        gradients = torch.autograd.grad(out.loss, leaves, materialize_grads=True)
        return (*gradients, out.log_probs, out.entropy, out.loss, *out.metrics.values()), out.bounds

    got, bounds = values(dtype, partial(bapo_loss_from_log_probs, backend=backend))
    truth, expected = values(torch.float64)
    assert [b.tolist() for b in bounds] == [b.tolist() for b in expected]
    assert not any(gradient[~unmasked].any() for gradient in got[:2])
    largest = logp[unmasked].abs().max().item()
    sizes = [max(1.0, value.abs().nan_to_num(posinf=0.0).item()) for value in truth[4:]]
    operands = (0.0,) * 4 + tuple(largest * size for size in sizes)
    assert_as_reference(got, lambda kind: values(kind)[0], dtype, operands)


@pytest.mark.parametrize("label", [2**62, -(2**62), 65, -1])
@pytest.mark.parametrize("statistics", ["all", "live"])
def test_labels_of_masked_tokens_may_be_anything(backend, device, label, statistics):
    case = make_case((4, 9), 65, device=device)
    expected = plain_result(backend, (4, 9), 65, statistics=statistics)
    case.labels[~case.response_mask] = label
    got = run_kernel(case, backend, statistics=statistics)
    assert_same(got, expected)


def test_more_rows_than_16_bits_can_count(backend, device, interpreted):
    if interpreted:
        pytest.skip("70,001 rows take 10 minutes in the interpreter")
    case = make_case((70_001,), 3, device=device, staleness=0.3)  # past 65,535 rows of one grid
    check_against_reference(case, backend)
