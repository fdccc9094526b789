"""Errors of all methods against float64, on logits of many kinds and on hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from rich.progress import track
from torch import Tensor

from bapo_kernels import (
    BAPOConfig,
    available_backends,
    bapo_linear_loss,
    bapo_loss,
    reference,
)
from bapo_kernels.tools.budget import Case, Loss, Result, evaluate, in_some_orders, quantities

from ..methods import Method, methods
from ..records import Record

N = 16
N_HIDDEN, V_HIDDEN, H = 32, 151_936, 256
VOCABULARIES = (1_000, 32_000, 151_936, 262_208)
DTYPES = ("float32", "float16", "bfloat16")
ROWS: dict[str, Callable[[Tensor], Tensor]] = {  # of standard normal [N, V]
    "std 1": lambda z: z,
    "std 3": lambda z: 3 * z,
    "std 10": lambda z: 10 * z,
    "std 30": lambda z: 30 * z,
    "-80 to 80": lambda z: 160 * torch.special.ndtr(z) - 80,
    "flat": lambda z: torch.full_like(z, 7.3),
    "one far above": lambda z: z.index_fill(-1, torch.tensor(z.shape[-1] // 3), 40.0),
    "last far above": lambda z: z.index_fill(-1, torch.tensor(z.shape[-1] - 1), 60.0),
    "half -inf": lambda z: (3 * z.abs()).masked_fill(z < 0, -torch.inf),
}
# Log-ratios far from all admissible bounds, so that a small error of a log-prob changes a gradient
# by as much and does not clip it. The masses still depend on the bounds.
LOG_RATIOS = (-1.0, 0.04, 1.4)
BASELINES = {
    "logits": ("PyTorch cross_entropy", "TRL selective_log_softmax", "verl logprobs_from_logits"),
    "hidden": (
        "PyTorch cross_entropy",
        "TRL chunked head",
        "verl chunked head",
        "Liger scaled cross entropy",
    ),
}
ENTROPIES = {  # the modules of entropy_from_logits
    "TRL selective_log_softmax": "trl.trainer.utils",
    "verl logprobs_from_logits": "verl.utils.torch_functional",
}


class Rows(NamedTuple):
    """The part of a batch that the adapters of log-probs read."""

    inputs: tuple[Tensor, ...]
    labels: Tensor
    mask: None = None

    @property
    def ignored_labels(self) -> Tensor:
        """No label is masked."""
        return self.labels


def log_softmax(batch: Rows) -> Tensor:
    """In the dtype of the logits."""
    logp = torch.log_softmax(batch.inputs[0], -1)
    return logp.gather(-1, batch.labels[:, None]).squeeze(-1)


def entropy_of(logits: Tensor) -> Tensor:
    """In the dtype of the logits."""
    logp = torch.log_softmax(logits, -1)
    return -(logp.exp() * logp).sum(-1)


def entropy_of_method(method: str) -> Callable[[Tensor], Tensor] | None:
    """The method's entropy of logits, if it has one."""
    if method in ENTROPIES:
        return import_module(ENTROPIES[method]).entropy_from_logits  # type: ignore[no-any-return]
    if method == "PyTorch cross_entropy":
        return lambda logits: entropy_of(logits.float())
    return entropy_of if method == "PyTorch log_softmax" else None


def known(level: str) -> list[Method]:
    """The baselines that are installed."""
    names = BASELINES[level]
    mine = [method for method in methods() if method.level == level and method.name in names]
    if level == "logits":
        mine.insert(0, Method("PyTorch log_softmax", level, log_probs=log_softmax))
    return [method for method in mine if method.package is None or method.version]


def losses(level: str) -> dict[str, Loss]:
    """Each method as a function with the arguments of ``bapo_loss`` or ``bapo_linear_loss``."""
    function = bapo_loss if level == "logits" else bapo_linear_loss
    backends = [name for name in ("cpu", "triton") if available_backends()[name] is None]
    ours = {f"bapo_kernels {name}": partial(function, backend=name) for name in backends}
    return ours | {method.name: partial(loss_of, method) for method in known(level)}


def loss_of(method: Method, *arguments: Any, **options: Any) -> Any:
    """The token loss in float32, from the method's log-probs."""
    *inputs, labels, old, A, mask = arguments
    assert method.log_probs is not None
    logp = method.log_probs(Rows(tuple(inputs), labels)).view(labels.shape)  # type: ignore[arg-type]
    entropy_of = entropy_of_method(method.name) if len(inputs) == 1 else None
    entropy = None if entropy_of is None else entropy_of(inputs[0].detach())
    return reference.bapo_loss_from_log_probs(logp, old, A, mask, entropy=entropy, **options)


def labels_of(logits: Tensor, g: torch.Generator) -> Tensor:
    """Every second label is drawn from the policy, the others from all allowed tokens."""
    drawn = torch.softmax(logits.float(), -1).multinomial(1, generator=g)
    allowed = (logits > -torch.inf).float().multinomial(1, generator=g)
    return torch.where(torch.arange(len(logits))[:, None] % 2 == 0, drawn, allowed).squeeze(-1)


def case_of(logits: Tensor, g: torch.Generator) -> Case:
    """A case with labels, log-ratios and advantages for ``logits [N, V]``."""
    labels = labels_of(logits, g)
    logp = reference.log_probs(logits.double(), labels, return_entropy=False)[0]
    near = torch.tensor(LOG_RATIOS)[torch.randint(len(LOG_RATIOS), labels.shape, generator=g)]
    log_ratio = near + 0.02 * (2 * torch.rand(labels.shape, generator=g) - 1)
    A = torch.randn(labels.shape, generator=g)
    return Case(logits, labels, (logp - log_ratio).float(), A, None, {"config": BAPOConfig.paper()})


def cases() -> Iterator[tuple[Record, Case, tuple[Tensor, ...]]]:
    """Fields of a record, the case, and its parameters: logits, or hidden states and weight."""
    for V in VOCABULARIES:
        for rows, make in ROWS.items():
            z = torch.randn(N, V, generator=torch.Generator().manual_seed(V))
            for dtype in DTYPES:
                logits = make(z).to(getattr(torch, dtype))
                case = case_of(logits, torch.Generator().manual_seed(1))
                fields = {"part": "logits", "dtype": dtype, "V": V, "N": N, "rows": rows}
                yield fields, case, (logits,)
    g = torch.Generator().manual_seed(V_HIDDEN)
    factors = torch.randn(N_HIDDEN, H, generator=g), torch.randn(V_HIDDEN, H, generator=g)
    factors = factors[0], 3 * H**-0.5 * factors[1]
    for dtype in DTYPES:
        hidden, weight = (f.to(getattr(torch, dtype)) for f in factors)
        case = case_of(hidden.double() @ weight.double().T, torch.Generator().manual_seed(1))
        fields = {"part": "hidden", "dtype": dtype, "V": V_HIDDEN, "N": N_HIDDEN, "H": H}
        yield fields, case, (hidden, weight)


def measure_errors() -> Iterator[Record]:
    """One record per case: errors of all methods, and the error budget of ours."""
    functions = {level: losses(level) for level in BASELINES}
    total = len(VOCABULARIES) * len(ROWS) * len(DTYPES) + len(DTYPES)
    for fields, case, inputs in track(cases(), "errors", total):
        at_logits = fields["part"] == "logits"
        specification = reference.bapo_loss if at_logits else reference.bapo_linear_loss
        truth = evaluate(specification, case, inputs, torch.float64)
        same = in_some_orders(partial(evaluate, specification, case, inputs))
        errors, budget = {}, {}
        for method, function in functions[fields["part"]].items():
            if method.endswith("triton") and (not at_logits or fields["V"] > 1_000):
                continue  # the interpreter takes milliseconds per row
            got = evaluate(function, case, inputs)
            errors[method] = errors_of(got, truth)
            if method == "bapo_kernels cpu":
                held = quantities(case, got, same, truth)
                budget = {name: value for name, _, value in held if not name.startswith("metric")}
        yield {**fields, "errors": errors, "budget": budget}


def errors_of(got: Result, truth: Result) -> dict[str, list[float] | None]:
    """By quantity, the largest absolute error and the relative error; None if one is not finite.

    Errors are relative to the largest value; those of a gradient are relative to its norm.
    """
    gradients = zip(("gradient", "weight gradient"), got.gradients, truth.gradients, strict=False)
    pairs = {name: (a, b) for name, a, b in gradients}
    for name in ("log_probs", "entropy", "loss"):
        pairs[name] = getattr(got.output, name), getattr(truth.output, name)
    pairs["bounds"] = torch.stack(got.output.bounds), torch.stack(truth.output.bounds)
    return {
        name: error_of(a, b, torch.inf if "gradient" not in name else 2)
        for name, (a, b) in pairs.items()
        if a is not None
    }


def error_of(got: Tensor, truth: Tensor, norm: float = torch.inf) -> list[float] | None:
    """Absolute error in the maximum norm, relative error in the given norm."""
    error, truth = (got.double() - truth.double()).flatten(), truth.double().flatten()
    if not error.isfinite().all():
        return None
    relative = torch.linalg.vector_norm(error, norm) / torch.linalg.vector_norm(truth, norm)
    return [error.abs().max().item(), relative.item()]
