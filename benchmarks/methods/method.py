"""What a method is: the adapter through which ours and the baselines are measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from bapo_kernels import available_backends, reference

from ..cases import Batch
from ..distillation import forward_kl
from ..floor import Floor

Step = tuple[Tensor, tuple[Tensor | None, ...]]  # loss, log-probs or bounds; gradients of inputs


@dataclass(frozen=True)
class Method:
    """One way to compute a case, or a yardstick: a copy or bare matrix products.

    Attributes:
        name: as shown in tables.
        train: computes loss and gradients of a batch.
        log_probs: computes log-probs of the columns of a batch, ``[N]``, ``[B, S]`` or, with
            several columns, ``[..., K]``, differentiable.
        yardstick: makes the call that is timed, with memory of its own.
        need: the floor of a yardstick.
        package: the distribution that it comes from.
        module: imported to find out whether the method can be used.
        devices: the devices that it runs on.
        overwrites: it overwrites the logits, which are restored, untimed, before each call.
        live: rows of zero advantage are not read.
        samples: gradients are from samples that are expected to have so many entries of a row.
        backend: the backend of this package.
    """

    name: str
    train: Callable[[Batch], Step] | None = None
    log_probs: Callable[[Batch], Tensor] | None = None
    yardstick: Callable[[Batch], Callable[[], object]] | None = None
    need: Callable[[Batch], Floor] | None = None
    package: str | None = None
    module: str | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")
    overwrites: bool = False
    live: bool = False
    samples: int | None = None
    backend: str | None = None

    @property
    def version(self) -> str | None:
        """Version of the package if it is installed."""
        try:
            return version(self.package) if self.package else None
        except PackageNotFoundError:
            return None

    def why_not(self, device: str) -> str | None:
        """Why it cannot run here; None if it can."""
        if device not in self.devices:
            return f"does not run on {device}"
        if self.backend is not None and available_backends()[self.backend] is not None:
            return available_backends()[self.backend]
        if self.package is not None and self.version is None:
            return f"{self.package} is not installed"
        if self.module is not None:
            try:
                import_module(self.module)
            except Exception as error:  # a package may fail in any way
                return f"{self.module} cannot be imported: {error}"
        return None

    def step(self, batch: Batch) -> Step:
        """Computes the case of the batch."""
        for leaf in batch.inputs:
            leaf.grad = None
        if self.train is not None:
            return self.train(batch)
        assert self.log_probs is not None
        with torch.set_grad_enabled(batch.case.task != "log_probs"):
            logp = self.log_probs(batch).view(batch.columns.shape)
        return trained(value_of(logp, batch), batch)


def trained(value: Tensor, batch: Batch) -> Step:
    """The value, and the gradients that its backward accumulates at the inputs."""
    if batch.case.task == "log_probs":
        return value.detach(), ()
    weights = None
    if batch.case.task == "vjp":
        assert batch.teacher is not None
        weights = batch.teacher.log_probs.exp().view(value.shape).to(value.dtype)
    value.backward(weights)
    return value.detach(), tuple(leaf.grad for leaf in batch.inputs)


def value_of(logp: Tensor, batch: Batch) -> Tensor:
    """What the case makes of log-probs of its columns: a loss, or these themselves."""
    task = batch.case.task
    if task in ("log_probs", "vjp"):
        return logp
    logp, loss = logp.to(torch.promote_types(logp.dtype, torch.float32)), 0.0
    if batch.teacher is not None:
        of_ids = logp[..., -batch.case.K :]
        loss = forward_kl(of_ids, batch.teacher.log_probs.view(of_ids.shape)).mean()
        if task == "forward_kl_topk":
            return loss
        logp = logp[..., 0]
    arguments = logp, batch.old, batch.A, batch.mask
    return loss + reference.bapo_loss_from_log_probs(*arguments, config=batch.case.config).loss
