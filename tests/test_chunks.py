"""The loss of hidden states in chunks of any size, and that of their logits."""

import random
from itertools import product

import pytest
import torch
from accuracy import assert_same, assert_sums, inputs_of
from helpers import examples, needs_native, sets_of
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_kernels import BAPOConfig, SamplingMask, bapo_linear_loss, bapo_loss, reference
from bapo_kernels.core.head.hidden import Compaction
from bapo_kernels.tools.budget import evaluate, make_case

B, S, H, V = 3, 7, 16, 33
N = B * S


OPTIONS = {
    "paper": {},
    "cispo": dict(surrogate="cispo"),
    "sequences": dict(ratio_level="sequence"),
    "KL, entropy": dict(kl_loss_coef=0.1, entropy_coef=0.01),
    "bounds": dict(bounds=(0.8, 1.2)),
    "sets": dict(sets=True),
}


@needs_native
@pytest.mark.parametrize("name", OPTIONS)
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
    hidden = torch.randint(-1, 2, (B, S, H), generator=g).float()
    weight, bias = (torch.randint(-2, 3, of, generator=g) / 2 for of in ((V, H), (V,)))
    options = dict(OPTIONS[name])
    bounds, sets = options.pop("bounds", None), options.pop("sets", False)
    of_case = dict(masked=masked, idle=idle, config=BAPOConfig(target=0.9, **options), seed=seed)
    logits = hidden @ weight.T + bias
    case = make_case((B, S), V, logits=logits.clone(), **of_case)
    mask = SamplingMask.from_lists(sets_of(case.labels, V, outside=False)) if sets else None
    logp, _ = reference.log_probs(logits.double(), case.labels, sampling_mask=mask)
    old, ref = logp + 0.4 * torch.randn(2, B, S, generator=g)
    case.old_log_probs = old.float()
    case = case.with_options(
        bounds=bounds, ref_log_probs=ref.float(), sampling_mask=mask, backend="cpu"
    )
    hidden[case.logits.isnan().any(-1)] = torch.nan  # as masked logits are

    def loss(hidden, *others, **options):
        W, b, *tokens = (weight, bias, *others) if frozen else others
        return bapo_linear_loss(hidden, W, *tokens, bias=b, chunk_tokens=chunk_tokens, **options)

    expected = evaluate(bapo_loss, case, (case.logits,))
    got = evaluate(loss, case, (hidden,) if frozen else (hidden, weight, bias))
    for name in ("bounds", "log_probs", "entropy", "loss"):
        assert_same(*(getattr(result.output, name) for result in (got, expected)), name)
    of_rows, h = expected.gradient.double(), hidden.double().nan_to_num(0.0)
    assert_sums(
        got.gradient,
        of_rows @ weight.double(),
        V,
        of_rows.abs() @ weight.double().abs(),
        "hidden gradient",
        inputs_of(case),
    )
    if not frozen:
        z, h = of_rows.flatten(0, 1), h.flatten(0, 1)
        assert_sums(got.gradients[1], z.T @ h, N, z.abs().T @ h.abs(), "weight gradient")
        assert_sums(got.gradients[2], z.sum(0), N, z.abs().sum(0), "bias gradient")


@pytest.mark.parametrize("n", [0, 1, 2, 5, 7, 100])
def test_compaction(n):
    """Of every mask, or of some: the last rows that stay take the places of those that do not."""
    draw = random.Random(n)
    some = ([draw.random() < share for _ in range(n)] for share in (0.1, 0.5, 0.9))
    for keep in product([False, True], repeat=n) if n < 10 else some:
        keep, values = torch.tensor(keep, dtype=torch.bool), torch.randn(n, 3)
        before, kept = values.clone(), Compaction.of(keep)
        count = int(keep.sum())
        assert_same(kept.rows.sort().values, keep.nonzero().flatten(), "rows that stay")
        stays = keep[:count]
        assert_same(kept.rows[stays], stays.nonzero().flatten(), "rows that do not move")
        moved = kept.moved(values)
        assert_same(moved, before[kept.rows], "moved rows")
        assert not count or moved.data_ptr() == values.data_ptr()
