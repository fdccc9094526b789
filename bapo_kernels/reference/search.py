"""The contributions of the tokens, and the search for the clip bounds (Algorithm 1).

Imports ``tokens`` and the checks; nothing of the kernels, whose truth it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import check_group
from ..config import RATIO_EPS, BAPOConfig, TargetKind
from ..core.arguments.single import check_search, config_or_default
from ..core.arguments.together import token_arguments
from ..core.call import bounds_tensor
from ..output import ClipBounds
from .tokens import behaviour_log_probs, per_token, ratios, unmasked_tokens

if TYPE_CHECKING:
    from ..core.arguments.options import TokenOptions


def find_clip_bounds(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None = None,
    *,
    config: BAPOConfig | None = None,
    rollout_log_probs: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> ClipBounds:
    """Algorithm 1 of the paper: widen the bounds until positive tokens carry the target share.

    One bound goes up in steps to its maximum, then the other, while the tested quantity is below
    the target. A step past the maximum is cut there, as in the authors' code; the printed algorithm
    refuses it. Sums are float64; every probe reads the device back.

    Examples:
        >>> log_probs, old = torch.tensor([1.5, 1.0]).log(), torch.zeros(2)
        >>> config = BAPOConfig(token_weight="uniform", target=0.48)
        >>> reference.find_clip_bounds(log_probs, old, torch.tensor([2.0, -3.0]), config=config)
        ClipBounds(lower=tensor(0.6000), upper=tensor(1.4000))
    """
    config = config_or_default(config)
    check_search(config)
    check_group("process_group", process_group)
    batch = log_probs, old_log_probs, advantages, response_mask
    probe = Contributions(config, *batch, rollout_log_probs, process_group, cu_seqlens)
    bounds = algorithm_1(config, probe.quantity)
    return ClipBounds(*torch.tensor(bounds, dtype=torch.float32, device=log_probs.device).unbind())


def algorithm_1(
    config: BAPOConfig, quantity: Callable[[float, float], float]
) -> tuple[float, float]:
    """Finds where the loop stops for the quantity at given bounds, its steps cut at the maxima."""
    bound = {"lower": config.ratio_lower_start, "upper": config.ratio_upper_start}
    step = {"lower": config.ratio_lower_step, "upper": config.ratio_upper_step}
    maximum = {"lower": config.ratio_lower_max, "upper": config.ratio_upper_max}
    order = ("upper", "lower") if config.raise_first == "upper" else ("lower", "upper")
    for side in order:
        while (
            quantity(bound["lower"], bound["upper"]) < config.target
            and bound[side] < maximum[side]
            and step[side] > 0
        ):
            bound[side] = min(bound[side] + step[side], maximum[side])
    return bound["lower"], bound["upper"]


class Contributions:
    """The positive and the negative mass of a set of tokens at given bounds.

    Examples:
        >>> log_probs, old = torch.tensor([1.5, 1.0]).log(), torch.zeros(2)
        >>> config, A = BAPOConfig(token_weight="uniform"), torch.tensor([2.0, -3.0])
        >>> probe = reference.Contributions(config, log_probs, old, A, None)
        >>> probe.sums(lower=0.6, upper=1.2)
        (2.4, 3.0)
        >>> round(probe.quantity(lower=0.6, upper=1.2), 4)  # 2.4/5.4
        0.4444
    """

    def __init__(
        self,
        config: BAPOConfig,
        log_probs: Tensor,
        old_log_probs: Tensor | None,
        advantages: Tensor,
        response_mask: Tensor | None,
        rollout_log_probs: Tensor | None = None,
        process_group: dist.ProcessGroup | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> None:
        batch = old_log_probs, advantages, response_mask
        options: TokenOptions = dict(rollout_log_probs=rollout_log_probs, cu_seqlens=cu_seqlens)
        token_arguments(log_probs, *batch, config=config, for_search=True, **options)
        unmasked = unmasked_tokens(log_probs, response_mask, cu_seqlens)
        logp = log_probs.detach().double()
        old = behaviour_log_probs(logp, old_log_probs).double()
        rollout = old if rollout_log_probs is None else rollout_log_probs.detach().double()
        A = per_token(advantages, log_probs, cu_seqlens).double()
        uniform = config.token_weight == "uniform"
        w = torch.ones_like(logp) if uniform else rollout.exp()

        self.config, self.group = config, process_group
        self.A, self.w = torch.where(unmasked, A, 0.0), torch.where(unmasked, w, 0.0)
        logp, old = (torch.where(unmasked, values, 0.0) for values in (logp, old))
        level = config.ratio_level
        self.r, _ = ratios(logp, old, unmasked, level, cu_seqlens)

    def positive(self, upper: float | Tensor) -> Tensor:
        """``sum w*A*min(r, upper)`` over A > 0, float64."""
        counted = self.r.clamp(max=upper)
        if self.config.contribution == "gradient":
            counted = torch.where(self.r > upper, 0.0, self.r)
        return torch.where(self.A > 0, self.w * self.A * counted, 0.0).sum()

    def negative(self, lower: float | Tensor) -> Tensor:
        """``sum w*|A|*max(r, lower)`` over A < 0, float64."""
        counted = self.r.clamp(min=lower)
        if self.config.contribution == "gradient":
            counted = torch.where(self.r < lower, 0.0, self.r)
        return torch.where(self.A < 0, self.w * -self.A * counted, 0.0).sum()

    def masses(self, lower: float | Tensor, upper: float | Tensor) -> Tensor:
        """``[2]``: the positive and the negative mass, over all ranks of the group."""
        masses = torch.stack([self.positive(upper), self.negative(lower)])
        if self.group is not None:
            dist.all_reduce(masses, group=self.group)
        return masses

    def sums(self, lower: float, upper: float) -> tuple[float, float]:
        """The masses as numbers."""
        pos, neg = self.masses(lower, upper).tolist()
        return pos, neg

    def quantity(self, lower: float, upper: float) -> float:
        """The quantity at these bounds that is compared with the target."""
        pos, neg = self.masses(lower, upper).unbind()
        return float(tested_quantity(pos, neg, self.config.target_kind))


def tested_quantity(pos: Tensor, neg: Tensor, kind: TargetKind) -> Tensor:
    """The quantity that is compared with the target; infinite where nothing is to be balanced."""
    if kind == "ratio":
        return torch.where(neg <= 0, torch.inf, pos / (neg + RATIO_EPS))
    return torch.where(pos + neg == 0, torch.inf, pos / (pos + neg))


def search_metrics(
    bounds: ClipBounds, masses: Tensor, config: BAPOConfig, acted: Tensor | None = None
) -> dict[str, Tensor]:
    """The metrics of a decision.

    Args:
        bounds: those of all tokens, or the means of those of each.
        acted: bool, whether any bound of a token is not the starting one.
        masses: ``[6]``, the positive and the negative mass at the bounds, then both at the starting
            bounds, then both at the last points of the grids.
    """
    pos, neg, pos_start, neg_start, pos_last, neg_last = masses.unbind()
    if acted is None:
        acted = differ(bounds, config)
    return {
        "bapo_clip_low": bounds.lower,
        "bapo_clip_high": bounds.upper,
        "bapo_pos_share": _share(pos, neg),
        "bapo_pos_share_start": _share(pos_start, neg_start),
        # The positive mass never falls with the upper bound, and the negative mass is monotonic in
        # the lower bound: it rises, or falls with the contribution "gradient".
        "bapo_pos_share_max": _share(pos_last, torch.minimum(neg_start, neg_last)),
        "bapo_pos_neg_ratio": tested_quantity(pos, neg, "ratio"),
        "bapo_saturated": tested_quantity(pos, neg, config.target_kind) < config.options.target,
        "bapo_acted": acted,
    }


def differ(bounds: ClipBounds, config: BAPOConfig) -> Tensor:
    """Where bounds, which are float32, are not the starting bounds."""
    lower, upper = bounds_tensor(config.options.start(), bounds.lower)
    different: Tensor = (bounds.lower != lower) | (bounds.upper != upper)
    return different


def _share(pos: Tensor, neg: Tensor) -> Tensor:
    return torch.where(pos + neg == 0, 0.0, pos / (pos + neg))


def contribution_table(config: BAPOConfig, *tokens: Any) -> Tensor:
    """Negative mass at every point of the lower grid, then positive mass of the upper grid.

    float64; ``tokens`` as :class:`Contributions` takes them.
    """
    probe = Contributions(config, *tokens)
    negative = [probe.negative(point) for point in config.lower_grid]
    return torch.stack(negative + [probe.positive(point) for point in config.upper_grid])


def solve_table(config: BAPOConfig, table: Tensor) -> tuple[Tensor, Tensor]:
    """Algorithm 1 on such a table: bounds as float32 ``[2]``, masses as :func:`search_metrics`."""
    lower, upper = config.lower_grid, config.upper_grid
    negative, positive = table.split([len(lower), len(upper)])

    def masses(at_lower: float, at_upper: float) -> tuple[Tensor, Tensor]:
        return positive[upper.index(at_upper)], negative[lower.index(at_lower)]

    def quantity(*bounds: float) -> float:
        return float(tested_quantity(*masses(*bounds), config.target_kind))

    bounds = algorithm_1(config, quantity)
    found = torch.tensor(bounds, dtype=torch.float32, device=table.device)
    at = bounds, config.options.start(), (lower[-1], upper[-1])
    return found, torch.stack([mass for each in at for mass in masses(*each)])
