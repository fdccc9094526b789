"""The loss of hidden states in chunks of any size, and that of their logits."""

from itertools import product

import pytest
import torch
from accuracy import assert_same, assert_sums, inputs_of
from helpers import examples, needs_native, sets_of
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_kernels import BAPOConfig, SamplingMask, bapo_linear_loss, bapo_loss, reference
from bapo_kernels.core.head.hidden import Compaction
from bapo_kernels.tools.budget import GRADIENTS, evaluate, make_case

shape = B, S = 3, 7
N, H, V = B * S, 16, 33
CONFIGS = {
    **{name: {} for name in ("paper", "bounds", "sets")},
    "cispo": dict(surrogate="cispo"),
    "sequences": dict(ratio_level="sequence"),
    "KL, entropy": dict(kl_loss_coef=0.1, entropy_coef=0.01),
}


@needs_native
@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=examples(40))
@given(
    chunk_tokens=st.integers(1, N),
    masked=st.sampled_from([0.25, 0.0, 0.7]),
    idle=st.sampled_from([0.3, 0.0, 0.8]),
    frozen=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_any_chunks(name, chunk_tokens, masked, idle, frozen, seed):
    """Products of small numbers are exact: all that is made of logits has the same bits."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randint(-1, 2, (*shape, H), generator=g).float()
    weight, bias = (torch.randint(-2, 3, of, generator=g) / 2 for of in ((V, H), (V,)))
    config, logits = BAPOConfig(target=0.9, **CONFIGS[name]), hidden @ weight.T + bias
    options = dict(logits=logits.clone(), config=config, seed=seed, backend="cpu")
    case = make_case(shape, V, masked=masked, idle=idle, **options)
    sets = sets_of(case.labels, V, outside=False) if name == "sets" else None
    mask = sets and SamplingMask.from_lists(sets)
    logp, _ = reference.log_probs(logits.double(), case.labels, sampling_mask=mask)
    case.old_log_probs, ref = (logp + 0.4 * torch.randn(2, *shape, generator=g)).float()
    bounds = (0.8, 1.2) if name == "bounds" else None
    case = case.with_options(bounds=bounds, ref_log_probs=ref, sampling_mask=mask)
    hidden[case.logits.isnan().any(-1)] = torch.nan

    def loss(hidden, *others, **options):
        W, b, *tokens = (weight, bias, *others) if frozen else others
        return bapo_linear_loss(hidden, W, *tokens, bias=b, chunk_tokens=chunk_tokens, **options)

    expected = evaluate(bapo_loss, case, (case.logits,))
    got = evaluate(loss, case, (hidden,) if frozen else (hidden, weight, bias))
    for name in ("bounds", "log_probs", "entropy", "loss"):
        assert_same(*(getattr(result.output, name) for result in (got, expected)), name)
    z, h = expected.gradient.double().view(N, V), hidden.double().nan_to_num(0.0).view(N, H)
    factors = (z, weight.double()), (z.T, h), (z.T, torch.ones(N, 1).double())
    for name, gradient, (a, b) in zip(GRADIENTS, got.gradients, factors, strict=False):
        truth, of = (product.view_as(gradient) for product in (a @ b, a.abs() @ b.abs()))
        assert_sums(gradient, truth, a.shape[1], of, name, inputs_of(case))


@pytest.mark.parametrize("n", [0, 1, 2, 5, 9])
def test_compaction(n):
    """Of every mask: the last rows that stay take the places of those that do not."""
    for keep in (torch.tensor(mask).bool() for mask in product([0, 1], repeat=n)):
        keep = keep.repeat(9)  # so many rows that several are copied at once
        values, kept = torch.randn(len(keep), 3), Compaction.of(keep)
        before, stays = values.clone(), keep[: keep.sum()]
        assert_same(kept.rows.sort().values, keep.nonzero().flatten(), "rows that stay")
        assert_same(kept.rows[stays], stays.nonzero().flatten(), "rows that do not move")
        assert_same(kept.moved(values), before[kept.rows], "moved rows")
        assert_same(values[: len(kept.rows)], before[kept.rows], "their memory")
