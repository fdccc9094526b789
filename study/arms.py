"""What is compared: ways to clip, and ways to reuse rollouts."""

from __future__ import annotations

from dataclasses import dataclass

from bapo_kernels import BAPOConfig
from bapo_kernels.scopes import Scope

NO_CLIP = "no clip"
PAPER = BAPOConfig.paper()


@dataclass(frozen=True)
class Arm:
    """Bounds or a search for them; over the micro-batches of an update, the scope of the search."""

    config: BAPOConfig
    scope: Scope = "call"
    micro_batches: int = 1


ARMS = {
    "fixed 0.8/1.2": Arm(BAPOConfig.fixed(0.8, 1.2)),
    "clip-higher 0.8/1.28": Arm(BAPOConfig.fixed(0.8, 1.28)),
    "fixed 0.6/1.2": Arm(BAPOConfig.fixed(0.6, 1.2)),
    "fixed 0.6/3.0": Arm(BAPOConfig.fixed(0.6, 3.0)),
    "fixed 0.9/3.0": Arm(BAPOConfig.fixed(0.9, 3.0)),  # the maxima of BAPO's search
    "fixed 0.8/2.0, dual clip 3": Arm(BAPOConfig.fixed(0.8, 2.0, clip_ratio_c=3.0)),  # the recipe's
    "CISPO 0/5": Arm(BAPOConfig.fixed(0.0, 5.0, surrogate="cispo")),
    NO_CLIP: Arm(BAPOConfig.fixed(0.0, 1e9)),
    "BAPO": Arm(PAPER),
    "BAPO, gradient": Arm(BAPOConfig.paper(contribution="gradient")),
    "BAPO, recipe": Arm(BAPOConfig.recipe()),
}
ONLY_SMOLLM2 = "fixed 0.8/2.0, dual clip 3", "CISPO 0/5"
ONLY_THE_TOY = "fixed 0.6/1.2", "fixed 0.6/3.0", "BAPO, gradient"
OF_SMOLLM2 = tuple(arm for arm in ARMS if arm not in ONLY_THE_TOY)
OF_THE_TOY = tuple(arm for arm in ARMS if arm not in ONLY_SMOLLM2)
FEW = "fixed 0.8/1.2", "BAPO", "fixed 0.9/3.0", NO_CLIP
ON_POLICY = "fixed 0.8/1.2", NO_CLIP  # all ratios are 1: no bounds clip anything
# One call per update decides over the whole update: in ARMS the scopes call and step are the same.
SCOPES = {
    "BAPO, scope call": Arm(PAPER, "call", 4),
    "BAPO, scope step": Arm(PAPER, "step", 4),
    "BAPO, scope lagged": Arm(PAPER, "lagged", 4),
}
DEMO = NO_CLIP, "BAPO"


@dataclass(frozen=True)
class Scenario:
    """What is learnt, and how rollouts are used.

    Attributes:
        task: of SmolLM2; the toy walks on a board.
        staleness: updates that a rollout is split into.
        replayed: share of the groups of an update that come from earlier rollouts.
        segments: a walk is drawn in this many parts, each by the policy of another rollout.
        arms: what is compared.
    """

    task: str = ""
    staleness: int = 1
    replayed: float = 0.0
    segments: int = 1
    arms: tuple[str, ...] = OF_THE_TOY


SCENARIOS = {
    "largest, staleness 1": Scenario("largest", arms=ON_POLICY),
    "largest, staleness 8": Scenario("largest", 8, arms=OF_SMOLLM2),
    "largest, staleness 32": Scenario("largest", 32, arms=OF_SMOLLM2),
    "sum, staleness 32": Scenario("sum", 32, arms=FEW),
    "staleness 8": Scenario(staleness=8),
    "sample replay": Scenario(replayed=0.5),
    "partial rollout": Scenario(staleness=4, segments=3),
}
