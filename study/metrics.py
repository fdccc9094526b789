"""What is recorded of an update, whoever learns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from bapo_kernels import BAPOOutput

from .arms import PAPER, Arm

TARGET = PAPER.target  # the share of every arm at its own start is compared with it
METRICS = (
    "entropy",
    "ppo_kl",
    "bapo_clip_low",
    "bapo_clip_high",
    "bapo_pos_share",
    "bapo_pos_share_start",
    "bapo_pos_share_max",
    "bapo_saturated",
)


def metrics_of(
    out: BAPOOutput, arm: Arm, of_search: Mapping[str, Tensor] = MappingProxyType({})
) -> dict[str, float]:
    """The call's own metrics, where a decision covers the call; else those of the decision."""
    metrics = {name: out.metrics[name].item() for name in METRICS}
    decision = {name: of_search[name].item() for name in METRICS if name in of_search}
    metrics |= {name: value for name, value in decision.items() if not math.isnan(value)}
    metrics |= place_on_grids(metrics, arm)
    for sign in ("positive", "negative"):
        metrics[f"clipped_{sign}"] = out.metrics[f"pg_clipfrac_{sign[:3]}"].item()
    return metrics


def place_on_grids(metrics: dict[str, float], arm: Arm) -> dict[str, float]:
    """Whether bounds left their start, and whether the upper one is strictly inside its range."""
    config = arm.config
    lower, upper = metrics["bapo_clip_low"], metrics["bapo_clip_high"]
    start, maximum = torch.tensor([config.options.start(), config.options.maximum()]).tolist()
    return {
        "moved": float([lower, upper] != start),
        "interior": float(start[1] < upper < maximum[1]),
        "below_target": float(metrics["bapo_pos_share_start"] < TARGET),
    }
