"""What is measured: models, tasks and their data."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bapo_kernels import BAPOConfig, SamplingMask, reference
from bapo_kernels.reference.tokens import clipped
from bapo_kernels.tools.real_rows import real_head, real_rows

from .distillation import Teacher
from .sets import Places, labels_in, sampling_mask

Divergence = Literal["forward_kl", "forward_kl_topk", "loss + forward_kl_topk"]
GAUSSIAN, REAL = "Gaussian rows", "real rows"  # the profiles; real ones are at temperature 1
SEQUENCES = 8
FEW = 24  # tokens that are checked
NOISE = {"on-policy": 0.0, "stale": 0.05, "very stale": 0.5}  # standard deviation of the log-ratio
# Where a search stops, and the target that makes it stop there: the loop tests 1 pair or 53.
SEARCHES = {"at the starting bounds": 0.0, "at the maximum bounds": 1.0}
IDLE_SHARE = 0.4  # of the sequences: prompts whose answers all have the same reward
MIXED_IDLE = [1, 5, 7]  # sequences that hold 40 % of the unmasked tokens
MIXED_UNDECIDED = 0.03  # of the rows
# Losses at fixed bounds, by task.
POLICIES: dict[str, dict[str, Any]] = {
    "clip": {},
    "cispo": dict(surrogate="cispo"),
    "sapo": dict(surrogate="sapo"),
    "gspo": dict(ratio_level="sequence"),
}
HEAD, TARGETS = "head", "targets"  # the sweep over the forms of the head, and SPEC's targets
# The sweep over sampling masks, and the same loss over the whole vocabulary.
SAMPLING_MASK, WHOLE_VOCABULARY = "sampling mask", "no sampling mask"
DISTILLATION = "distillation"  # the sweep over labels per row
SAMPLES = "gradient samples"  # the sweep over gradients of the head from samples
STEPS = {f"steps, {S} tokens": S for S in (64, 512)}  # sequences of a model that is trained


MODELS = {  # V and H
    "Qwen3-0.6B": (151_936, 1_024),
    "Qwen3-8B": (151_936, 4_096),
    "Llama-3.2-1B": (128_256, 2_048),
    "Llama-3-8B": (128_256, 4_096),
    "Gemma-3-1B": (262_144, 1_152),
    "Gemma-3-12B": (262_208, 3_840),
    "DeepSeek-V3": (129_280, 7_168),
    "gpt-oss-20b": (201_088, 2_880),
    "SmolLM2-135M": (49_152, 576),
}


@dataclass(frozen=True)
class Case:
    """A task on data of given sizes.

    ``loss`` is BAPO with its search, ``clip`` the same with fixed bounds, and ``cispo``, ``sapo``
    and ``gspo`` are these policies at fixed bounds, all with gradients; ``log_probs`` has no
    gradient; ``search`` finds the bounds from log-probs. The layout ``mixed`` is the data of the
    targets: 25 % of the tokens are masked, 40 % of the others have no advantage, and 3 % of all are
    undecided. With a frozen head only the hidden states need a gradient. Every token of the sweep
    ``SAMPLING_MASK`` has a set; its layouts are those of ``sets``.

    In the sweep ``DISTILLATION`` the labels are the ``K`` most probable ids of a teacher. ``vjp``
    is log-probs and the gradient of their sum with given weights, ``forward_kl_topk`` the loss of
    ``distillation.forward_kl``, which ``loss + forward_kl_topk`` adds to BAPO's, and ``forward_kl``
    that of the whole vocabulary, with a K of 0.
    """

    level: Literal["logits", "hidden", "tokens"]
    task: (
        Literal["loss", "clip", "cispo", "sapo", "gspo", "log_probs", "search", "vjp"] | Divergence
    )
    model: str
    N: int
    V: int
    H: int
    dtype: str = "bfloat16"
    layout: str = "dense"  # or zero advantage, mixed, or a layout of sets
    data: str = "stale"
    sweep: str | None = None
    frozen: bool = False
    K: int = 0
    profile: str = GAUSSIAN

    @classmethod
    def of(cls, level: Any, task: Any, model: str, N: int, **options: Any) -> Case:
        """A case with the sizes of a model."""
        return cls(level, task, model, N, *MODELS[model], **options)

    @property
    def config(self) -> BAPOConfig:
        """The paper's preset, or fixed bounds as in GRPO."""
        if self.task in POLICIES:
            return BAPOConfig.fixed(0.8, 1.2, **POLICIES[self.task])
        return BAPOConfig.paper(target=SEARCHES.get(self.model, 0.4))

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the inputs."""
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def title(self) -> str:
        """One line, the group of its benchmarks."""
        sizes = f"N = {self.N:,}, V = {self.V:,}, {self.dtype}"
        head, form = f", {'frozen' if self.frozen else 'trained'} head", ""
        if self.sweep == HEAD:
            form = head
        elif self.sweep in (SAMPLING_MASK, WHOLE_VOCABULARY):
            form = f", {self.sweep}{', frozen' if self.frozen else ''}"
        elif self.sweep == SAMPLES:
            form = f", {self.sweep}{head}"
        elif self.sweep in (TARGETS, "many tokens", *STEPS):
            form = f", {self.sweep}"
        elif self.sweep == DISTILLATION:
            form = f", {self.sweep}{head if self.level == 'hidden' else ''}"
            form += f", K = {self.K}" if self.K else ", whole vocabulary"
        form += f", {REAL}" if self.profile == REAL else ""
        source = f"{self.task} from {self.level}{form}"
        return f"{source}, {self.model}, {sizes}, {self.layout}, {self.data}"

    @property
    def short_title(self) -> str:
        """For ``-k``, without what most cases have in common."""
        return re.sub(" = |,(?=[0-9])|, dense|, stale", "", self.title)

    def resized(self, **sizes: Any) -> Case:
        """With sizes of one's own, which are those of no model."""
        given = {name: size for name, size in sizes.items() if size is not None}
        if self.level == "tokens":
            given = {name: size for name, size in given.items() if name == "N"}
        own = self.model if self.level == "tokens" or not {"V", "H"} & given.keys() else "any"
        sweep = None if self.sweep in ("N", "V", "many tokens") and given else self.sweep
        return replace(self, **given, model=own, sweep=sweep)

    def shrunk(self) -> Case:
        """The same case with few rows, and as narrow a head as the reference in float64 takes."""
        return replace(self, N=FEW, H=min(self.H, 128))


class Batch:
    """Inputs of a case, the same for every method.

    ``inputs`` are ``(logits,)`` or ``(hidden_states, lm_head_weight)``, leaves that require a
    gradient, except for a frozen weight. ``labels``, ``old``, ``A`` and ``mask`` are ``[B, S]``.
    ``unmasked`` and ``active`` are numbers of rows. ``sampling_mask`` is None except in the sweep
    over these; its sets have the labels, and ``old`` is of its distribution.
    ``columns`` are the labels whose log-probs the task needs, ``[..., K]`` if it has several, after
    the sampled one if its loss is needed too; ``teacher`` is None except in a distillation.
    """

    def __init__(self, case: Case, device: str) -> None:
        g = torch.Generator(device).manual_seed(0)
        self.case, self.device = case, torch.device(device)
        dtype = case.torch_dtype
        shape = B, S = SEQUENCES, case.N // SEQUENCES

        def normal(*sizes: int, scale: float) -> Tensor:
            values = torch.empty(sizes, dtype=dtype, device=device)
            for rows in values.flatten(0, -2).split(1024):  # no float32 copy of the tensor
                rows.copy_(torch.randn(rows.shape, generator=g, device=device).mul_(scale))
            return values

        self.inputs: tuple[Tensor, ...] = ()
        if case.profile == REAL:
            self.inputs, self.labels = _real(case, shape, device)
        elif case.level == "logits":
            self.inputs = (normal(*shape, case.V, scale=3.0),)
        elif case.level == "hidden":
            weight = normal(case.V, case.H, scale=3.0 * case.H**-0.5)
            self.inputs = (normal(*shape, case.H, scale=1.0), weight)
        self.sampling_mask: SamplingMask | None = None
        if case.sweep == SAMPLING_MASK:
            self.sampling_mask = sampling_mask(case.N, case.V, g, case.layout)
            self.labels = labels_in(self.sampling_mask, g).view(shape)
        elif case.profile == GAUSSIAN:
            self.labels = torch.randint(0, case.V, shape, generator=g, device=device)
        self.columns, self.teacher = self.labels, None
        if case.sweep == DISTILLATION:
            rows, *head = self.inputs
            self.teacher = Teacher.of(rows.flatten(0, -2), head, max(case.K, 1), g)
            self.columns = self.teacher.ids.view(*shape, -1)
            if case.task.startswith("loss"):
                self.columns = torch.cat([self.labels[..., None], self.columns], dim=-1)
        noise = torch.randn(shape, generator=g, device=device)
        if case.level == "tokens":
            self.logp = -3 * torch.rand(shape, generator=g, device=device)
        else:
            self.logp = self.log_probs()
        self.old = self.logp + NOISE[case.data] * noise
        self.sequence_A = torch.randn(B, generator=g, device=device)
        if case.layout == "zero advantage":
            self.sequence_A[: round(IDLE_SHARE * B)] = 0.0
        elif case.layout == "mixed":
            self.sequence_A[MIXED_IDLE] = 0.0
        self.mask: Tensor | None = None
        self.A = self.sequence_A[:, None].expand(B, S).contiguous()
        if case.layout in ("zero advantage", "mixed"):
            # Lengths from S/2 to S: a quarter of the batch is padding.
            lengths = torch.linspace(S / 2, S, B, device=device).round()
            self.mask = torch.arange(S, device=device) < lengths[:, None]
        if case.layout == "mixed":
            self._leave_undecided(round(MIXED_UNDECIDED * case.N))
        unmasked = torch.ones_like(self.A, dtype=torch.bool) if self.mask is None else self.mask
        self.unmasked, self.active = int(unmasked.sum()), int((unmasked & (self.A != 0)).sum())
        for leaf in self.inputs[:1] if case.frozen else self.inputs:
            leaf.requires_grad_()

    def log_probs(self) -> Tensor:
        """Of the labels, by the reference: the data must not depend on the kernels under test."""
        logp = torch.empty(self.labels.shape, device=self.device)
        flat, *weight = (leaf.detach().flatten(0, -2) for leaf in self.inputs)
        for part in map(slice, range(0, self.case.N, 256), range(256, self.case.N + 256, 256)):
            logits = F.linear(flat[part], *weight) if weight else flat[part]
            mask = None if self.sampling_mask is None else self.sampling_mask[part]
            labels = self.labels.flatten()[part]
            logp.view(-1)[part] = reference.log_probs(logits, labels, sampling_mask=mask)[0]
        return logp

    def _leave_undecided(self, count: int) -> None:
        """Makes ``count`` active rows, evenly spread, undecided by moving their ratio."""
        assert self.mask is not None
        active = (self.mask & (self.A != 0)).flatten().nonzero().squeeze(1)
        rows = active[torch.linspace(0, active.numel() - 1, count, device=self.device).long()]
        config, A = BAPOConfig.paper(), self.A.flatten()[rows]
        above = (config.ratio_upper_start + config.ratio_upper_max) / 2
        below = (config.ratio_lower_start + config.ratio_lower_max) / 2
        ratio = torch.where(A > 0, above, below)
        self.old.view(-1)[rows] = self.logp.flatten()[rows] - ratio.log()

    @property
    def ignored_labels(self) -> Tensor:
        """``labels`` with -100 at masked tokens, for methods that skip these."""
        return self.labels if self.mask is None else self.labels.masked_fill(~self.mask, -100)

    @property
    def rest(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """``labels, old_log_probs, advantages, response_mask``."""
        return self.labels, self.old, self.A, self.mask

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """``log_probs, old_log_probs, advantages, response_mask``."""
        return self.logp, self.old, self.A, self.mask

    @cached_property
    def overwritable(self) -> Batch:
        """The same batch with a copy of the logits, for methods that overwrite them."""
        own = copy.copy(self)
        own.inputs = tuple(
            leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in self.inputs
        )
        return own

    def restore(self, source: Batch) -> None:
        """Copies the logits of another batch."""
        for leaf, values in zip(self.inputs, source.inputs, strict=True):
            leaf.detach().copy_(values.detach())

    def release(self) -> None:
        """Frees the gradients of the last method."""
        for leaf in self.inputs:
            leaf.grad = None
        vars(self).pop("padded_logits", None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @cached_property
    def padded_logits(self) -> Tensor:
        """Logits with one more position, as a leaf."""
        return F.pad(self.inputs[0].detach(), (0, 0, 0, 1)).requires_grad_()

    @cached_property
    def places(self) -> Places:
        """Of the ids of the sampling mask."""
        assert self.sampling_mask is not None
        return Places.of(self.sampling_mask, self.labels.flatten())

    def shares(self) -> dict[str, float]:
        """Shares of the rows, the search done: unmasked, active, undecided, with a gradient.

        With a sampling mask also ``allowed``, the share of the logits that is in a set.
        """
        config = self.case.config
        if self.case.sweep == DISTILLATION:
            return dict(unmasked=1.0, active=1.0, undecided=1.0, gradient=1.0)
        shares = {"unmasked": self.unmasked / self.case.N, "active": self.active / self.case.N}
        if self.case.task in POLICIES and self.case.task != "clip":
            # Of every active row. A ratio of a sequence is known when all its rows have been read.
            again = shares["active"] if config.ratio_level == "sequence" else 0.0
            return shares | dict(undecided=again, gradient=shares["active"])
        bounds = reference.find_clip_bounds(*self.tokens, config=config)
        tokens = reference.Contributions(config, *self.tokens)
        ends = config.options.start(), config.options.maximum(), bounds
        first, last, found = (clipped(tokens.r, tokens.A, *end) for end in ends)
        rows = {"undecided": first != last, "gradient": (tokens.A != 0) & ~found}
        shares |= {name: mask.double().mean().item() for name, mask in rows.items()}
        if self.sampling_mask is not None:
            shares["allowed"] = len(self.sampling_mask.token_ids) / (self.case.N * self.case.V)
        return shares


def half(level: str, device: str) -> str:
    """bfloat16; float32 where a large product in bfloat16 takes a minute, without AVX-512."""
    slow = device == "cpu" and "AVX512" not in torch.backends.cpu.get_cpu_capability()
    return "float32" if slow and level == "hidden" else "bfloat16"


def _real(case: Case, shape: tuple[int, ...], device: str) -> tuple[tuple[Tensor, ...], Tensor]:
    """Inputs and labels; after 128 rows (of ``SAMPLES`` 512), or H, they are repeated."""
    hidden, most = case.level == "hidden", 512 if case.sweep == SAMPLES else 128
    made = partial(real_head, H=case.H) if hidden else real_rows
    *inputs, labels = made((N := min(case.N, most, case.H if hidden else most),), case.V)
    rows, *head = (x.to(device, case.torch_dtype) for x in inputs)
    again = torch.arange(case.N, device=device).view(shape) % N
    return (rows[again], *head), labels.to(device)[again]
