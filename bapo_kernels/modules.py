"""The losses as ``nn.Module``.

Imports the public functions, whose arguments and defaults these have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .config import BAPOConfig
from .core.arguments.options import LinearOptions, LogitsOptions
from .core.arguments.single import config_or_default
from .core.call import Statistics
from .functional import bapo_loss
from .linear import bapo_linear_loss
from .output import BAPOOutput

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _LossModule(torch.nn.Module):
    """Keeps some options of a loss; those that a call gives, and that are not ``None``, win."""

    kept: ClassVar[tuple[str, ...]]

    def _options(self, options: Any) -> dict[str, Any]:
        given = {name: value for name, value in options.items() if value is not None}
        return {name: getattr(self, name) for name in self.kept} | given

    def extra_repr(self) -> str:
        """Shown by ``print``."""
        config, *others = self.kept
        options = [f"{name}={getattr(self, name)!r}" for name in others]
        return ", ".join([str(getattr(self, config)), *options])


class BAPOLoss(_LossModule):
    """:func:`bapo_kernels.bapo_loss` as a module.

    ``forward`` takes the arguments of the function. The module stores ``config``, ``backend``,
    ``inplace`` and ``statistics``. A call can override them; ``None`` keeps the module's value.

    Examples:
        >>> loss = BAPOLoss(BAPOConfig.recipe(temperature=0.7))
        >>> loss(torch.zeros(2, 5), torch.tensor([1, 3]), None, torch.tensor([1.0, -0.5])).loss
        tensor(-0.2500)
    """

    kept = ("config", "backend", "inplace", "statistics")

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
        self.backend, self.inplace, self.statistics = backend, inplace, statistics

    def forward(self, *batch: Any, **options: Unpack[LogitsOptions]) -> BAPOOutput:
        """The loss of a batch."""
        return bapo_loss(*batch, **self._options(options))


class BAPOLinearLoss(_LossModule):
    """:func:`bapo_kernels.bapo_linear_loss` as a module.

    ``forward`` takes the arguments of the function, ``hidden_states`` and ``lm_head_weight`` first.
    The module stores ``config``, ``backend``, ``chunk_tokens``, ``gradient_samples`` and
    ``statistics``. A call can override them; ``None`` keeps the module's value.

    Examples:
        >>> loss, lm_head = BAPOLinearLoss(chunk_tokens=1), torch.nn.Linear(4, 10, bias=False)
        >>> labels, advantages = torch.tensor([1, 3]), torch.tensor([1.0, -0.5])
        >>> loss(torch.ones(2, 4), lm_head.weight, labels, None, advantages).loss.backward()
        >>> lm_head.weight.grad.shape
        torch.Size([10, 4])
    """

    kept = ("config", "backend", "chunk_tokens", "gradient_samples", "statistics")

    def __init__(
        self,
        config: BAPOConfig | None = None,
        *,
        backend: str | None = None,
        chunk_tokens: int | None = None,
        gradient_samples: int | None = None,
        statistics: Statistics = "all",
    ) -> None:
        super().__init__()
        self.config = config_or_default(config)
        self.backend, self.statistics = backend, statistics
        self.chunk_tokens, self.gradient_samples = chunk_tokens, gradient_samples

    def forward(self, *batch: Any, **options: Unpack[LinearOptions]) -> BAPOOutput:
        """The loss of a batch."""
        return bapo_linear_loss(*batch, **self._options(options))
