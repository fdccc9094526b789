"""The tokens that could have been drawn for each row: sets of ids in CSR form.

May import the checks and the config. The kernels read sorted copies made here: they rely on these
for their results, and on nothing for memory.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .checks import OFFSETS, check_device, check_dtype, is_readable, refuse, require
from .config import IGNORE_INDEX

_WIDTH = 2**32  # keys of the sort that belong to a row: more than it may have ids
_LARGEST = 2**31 - 1  # larger ids are in no vocabulary, and neither is -1


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """The sets of token ids that top-k, top-p or min-p sampling could have drawn from, by row.

    Row ``n`` has the set ``S_n = token_ids[offsets[n]:offsets[n + 1]]``. Its distribution is the
    softmax over this set, ``p_j = exp(x_j)/sum_{i in S_n} exp(x_i)``, as if every other logit were
    -inf (keep sampling mask, DeepSeek-V3.2, arXiv 2512.02556, section 3.1). An empty set stands for
    the whole vocabulary. vLLM and SGLang return their sets in this form.

    A mask copies its inputs, so later writes to them do not change it.

    The ids of a set are distinct, in any order. Ids that are repeated or outside the vocabulary
    make the loss NaN, and :func:`bapo_kernels.debug.check_inputs` names them. The host does not
    read offsets on a GPU; wrong ones make the loss NaN.

    Args:
        token_ids: int32 or int64 ``[K]``, the sets one after the other.
        offsets: int32 or int64 ``[N + 1]``, rising from 0 to ``K``. ``N`` counts all rows, masked
            ones included, in the order of ``labels.flatten()``.

    Raises:
        ValueError: a shape, dtype or device is wrong, or offsets on a CPU do not rise from 0 to K.

    Examples:
        >>> logits, labels = torch.tensor([[1.0, 5.0, 1.0, 2.0], [0.0] * 4]), torch.tensor([2, 3])
        >>> mask = SamplingMask(torch.tensor([2, 0]), torch.tensor([0, 2, 2]))
        >>> log_probs(logits, labels, sampling_mask=mask)[0].exp()  # one of two, one of four
        tensor([0.5000, 0.2500])
    """

    token_ids: Tensor
    offsets: Tensor
    # The kernels read these: int32 ids that ascend within a set, and int64 offsets that are right,
    # or -1 alone.
    _ids: Tensor = field(init=False, repr=False)
    _offsets: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, tensor in (("token_ids", self.token_ids), ("offsets", self.offsets)):
            check_dtype(name, tensor, OFFSETS, "be int32 or int64")
        require(self.token_ids.ndim == 1, "token_ids", "have shape (K,)", self.token_ids.shape)
        some = self.offsets.ndim == 1 and self.offsets.shape[0] >= 1
        require(some, "offsets", "have shape (N + 1,)", self.offsets.shape)
        check_device("offsets", self.offsets, self.token_ids, "token_ids")

        given = [tensor.contiguous().clone() for tensor in (self.token_ids, self.offsets)]
        ids, offsets = given[0], given[1].long()
        if readable := is_readable(offsets):
            check_rise(offsets, len(ids))
        else:
            offsets = torch.where(_wrong(offsets, len(ids)).any(), -1, offsets)
        if not readable or not _ascend(ids, offsets):
            ids = _sorted(ids, offsets)
        self._keep(*given, _narrowed(ids), offsets)

    def _keep(self, *tensors: Tensor) -> None:
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # ordinary tensors, which backward can save
                tensors = tuple(tensor.clone() for tensor in tensors)
        for name, tensor in zip(("token_ids", "offsets", "_ids", "_offsets"), tensors, strict=True):
            object.__setattr__(self, name, tensor)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.token_ids, self.offsets)  # a loaded mask is checked, too

    @classmethod
    def from_lists(
        cls, sets: Sequence[Sequence[int]], device: torch.device | str | None = None
    ) -> SamplingMask:
        """Makes a mask of a list of ids per row; an empty one stands for the whole vocabulary.

        Examples:
            >>> SamplingMask.from_lists([[7, 3], [], [5]])
            SamplingMask(token_ids=tensor([7, 3, 5]), offsets=tensor([0, 2, 2, 3]))
        """
        rows = [_row_of(n, ids) for n, ids in enumerate(sets)]
        counts = torch.tensor([len(row) for row in rows], dtype=torch.int64, device="cpu")
        return cls.from_counts(torch.cat([counts[:0], *rows]), counts).to(device or "cpu")

    @classmethod
    def from_counts(cls, token_ids: Tensor, counts: Tensor) -> SamplingMask:
        """Makes a mask of concatenated ids, and the number of ids per row.

        Args:
            token_ids: int32 or int64 ``[K]``.
            counts: integers ``[...]``, any shape; 0 stands for the whole vocabulary.

        Examples:
            >>> SamplingMask.from_counts(torch.tensor([7, 3, 5]), torch.tensor([2, 0, 1])).offsets
            tensor([0, 2, 2, 3])
        """
        check_dtype("counts", counts, OFFSETS, "be int32 or int64")
        ends = counts.flatten().cumsum(0, dtype=torch.int64)
        return cls(token_ids, torch.cat([ends.new_zeros(1), ends]))

    @classmethod
    def from_padded(cls, token_ids: Tensor) -> SamplingMask:
        """Makes a mask of sets padded to equal length with -1 or -100, anywhere in them.

        On a GPU the host waits, to read the number of ids.

        Args:
            token_ids: int32 or int64 ``[..., K]``; a row of padding alone stands for the whole
                vocabulary. Pass ``rows[..., 1:]`` of rows ``[sampled, candidates...]``, as vLLM's:
                the sampled id is among the candidates.

        Examples:
            >>> SamplingMask.from_padded(torch.tensor([[7, 3], [5, -1]]))
            SamplingMask(token_ids=tensor([7, 3, 5]), offsets=tensor([0, 2, 3]))
        """
        check_dtype("token_ids", token_ids, OFFSETS, "be int32 or int64")
        require(token_ids.ndim >= 1, "token_ids", "have shape (..., K)", token_ids.shape)
        given = (token_ids != -1) & (token_ids != IGNORE_INDEX)
        return cls.from_counts(token_ids[given], given.sum(-1))

    @classmethod
    def from_bool(cls, allowed: Tensor) -> SamplingMask:
        """Makes a mask of bools by row: whether each token could have been drawn.

        On a GPU the host waits, to read the number of ids.

        Args:
            allowed: bool ``[..., V]``; a row that allows nothing stands for the whole vocabulary.

        Examples:
            >>> SamplingMask.from_bool(torch.tensor([[True, False, True], [False, True, False]]))
            SamplingMask(token_ids=tensor([0, 2, 1]), offsets=tensor([0, 2, 3]))
        """
        check_dtype("allowed", allowed, (torch.bool,), "be bool")
        require(allowed.ndim >= 1, "allowed", "have shape (..., V)", allowed.shape)
        return cls.from_counts(allowed.nonzero()[:, -1], allowed.sum(-1))

    @classmethod
    def cat(cls, masks: Sequence[SamplingMask]) -> SamplingMask:
        """Concatenates the rows of several masks; sorts the ids in each set.

        Examples:
            >>> SamplingMask.cat([SamplingMask.from_lists([[7, 3]]), SamplingMask.from_lists([[]])])
            SamplingMask(token_ids=tensor([3, 7], dtype=torch.int32), offsets=tensor([0, 2, 2]))
        """
        require(len(masks) > 0, "masks", "be one or more", len(masks))
        others = [type(mask).__name__ for mask in masks if not isinstance(mask, SamplingMask)]
        require(not others, "masks", "be SamplingMasks", others)
        ends, before = [masks[0]._offsets[:1]], 0
        for mask in masks:
            check_device("masks", mask._ids, masks[0]._ids, "the first one")
            own = mask._offsets[1:]
            ends.append(torch.where(own < 0, -1, own + before))
            before += len(mask._ids)
        return cls._of(torch.cat([mask._ids for mask in masks]), torch.cat(ends))

    @classmethod
    def _of(cls, ids: Tensor, offsets: Tensor) -> SamplingMask:
        """Makes a mask of what another one has sorted and checked."""
        mask = object.__new__(cls)
        mask._keep(ids, offsets, ids, offsets)
        return mask

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1

    def __getitem__(self, rows: slice) -> SamplingMask:
        """The sets of consecutive flattened rows, such as a micro-batch; their ids are sorted.

        On a GPU the host waits, to read the offsets.

        Examples:
            >>> SamplingMask.from_lists([[7, 3], [], [5]])[1:]
            SamplingMask(token_ids=tensor([5], dtype=torch.int32), offsets=tensor([0, 0, 1]))
        """
        require(isinstance(rows, slice), "rows", "be a slice", rows)
        first, end, step = rows.indices(len(self))
        require(step == 1, "rows", "have step 1", step)
        offsets = self._offsets[first : max(first, end) + 1]
        begin, end = offsets[[0, -1]].tolist()
        if begin < 0:
            check_rise(self.offsets, len(self._ids))
        return self._of(self._ids[begin:end], offsets - begin)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> SamplingMask:
        """The mask on a device, its ids sorted; the mask itself if it is already there.

        Examples:
            >>> mask = SamplingMask.from_lists([[7, 3]])
            >>> mask.to("cpu") is mask
            True
        """
        ids = self._ids.to(device=device, non_blocking=non_blocking)
        offsets = self._offsets.to(device=device, non_blocking=non_blocking)
        return self if ids is self._ids else self._of(ids, offsets)


def _row_of(n: int, ids: Any) -> Tensor:
    """The ids of row ``n``."""
    try:
        row = torch.tensor(list(ids), device="cpu")  # no dtype: others than integers are refused
    except (TypeError, ValueError, RuntimeError):
        row = torch.empty((), device="cpu")
    if row.ndim != 1 or (len(row) and row.dtype not in (torch.int32, torch.int64)):
        rule = "have a list of int64 ids for each row (of lists per request, pass sum(sets, []))"
        refuse("sets", rule, f"{reprlib.repr(ids)} at ({n},)")
    return row.long()


def check_rise(offsets: Tensor, K: int) -> None:
    """Requires offsets that rise from 0 to ``K``. Reads the device."""
    for n in _wrong(offsets, K).nonzero()[:1, 0].tolist():
        refuse("offsets", f"rise from 0 to {K}", f"{offsets[n].item()} at ({n},)")


def _wrong(offsets: Tensor, K: int) -> Tensor:
    """Whether each offset is below the one before, or at an end and not 0 or ``K``."""
    wrong = torch.cat([offsets[:1] != 0, offsets[1:] < offsets[:-1]])
    wrong[-1] |= offsets[-1] != K
    return wrong


def _row_starts(ids: Tensor, offsets: Tensor) -> Tensor:
    """Whether each id is the first of its set."""
    starts = torch.zeros(len(ids) + 1, dtype=torch.bool, device=ids.device)
    starts[offsets] = True
    return starts[:-1]


def _ascend(ids: Tensor, offsets: Tensor) -> bool:
    """Whether the ids of every set ascend. Reads the device."""
    return bool(((ids[1:] >= ids[:-1]) | _row_starts(ids, offsets)[1:]).all())


def _sorted(ids: Tensor, offsets: Tensor) -> Tensor:
    """Sorts the ids of each set, by one sort of keys; reads nothing on the host."""
    places = torch.arange(len(ids), device=ids.device)
    rows = torch.searchsorted(offsets, places, right=True) * _WIDTH
    return (rows + ids.long().clamp(-1, _LARGEST)).sort().values - rows


def _narrowed(ids: Tensor) -> Tensor:
    """Converts to int32; ids that are in no vocabulary stay so."""
    return ids if ids.dtype == torch.int32 else ids.clamp(-1, _LARGEST).int()


torch.serialization.add_safe_globals([SamplingMask])  # for torch.load(weights_only=True)
