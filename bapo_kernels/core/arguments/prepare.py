"""From the arguments of a caller to a call: flat, of one dtype, weighted, by one operator.

Imports the arguments, the data of a call and the operators. A second read of the arguments anywhere
else would cost every call of a small batch; what only the device knows to be wrong becomes NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...checks import check_no_transform
from ..call import Call, SamplingSets
from ..distributed import VocabShard
from ..operators import FIELDS, ops_of
from .single import as_numbers
from .together import Arguments


def prepared(backend: str, given: Arguments, columns: int = 0) -> Call:
    """The call that a backend takes.

    Args:
        columns: of the vocabulary, on this rank.
    """
    if given.weighted or columns:
        check_no_transform(backend)
    like, config = given.labels_or_log_probs, given.config
    matrix = _matrix(like, like)
    N, device = matrix.numel(), matrix.device
    unmasked = torch.empty(N, dtype=torch.bool, device=device)
    counted = torch.empty_like(unmasked) if given.is_live() else None
    has_labels = not like.is_floating_point()
    labels = torch.empty(N, dtype=torch.int64, device=device) if has_labels else None
    weights = torch.empty(N, dtype=torch.float64, device=device) if given.weighted else None
    ticket = torch.empty(1, dtype=torch.int32, device=device) if given.weighted else None
    fields = None
    if given.fields:
        fields = torch.empty((len(FIELDS), N), dtype=torch.float32, device=device)
    sources = [given.fields.get(name) for name in FIELDS]
    mask = None if given.response_mask is None else _matrix(given.response_mask, like)
    matrices = [None if field is None else _matrix(field, like) for field in sources]
    on_device = isinstance(given.divisor, Tensor)
    divisors = (None, given.divisor) if on_device else (given.divisor, None)
    ops_of(backend).prepare(
        *(matrix, mask, matrices, given.cu_seqlens, given.dp_size, *divisors),
        *(given.bounds, given.is_live(), config.options),
        *(unmasked, counted, labels, weights, fields, ticket),
    )
    present = sum(1 << k for k, field in enumerate(sources) if field is not None)
    masks = unmasked, unmasked if counted is None else counted
    call = Call(
        *(config.options, backend, like.shape, *masks, fields, present, given.statistics),
        *(labels, weights, given.adds_up(), ticket, given.bounds),
        process_group=given.process_group,
    )
    if config.ratio_level == "sequence":
        call.sequences = given.sequences()
        if given.is_live():
            call.counted = unmasked & given.sequences().with_any(call.counted)
    if given.labels is not None:
        call.labels = given.labels.reshape(N, given.labels.shape[-1]).contiguous()
    call.shard = VocabShard.of(columns, unmasked, given.vocab_group)
    if (sets := given.sampling_mask) is not None:
        assert call.labels is not None
        row_ids = sets._ids, sets._offsets, call.labels
        call.sets = SamplingSets.of(*row_ids, backend, call.shard or columns)
    return call


def _matrix(values: Tensor, like: Tensor) -> Tensor:
    """``[rows, columns]`` as the operator takes it; a view of up to two dimensions.

    Values of packed sequences that are not per token stay ``[B]``. The operator has no derivative.
    """
    values = as_numbers(values.detach() if values.requires_grad else values)
    if values.ndim == 2 or values.shape != like.shape:
        return values
    return values.flatten(0, -2) if values.ndim > 2 else values.reshape(1, -1)
