"""The losses as ``nn.Module``."""

from __future__ import annotations

from typing import Any

import torch

from .config import BAPOConfig
from .functional import Statistics, bapo_linear_loss, bapo_loss
from .inputs import config_or_default
from .output import BAPOOutput


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


class BAPOLoss(torch.nn.Module):
    """:func:`bapo_kernels.bapo_loss` with its configuration.

    ``forward`` takes the arguments of the function; ``config``, ``backend``, ``inplace`` and
    ``statistics`` are those of the module, unless the call has its own (``None`` is none).

    Examples:
        >>> loss = BAPOLoss(BAPOConfig.recipe(temperature=0.7))
        >>> loss(torch.zeros(2, 5), torch.tensor([1, 3]), None, torch.tensor([1.0, -0.5])).loss
        tensor(-0.2500)
    """

    def __init__(
        self,
        config: BAPOConfig | None = None,
        *,
        backend: str | None = None,
        inplace: bool = False,
        statistics: Statistics = "all",
    ) -> None:
        super().__init__()
        self.config = config_or_default(config)
        self.backend = backend
        self.inplace = inplace
        self.statistics = statistics

    def forward(self, *args: Any, **kwargs: Any) -> BAPOOutput:
        """The loss of a batch."""
        of_module = dict(
            config=self.config,
            backend=self.backend,
            inplace=self.inplace,
            statistics=self.statistics,
        )
        return bapo_loss(*args, **(of_module | _given(kwargs)))

    def extra_repr(self) -> str:
        """Shown by ``print``."""
        return (
            f"{self.config}, backend={self.backend!r}, inplace={self.inplace}, "
            f"statistics={self.statistics!r}"
        )


class BAPOLinearLoss(torch.nn.Module):
    """:func:`bapo_kernels.bapo_linear_loss` with its configuration.

    ``forward`` takes the arguments of the function, ``hidden_states`` and ``lm_head_weight`` first;
    ``config``, ``backend``, ``chunk_tokens`` and ``statistics`` are those of the module, unless the
    call has its own (``None`` is none).

    Examples:
        >>> loss, lm_head = BAPOLinearLoss(chunk_tokens=1), torch.nn.Linear(4, 10, bias=False)
        >>> labels, advantages = torch.tensor([1, 3]), torch.tensor([1.0, -0.5])
        >>> loss(torch.ones(2, 4), lm_head.weight, labels, None, advantages).loss.backward()
        >>> lm_head.weight.grad.shape
        torch.Size([10, 4])
    """

    def __init__(
        self,
        config: BAPOConfig | None = None,
        *,
        backend: str | None = None,
        chunk_tokens: int | None = None,
        statistics: Statistics = "all",
    ) -> None:
        super().__init__()
        self.config = config_or_default(config)
        self.backend = backend
        self.chunk_tokens = chunk_tokens
        self.statistics = statistics

    def forward(self, *args: Any, **kwargs: Any) -> BAPOOutput:
        """The loss of a batch."""
        of_module = dict(
            config=self.config,
            backend=self.backend,
            chunk_tokens=self.chunk_tokens,
            statistics=self.statistics,
        )
        return bapo_linear_loss(*args, **(of_module | _given(kwargs)))

    def extra_repr(self) -> str:
        """Shown by ``print``."""
        return (
            f"{self.config}, backend={self.backend!r}, chunk_tokens={self.chunk_tokens}, "
            f"statistics={self.statistics!r}"
        )
