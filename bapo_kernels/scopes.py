"""The search of a trainer, over the tokens of a call, of a step or of the previous step.

Imports ``bounds`` and the config. Only ``step`` makes a collective. Elsewhere it would
make ranks with other numbers of micro-batches wait for each other.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from .bounds import SEARCH_METRICS, TABLE_FIELDS, ContributionHistogram, empty_table
from .checks import check_group, outside_inference_mode, require
from .config import BAPOConfig
from .core.arguments.single import config_or_default
from .output import ClipBounds

Scope = Literal["call", "step", "lagged"]


class ClipBoundSearch:
    """The clip bounds of a trainer, searched over the scope it chooses.

    - ``"call"``: every call searches over its own tokens, or with ``process_group`` over those of
      all its ranks, as the authors' code does. That takes one collective per call, so every rank
      must make the same number of calls.
    - ``"step"``: one decision covers all micro-batches of an optimizer step, as in the paper. Call
      :meth:`update` with their log-probs, computed without gradient, then :meth:`step`, then the
      losses.
    - ``"lagged"``: the tokens of one step decide the bounds of the next. Call the losses,
      :meth:`update` with the log-probs that they return, then :meth:`step`. The first step has the
      starting bounds.

    In the scopes ``"step"`` and ``"lagged"`` only :meth:`step` makes a collective. Its size is
    fixed, so a rank may have any number of micro-batches, or none. Pass :attr:`options` to every
    call::

        out = bapo_loss(logits, labels, old, advantages, mask, **search.options)

    Args:
        config: options of the loss and the search; default: the paper's.
        scope: which tokens a decision covers.
        process_group: data-parallel ranks that decide together; ``None``: this rank alone.
        device: where the tokens are; default: the device of the first update. Needed if a rank
            may reach its first :meth:`step` without an update, unless the group uses NCCL.

    Examples:
        >>> config = BAPOConfig(token_weight="uniform", target=0.48)
        >>> search = ClipBoundSearch(config, scope="lagged")
        >>> batch = torch.tensor([1.5, 1.0]).log(), torch.zeros(2), torch.tensor([2.0, -3.0])
        >>> for _ in range(2):
        ...     out = bapo_loss_from_log_probs(*batch, **search.options)
        ...     print(out.bounds.upper, search.metrics["bapo_pos_share"])
        ...     search.update(*batch)
        ...     search.step()
        tensor(1.2000) tensor(nan)
        tensor(1.4000) tensor(0.4828)
    """

    def __init__(
        self,
        config: BAPOConfig | None = None,
        scope: Scope = "call",
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        require(scope in get_args(Scope), "scope", "be call, step or lagged", scope)
        check_group("process_group", process_group)
        self.config = config_or_default(config)
        rule = f"be 'call' with surrogate={self.config.surrogate!r}, which has no search"
        require(scope == "call" or self.config.has_bounds, "scope", rule, repr(scope))
        self.histogram: ContributionHistogram | None = None
        if scope != "call":
            self.histogram = ContributionHistogram(self.config, device)
        self.scope: Scope = scope
        self.process_group = process_group
        self._bounds: ClipBounds | None = None
        self._metrics: dict[str, Tensor] = {}
        self._undecided = False  # tokens since the last decision
        if scope == "lagged":
            start = self.config.options.start()
            known = dict(bapo_clip_low=start[0], bapo_clip_high=start[1], bapo_acted=0.0)
            self._decide(start, known)

    @property
    def metrics(self) -> dict[str, Tensor]:
        """The ``bapo_...`` metrics of :attr:`BAPOOutput.metrics` for the decision in use.

        One call of a loss over all tokens of the decision would report the same; no value is read
        on the host. In the scope ``"lagged"`` the decision is that of the previous step: the first
        step has the starting bounds, and NaN for the other metrics. Empty in the scope ``"call"``,
        where each call reports its own decision, and in ``"step"`` before the first :meth:`step`.
        """
        return self._metrics

    @property
    def bounds(self) -> ClipBounds | None:
        """The argument ``bounds`` of the next calls; ``None`` where every call searches.

        Raises:
            RuntimeError: in the scope ``"step"`` before the first :meth:`step`, or after an
                :meth:`update` that no :meth:`step` has followed.
        """
        if self.scope == "step" and (self._bounds is None or self._undecided):
            yet = "no bounds for these tokens yet: call update() for every micro-batch, then step()"
            raise RuntimeError(f"scope 'step' has {yet}")
        return self._bounds

    @property
    def options(self) -> dict[str, Any]:
        """The arguments ``config``, ``bounds`` and ``process_group`` of a loss or its module."""
        return dict(config=self.config, bounds=self.bounds, process_group=self.process_group)

    def update(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor | None,
        advantages: Tensor,
        response_mask: Tensor | None = None,
        *,
        rollout_log_probs: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> None:
        """Adds the tokens of a micro-batch, as :meth:`ContributionHistogram.update` does.

        With the scope ``"call"`` this and :meth:`step` do nothing.
        """
        if self.histogram is not None:
            tokens = log_probs, old_log_probs, advantages, response_mask
            self.histogram.update(
                *tokens, rollout_log_probs=rollout_log_probs, cu_seqlens=cu_seqlens
            )
            self._undecided = True

    def step(self) -> None:
        """Decides, and forgets the tokens. Every rank of the group must call it once per step."""
        if self.histogram is not None:
            self._bounds = self.histogram.solve(process_group=self.process_group)
            self._metrics = self.histogram.metrics
            self._undecided = False
            self.histogram.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> ClipBoundSearch:
        """A search of its own over the same process group, which cannot be copied."""
        memo[id(self.process_group)] = self.process_group
        other = object.__new__(type(self))
        memo[id(self)] = other
        vars(other).update(copy.deepcopy(vars(self), memo))
        return other

    def state_dict(self) -> dict[str, Any]:
        """Scope, bounds and their metrics, and the sums gathered since the last decision.

        Every name is there from the start, and sums are under the rank that gathered them:
        ``torch.distributed.checkpoint`` loads the names that a new search has, and of a name that
        several ranks have it saves one.
        """
        state: dict[str, Any] = dict(
            scope=self.scope,
            config={name: getattr(self.config, name) for name in TABLE_FIELDS},
            bounds=None if self._bounds is None else [float(bound) for bound in self._bounds],
            metrics={name: float(self._metrics.get(name, torch.nan)) for name in SEARCH_METRICS},
            ranks={},
        )
        if self.histogram is not None:
            table = empty_table(self.config, "cpu") if self._table is None else self._table.clone()
            state["ranks"][self._rank] = dict(table=table, undecided=self._undecided)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a :meth:`state_dict`, without sums if it has none of this rank.

        Raises:
            ValueError: it is no such state; its scope, grids, ``token_weight``, ``contribution`` or
                ``ratio_level`` differ; or its sums are not finite and >= 0. Nothing changes then.
        """
        got = list(state) if isinstance(state, Mapping) else type(state).__name__
        is_state = {"scope", "bounds"} <= set(got)
        require(is_state, "state", "be what state_dict() returned", got)
        rule = "be {!r} in the state too"
        require(state["scope"] == self.scope, "scope", (rule, self.scope), repr(state["scope"]))
        for name, value in state.get("config", {}).items():
            mine = getattr(self.config, name)
            require(value == mine, f"config.{name}", (rule, mine), repr(value))
        # Earlier states are those of one rank, without a table before its first update.
        mine = state.get("ranks", {self._rank: state}).get(self._rank, {})
        if self.histogram is not None and mine.get("table") is not None:
            self.histogram.load(mine["table"])
        elif self.histogram is not None:
            self.histogram.reset()
        self._undecided = bool(mine.get("undecided"))
        self._decide(state["bounds"], state.get("metrics") or {})

    @property
    def _rank(self) -> str:
        return str(dist.get_rank(self.process_group) if self.process_group is not None else 0)

    @property
    def _table(self) -> Tensor | None:
        return None if self.histogram is None else self.histogram.table

    @outside_inference_mode
    def _decide(self, bounds: Sequence[float] | None, metrics: dict[str, float]) -> None:
        """Sets a decision; NaN is a metric that is not known, and without any there are none."""
        device = "cpu" if self._table is None else self._table.device

        def tensors(values: Sequence[float]) -> tuple[Tensor, ...]:
            return torch.tensor(values, dtype=torch.float32, device=device).unbind()

        self._bounds = None if bounds is None else ClipBounds(*tensors(bounds))
        known = tensors([metrics.get(name, torch.nan) for name in SEARCH_METRICS])
        decided = bounds is not None and metrics
        self._metrics = dict(zip(SEARCH_METRICS, known, strict=True)) if decided else {}
