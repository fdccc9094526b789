"""The options of the loss and of the search, validated when a config is made.

Imports only the checks of arguments. :class:`Options` has the order of ``Options`` in
``csrc/params.h``: the kernels know a number by its place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from .checks import number, require

IGNORE_INDEX = -100
LOG_RATIO_LIMIT = 20.0
RATIO_EPS = 1e-8
MAX_GRID_POINTS = 1024

# The numbers are those of csrc/policy_math.h.
KL_LOSS_TYPES = {"k1": 0, "k2": 1, "k3": 2, "low_var_kl": 2}
SURROGATES = {"clip": 0, "cispo": 1, "sapo": 2, "mask": 3}

TargetKind = Literal["share", "ratio"]
RaiseFirst = Literal["upper", "lower"]
TokenWeight = Literal["rollout_prob", "uniform"]
Contribution = Literal["surrogate", "gradient"]
KLLossType = Literal["k1", "k2", "k3", "low_var_kl"]
Surrogate = Literal["clip", "cispo", "sapo", "mask"]
RatioLevel = Literal["token", "sequence"]
LossAggMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
]

_CHOICES: dict[str, Any] = {
    "target_kind": TargetKind,
    "raise_first": RaiseFirst,
    "token_weight": TokenWeight,
    "contribution": Contribution,
    "surrogate": Surrogate,
    "ratio_level": RatioLevel,
    "kl_loss_type": KLLossType,
    "loss_agg_mode": LossAggMode,
}
GRID_FIELDS = (
    "ratio_lower_start",
    "ratio_lower_max",
    "ratio_lower_step",
    "ratio_upper_start",
    "ratio_upper_max",
    "ratio_upper_step",
)
# The other numbers: each must be greater than its limit, and finite; the text states that rule.
_FINITE: dict[str, tuple[float, str]] = {
    "kl_loss_coef": (-math.inf, "be finite"),
    "entropy_coef": (-math.inf, "be finite"),
    "temperature": (0.0, "be finite and > 0"),
    "logit_scale": (0.0, "be finite and > 0"),
    "sapo_tau_pos": (0.0, "be finite and > 0"),
    "sapo_tau_neg": (0.0, "be finite and > 0"),
}
_NONE_OR_FINITE: dict[str, tuple[float, str]] = {
    "final_logit_softcapping": (0.0, "be None, or finite and > 0"),
    "loss_scale_factor": (0.0, "be None, or finite and > 0"),
    "clip_ratio_c": (1.0, "be None, or finite and > 1"),
}


# What other trainers call these, or the way to say them here (docs/migrating.md).
_ELSEWHERE = {
    "clip_ratio_c": ("delta",),
    "kl_loss_coef": ("beta", "kl_coef"),
    "loss_agg_mode": ("loss_type",),
    "ratio_level": ("importance_sampling_level",),
    "sapo_tau_neg": ("sapo_temperature_neg", "tau_neg"),
    "sapo_tau_pos": ("sapo_temperature_pos", "tau_pos"),
    "surrogate": ("loss_mode", "policy_loss"),
    "target": ("adv_ratio_target",),
    "ratio_lower_max and ratio_upper_start, bounds of the ratio (BAPOConfig.fixed)": (
        *("clip_ratio", "clip_ratio_low", "clip_ratio_high"),
        *("epsilon", "epsilon_low", "epsilon_high", "eps_clip"),
    ),
}


def meant(name: str) -> str:
    """The option that a wrong name stands for, as the end of an error; empty if none does."""
    elsewhere = {old: here for here, names in _ELSEWHERE.items() for old in names}
    options = [field.name for field in fields(BAPOConfig)]
    near = get_close_matches(name, [*options, *elsewhere], 1)
    here = elsewhere.get(near[0], near[0]) if near else None
    return f", did you mean {here}?" if here else ""


def bound_grid(start: float, maximum: float, step: float) -> list[float]:
    """The values that a bound takes, by repeated float64 addition.

    The last step stops at ``maximum``, as in the authors' code; the paper's Algorithm 1 refuses a
    step that would end past it (docs/internals/paper.md). With a step of 0 the bound does not move.

    Examples:
        >>> bound_grid(1.2, 1.35, 0.1)
        [1.2, 1.3, 1.35]
    """
    points = [start]
    while step > 0 and points[-1] < maximum:
        points.append(min(points[-1] + step, maximum))
    return points


class Options(NamedTuple):
    """The numbers of a config as the kernels take them, in this order.

    Without bounds (SAPO) each grid is one point that clips nothing, and every share reaches the
    target. Choices are their numbers (``SURROGATES``, ``KL_LOSS_TYPES``, ``LossAggMode``), flags 0
    or 1. An absent soft cap or dual clip is infinite, and an absent scale factor is 0.
    """

    lower_start: float
    lower_max: float
    lower_step: float
    upper_start: float
    upper_max: float
    upper_step: float
    target: float
    target_is_ratio: float
    upper_first: float
    uniform_weight: float
    unclipped_only: float
    surrogate: float
    clip_ratio_c: float
    sapo_tau_pos: float
    sapo_tau_neg: float
    kl_loss_coef: float
    kl_loss_type: float
    entropy_coef: float
    temperature: float
    logit_scale: float
    softcap: float
    loss_agg_mode: float
    loss_scale_factor: float

    @classmethod
    def of(cls, config: BAPOConfig) -> Options:
        """The numbers of a checked config."""
        grids = 0.0, 0.0, 0.0, math.inf, math.inf, 0.0
        if config.has_bounds:
            grids = tuple(getattr(config, name) for name in GRID_FIELDS)
        numbers = (
            *grids,
            config.target if config.has_bounds else 0.0,
            config.target_kind == "ratio",
            config.raise_first == "upper",
            config.token_weight == "uniform",
            config.contribution == "gradient",
            SURROGATES[config.surrogate],
            math.inf if config.clip_ratio_c is None else config.clip_ratio_c,
            config.sapo_tau_pos,
            config.sapo_tau_neg,
            config.kl_loss_coef,
            KL_LOSS_TYPES[config.kl_loss_type],
            config.entropy_coef,
            config.temperature,
            config.logit_scale,
            config.final_logit_softcapping or math.inf,
            get_args(LossAggMode).index(config.loss_agg_mode),
            config.loss_scale_factor or 0.0,
        )
        return cls(*map(float, numbers))

    def differentiates_ratio(self) -> bool:
        """Whether the gradient flows through the ratio, which CISPO holds constant."""
        return self.surrogate != SURROGATES["cispo"]

    def points(self) -> int:
        """Total grid points."""
        return len(bound_grid(*self[:3])) + len(bound_grid(*self[3:6]))

    def start(self) -> tuple[float, float]:
        """The first point of each grid, where the search starts."""
        return self.lower_start, self.upper_start

    def maximum(self) -> tuple[float, float]:
        """The maxima of the bounds: no search goes past them."""
        return self.lower_max, self.upper_max


@dataclass(frozen=True)
class BAPOConfig:
    """Options of Balanced Policy Optimization with Adaptive Clipping (arXiv 2510.18927).

    By default the search is the paper's (Algorithm 1, until Eq. 8 holds): ``BAPOConfig()`` equals
    :meth:`paper`. :meth:`recipe` follows the authors' published code, which differs from the paper.
    :meth:`fixed` clips as PPO, GRPO and DAPO do, without a search.

    Bounds are bounds of the probability ratio (0.8, 1.2), never epsilons around 1.

    Args:
        ratio_lower_start, ratio_lower_max, ratio_lower_step: grid of the lower bound, c_low.
        ratio_upper_start, ratio_upper_max, ratio_upper_step: grid of the upper bound, c_high.
        target: the search stops at the first bounds at which the tested quantity reaches this.
        target_kind: the tested quantity. ``"share"`` is ``pos/(pos + neg)``, ``"ratio"`` is
            ``pos/(neg + 1e-8)``. The positive mass ``pos`` sums the contributions of the tokens of
            positive advantage, the negative mass ``neg`` those of negative advantage.
        raise_first: the bound that rises to its maximum before the other one moves: ``"upper"`` or
            ``"lower"``.
        token_weight: weight of a token in the masses. ``"uniform"`` is 1. ``"rollout_prob"`` is its
            probability under the rollout policy, from ``rollout_log_probs`` if given, else from
            ``old_log_probs``. The ratio always uses ``old_log_probs``; in the paper both are of one
            policy.
        contribution: ``"surrogate"`` counts ``A*min(r, c_high)`` and ``|A|*max(r, c_low)`` (the
            paper's Eq. 8). ``"gradient"`` counts only tokens whose gradient is not clipped, which
            is *not* Eq. 8.
        clip_ratio_c: dual clip: the loss of a token of negative advantage is at most
            ``|A|*clip_ratio_c``. Only with ``surrogate="clip"``.
        surrogate: the policy term ``l`` of a token, and its derivative ``g = d l/d logp``.

            - ``"clip"``: ``l = -min(r*A, clip(r, c_low, c_high)*A)``.
            - ``"cispo"`` (arXiv 2506.13585): ``l = -clip(r, c_low, c_high)*A*logp``, the clipped
              ratio held constant, so ``g = -clip(r, c_low, c_high)*A``. TRL clips only from above
              (``c_low = 0``), verl from both sides. The search counts the masses of ``"clip"``.
            - ``"sapo"`` (arXiv 2511.20347): ``l = -A*(4/tau)*sigmoid(tau*(r - 1))``, without
              bounds or a search: those of the config are not used.
            - ``"mask"`` (IcePop, IPO): ``l = -r*A`` where ``c_low <= r <= c_high``. Elsewhere a
              token has neither loss nor gradient, whatever the sign of A. The search counts the
              masses of ``"clip"``.
        sapo_tau_pos, sapo_tau_neg: ``tau`` of tokens with A > 0, and of all others (TRL's
            ``sapo_temperature_pos`` and ``_neg``, verl's ``tau_pos`` and ``tau_neg``).
        ratio_level: ``"token"``, or ``"sequence"`` (GSPO, arXiv 2507.18071): the ratio ``r`` of
            every token is ``exp`` of the mean of ``logp - old`` over the unmasked tokens of its
            sequence. Its derivative is spread over these tokens, as in TRL. verl gives each token
            the gradient of its own loss, which is the same where advantages and importance weights
            are constant in a sequence. The search counts the same ``r``.
        loss_agg_mode: by verl's names. ``"token-mean"`` and ``"token-sum"`` are the mean and the
            sum over the unmasked tokens of all sequences. ``"seq-mean-token-sum"`` and
            ``"seq-mean-token-mean"`` first take the sum or the mean over the tokens of each
            sequence, then the mean over the sequences. ``"seq-mean-token-sum-norm"`` is
            ``"seq-mean-token-sum"`` divided by ``loss_scale_factor``. The paper's Algorithm 1
            prints ``"seq-mean-token-sum"``.
        loss_scale_factor: divisor of ``"seq-mean-token-sum-norm"``; default: the padded length.
        kl_loss_coef: weight of the KL penalty towards the policy of ``ref_log_probs``.
        kl_loss_type: with ``d = logp - ref``, ``"k1"`` is ``d``, ``"k2"`` is ``d^2/2``, ``"k3"``
            or ``"low_var_kl"`` is ``exp(-d) - 1 + d``, clamped as in verl.
        entropy_coef: weight of the entropy bonus.
        temperature, logit_scale, final_logit_softcapping: logits enter the softmax as
            ``softcap*tanh(logit_scale*z/softcap)/temperature``, or ``logit_scale*z/temperature``.

    Python and NumPy numbers are stored as ``float``; bools and tensors are refused.

    Raises:
        ValueError: a value breaks its rule. The message has the name, the rule and the value.

    Examples:
        >>> BAPOConfig.recipe(entropy_coef=0.001).lower_grid[:2]
        [0.6, 0.65]
        >>> BAPOConfig.fixed(0.8, 1.28).upper_grid  # DAPO, nothing to search
        [1.28]
        >>> BAPOConfig(temperature=0)
        Traceback (most recent call last):
        ValueError: temperature must be finite and > 0, got 0.0
    """

    ratio_lower_start: float = 0.6
    ratio_lower_max: float = 0.9
    ratio_lower_step: float = 0.02
    ratio_upper_start: float = 1.2
    ratio_upper_max: float = 3.0
    ratio_upper_step: float = 0.05
    target: float = 0.4
    target_kind: TargetKind = "share"
    raise_first: RaiseFirst = "upper"
    token_weight: TokenWeight = "rollout_prob"
    contribution: Contribution = "surrogate"
    clip_ratio_c: float | None = None
    surrogate: Surrogate = "clip"
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    ratio_level: RatioLevel = "token"
    loss_agg_mode: LossAggMode = "token-mean"
    loss_scale_factor: float | None = None
    kl_loss_coef: float = 0.0
    kl_loss_type: KLLossType = "low_var_kl"
    entropy_coef: float = 0.0
    temperature: float = 1.0
    logit_scale: float = 1.0
    final_logit_softcapping: float | None = None
    options: ClassVar[Options]  # of each config, made once; a field would be part of its repr

    @classmethod
    def paper(cls, **options: Any) -> BAPOConfig:
        """The paper's formula and ranges (the defaults).

        Examples:
            The runs with OctoThinker (the paper's appendix A), whose steps the paper does not give:

            >>> config = BAPOConfig.paper(ratio_lower_start=0.8, ratio_upper_max=2.0, target=0.45)
            >>> [(grid[0], grid[-1]) for grid in (config.lower_grid, config.upper_grid)]
            [(0.8, 0.9), (1.2, 2.0)]
        """
        return cls(**options)

    @classmethod
    def recipe(cls, **options: Any) -> BAPOConfig:
        """The authors' published code: target 1 for pos/neg, uniform weights, lower bound first.

        c_low goes from 0.6 to 0.8 and c_high from 1.2 to 2.0, in steps of 0.05. Dual clip at 3
        (with ``surrogate="clip"``).
        """
        preset: dict[str, Any] = dict(
            ratio_lower_max=0.8,
            ratio_lower_step=0.05,
            ratio_upper_max=2.0,
            target=1.0,
            target_kind="ratio",
            raise_first="lower",
            token_weight="uniform",
            clip_ratio_c=3.0 if options.get("surrogate", "clip") == "clip" else None,
        )
        return cls(**(preset | options))

    @classmethod
    def fixed(cls, lower: float, upper: float, **options: Any) -> BAPOConfig:
        """Fixed bounds without a search: PPO and GRPO at (0.8, 1.2), DAPO at (0.8, 1.28)."""
        preset: dict[str, Any] = dict(
            ratio_lower_start=lower,
            ratio_lower_max=lower,
            ratio_upper_start=upper,
            ratio_upper_max=upper,
            target=0.0,
        )
        is_swapped = all(isinstance(x, Real) for x in (lower, upper)) and upper < 1 < lower
        rule = "be <= 1 and upper >= 1 (they are swapped)"
        require(not is_swapped, "lower", rule, f"{lower} and {upper}")
        return cls(**(preset | options))

    @property
    def has_bounds(self) -> bool:
        """Whether the surrogate clips the ratio, so that bounds can be searched for."""
        return self.surrogate != "sapo"

    @property
    def lower_grid(self) -> list[float]:
        """Values that the lower bound can take, ascending; without bounds 0."""
        return bound_grid(*self.options[:3])

    @property
    def upper_grid(self) -> list[float]:
        """Values that the upper bound can take, ascending; without bounds infinity."""
        return bound_grid(*self.options[3:6])

    def __post_init__(self) -> None:
        for name, literal in _CHOICES.items():
            value, choices = getattr(self, name), get_args(literal)
            another = " (another: docs/guide.md, 'Your own loss')" if name == "surrogate" else ""
            require(value in choices, name, f"be one of {sorted(choices)}{another}", repr(value))
        for name in (*GRID_FIELDS, "target", *_FINITE, *_NONE_OR_FINITE):
            value = getattr(self, name)
            if value is not None or name not in _NONE_OR_FINITE:
                object.__setattr__(self, name, number(name, value))
        for name, (least, rule) in (_FINITE | _NONE_OR_FINITE).items():
            value = getattr(self, name)
            require(value is None or least < value < math.inf, name, rule, value)
        self._check_search()
        self._check_surrogate()
        object.__setattr__(self, "options", Options.of(self))

    def _check_search(self) -> None:
        for side in ("lower", "upper"):
            names = [f"ratio_{side}_{part}" for part in ("start", "max", "step")]
            start, maximum, step = (getattr(self, name) for name in names)
            require(0 <= start < math.inf, names[0], "be finite and >= 0", start)
            rule: tuple[Any, ...] = ("be finite and >= {} ({})", names[0], start)
            require(start <= maximum < math.inf, names[1], rule, maximum)
            require(0 <= step < math.inf, names[2], "be finite and >= 0", step)
            few = step == 0 or (maximum - start) / step < MAX_GRID_POINTS - 1
            rule = ("be large enough for at most {} grid points", MAX_GRID_POINTS)
            require(few, names[2], rule, step)
        epsilon = "a bound of the ratio, not an epsilon"
        lower, upper = self.ratio_lower_max, self.ratio_upper_start
        require(lower <= 1, "ratio_lower_max", f"be <= 1, {epsilon}", lower)
        require(upper >= 1, "ratio_upper_start", f"be >= 1, {epsilon}", upper)
        if self.target_kind == "share":
            require(0 <= self.target <= 1, "target", "be in [0, 1]", self.target)
        else:
            require(0 <= self.target < math.inf, "target", "be finite and >= 0", self.target)

    def _check_surrogate(self) -> None:
        if self.surrogate == "clip":
            return
        because = f"with surrogate={self.surrogate!r}"
        rule = f"be None {because}, which has no dual clip"
        require(self.clip_ratio_c is None, "clip_ratio_c", rule, self.clip_ratio_c)
        rule = f"be 'surrogate' {because}, which clips no gradient away"
        counted, masks = self.contribution, self.surrogate == "mask"
        require(masks or counted == "surrogate", "contribution", rule, repr(counted))


def _names_instead(init: Any) -> Any:
    """Makes an unknown option say which one is meant."""

    @wraps(init)
    def made(self: BAPOConfig, *values: Any, **options: Any) -> None:
        for name in options:
            if name not in BAPOConfig.__dataclass_fields__:
                unknown = f"BAPOConfig() got an unexpected keyword argument {name!r}"
                raise TypeError(unknown + meant(name))
        init(self, *values, **options)

    return made


BAPOConfig.__init__ = _names_instead(BAPOConfig.__init__)  # type: ignore[method-assign]
