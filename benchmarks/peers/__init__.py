"""Everybody who is measured, behind one small adapter each. Peers are installed packages.

An adapter computes the quantity of the case: BAPO's loss and the gradients of its inputs, or
log-probs. Packages that know log-probs alone get the search of the paper, a loop on the host, and
the loss of the tokens on top, in plain PyTorch: some kilobytes beside the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from torch import Tensor

from bapo_kernels import available_backends, reference

from ..cases import Batch, Case

Step = tuple[Tensor, tuple[Tensor | None, ...]]  # loss, log-probs or bounds; gradients of inputs


@dataclass(frozen=True)
class Peer:
    """One way to compute a case.

    Attributes:
        name: as in tables.
        level: of the cases it computes.
        train: loss and gradients of a batch.
        log_probs: of a batch, ``[N]`` or ``[B, S]``, differentiable.
        package: the distribution it comes from.
        module: is imported to see whether it can be used at all.
        devices: where it runs.
        tasks: of the cases it computes, where not all that its functions allow.
        layouts: it takes.
        overwrites: the logits, which get their values back before each call, untimed.
        live: rows of zero advantage are not read.
        backend: of this package.
        everywhere: False where a few cases are enough, for those that take very long.
        holds_logits: of all tokens at once, although it starts from hidden states.
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

    @property
    def version(self) -> str | None:
        """Of the package, where it is installed."""
        try:
            return version(self.package) if self.package else None
        except PackageNotFoundError:
            return None

    def takes(self, case: Case) -> bool:
        """Whether it is meant for such a case at all."""
        known = self.log_probs if case.task == "log_probs" else self.train or self.log_probs
        if case.level != self.level or case.task not in self.tasks or known is None:
            return False
        if self.live and case.layout not in ("zero advantage", "mixed"):
            return False
        if case.sweep == "many tokens":
            return not self.holds_logits
        plain = case.sweep is None and case.layout == "dense" and case.data == "stale"
        return plain or self.everywhere

    def why_not(self, case: Case, device: str) -> str | None:
        """Why it cannot compute a case that it takes, or None."""
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
        return None if case.layout in self.layouts else f"takes no {case.layout} batch"

    def step(self, batch: Batch) -> Step:
        """Computes the case of the batch."""
        for leaf in batch.inputs:
            leaf.grad = None
        if batch.case.task == "log_probs":
            assert self.log_probs is not None
            return self.log_probs(batch), ()
        if self.train is not None:
            return self.train(batch)
        assert self.log_probs is not None
        logp = self.log_probs(batch).view(batch.labels.shape)
        out = reference.bapo_loss_from_log_probs(
            logp, batch.old, batch.A, batch.mask, **batch.options
        )
        return trained(out.loss, batch)


def trained(loss: Tensor, batch: Batch) -> Step:
    """The loss, and the gradients that its backward leaves at the inputs."""
    loss.backward()
    return loss.detach(), tuple(leaf.grad for leaf in batch.inputs)


def peers() -> Iterator[Peer]:
    """All of them, ours first."""
    from . import cut_cross_entropy, flash_attention, liger, ours, pytorch, quack, trl, verl

    # PyTorch's last: compiling theirs takes longest.
    for module in (ours, trl, liger, cut_cross_entropy, verl, flash_attention, quack, pytorch):
        yield from module.PEERS
