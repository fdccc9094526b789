"""verl's sampling masks: from a micro-batch of the FSDP engine to the head.

The sets are a non-tensor of the batch, which verl carries as it is from the ``extra_fields`` of an
agent loop: through unions, chunks, dispatch and micro-batches. The fused head of a model gets no
micro-batch, so the engine leaves its sets here for the head that it is about to call.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from ..checks import require
from ..sampling_mask import SamplingMask

KEY = "sampling_mask"
_micro_batch: Any = None  # whose sets the head has not taken yet


def install() -> None:
    """Lets the engine leave the sets of each micro-batch here."""
    from verl.workers.engine.fsdp import transformer_impl as engines

    original = engines.FSDPEngineWithLMHead.forward_step

    @functools.wraps(original)
    def forward_step(self: Any, micro_batch: Any, *args: Any, **options: Any) -> Any:
        global _micro_batch
        if KEY not in micro_batch or isinstance(self, engines.FSDPEngineWithValueHead):
            return original(self, micro_batch, *args, **options)
        rule = "be absent with sequence parallelism, which splits the rows"
        require(not self.use_ulysses_sp, KEY, rule, "one")
        _micro_batch = micro_batch
        try:
            result = original(self, micro_batch, *args, **options)
            rule = "be absent unless use_fused_kernels with the backend torch makes the log-probs"
            require(_micro_batch is None, KEY, rule, "one")
            return result
        finally:
            _micro_batch = None

    engines.FSDPEngineWithLMHead.forward_step = forward_step


def take(labels: Tensor) -> SamplingMask | None:
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
    of_sequences = tensordict_utils.get(batch, KEY)
    rows: list[Any] = [()] * labels.numel()
    for i, count in enumerate(_response_lengths(batch)):
        sets = of_sequences[i]
        if sets is not None:
            rule = f"have a set for each of the {count} tokens of the response"
            require(len(sets) >= count, f"{KEY}[{i}]", rule, len(sets))
            first = starts[i] + lengths[i] - count - 1
            rows[first : first + count] = sets[:count]
    return SamplingMask.from_lists(rows, labels.device)


def _response_lengths(batch: Any) -> list[int]:
    responses = batch["responses"]
    if responses.is_nested:
        return list(responses.offsets().diff().tolist())
    return list(batch["attention_mask"][:, -responses.shape[1] :].sum(1).tolist())
