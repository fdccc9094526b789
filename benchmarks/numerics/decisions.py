"""How often rounding changes a decision of the search, predicted and observed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from rich.progress import track
from torch import Tensor

from bapo_kernels import (
    BAPOConfig,
    find_clip_bounds,
    log_probs,
    reference,
)
from bapo_kernels.config import LOG_RATIO_LIMIT, RATIO_EPS
from bapo_kernels.core.arguments import log_probs_arguments
from bapo_kernels.core.autograd import LogProbs
from bapo_kernels.core.operators import as_rows
from bapo_kernels.core.prepare import prepared

from ..records import Record
from .errors import Rows, known

BATCHES, TOKENS = 5_000, (16, 64, 256, 1_024)  # per preset; per batch
POOL, POOL_V = 4_096, 32_000
BITS = {"24 (float32)": 24, "20": 20, "17": 17, "14": 14, "11 (float16)": 11, "8 (bfloat16)": 8}
SIGNIFICANT = {torch.float64: 24, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
MARGINS = [10 ** (k / 4) for k in range(-40, 5)]  # 1e-10 to 10


def ulp(x: Tensor, bits: int) -> Tensor:
    """The last place of float64 values in a significand of ``bits`` bits."""
    return torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - bits)


def rounded(x: Tensor, bits: int) -> Tensor:
    """Float64 values rounded to a significand of ``bits`` bits, ties to even."""
    return torch.round(x / ulp(x, bits)) * ulp(x, bits)


def perturbed(x: Tensor, bits: int, g: torch.Generator) -> Tensor:
    """Values moved by up to half a unit in the last place of such a significand."""
    return x + ulp(x, bits) * (torch.rand(x.shape, generator=g, dtype=x.dtype) - 0.5)


@dataclass(frozen=True)
class Batches:
    """``[B, n]`` tokens from the pool, and targets ``[B]`` that the search can reach."""

    config: BAPOConfig
    index: Tensor
    old: Tensor
    A: Tensor
    low: Tensor
    high: Tensor
    target: Tensor

    @classmethod
    def draw(
        cls, config: BAPOConfig, logp: Tensor, n: int, count: int, g: torch.Generator
    ) -> Batches:
        """Batches of staleness 0.1 to 2 in which some bound raises the tested quantity.

        Targets are uniform between its value at the starting bounds and its highest value.
        """
        index = torch.randint(len(logp), (4 * count, n), generator=g)
        staleness = 0.1 * 20 ** torch.rand(4 * count, 1, generator=g)
        old = (logp[index] + staleness * torch.randn(index.shape, generator=g)).float()
        A = torch.randn(index.shape, generator=g)
        values = path(config, logp[index], old, A)
        low, high = values[:, 0], values[:, :-1].amax(-1)
        kept = (high > low).nonzero().squeeze(1)[:count]
        assert len(kept) == count
        low, high = low[kept], high[kept]
        target = low + (high - low) * torch.rand(count, generator=g, dtype=torch.float64)
        return cls(config, index[kept], old[kept], A[kept], low, high, target)

    def path(self, logp: Tensor) -> Tensor:
        """The tested quantity with these log-probs of the pool."""
        return path(self.config, logp[self.index], self.old, self.A)


def visits(config: BAPOConfig) -> tuple[list[int], list[int]]:
    """Grid points of the lower and the upper bound, in the order of a loop that never stops."""
    first, second = len(config.lower_grid), len(config.upper_grid)
    if config.raise_first == "upper":
        first, second = second, first
    raised = [*range(first), *[first - 1] * (second - 1)]
    then = [*[0] * first, *range(1, second)]
    return (then, raised) if config.raise_first == "upper" else (raised, then)


def path(config: BAPOConfig, logp: Tensor, old: Tensor, A: Tensor) -> Tensor:
    """The tested quantity at every point the loop may visit, float64 ``[B, points]``."""
    old, A = old.double(), A.double()
    r = (logp.double() - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    w = torch.ones_like(old) if config.token_weight == "uniform" else old.exp()
    positive, negative = w * A.clamp(min=0), -w * A.clamp(max=0)
    pos = torch.stack([(positive * r.clamp(max=c)).sum(-1) for c in config.upper_grid], -1)
    neg = torch.stack([(negative * r.clamp(min=c)).sum(-1) for c in config.lower_grid], -1)
    lower, upper = visits(config)
    pos, neg = pos[:, upper], neg[:, lower]
    return pos / (neg + RATIO_EPS) if config.target_kind == "ratio" else pos / (pos + neg)


def stops(values: Tensor, target: Tensor) -> Tensor:
    """Where the loop stops: the first point that meets the target, or the last."""
    met = values >= target[:, None]
    met[:, -1] = True
    return met.int().argmax(-1)


def margins(values: Tensor, target: Tensor) -> Tensor:
    """The least change of a tested quantity that could move the stop."""
    points = torch.arange(values.shape[1] - 1)  # at the last point it stops in any case
    visited = points <= stops(values, target)[:, None]
    distance = (values[:, :-1] - target[:, None]).abs()
    return distance.masked_fill(~visited, torch.inf).amin(-1)


def flipped(values: Tensor, other: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The share of the targets in [low, high] at which two paths stop differently.

    A search stops at the first point whose running maximum meets the target, so these are the
    targets between the two maxima of a point: a union of intervals that ascend at both ends.
    """
    maxima = torch.stack([v[:, :-1].cummax(-1).values for v in (values, other)])
    begin, end = maxima.amin(0), maxima.amax(0)
    begin, end = (torch.clamp(x, low[:, None], high[:, None]) for x in (begin, end))
    before = torch.cat([low[:, None], end[:, :-1]], -1)
    return (end - torch.maximum(begin, before)).clamp(min=0).sum(-1) / (high - low)


def pool() -> tuple[Tensor, dict[str, tuple[Tensor, int]]]:
    """Log-probs of sampled tokens in float64, and by all methods with their significant bits.

    The methods get the same bfloat16 logits in two dtypes.
    """
    g = torch.Generator().manual_seed(0)
    truth: list[Tensor] = []
    found: dict[str, list[Tensor]] = {}
    others = {p.name: p.log_probs for p in known("logits")}
    for _ in track(range(POOL // 256), "log-probs"):
        logits = (3 * torch.randn(256, POOL_V, generator=g)).bfloat16()
        labels = torch.softmax(logits.float(), -1).multinomial(1, generator=g).squeeze(-1)
        truth.append(reference.log_probs(logits.double(), labels, return_entropy=False)[0])
        for dtype in (torch.bfloat16, torch.float32):
            z, suffix = logits.to(dtype), f", {str(dtype).removeprefix('torch.')} logits"
            ours = log_probs(z, labels, return_entropy=False, backend="cpu")[0]
            found.setdefault("bapo_kernels cpu" + suffix, []).append(ours)
            arguments = log_probs_arguments(labels, 1.0, 1.0, None, None, None)
            call = prepared("cpu", arguments, POOL_V)
            inside = LogProbs.apply(as_rows(z), call, None)[0]
            found.setdefault("bapo_kernels cpu in bapo_loss" + suffix, []).append(inside)
            for method, function in others.items():
                found.setdefault(method + suffix, []).append(function(Rows((z,), labels)))
    whole = {method: torch.cat(parts) for method, parts in found.items()}
    return torch.cat(truth), {
        method: (logp.double(), SIGNIFICANT[logp.dtype]) for method, logp in whole.items()
    }


def measure_decisions() -> Iterator[Record]:
    """One record per preset: one-pass search against the loop, margins, flips due to rounding."""
    truth, by_method = pool()
    sources = {f"rounded to {n} bits": (rounded(truth, b), b) for n, b in BITS.items()}
    sources |= by_method
    for preset in ("paper", "recipe"):
        g = torch.Generator().manual_seed(0)
        config = getattr(BAPOConfig, preset)()
        count = BATCHES // len(TOKENS)
        groups = [Batches.draw(config, truth, n, count, g) for n in TOKENS]
        differ: list[float] = []
        for batches in track(groups, f"{preset}: the loop"):
            differ += against_the_loop(batches, truth.float())
        true_paths = [batches.path(truth) for batches in groups]
        margin = torch.cat([margins(v, b.target) for v, b in zip(true_paths, groups, strict=True)])
        noise = {
            bits: flips(groups, true_paths, perturbed(truth, bits, g))["all_targets"]
            for bits in track(sorted(set(BITS.values())), f"{preset}: half a unit")
        }
        found = {
            method: {
                "mean": (logp - truth).mean().item(),
                "rms": (logp - truth).square().mean().sqrt().item(),
                "predicted": noise[bits],
                **flips(groups, true_paths, logp),
            }
            for method, (logp, bits) in track(sources.items(), f"{preset}: flips")
        }
        yield {
            "part": "decisions",
            "preset": preset,
            "batches": len(margin),
            "tokens": TOKENS,
            "V": POOL_V,
            "differ": differ,
            "ties": int((margin == 0).sum()),
            "least_margin": margin.min().item(),
            "margins": [int((margin < x).sum()) for x in MARGINS],
            "sources": found,
        }


def against_the_loop(batches: Batches, logp: Tensor) -> list[float]:
    """Margins of the batches in which the one-pass search and the reference's loop differ.

    Both get the same float32 log-probs; every path is checked against the loop as well.
    """
    values, config = batches.path(logp), batches.config
    at, margin = stops(values, batches.target), margins(values, batches.target)
    lower, upper = visits(config)
    differ = []
    for b in range(len(at)):
        tokens = logp[batches.index[b]], batches.old[b], batches.A[b]
        asked = replace(config, target=batches.target[b].item())
        loop = reference.find_clip_bounds(*tokens, config=asked)
        k = int(at[b])
        mine = torch.tensor([config.lower_grid[lower[k]], config.upper_grid[upper[k]]])
        assert torch.equal(torch.stack(loop), mine), "the flips are not those of the loop"
        if find_clip_bounds(*tokens, config=asked) != loop:
            differ.append(margin[b].item())
    return differ


def flips(groups: list[Batches], true_paths: list[Tensor], logp: Tensor) -> dict[str, float]:
    """Decisions that differ with other log-probs, and the median shift of the tested quantity.

    ``all_targets`` is the expected number of such decisions over all targets.
    """
    observed, share, shifts = 0, 0.0, []
    for batches, values in zip(groups, true_paths, strict=True):
        other, at = batches.path(logp), stops(values, batches.target)
        observed += int((stops(other, batches.target) != at).sum())
        share += flipped(values, other, batches.low, batches.high).sum().item()
        shifts.append((other - values).abs().gather(-1, at[:, None]))
    return {
        "observed": observed,
        "all_targets": share,
        "shift": torch.cat(shifts).median().item(),
    }
