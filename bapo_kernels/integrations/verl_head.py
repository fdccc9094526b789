"""verl's ``use_fused_kernels`` with :func:`bapo_kernels.linear_log_probs`, once this is imported.

May import public modules and the package's checks. verl's fused head gets no micro-batch, so the
engine leaves its sets here. A head that did not take them would use the whole vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from ..checks import require
from ..linear import linear_log_probs
from ..sampling_mask import SamplingMask
from . import require_version

verl = require_version("verl", "0.6.1")

from packaging.version import Version  # noqa: E402
from verl.utils.experimental.torch_functional import FusedLinearForPPO  # noqa: E402

gradient_samples: int | None = None  # that linear_log_probs is called with; yours to set

_SETS = "sampling_mask"
_micro_batch: Any = None  # the one whose sets the head has not taken yet


def forward(
    self: Any,
    hidden_states: Tensor,
    vocab_weights: Tensor,
    input_ids: Tensor,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """``(log_probs, entropy)``, float32, of ``hidden_states [..., H]`` and aligned ``input_ids``.

    It replaces the forward of verl's ``FusedLinearForPPO``, which the fused forward of every model
    family calls.
    """
    return linear_log_probs(
        hidden_states,
        vocab_weights,
        input_ids,
        temperature=temperature,
        sampling_mask=_sampling_mask(input_ids),
        gradient_samples=gradient_samples,
    )


def _carry_sampling_masks() -> None:
    """Lets the engine leave the sets of each micro-batch here, for the head that it will call."""
    from verl.workers.engine.fsdp import transformer_impl as engines

    original = engines.FSDPEngineWithLMHead.forward_step

    @functools.wraps(original)
    def forward_step(self: Any, micro_batch: Any, *args: Any, **options: Any) -> Any:
        global _micro_batch
        if _SETS not in micro_batch or isinstance(self, engines.FSDPEngineWithValueHead):
            return original(self, micro_batch, *args, **options)
        rule = "be absent with sequence parallelism, which splits the rows"
        require(not self.use_ulysses_sp, _SETS, rule, "one")
        _micro_batch = micro_batch
        try:
            result = original(self, micro_batch, *args, **options)
            rule = "be absent unless use_fused_kernels is on, with the backend torch"
            require(_micro_batch is None, _SETS, rule, "one")
            return result
        finally:
            _micro_batch = None

    engines.FSDPEngineWithLMHead.forward_step = forward_step


def _sampling_mask(labels: Tensor) -> SamplingMask | None:
    """The sampling mask of the running micro-batch, a row for each label.

    Args:
        labels: ``[1, T]`` of packed or ``[B, S]`` of padded sequences, one position early.
    """
    global _micro_batch
    batch, _micro_batch = _micro_batch, None
    if batch is None:
        return None
    from verl.utils import tensordict_utils

    offsets = batch["input_ids"].offsets()
    starts, lengths = offsets[:-1].tolist(), offsets.diff().tolist()
    if labels.shape[0] > 1:
        starts = [i * labels.shape[1] for i in range(len(lengths))]
    responses = batch["responses"]
    if responses.is_nested:
        counts = responses.offsets().diff()
    else:
        counts = batch["attention_mask"][:, -responses.shape[1] :].sum(1)
    column = tensordict_utils.get(batch, _SETS)
    rows: list[Any] = [()] * labels.numel()
    for i, count in enumerate(counts.tolist()):
        sets = column[i]
        if sets is not None:
            rule = f"have a set for each of the {count} tokens of the response"
            require(len(sets) >= count, f"{_SETS}[{i}]", rule, len(sets))
            first = starts[i] + lengths[i] - count - 1
            rows[first : first + count] = sets[:count]
    return SamplingMask.from_lists(rows, labels.device)


FusedLinearForPPO.forward = forward
if Version(verl.__version__) >= Version("0.8"):  # since which actors run on this engine
    _carry_sampling_masks()
