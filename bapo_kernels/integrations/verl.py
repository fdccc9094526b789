"""verl 0.6.1 and later: the policy loss ``bapo``.

May import public modules and the package's checks. Users' configs have the names of the module, of
the class and of its fields. A search left behind after a step would decide for another engine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from ..checks import check_group, require, warn_once
from ..config import BAPOConfig
from ..functional import bapo_loss_from_log_probs
from ..scopes import ClipBoundSearch, Scope
from . import CLIP_METRICS, DECISION_METRICS, OPTIONS, config_of, on_host, require_version

require_version("verl", "0.6.1")

from verl.trainer.ppo.core_algos import register_policy_loss  # noqa: E402
from verl.workers.config import ActorConfig, PolicyLossConfig  # noqa: E402

_METRICS = (*CLIP_METRICS, "ppo_kl", *DECISION_METRICS)
_group: dist.ProcessGroup | None = None


@dataclass
class BAPOPolicyLossConfig(PolicyLossConfig):
    """The ``policy_loss`` of an actor whose ``policy_loss._target_`` names this class.

    Args:
        preset: ``"paper"``, or ``"recipe"`` to do as the authors' code.
        adv_ratio_target: the authors' name for a target of the ratio of the masses.
        surrogate: ``"clip"``, ``"cispo"``, ``"sapo"``, ``"mask"``, or verl's names ``"vanilla"``
            (the clip) and ``"gspo"`` (the clip with ``ratio_level="sequence"``). ``"sapo"`` has no
            bounds and no search; its taus are ``actor.tau_pos`` and ``actor.tau_neg``.
        ratio_level: ``"token"`` or ``"sequence"``.
        search_ranks: ``"own"``: each rank decides for its own micro-batch, or together with the
            group given to :func:`use_process_group`. ``"world"``: all ranks of the default group
            decide together, as in the authors' code. Every rank must then have the same number of
            micro-batches.
        scope: what a decision covers. ``"call"``: a micro-batch. ``"step"``: all micro-batches of
            the optimizer step on all data-parallel ranks; the engine first makes a forward without
            gradients. ``"lagged"``: those of the optimizer step before. The last two need the
            engines of verl 0.8 or later (``"step"`` FSDP's), and ``search_ranks="own"``.

    The other fields are those of :class:`bapo_kernels.BAPOConfig`; ``None`` takes the preset's.
    With fixed bounds (``ratio_lower_start=ratio_lower_max``, ``ratio_upper_start=ratio_upper_max``,
    ``target=0``) losses and gradients are verl's, except for the gradient and the clamp of ``gspo``
    and the mean of ``sapo`` (docs/migrating.md, Where TRL and verl differ).

    Raises:
        ValueError: a value breaks its rule, two values contradict each other, or ``loss_mode``
            names another loss, which would ignore all of them.
    """

    loss_mode: str = "bapo"
    preset: str = "paper"
    adv_ratio_target: float | None = None
    target: float | None = None
    target_kind: str | None = None
    ratio_lower_start: float | None = None
    ratio_lower_max: float | None = None
    ratio_lower_step: float | None = None
    ratio_upper_start: float | None = None
    ratio_upper_max: float | None = None
    ratio_upper_step: float | None = None
    raise_first: str | None = None
    token_weight: str | None = None
    contribution: str | None = None
    surrogate: str | None = None
    ratio_level: str | None = None
    search_ranks: str = "own"
    scope: str = "call"

    def __post_init__(self) -> None:
        rule = "be 'bapo' with BAPOPolicyLossConfig"
        require(self.loss_mode == "bapo", "policy_loss.loss_mode", rule, repr(self.loss_mode))
        _deciding_ranks(self, _config(self))
        if self.scope != "call":
            self.search()
            _install()

    def search(
        self, group: dist.ProcessGroup | None = None, device: str = "cpu"
    ) -> ClipBoundSearch:
        """The search of an engine, over the tokens of the data-parallel ranks ``group``."""
        return ClipBoundSearch(_config(self), cast(Scope, self.scope), group, device)


_OPTIONS = OPTIONS & BAPOPolicyLossConfig.__annotations__.keys()


def use_process_group(group: dist.ProcessGroup | None) -> None:
    """Sets the data-parallel ranks that decide together with this one (``mesh.get_group()``)."""
    global _group
    check_group("group", group)
    _group = group


def _config(loss: Any, **decided: Any) -> BAPOConfig:
    """Makes the config of a ``policy_loss``, which may be of any class, and verl's own options."""
    options = {name: loss.get(name, None) for name in _OPTIONS}
    ratio = loss.get("adv_ratio_target", None)
    if ratio is not None:
        rule = "not be given together with adv_ratio_target"
        require(options["target"] is None, "policy_loss.target", rule, options["target"])
        kind = options["target_kind"]
        rule = "be 'ratio' with adv_ratio_target"
        require(kind in (None, "ratio"), "policy_loss.target_kind", rule, repr(kind))
        options.update(target=ratio, target_kind="ratio")
    surrogate, level = options["surrogate"], options["ratio_level"]
    if surrogate == "gspo":
        rule = "be 'sequence' with surrogate='gspo'"
        require(level in (None, "sequence"), "policy_loss.ratio_level", rule, repr(level))
        level = "sequence"
    if surrogate in (None, "vanilla", "gspo"):
        surrogate = "clip"
    if surrogate != "clip":
        decided["clip_ratio_c"] = None
    options.update(surrogate=surrogate, ratio_level="token" if level is None else level)
    return config_of(loss.get("preset", "paper"), **options, **decided)


def _deciding_ranks(loss: Any, config: BAPOConfig) -> dist.ProcessGroup | None:
    name, ranks = "policy_loss.search_ranks", loss.get("search_ranks", "own")
    require(ranks in ("own", "world"), name, "be 'own' or 'world'", repr(ranks))
    scope = loss.get("scope", "call")
    for ok, why in (
        (config.has_bounds, f"with surrogate={config.surrogate!r}, which has no search"),
        (scope == "call", f"with scope={scope!r}, whose decisions cover all data-parallel ranks"),
        (_group is None, "after use_process_group(), which gave the ranks"),
    ):
        require(ok or ranks == "own", name, f"be 'own' {why}", repr(ranks))
    rule = "be 'call' after use_process_group(), whose ranks decide call by call"
    require(scope == "call" or _group is None, "policy_loss.scope", rule, repr(scope))
    if ranks == "own":
        return _group
    return dist.group.WORLD if dist.is_initialized() else None


def _warn_of_unused(config: Any, made: BAPOConfig) -> None:
    """Warns of options of verl's own clipping that were changed, but are not used."""
    if not made.has_bounds:  # verl's own SAPO uses none of them either
        return
    unused = ["clip_ratio", "clip_ratio_low", "clip_ratio_high"]
    if made.clip_ratio_c is None:
        unused.append("clip_ratio_c")
    for name in unused:
        value, default = config.get(name, None), ActorConfig.__dataclass_fields__[name].default
        if value not in (None, default):
            warn_once(
                f"actor.{name}={value} is not used by the policy loss 'bapo'. It searches for its "
                "bounds: set policy_loss.ratio_lower_start and others as ratio bounds (0.8, 1.28), "
                "never epsilons (0.2, 0.28). It has a dual clip, clip_ratio_c, only with "
                "preset='recipe' and surrogate='clip'."
            )


class _Step(NamedTuple):
    """The step that an engine is in."""

    search: ClipBoundSearch
    gathers: bool  # whether losses only give their log-probs to the decision
    decision: dict[str, Tensor]  # the metrics of the decision


_searches: WeakKeyDictionary[Any, ClipBoundSearch] = WeakKeyDictionary()  # by engine, once decided
_running: _Step | None = None  # verl does not tell a policy loss which step calls it


def _running_step(scope: str) -> _Step | None:
    """The step that a policy loss is called in; required unless the scope is ``call``."""
    if scope == "call":
        return None
    rule = "be 'call' outside of the optimizer step of an engine (train_batch)"
    require(_running is not None, "policy_loss.scope", rule, repr(scope))
    return _running


@functools.cache
def _install() -> None:
    """Lets every engine's ``train_batch`` decide for its micro-batches, over all its ranks."""
    require_version("verl", "0.8")  # since which actors run on these engines
    from verl.workers.engine.base import BaseEngine

    original = BaseEngine.train_batch

    @functools.wraps(original)
    def train_batch(self: Any, data: Any, loss_function: Any) -> Any:
        search = _search_of(self, loss_function)
        if search is None:
            return original(self, data, loss_function)
        if search.scope == "step":
            with _running_in(_Step(search, True, {})), ExitStack() as stack:
                # In eval mode dropout draws nothing, and activation offload expects no backward.
                stack.callback(self.module.train, self.module.training)
                self.module.eval()
                self.infer_batch(data, loss_function)
            _decide(self, search)
        # At the starting bounds of the scope "lagged", each call logs metrics of its own.
        decision = search.metrics if self in _searches else {}
        with _running_in(_Step(search, False, decision)):
            outputs = original(self, data, loss_function)
        if search.scope == "lagged":
            _decide(self, search)
        return outputs

    BaseEngine.train_batch = train_batch


def _search_of(engine: Any, loss_function: Any) -> ClipBoundSearch | None:
    from verl.utils.device import get_device_name

    config = getattr(loss_function, "keywords", {}).get("config")  # verl's is a partial
    loss = getattr(config, "policy_loss", None)
    if not isinstance(loss, BAPOPolicyLossConfig) or loss.scope == "call":
        return None
    search = _searches.get(engine)
    if search is None:
        _check_engine(engine, loss.scope)
        search = loss.search(engine.get_data_parallel_group(), get_device_name())
    elif search.histogram is not None:
        search.histogram.reset()  # a step that raised has left tokens there
    return search


def _decide(engine: Any, search: ClipBoundSearch) -> None:
    search.step()
    _searches[engine] = search


def _check_engine(engine: Any, scope: str) -> None:
    """Refuses an engine that cannot make the forward of ``step``, or whose ranks cannot share."""
    from verl.workers.engine.fsdp import FSDPEngine

    is_fsdp = type(engine).forward_backward_batch is FSDPEngine.forward_backward_batch
    rule = f"be 'call' or 'lagged' with {type(engine).__name__}"
    require(scope == "lagged" or is_fsdp, "policy_loss.scope", rule, repr(scope))
    # verl's group would be a single rank, though the batch is split over several.
    config = getattr(engine, "engine_config", None)
    splits = getattr(config, "dynamic_context_parallel", False)
    rule = "be 'call' with dynamic_context_parallel=True"
    require(not splits, "policy_loss.scope", rule, repr(scope))


@contextmanager
def _running_in(step: _Step) -> Iterator[None]:
    global _running
    _running = step
    try:
        yield
    finally:
        _running = None


@register_policy_loss("bapo")
def compute_policy_loss_bapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The loss of a micro-batch ``[B, T]`` and its metrics, as verl calls policy losses.

    ``config.global_batch_info`` has the normalisers, and verl adds entropy and KL terms. The token
    weight of the paper's search is exp of the old log-prob, because verl passes no rollout
    log-probs.
    """
    step = _running_step(config.policy_loss.get("scope", "call"))
    tokens = log_prob, old_log_prob, advantages, response_mask
    if step is not None and step.gathers:
        step.search.update(*tokens)
        return log_prob.new_zeros(()), {}
    info = getattr(config, "global_batch_info", None) or {}
    recipe = config.policy_loss.get("preset", "paper") == "recipe"
    made = _config(
        config.policy_loss,
        clip_ratio_c=config.get("clip_ratio_c", 3.0) if recipe else None,
        loss_agg_mode=loss_agg_mode,
        loss_scale_factor=info.get("loss_scale_factor"),
        sapo_tau_pos=config.get("tau_pos", None),
        sapo_tau_neg=config.get("tau_neg", None),
    )
    _warn_of_unused(config, made)
    out = bapo_loss_from_log_probs(
        *tokens,
        config=made,
        bounds=None if step is None else step.search.bounds,
        rollout_is_weights=rollout_is_weights,
        batch_num_tokens=info.get("batch_num_tokens"),
        global_batch_size=info.get("global_batch_size"),
        dp_size=info.get("dp_size", 1),
        process_group=_deciding_ranks(config.policy_loss, made),
    )
    metrics = out.metrics
    if step is not None:
        if step.search.scope == "lagged":
            step.search.update(*tokens)
        metrics = metrics | step.decision
    # verl itself would read the device once for each metric.
    numbers = on_host(made, metrics, _METRICS)
    return out.loss, {f"actor/{name}": value for name, value in numbers.items()}
