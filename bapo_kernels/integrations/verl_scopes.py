"""verl's optimizer step: the scopes ``step`` and ``lagged`` of the search.

May import public modules, the package's checks, and verl inside of functions, but not the adapter
``verl``. A search left behind after its step would decide for the losses of another engine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from ..checks import require
from ..scopes import ClipBoundSearch
from . import require_version


class OptimizerStep(NamedTuple):
    """The step that an engine is in."""

    search: ClipBoundSearch
    gathers: bool  # whether losses only give their log-probs to the decision
    decision: dict[str, Tensor]  # the metrics of the decision


_searches: WeakKeyDictionary[Any, ClipBoundSearch] = WeakKeyDictionary()  # by engine, once decided
_running: OptimizerStep | None = None  # verl does not tell a policy loss which step calls it


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
def install(kind: Any) -> None:
    """Lets ``train_batch`` decide for its micro-batches, over all data-parallel ranks.

    It does so if the ``policy_loss`` is a ``kind``, which has the search. In every engine,
    ``train_batch`` computes the gradients of all micro-batches, then steps the optimizer.
    """
    require_version("verl", "0.8")  # since which actors run on these engines
    from verl.workers.engine.base import BaseEngine

    original = BaseEngine.train_batch

    @functools.wraps(original)
    def train_batch(self: Any, data: Any, loss_function: Any) -> Any:
        search = _search_of(self, loss_function, kind)
        if search is None:
            return original(self, data, loss_function)
        if search.scope == "step":
            with _running_in(OptimizerStep(search, True, {})), ExitStack() as stack:
                # In eval mode dropout draws nothing, and activation offload expects no backward.
                stack.callback(self.module.train, self.module.training)
                self.module.eval()
                self.infer_batch(data, loss_function)
            _decide(self, search)
        # At the starting bounds of the scope "lagged", each call logs metrics of its own.
        decision = search.metrics if self in _searches else {}
        with _running_in(OptimizerStep(search, False, decision)):
            outputs = original(self, data, loss_function)
        if search.scope == "lagged":
            _decide(self, search)
        return outputs

    BaseEngine.train_batch = train_batch


def _search_of(engine: Any, loss_function: Any, kind: Any) -> ClipBoundSearch | None:
    from verl.utils.device import get_device_name

    config = getattr(loss_function, "keywords", {}).get("config")  # verl's is a partial
    loss = getattr(config, "policy_loss", None)
    if not isinstance(loss, kind) or loss.scope == "call":
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
def _running_in(step: OptimizerStep) -> Iterator[None]:
    global _running
    _running = step
    try:
        yield
    finally:
        _running = None
