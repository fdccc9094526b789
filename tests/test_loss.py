"""bapo_loss of every backend against the float64 reference."""

import math
from functools import partial

import pytest
import torch
from helpers import (
    DEVICES,
    KERNELS,
    assert_within_budget,
    check_against_reference,
    examples,
    make_case,
    needs_native,
    per_token,
    plain_result,
    run_kernel,
    run_reference,
    unmasked_tokens,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
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

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CU = torch.tensor([0, 5, 5, 12, 20])

TEMPERATURES = per_token(seed=5, low=0.4, high=2.5)
OWN_BOUNDS = ClipBounds(per_token(low=0.7, high=1.0), per_token(seed=1, low=1.0, high=1.3))
REF = dict(ref_log_probs=per_token())
# One option alone, then many together: (config options, call options).
OPTIONS = {
    "paper": ({}, {}),
    "recipe": (dict(preset="recipe"), {}),
    "fixed": (dict(preset="fixed"), {}),
    "temperature": (dict(temperature=0.7), {}),
    "temperatures": (dict(temperature=30.0), dict(temperature=TEMPERATURES)),
    "logit_scale": (dict(logit_scale=1.7), {}),
    "softcap": (dict(final_logit_softcapping=5.0), {}),
    "dual_clip": (dict(clip_ratio_c=1.1), {}),
    "k1": (dict(kl_loss_coef=0.1, kl_loss_type="k1"), dict(ref_log_probs=per_token())),
    "k2": (dict(kl_loss_coef=0.1, kl_loss_type="k2"), dict(ref_log_probs=per_token())),
    "k3": (dict(kl_loss_coef=0.1, kl_loss_type="k3"), dict(ref_log_probs=per_token())),
    "kl_metric_only": ({}, dict(ref_log_probs=per_token())),
    "entropy": (dict(entropy_coef=0.05), {}),
    "is_weights": ({}, dict(rollout_is_weights=per_token(low=0.2, high=2.0))),
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
    "seq_norm": (dict(loss_agg_mode="seq-mean-token-sum-norm"), {}),
    "seq_norm_factor": (
        dict(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=11.0),
        {},
    ),
    "seq_mean": (dict(loss_agg_mode="seq-mean-token-mean"), {}),
    "global_tokens": ({}, dict(batch_num_tokens=100, dp_size=4)),
    "global_sequences": (
        dict(loss_agg_mode="seq-mean-token-mean"),
        dict(global_batch_size=torch.tensor(16), dp_size=2),
    ),
    "temperatures, together": (
        dict(entropy_coef=0.05, kl_loss_coef=0.1, final_logit_softcapping=5.0, logit_scale=1.7),
        dict(temperature=TEMPERATURES, ref_log_probs=per_token()),
    ),
    "sequence, together": (
        dict(
            ratio_level="sequence",
            clip_ratio_c=1.05,
            kl_loss_coef=0.05,
            entropy_coef=0.01,
            contribution="gradient",
            loss_agg_mode="seq-mean-token-mean",
        ),
        dict(rollout_is_weights=per_token(low=0.2, high=2.0), bounds=OWN_BOUNDS) | REF,
    ),
    "together": (
        dict(
            preset="recipe",
            temperature=0.9,
            final_logit_softcapping=20.0,
            kl_loss_coef=0.05,
            entropy_coef=0.01,
            loss_agg_mode="seq-mean-token-mean",
        ),
        dict(
            ref_log_probs=per_token(),
            rollout_is_weights=per_token(low=0.2, high=2.0),
            rollout_log_probs=per_token(seed=2),
        ),
    ),
}


def build_config(options):
    options = dict(options)
    preset = options.pop("preset", "paper")
    if preset == "fixed":
        return BAPOConfig.fixed(0.8, 1.2, **options)
    return getattr(BAPOConfig, preset)(**options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("statistics", ["all", "live"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(backend, device, dtype, statistics, name):
    config_options, call_options = OPTIONS[name]
    config = build_config(config_options)
    case = make_case(dtype=dtype, device=device, config=config, **call_options)
    check_against_reference(case, backend, statistics=statistics)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "V",
    # one token, less than a vector, primes, a vector and a block and their neighbours, unaligned
    # rows of several tiles, a shard of a large vocabulary
    [1, 2, 3, 15, 16, 17, 31, 33, 127, 1009, 4095, 4096, 4097, 8191, 16399, 18992],
)
def test_vocabulary_sizes(backend, device, dtype, V):
    case = make_case((2, 3), V, dtype, device, masked=0.0, config=BAPOConfig(entropy_coef=0.01))
    check_against_reference(case, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("V", [151_936, 262_208])  # Qwen3 and Gemma 3
def test_real_vocabularies(backend, device, dtype, V):
    check_against_reference(make_case((1, 4), V, dtype, device, masked=0.0, idle=0.0), backend)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (2, 2, 3)])  # 0 to 3 leading sizes
def test_leading_shapes(backend, device, shape):
    case = make_case(shape, 33, device=device, masked=0.0, poison=False)
    got = check_against_reference(case, backend)
    assert got.output.log_probs.shape == shape


@pytest.mark.parametrize("staleness", [0.0, 0.02, 0.3, 3.0, 60.0])  # on-policy .. past the clamp
@pytest.mark.parametrize("preset", ["paper", "recipe"])
def test_staleness(backend, device, staleness, preset):
    config = build_config(dict(preset=preset))
    case = make_case((4, 16), 65, device=device, staleness=staleness, config=config)
    check_against_reference(case, backend)


def test_on_policy(backend, device):
    case = make_case(device=device)
    case.old_log_probs = None
    got = check_against_reference(case, backend)
    assert got.output.metrics["pg_clipfrac"] == 0
    assert got.output.metrics["ppo_kl"] == 0


@pytest.mark.parametrize(
    "mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"]
)
@pytest.mark.parametrize("per_sequence", [False, True])
def test_packed_batches(backend, device, mode, per_sequence):
    config = BAPOConfig(loss_agg_mode=mode)
    case = make_case((20,), 65, device=device, config=config, cu_seqlens=CU.int())
    if per_sequence:
        case.advantages = torch.tensor([0.5, 2.0, -1.0, 0.7], device=device)
    check_against_reference(case, backend)


def test_packed_equals_padded(backend, device):
    """The same tokens with and without padding."""
    for mode in ("seq-mean-token-sum", "seq-mean-token-mean"):
        config = BAPOConfig(loss_agg_mode=mode)
        case = make_case((3, 6), 33, device=device, config=config, poison=False)
        lengths = torch.tensor([6, 2, 4])
        inside = (torch.arange(6) < lengths[:, None]).to(device)
        case.response_mask = case.response_mask & inside
        padded = run_kernel(case, backend)
        arguments = [None if a is None else a[inside] for a in case.arguments()]
        logits = case.logits[inside].requires_grad_()
        cu = torch.tensor([0, 6, 8, 12], device=device)
        out = bapo_loss(logits, *arguments, config=config, cu_seqlens=cu, backend=backend)
        out.loss.backward()
        torch.testing.assert_close(out.loss, padded.output.loss, rtol=0, atol=0)
        torch.testing.assert_close(logits.grad, padded.gradient[inside], rtol=0, atol=0)


def test_advantages_per_sequence(backend, device):
    case = make_case(device=device)
    case.advantages = torch.tensor([0.5, 0.0, -1.0], device=device)
    check_against_reference(case, backend)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_micro_batches_add_up(backend, device, interpreted, mode):
    """Eight micro-batches with global counts and shared bounds add up to one batch."""
    config = BAPOConfig(loss_agg_mode=mode)
    B = 8 if interpreted else 16
    case = make_case((B, 5), 33, device=device, config=config)
    whole = run_kernel(case, backend)
    unmasked = unmasked_tokens(case)
    counts = dict(
        batch_num_tokens=unmasked.sum(),
        global_batch_size=unmasked.any(-1).sum(),
        bounds=whole.output.bounds,
    )
    total, gradients = 0.0, []
    for rows in torch.arange(B).chunk(8):
        part = type(case)(
            case.logits[rows],
            case.labels[rows],
            case.old_log_probs[rows],
            case.advantages[rows],
            case.response_mask[rows],
            case.options,
        )
        result = run_kernel(part, backend, **counts)
        total += result.output.loss.item()
        gradients.append(result.gradient)
    assert total == pytest.approx(whole.output.loss.item(), rel=1e-6)
    torch.testing.assert_close(torch.cat(gradients), whole.gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.uint8, torch.float32])
def test_mask_dtypes(backend, device, mask_dtype):
    case = make_case(device=device)
    expected = plain_result(backend)
    case.response_mask = case.response_mask.to(mask_dtype)
    assert torch.equal(run_kernel(case, backend).gradient, expected.gradient)


@pytest.mark.parametrize("statistics", ["all", "live"])
def test_all_masked(backend, device, statistics):
    case = make_case(device=device)
    case.response_mask = torch.zeros_like(case.response_mask)
    case.logits.fill_(torch.nan)
    got = run_kernel(case, backend, statistics=statistics)
    assert got.output.loss == 0
    assert torch.equal(got.gradient, torch.zeros_like(got.gradient))
    assert [b.item() for b in got.output.bounds] == pytest.approx([0.6, 1.2])
    assert all(v.isfinite() or k == "bapo_pos_neg_ratio" for k, v in got.output.metrics.items())


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])  # no tokens at all
def test_no_tokens(backend, device, shape):
    logits = torch.empty(*shape, 11, device=device, requires_grad=True)
    tokens = torch.empty(shape, device=device)
    out = bapo_loss(logits, tokens.long(), tokens, tokens, backend=backend)
    out.loss.backward()
    assert out.loss == 0
    assert logits.grad.shape == logits.shape


def test_live_statistics_skip_inactive_tokens(backend, device):
    case = make_case(device=device)
    everything, live = (run_kernel(case, backend, statistics=s) for s in ("all", "live"))
    assert torch.equal(everything.gradient, live.gradient)
    assert everything.output.loss == live.output.loss
    inactive = unmasked_tokens(case) & (case.advantages == 0)
    active = unmasked_tokens(case) & ~inactive
    assert torch.equal(live.output.log_probs.isnan(), inactive)
    assert live.output.metrics["live_tokens"] == active.sum()
    assert "live_tokens" not in everything.output.metrics


def test_live_statistics_read_only_active_rows(backend, device):
    """Rows of inactive tokens may be full of NaN."""
    case = make_case(device=device)
    expected = run_kernel(case, backend, statistics="live")
    case.logits[case.advantages == 0] = torch.nan
    got = run_kernel(case, backend, statistics="live")
    assert torch.equal(got.gradient, expected.gradient)
    assert got.output.loss == expected.output.loss


def test_undecided_rows_are_finished_with_the_final_bounds(backend, device, interpreted):
    """The bounds of the search and the same bounds given lead to the same gradient."""
    shape, seed = ((4, 16), 5) if interpreted else ((8, 32), 0)
    case = make_case(shape, 65, device=device, staleness=0.4, seed=seed)
    searched = run_kernel(case, backend)
    assert searched.output.bounds.upper > 1.2, "the case must need a search"
    given_bounds = run_kernel(case, backend, bounds=searched.output.bounds)
    assert torch.equal(searched.gradient, given_bounds.gradient)
    assert searched.output.loss == given_bounds.output.loss


def test_bounds_as_floats(backend, device):
    case = make_case(device=device)
    tensors = ClipBounds(torch.tensor(0.8, device=device), torch.tensor(1.3, device=device))
    expected = run_kernel(case, backend, bounds=tensors)
    got = run_kernel(case, backend, bounds=(0.8, 1.3))
    assert torch.equal(got.gradient, expected.gradient)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_equal_temperatures_have_the_bits_of_one_number(backend, device, dtype, softcap, inplace):
    """In any shape and any floating dtype; 0.75 is one of every dtype."""
    B, S = 2, 3
    config = BAPOConfig(final_logit_softcapping=softcap, entropy_coef=0.05, temperature=0.75)
    case = make_case((B, S), 65, dtype, device, config=config, staleness=0.4)
    logits = case.logits.clone() if inplace else case.logits.requires_grad_()
    plain = bapo_loss(logits, *case.arguments(), **case.options, backend=backend, inplace=inplace)
    expected = logits if inplace else torch.autograd.grad(plain.loss, logits)[0]
    ignored = BAPOConfig(final_logit_softcapping=softcap, entropy_coef=0.05, temperature=9.0)
    kinds = {(): torch.float64, (B,): torch.bfloat16, (B, S): torch.float32, (S, B): torch.float16}
    for shape, kind in kinds.items():
        T = torch.full(shape, 0.75, dtype=kind, device=device)
        T = T.T if shape == (S, B) else T
        x = case.logits.detach().clone().requires_grad_(not inplace)
        options = dict(config=ignored, temperature=T, backend=backend, inplace=inplace)
        got = bapo_loss(x, *case.arguments(), **options)
        gradient = x if inplace else torch.autograd.grad(got.loss, x)[0]
        assert torch.equal(gradient, expected)
        assert torch.equal(got.loss, plain.loss)
        assert torch.equal(got.entropy, plain.entropy)


@pytest.mark.parametrize("shape", [(), (3,), (3, 5)])
def test_shapes_of_temperature(backend, device, shape):
    """One for all tokens, one per sequence, one per token: as the same ones written out."""
    T = torch.linspace(0.5, 2.0, math.prod(shape), device=device).view(shape)
    case = make_case((3, 5), 65, device=device, poison=False)
    written_out = T.view(*shape, *[1] * (2 - len(shape))).expand(3, 5).clone()
    expected = check_against_reference(case, backend, temperature=written_out)
    got = check_against_reference(case, backend, temperature=T.clone().requires_grad_())
    assert torch.equal(got.gradient, expected.gradient)
    assert torch.equal(got.output.loss, expected.output.loss)


def test_temperatures_of_packed_sequences(backend, device):
    """One per sequence, an empty one among them; tokens after the last sequence are masked."""
    cu = torch.tensor([0, 5, 5, 12, 20], device=device)
    case = make_case((24,), 65, device=device, cu_seqlens=cu)
    T = torch.tensor([0.5, torch.nan, 1.25, 2.0], device=device)
    got = check_against_reference(case, backend, temperature=T)
    per_token = torch.cat([T.repeat_interleave(cu.diff()), T.new_zeros(4)])
    expected = check_against_reference(case, backend, temperature=per_token)
    assert torch.equal(got.gradient, expected.gradient)
    case.advantages = torch.tensor([0.5, 2.0, -1.0, 0.7], device=device)
    check_against_reference(case, backend, temperature=T)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16]
)  # gradient in forward, in backward
@pytest.mark.parametrize("bad", [0.0, -0.5, torch.inf, torch.nan])
def test_bad_temperature_makes_its_token_nan(backend, device, dtype, bad):
    case = make_case((2, 4), 65, dtype, device, poison=False)
    unmasked = unmasked_tokens(case)
    T = torch.full((2, 4), 0.75, device=device)
    expected = run_kernel(case, backend, temperature=T)
    hidden = T.masked_fill(~unmasked, bad)
    got = run_kernel(case, backend, temperature=hidden)
    assert torch.equal(got.gradient, expected.gradient)
    assert torch.equal(got.output.loss, expected.output.loss)
    place = tuple(unmasked.nonzero()[2].tolist())
    T[place] = bad
    for result in run_kernel(case, backend, temperature=T), run_reference(case, temperature=T):
        assert result.output.loss.isnan()
        isnan = torch.zeros_like(unmasked)
        isnan[place] = True
        assert torch.equal(result.output.log_probs.isnan(), isnan)
        assert torch.equal(result.output.entropy.isnan(), isnan)
    case.advantages[place] = 0.0  # then it cannot change the loss
    live = run_kernel(case, backend, temperature=T, statistics="live")
    assert live.output.loss.isfinite()
    assert live.gradient.isfinite().all()


@pytest.mark.parametrize("pair", [(1.2, 0.8), (-0.1, 1.2), (torch.nan, 1.2), (0.8, torch.nan)])
def test_tensor_bounds_that_break_their_rule_make_the_loss_nan(backend, device, pair):
    """Unless no token is counted. Numbers raise."""
    case = make_case(device=device, poison=False)
    bounds = tuple(torch.tensor(bound, device=device) for bound in pair)
    for got in run_kernel(case, backend, bounds=bounds), run_reference(case, bounds=bounds):
        assert got.output.loss.isnan()
        assert got.gradient[unmasked_tokens(case)].isnan().any()
        assert (got.gradient[~unmasked_tokens(case)] == 0).all()
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
    for function, dtype, digits in ((kernel, torch.float32, 24), (truth, torch.float64, 50)):
        logits = torch.zeros(2, 1, dtype=dtype, device=device)
        share = function(logits, labels, old, A, bounds=(0.8, 1.2)).metrics["bapo_pos_share"]
        expected = (pos / (pos + neg)).to(device)
        torch.testing.assert_close(share.double(), expected, rtol=2.0**-digits, atol=0)


def test_module(backend, device):
    case = make_case(device=device)
    loss = BAPOLoss(BAPOConfig.recipe(), backend=backend, statistics="live")
    got = loss(case.logits, *case.arguments())
    expected = bapo_loss(
        case.logits,
        *case.arguments(),
        config=BAPOConfig.recipe(),
        backend=backend,
        statistics="live",
    )
    assert got.loss == expected.loss
    assert "recipe" not in repr(loss)
    assert "statistics='live'" in repr(loss)


@pytest.mark.parametrize("scope", ["call", "lagged"])
def test_module_with_the_options_of_a_search(backend, device, scope):
    case = make_case(device=device)
    search = ClipBoundSearch(BAPOConfig.recipe(), scope)
    got = BAPOLoss(backend=backend)(case.logits, *case.arguments(), **search.options)
    expected = bapo_loss(case.logits, *case.arguments(), backend=backend, **search.options)
    assert got.loss == expected.loss


def test_reference_backend(device):
    """The reference is a backend too, in place or not."""
    case = make_case()
    truth = run_reference(case)
    assert torch.equal(run_kernel(case, "reference").gradient, truth.gradient)
    weight = torch.ones((), requires_grad=True)
    logits = case.logits * weight
    out = bapo_loss(logits, *case.arguments(), backend="reference", inplace=True)
    assert torch.equal(logits.detach(), truth.gradient)
    out.loss.backward()


# Shrinking thousands of interpreted rows would take an hour.
NO_EXPLANATION = [Phase.explicit, Phase.reuse, Phase.generate]
CONFIGS = st.builds(
    BAPOConfig,
    target=st.floats(0, 1),
    raise_first=st.sampled_from(["upper", "lower"]),
    token_weight=st.sampled_from(["rollout_prob", "uniform"]),
    contribution=st.sampled_from(["surrogate", "gradient"]),
    clip_ratio_c=st.sampled_from([None, 1.5, 3.0]),
    kl_loss_coef=st.sampled_from([0.0, 0.1]),
    kl_loss_type=st.sampled_from(["k1", "k2", "low_var_kl"]),
    entropy_coef=st.sampled_from([0.0, 0.01, -0.02]),
    loss_agg_mode=st.sampled_from(["token-mean", "token-sum", "seq-mean-token-mean"]),
    ratio_level=st.sampled_from(["token", "sequence"]),
    temperature=st.sampled_from([1.0, 0.6, 1.3]),
    logit_scale=st.sampled_from([1.0, 0.5]),
    final_logit_softcapping=st.sampled_from([None, 10.0]),
)


@settings(max_examples=examples(150), phases=NO_EXPLANATION)
@given(
    backend=st.sampled_from(KERNELS or ["none"]),
    config=CONFIGS,
    dtype=st.sampled_from(DTYPES),
    B=st.integers(1, 4),
    S=st.integers(1, 9),
    V=st.integers(1, 300),
    staleness=st.sampled_from([0.0, 0.1, 1.0]),
    statistics=st.sampled_from(["all", "live"]),
    seed=st.integers(0, 2**20),
)
@pytest.mark.skipif(not KERNELS, reason="no kernels")
def test_any_combination(backend, config, dtype, B, S, V, staleness, statistics, seed):
    case = make_case(
        (B, S),
        V,
        dtype,
        DEVICES[backend],
        staleness=staleness,
        config=config,
        seed=seed,
        ref_log_probs=per_token((B, S), seed),
        rollout_is_weights=per_token((B, S), seed, low=0.0, high=2.0),
    )
    check_against_reference(case, backend, few_tokens=True, statistics=statistics)


def scalar(output, name):
    return output.loss if name == "loss" else output.metrics[name]


def stacked(results, name):
    return torch.stack([scalar(r.output, name) for r in results])


@pytest.mark.parametrize("name", ["paper", "recipe", "together", "bounds", "entropy", "seq_mean"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scalars_are_within_the_plain_budget(backend, device, interpreted, dtype, name):
    """Loss and metrics of many batches, each as one tensor: no allowance for operands is needed,
    because the reference is not right by luck in all batches."""
    if interpreted and dtype != DTYPES[0] and name not in ("paper", "together"):
        pytest.skip("sums over tokens do not depend on the dtype of the logits")
    config_options, call_options = OPTIONS[name]
    config = build_config(config_options)
    runs = []
    for seed in range(6 if interpreted else 24):
        case = make_case(dtype=dtype, device=device, config=config, seed=seed, **call_options)
        truth = run_reference(case, torch.float64)
        runs.append((run_kernel(case, backend), run_reference(case), truth))
    for metric in ["loss", *runs[0][0].output.metrics]:
        assert_within_budget(metric, *(stacked(r, metric) for r in zip(*runs, strict=True)))


OF_LOGITS = "temperature", "temperatures", "temperatures, together", "logit_scale", "softcap"
FROM_LOG_PROBS = [name for name in OPTIONS if name not in OF_LOGITS]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("statistics", ["all", "live"])
@pytest.mark.parametrize("name", FROM_LOG_PROBS)
def test_options_of_loss_from_log_probs(dtype, statistics, name):
    """Every option, from log-probs and entropies that are NaN wherever masked."""
    config_options, options = OPTIONS[name]
    options = dict(options, config=build_config(config_options), statistics=statistics)
    case = make_case(staleness=0.0)
    unmasked = unmasked_tokens(case)
    logp = (case.old_log_probs + 0.3 * torch.randn(3, 7)).to(dtype)
    entropy = per_token(low=0.0, high=3.0).to(dtype).masked_fill(~unmasked, torch.nan)
    options = tree_map_only(
        Tensor, lambda v: v.masked_fill(~unmasked, torch.inf) if v.ndim == 2 else v, options
    )
    results = []
    for function, kind in (
        (bapo_loss_from_log_probs, dtype),
        (reference.bapo_loss_from_log_probs, dtype),
        (reference.bapo_loss_from_log_probs, torch.float64),
    ):
        leaves = [t.detach().clone().to(kind).requires_grad_() for t in (logp, entropy)]
        arguments = (leaves[0], case.old_log_probs, case.advantages, unmasked)
        out = function(*arguments, entropy=leaves[1], **options)
        out.loss.backward()
        gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]
        results.append((out, gradients))
    assert [b.tolist() for b in results[0][0].bounds] == [b.tolist() for b in results[2][0].bounds]
    for which in (0, 1):
        assert_within_budget(f"gradient {which}", *(r[1][which] for r in results))
        assert not results[0][1][which][~unmasked].any()
    largest = logp[unmasked].abs().max().item()
    for metric in ("loss", *results[2][0].metrics):
        parts = [scalar(r[0], metric) for r in results]
        size = max(1.0, parts[2].abs().nan_to_num(posinf=0.0).item())
        assert_within_budget(metric, *parts, operand=largest * size)
    for metric in ("log_probs", "entropy"):
        assert_within_budget(metric, *(getattr(r[0], metric) for r in results))


@pytest.mark.parametrize("label", [2**62, -(2**62), 65, -1])
@pytest.mark.parametrize("statistics", ["all", "live"])
def test_labels_of_masked_tokens_may_be_anything(backend, device, label, statistics):
    case = make_case((4, 9), 65, device=device)
    expected = plain_result(backend, (4, 9), 65, statistics=statistics)
    case.labels[~case.response_mask] = label
    got = run_kernel(case, backend, statistics=statistics)
    assert torch.equal(got.gradient, expected.gradient)
    assert torch.equal(got.output.loss, expected.output.loss)


def test_masked_sequence_may_have_a_nan_advantage(backend, device):
    case = make_case((3, 7), device=device)
    case.advantages = torch.tensor([0.5, torch.nan, -1.0], device=device)
    case.response_mask[1] = False
    got = check_against_reference(case, backend)
    assert got.output.loss.isfinite()
    assert not got.gradient[1].any()


@pytest.mark.parametrize("S", [2, 4])  # equal to the number of sequences, and not
def test_three_leading_sizes_with_one_advantage_per_sequence(backend, device, S):
    case = make_case((2, S, 3), 33, device=device, masked=0.0, poison=False)
    case.advantages = torch.tensor([1.0, -2.0], device=device)
    check_against_reference(case, backend)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_packed_with_tokens_after_the_last_sequence(backend, device, mode, per_sequence):
    """Padding to a multiple, masked out and full of NaN: check_inputs allows these offsets."""
    cu = torch.tensor([0, 5, 5, 12, 20], device=device)
    case = make_case((24,), 65, device=device, config=BAPOConfig(loss_agg_mode=mode), cu_seqlens=cu)
    case.response_mask[20:] = False
    case.logits[20:] = torch.nan
    if per_sequence:
        case.advantages = torch.tensor([0.5, 2.0, -1.0, 0.7], device=device)
    got = check_against_reference(case, backend)
    assert not got.gradient[20:].any()


def test_more_rows_than_16_bits_can_count(backend, device, interpreted):
    if interpreted:
        pytest.skip("70,001 rows take 10 minutes in the interpreter")
    case = make_case((70_001,), 3, device=device, staleness=0.3)  # past 65,535 rows of one grid
    check_against_reference(case, backend)


@needs_native
@settings(max_examples=examples(60))
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    mode=st.sampled_from(["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]),
    recipe=st.booleans(),
    per_sequence=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**20),
)
def test_any_packing(lengths, mode, recipe, per_sequence, dtype, seed):
    """Empty sequences first, last, in the middle and alone."""
    cu = torch.tensor([0, *lengths]).cumsum(0)
    config = (BAPOConfig.recipe if recipe else BAPOConfig)(loss_agg_mode=mode)
    case = make_case((sum(lengths),), 41, dtype, config=config, seed=seed)
    case = case.with_options(cu_seqlens=cu)
    if per_sequence:
        case.advantages = torch.randn(len(lengths), generator=torch.Generator().manual_seed(seed))
    if sum(lengths):
        check_against_reference(case, "cpu")
    else:
        assert run_kernel(case, "cpu").output.loss == 0
