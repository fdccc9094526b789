"""verl's optimizer step: the scopes ``step`` and ``lagged`` of the search.

In verl 0.8 and later ``BaseEngine.train_batch`` is an optimizer step, of whichever engine: the
gradients of all micro-batches, then the optimizer. It takes the loss function, which has the config
of the actor. verl does not tell a policy loss which step it is called in, so the search of a step
is kept here while the step runs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from ..checks import require
from ..scopes import ClipBoundSearch
from . import require_version


class OptimizerStep(NamedTuple):
    """The step that an engine is in."""

    search: ClipBoundSearch
    gathers: bool  # log-probs for the decision, before the losses
    decision: dict[str, Tensor]  # its metrics


_searches: WeakKeyDictionary[Any, ClipBoundSearch] = WeakKeyDictionary()  # of engines
_running: OptimizerStep | None = None


def running_step(scope: str) -> OptimizerStep | None:
    """The step that a policy loss is called in; ``None`` with the scope ``call``.

    Raises:
        ValueError: no engine is in a step that has a search.
    """
    if scope == "call":
        return None
    rule = "be 'call' outside of the optimizer step of an engine (train_batch)"
    require(_running is not None, "policy_loss.scope", rule, repr(scope))
    return _running


@functools.cache
def install() -> None:
    """Lets ``train_batch`` decide for its micro-batches, over all data-parallel ranks."""
    require_version("verl", "0.8")  # whose actors run on these engines
    from verl.workers.engine.base import BaseEngine

    original = BaseEngine.train_batch

    @functools.wraps(original)
    def train_batch(self: Any, data: Any, loss_function: Any) -> Any:
        is_first = self not in _searches
        search = _search_of(self, loss_function)
        if search is None:
            return original(self, data, loss_function)
        if search.scope == "step":
            with _running_in(OptimizerStep(search, True, {})):
                self.infer_batch(data, loss_function)
            search.step()
        # The first bounds of the scope "lagged" have no metrics: each call has its own.
        nothing_decided = is_first and search.scope == "lagged"
        decision = {} if nothing_decided else search.metrics
        with _running_in(OptimizerStep(search, False, decision)):
            outputs = original(self, data, loss_function)
        if search.scope == "lagged":
            search.step()
        return outputs

    BaseEngine.train_batch = train_batch


def _search_of(engine: Any, loss_function: Any) -> ClipBoundSearch | None:
    from verl.utils.device import get_device_name

    from .verl import BAPOPolicyLossConfig

    config = getattr(loss_function, "keywords", {}).get("config")  # verl's is a partial
    loss = getattr(config, "policy_loss", None)
    if not isinstance(loss, BAPOPolicyLossConfig) or loss.scope == "call":
        return None
    if engine not in _searches:
        _check_engine(engine, loss.scope)
        _searches[engine] = loss.search(engine.get_data_parallel_group(), get_device_name())
    return _searches[engine]


def _check_engine(engine: Any, scope: str) -> None:
    """The scope ``step`` makes a forward without gradients first, which FSDP's engine allows."""
    from verl.workers.engine.fsdp import FSDPEngine

    is_fsdp = type(engine).forward_backward_batch is FSDPEngine.forward_backward_batch
    rule = f"be 'call' or 'lagged' with {type(engine).__name__}"
    require(scope == "lagged" or is_fsdp, "policy_loss.scope", rule, repr(scope))


@contextmanager
def _running_in(step: OptimizerStep) -> Iterator[None]:
    global _running
    _running = step
    try:
        yield
    finally:
        _running = None
