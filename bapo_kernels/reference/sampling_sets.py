"""The tokens that a sampling mask allows, as a bool for each logit.

Imports the mask and the checks; nothing of the kernels, whose truth it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.arguments.single import check_sampling_mask
from ..sampling_mask import SamplingMask


def allowed_tokens(mask: SamplingMask, labels: Tensor, V: int) -> tuple[Tensor, Tensor]:
    """bool ``[..., V]``, true in the set of each row; bool ``[...]``, rows whose set is wrong.

    A set is wrong if it has an id outside of ``[0, V)`` or the same one twice; all are if the
    offsets do not rise from 0 to ``K``. Without a set, everything is allowed.
    """
    check_sampling_mask(mask, labels)
    ids, counts, offsets = mask.token_ids.long(), mask.offsets.diff(), mask.offsets.tolist()
    allowed = torch.zeros(len(mask), V, dtype=torch.bool, device=ids.device)
    if offsets[0] != 0 or offsets[-1] != len(ids) or offsets != sorted(offsets):
        allowed[:] = True
        return allowed.view(*labels.shape, V), torch.ones_like(labels, dtype=torch.bool)
    rows = torch.arange(len(mask), device=ids.device).repeat_interleave(counts)
    known = (ids >= 0) & (ids < V)
    allowed[rows[known], ids[known]] = True
    wrong = allowed.sum(-1) != counts
    allowed[counts == 0] = True
    return allowed.view(*labels.shape, V), wrong.view(labels.shape)


def outside_of_sets(mask: SamplingMask, labels: Tensor, V: int) -> Tensor:
    """bool ``[...]``: labels that are tokens, but not in the set of their row."""
    allowed, _ = allowed_tokens(mask, labels, V)
    known = (labels >= 0) & (labels < V)
    return known & ~allowed.gather(-1, torch.where(known, labels, 0)[..., None]).squeeze(-1)
