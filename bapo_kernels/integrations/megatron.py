"""Megatron-core: a loss or log-probs from hidden states, in place of the logits of a ``GPTModel``.

May import Megatron and the package's checks: the function of the head is the caller's. A head that
``_check`` lets through by mistake trains on other logits than the model's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checks import require
from . import require_version

require_version("megatron.core", "0.16")

from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region  # noqa: E402
from megatron.core.utils import unwrap_model  # noqa: E402

_WITHOUT_THE_HOOK = "be None for a model without output_processor"


class FusedHead:
    """The head of a micro-batch: a function of the model's hidden states and output weight.

    The model's ``output_layer`` decides about tensor parallelism (with or without sequence
    parallelism), tied embeddings, its bias and gradient accumulation fusion. The logits are never
    materialised, so ``parallel_output`` has no effect.

    Args:
        function: :func:`~bapo_kernels.bapo_linear_loss` or
            :func:`~bapo_kernels.linear_log_probs`.
        labels: int64 ``[B, S]``, the next tokens; under context parallelism, of this rank's part
            of the sequences. For packed sequences ``[S]``, with ``cu_seqlens``.
        arguments, options: what ``function`` takes after ``labels``, except ``bias`` and
            ``vocab_group``, which come from the model.

    Examples:
        >>> head = FusedHead(bapo_linear_loss, labels, old, advantages, mask)  # doctest: +SKIP
        >>> output = head.forward(model, tokens, positions, None)  # doctest: +SKIP
    """

    def __init__(
        self, function: Callable[..., Any], labels: Tensor, *arguments: Any, **options: Any
    ) -> None:
        takes = inspect.signature(function).parameters
        fits = "bias" in takes or any(each.kind is each.VAR_KEYWORD for each in takes.values())
        rule = "be bapo_linear_loss, linear_log_probs, or a function of their arguments"
        require(fits, "function", rule, getattr(function, "__name__", function))
        self.function, self.labels = function, labels
        self.arguments, self.options = arguments, options

    def forward(self, model: torch.nn.Module, *inputs: Any, **others: Any) -> Any:
        """Runs a ``GPTModel``, also within DDP and ``Float16Module``.

        Args:
            inputs, others: what the model takes; only multi-token prediction needs ``labels``.

        Returns:
            On the last pipeline stage the result of ``function``, elsewhere the hidden states.

        Raises:
            ValueError: the model's head is not supported; names the option and its value.
        """
        inner = unwrap_model(model)
        if not inner.post_process:
            return model(*inputs, **others)
        signature = inspect.signature(inner.forward)
        # The wrappers' own keywords are in `others` too, so only the positional ones are bound.
        given = signature.bind_partial(*inputs).arguments | others
        context = given.get("inference_context") or given.get("inference_params")
        _check(inner.output_layer, inner.config, context)
        outputs: list[Any] = []  # Float16Module would make a plain tuple of a named one
        if "output_processor" in signature.parameters:

            def processor(**given: Any) -> Any:
                outputs.append(self(**given))
                return outputs[0]

            model(*inputs, output_processor=processor, **others)
        else:
            layers = inner.config.mtp_num_layers
            require(layers is None, "mtp_num_layers", _WITHOUT_THE_HOOK, layers)
            require(given.get("labels") is None, "labels", _WITHOUT_THE_HOOK, "a tensor")

            def instead(
                hidden_states: Tensor, weight: Tensor | None = None, **_: Any
            ) -> tuple[Tensor, None]:
                outputs.append(self._apply(inner.output_layer, hidden_states, weight))
                return hidden_states.new_empty(1, 1), None  # which the model transposes

            with _replaced(inner.output_layer, instead):
                model(*inputs, **others)
        return outputs[0]

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: torch.nn.Module,
        output_weight: Tensor | None,
        config: Any,
        inference_context: Any = None,
        **_: Any,
    ) -> Any:
        """Acts as the model's ``output_processor``, which megatron-core has from 0.18 on."""
        _check(output_layer, config, inference_context)
        # The layer is called for its hooks, which await weights that are still being gathered.
        with _replaced(output_layer, partial(self._apply, output_layer)):
            return output_layer(hidden_states, output_weight)

    def _apply(self, layer: Any, hidden: Tensor, weight: Tensor | None) -> Any:
        """Calls the function on ``hidden [S, B, H]``; under sequence parallelism S is a part."""
        weight = layer.weight if weight is None else weight
        managed = hasattr(weight, "__fsdp_param__")
        require(not managed, "output_layer.weight", "not be managed by Megatron-FSDP", "a shard")
        group = layer.tp_group if layer.tp_group.size() > 1 else None
        if layer.sequence_parallel:
            # Every rank gets the whole gradient, of which backward takes the rank's own part.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=group
            )
        hidden = hidden.transpose(0, 1)
        if self.labels.ndim == 1 and hidden.shape[0] == 1:
            hidden = hidden[0]
        if layer.gradient_accumulation_fusion and hasattr(weight, "main_grad"):
            weight = _AddedToMainGrad.apply(weight)
        bias = None if layer.skip_bias_add else layer.bias
        given = hidden, weight, self.labels, *self.arguments
        return self.function(*given, bias=bias, vocab_group=group, **self.options)


class _AddedToMainGrad(torch.autograd.Function):
    """A weight whose gradient is added to its ``main_grad``.

    Megatron's fused GEMM accumulates in float32. This gradient is rounded to the dtype of the
    weight first, as without the fusion.
    """

    @staticmethod
    def forward(ctx: Any, weight: Any) -> Any:
        ctx.weight, ctx.main_grad = weight, weight.main_grad
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor | None:
        ctx.main_grad.add_(gradient)
        if not hasattr(ctx.weight, "grad_added_to_main_grad"):
            return None
        ctx.weight.grad_added_to_main_grad = True
        # DDP needs a gradient, which it drops. Only with a tied embedding, to whose gradient
        # autograd adds this one, does DDP add the sum to main_grad: hence the zeros.
        return gradient.zero_() if getattr(ctx.weight, "zero_out_wgrad", False) else gradient


@contextmanager
def _replaced(layer: Any, forward: Callable[..., Any]) -> Iterator[None]:
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


def _check(layer: Any, config: Any, inference_context: Any) -> None:
    """Raises for a head that computes anything else than ``hidden @ weight.T + bias``."""
    plain = type(layer) is ColumnParallelLinear and "forward" not in vars(layer)
    rule = "be a ColumnParallelLinear with an unchanged forward"
    require(plain, "output_layer", rule, type(layer).__name__)
    for name in ("use_mup", "defer_embedding_wgrad_compute"):
        require(not getattr(config, name, False), name, "be False", True)
    require(not layer.disable_grad_reduce, "disable_grad_reduce", "be False", True)
    shards = getattr(layer, "gtp_remat_size", 1)
    require(shards == 1, "gtp_remat_size", "be 1", shards)
    kind = type(inference_context).__name__
    require(inference_context is None, "inference_context", "be None", kind)
