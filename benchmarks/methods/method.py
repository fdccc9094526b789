"""What a method is: the adapter through which ours and the baselines are measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from torch import Tensor

from bapo_kernels import available_backends, reference

from ..cases import HEAD, SAMPLING_MASK, WHOLE_VOCABULARY, Batch, Case
from ..distillation import forward_kl

# What log-probs of several labels are enough for.
OF_TOP_K = ("vjp", "forward_kl_topk", "loss + forward_kl_topk")
Step = tuple[Tensor, tuple[Tensor | None, ...]]  # loss, log-probs or bounds; gradients of inputs


@dataclass(frozen=True)
class Method:
    """One way to compute a case: ours or a baseline.

    Attributes:
        name: as shown in tables.
        level: level of the cases that it computes.
        train: computes loss and gradients of a batch.
        log_probs: computes log-probs of a batch, ``[N]`` or ``[B, S]``, differentiable; of its
            columns ``[..., K]`` in a distillation.
        package: the distribution that it comes from.
        module: imported to find out whether the method can be used.
        devices: the devices that it runs on.
        tasks: tasks that it computes, as far as its functions allow.
        layouts: layouts that it accepts.
        overwrites: it overwrites the logits, which are restored, untimed, before each call.
        live: rows of zero advantage are not read.
        backend: the backend of this package.
        everywhere: False for a slow method that is measured on a few cases only.
        holds_logits: from hidden states, it holds the logits of all tokens at once.
        dtypes: of the inputs that it is measured with.
        sweep: the only sweep that it is measured in. Without one it is measured in all, but with
            sampling masks only if it is ours.
        float32_logits: from hidden states of half precision, it makes float32 logits.
    """

    name: str
    level: str
    train: Callable[[Batch], Step] | None = None
    log_probs: Callable[[Batch], Tensor] | None = None
    package: str | None = None
    module: str | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")
    tasks: tuple[str, ...] = ("loss", "clip", "log_probs", "search")
    layouts: tuple[str, ...] = ("dense", "padded", "packed", "zero advantage", "mixed")
    overwrites: bool = False
    live: bool = False
    backend: str | None = None
    everywhere: bool = True
    holds_logits: bool = False
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    sweep: str | None = None
    float32_logits: bool = False

    @property
    def version(self) -> str | None:
        """Version of the package if it is installed."""
        try:
            return version(self.package) if self.package else None
        except PackageNotFoundError:
            return None

    def takes(self, case: Case) -> bool:
        """Whether the method is meant for such a case."""
        known = self.log_probs if case.task == "log_probs" else self.train or self.log_probs
        if case.level != self.level or case.task not in self.tasks or known is None:
            return False
        if self.live and case.layout not in ("zero advantage", "mixed"):
            return False
        if case.dtype not in self.dtypes or self.sweep not in (None, case.sweep):
            return False
        if case.sweep == HEAD:
            return self.backend is not None or (self.everywhere and case.layout == "dense")
        if case.sweep in (SAMPLING_MASK, WHOLE_VOCABULARY):
            return self.sweep == SAMPLING_MASK or (self.backend is not None and self.everywhere)
        if case.sweep == "many tokens":
            return not self.holds_logits
        plain = case.sweep is None and case.layout == "dense" and case.data == "stale"
        return plain or self.everywhere

    def why_not(self, case: Case, device: str) -> str | None:
        """Why it cannot compute a case that it takes; None if it can."""
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
        if case.sweep == SAMPLING_MASK or case.layout in self.layouts:
            return None
        return f"takes no {case.layout} batch"

    def step(self, batch: Batch) -> Step:
        """Computes the case of the batch."""
        for leaf in batch.inputs:
            leaf.grad = None
        if batch.case.task == "log_probs":
            assert self.log_probs is not None
            return self.log_probs(batch), ()
        if batch.teacher is not None and self.log_probs is not None:
            return distilled(self.log_probs(batch).view(batch.columns.shape), batch)
        if self.train is not None:
            return self.train(batch)
        assert self.log_probs is not None
        logp = self.log_probs(batch).view(batch.labels.shape)
        out = reference.bapo_loss_from_log_probs(
            logp, batch.old, batch.A, batch.mask, **batch.options
        )
        return trained(out.loss, batch)


def trained(loss: Tensor, batch: Batch) -> Step:
    """The loss, and the gradients that its backward accumulates at the inputs."""
    loss.backward()
    return loss.detach(), tuple(leaf.grad for leaf in batch.inputs)


def distilled(logp: Tensor, batch: Batch) -> Step:
    """The task from log-probs of the columns, and the gradients of the inputs."""
    teacher, task = batch.teacher, batch.case.task
    assert teacher is not None
    if task == "vjp":
        logp.backward(teacher.log_probs.exp().view(logp.shape).to(logp.dtype))
        return logp.detach(), tuple(leaf.grad for leaf in batch.inputs)
    logp = logp.float()
    of_ids = logp[..., -batch.case.K :]
    loss = forward_kl(of_ids, teacher.log_probs.view(of_ids.shape)).mean()
    if task != "forward_kl_topk":
        arguments = logp[..., 0], batch.old, batch.A, batch.mask
        loss = loss + reference.bapo_loss_from_log_probs(*arguments, **batch.options).loss
    return trained(loss, batch)
