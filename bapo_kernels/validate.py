"""The kernels that run on this machine against the reference in float64.

The budget of an error is computed, never tuned: twice the error of the reference in the kernel's
dtype, plus one rounding. ``python -m bapo_kernels validate`` prints what :func:`run` finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import reference
from .backends import NAMES, choose, triton, why_not
from .bounds import find_clip_bounds
from .config import IGNORE_INDEX, BAPOConfig
from .functional import bapo_linear_loss, bapo_loss, bapo_loss_from_log_probs, log_probs
from .output import BAPOOutput, ClipBounds

CANDIDATES = tuple(name for name in NAMES if name != "reference")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VOCABULARY = 151_936  # Qwen3
EPS = {
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-9,
    torch.float16: 2.0**-12,
    torch.float64: 0.0,
}
# Below this a result of the dtype is subnormal: one rounding is absolute there.
TINY = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}

Measured = tuple[str, float, float]  # quantity, error, budget
Loss = Callable[..., BAPOOutput]


@dataclass(frozen=True)
class Check:
    """One quantity of a case; of a call that raised, error and budget are NaN."""

    backend: str
    case: str
    dtype: str
    quantity: str
    error: float
    budget: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is within the budget; NaN never is."""
        return self.error <= self.budget


class Task(NamedTuple):
    """A case of a backend, not run yet."""

    backend: str
    case: str
    dtype: torch.dtype
    measure: Callable[[], Iterable[Measured]]


def run(
    device: str,
    backends: Sequence[str] | None = None,
    track: Callable[[Sequence[Task]], Iterable[Task]] = iter,
) -> list[Check]:
    """Every check of every backend; a case that raises is a failed one.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        backends: default: all with kernels of their own that can run on the device.
        track: goes through the tasks, to show progress.

    Raises:
        ValueError: a named backend cannot run on the device, or none can.
    """
    of_all = [task for name in runnable(device, backends) for task in tasks(name, device)]
    checks: list[Check] = []
    for backend, case, dtype, measure in track(of_all):
        check = partial(Check, backend, case, str(dtype).removeprefix("torch."))
        try:
            for measured in measure():
                checks.append(check(*measured))
        except Exception as error:
            note = f"{type(error).__name__}: {error}"
            checks.append(check("call", math.nan, math.nan, note))
    return checks


def runnable(device: str, names: Sequence[str] | None) -> list[str]:
    """The named backends, or all with kernels of their own that can run on the device."""
    tensor = torch.empty(0, device=device)
    reasons = {name: why_not(name, tensor, "tensors") for name in CANDIDATES}
    for name in names or ():
        if name not in reasons:
            raise ValueError(f"backend must be one of {list(CANDIDATES)}, got {name!r}")
        if reasons[name] is not None:
            raise ValueError(f"backend {name!r} cannot run: {reasons[name]}")
    found = list(names or [name for name, reason in reasons.items() if reason is None])
    if not found:
        told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise ValueError(f"no backend can run on {device}: {told}")
    return found


def tasks(backend: str, device: str) -> Iterator[Task]:
    """All cases; in Triton's interpreter, where a row takes milliseconds, on short rows."""
    interpreted = backend == "triton" and triton.INTERPRETED
    on_gpu = device.startswith("cuda")
    V = 2_503 if interpreted else VOCABULARY
    shape = (4, 64) if on_gpu else (2, 4)  # on a GPU more rows than it has on chip at a time
    losses: dict[str, tuple[Loss, dict[str, Any]]] = {
        f"V = {V:,}": (bapo_loss, dict(shape=shape, V=V)),
        "V = 257": (bapo_loss, {}),
        "logits[:, :-1]": (_of_slice, {}),
        "all options": (bapo_loss, _all_options()),
        "statistics=live": (bapo_loss, dict(statistics="live")),
        "inplace": (_inplace, {}),
        "packed": (bapo_loss, _packed()),
    }
    for dtype in DTYPES:
        for case, (loss, options) in losses.items():
            call = partial(loss, backend=backend)
            yield Task(backend, case, dtype, partial(_loss, call, dtype, device, options))
        yield Task(backend, "log_probs", dtype, partial(_log_probs, backend, dtype, device, V))
        yield Task(backend, "bapo_linear_loss", dtype, partial(_linear, backend, dtype, device))
    batches = 10 if interpreted else 200
    for preset in ("paper", "recipe"):
        config = getattr(BAPOConfig, preset)()
        measure = partial(_search, backend, device, config, batches)
        yield Task(backend, f"search, {preset}", torch.float32, measure)
    if on_gpu and torch.cuda.mem_get_info(device)[0] > 2 * 2**32:
        measure = partial(_beyond_32_bits, backend, device)
        yield Task(backend, "2^31 logits", torch.bfloat16, measure)


def error_and_budget(
    got: Tensor, same_dtype: Tensor, truth: Tensor, *, operand: float = 0.0, inherited: float = 0.0
) -> tuple[float, float]:
    """``|got - truth|``, and ``2*|same_dtype - truth| + one rounding``, in the maximum norm.

    The rounding is one of the largest value, or of the largest operand of a difference;
    ``inherited`` comes on top. The error is NaN, above every budget, where shapes differ or NaN or
    an infinity stands in another place than in the truth.
    """
    got64, same64, truth = got.double().cpu(), same_dtype.double().cpu(), truth.double().cpu()
    finite = truth.isfinite()
    rounding = EPS[got.dtype] * max(_largest(truth[finite]), operand) + TINY[got.dtype]
    budget = 2 * _largest((same64 - truth)[finite]) + rounding + inherited
    alike = got64.shape == truth.shape and torch.allclose(
        got64[~finite], truth[~finite], rtol=0, atol=0, equal_nan=True
    )
    return _largest((got64 - truth)[finite]) if alike else math.nan, budget


def _largest(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0


def _difference(bounds: ClipBounds, expected: ClipBounds) -> float:
    return _largest(torch.stack(bounds) - torch.stack(expected).float())


@dataclass
class Case:
    """Arguments of ``bapo_loss``."""

    logits: Tensor
    labels: Tensor
    old_log_probs: Tensor | None
    advantages: Tensor
    response_mask: Tensor | None
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> tuple[Any, ...]:
        """Those between the logits and the options."""
        return self.labels, self.old_log_probs, self.advantages, self.response_mask

    def with_options(self, **options: Any) -> Case:
        """The same case, with more options."""
        return replace(self, options=self.options | options)


def make_case(
    shape: tuple[int, ...] = (3, 7),
    V: int = 257,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    logits: Tensor | None = None,
    staleness: float = 0.3,
    spread: float = 3.0,
    masked: float = 0.25,
    idle: float = 0.2,
    config: BAPOConfig | None = None,
    seed: int = 0,
    poison: bool = True,
    **options: Any,
) -> Case:
    """A stale batch with masked, ignored and zero-advantage tokens; NaN wherever it is masked."""
    g = torch.Generator().manual_seed(seed)
    config = config or BAPOConfig()
    if logits is None:
        logits = (spread * torch.randn(*shape, V, generator=g)).to(dtype)
    labels = torch.randint(0, V, shape, generator=g)
    transform = {
        name: getattr(config, name)
        for name in ("temperature", "logit_scale", "final_logit_softcapping")
    }
    logp = reference.log_probs(logits.double(), labels, **transform)[0]
    old = (logp + staleness * torch.randn(shape, generator=g)).float()
    advantages = torch.randn(shape, generator=g)
    advantages[torch.rand(shape, generator=g) < idle] = 0.0
    mask = torch.rand(shape, generator=g) >= masked
    labels[torch.rand(shape, generator=g) < 0.05] = IGNORE_INDEX
    live = mask & (labels != IGNORE_INDEX)
    if poison:
        logits[~live] = torch.nan
        old[~live] = torch.nan
        advantages[~live] = torch.nan
    for name, value in options.items():
        if isinstance(value, Tensor) and value.shape == tuple(shape) and poison:
            options[name] = value.clone().masked_fill(~live, torch.nan)
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    return Case(
        logits.to(device),
        labels.to(device),
        old.to(device),
        advantages.to(device),
        mask.to(device),
        {"config": config, **moved},
    )


def per_token(
    shape: tuple[int, ...] = (3, 7), seed: int = 1, low: float = -6.0, high: float = 0.0
) -> Tensor:
    """Uniform values of an optional argument."""
    g = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=g) * (high - low) + low


@dataclass
class Result:
    """Output of a loss, and its gradients of logits, or of hidden states and weight."""

    output: BAPOOutput
    gradients: tuple[Tensor, ...]

    @property
    def gradient(self) -> Tensor:
        """The first gradient."""
        return self.gradients[0]


def evaluate(
    loss: Loss, case: Case, parameters: tuple[Tensor, ...], dtype: torch.dtype | None = None
) -> Result:
    """``loss(*parameters, ...)`` of a case, the parameters in another dtype if one is given."""
    leaves = [p.detach().to(dtype or p.dtype, copy=True).requires_grad_() for p in parameters]
    output = loss(*leaves, *case.arguments(), **case.options)
    return Result(output, torch.autograd.grad(output.loss, leaves))


def loss_sensitivity(case: Case, truth: Result) -> float:
    """Sum of |d loss / d log_prob|."""
    live = case.labels != IGNORE_INDEX
    if case.response_mask is not None:
        live = live & (case.response_mask != 0)
    logp = truth.output.log_probs.double().nan_to_num(0.0).requires_grad_()
    options = case.options | {"bounds": truth.output.bounds}
    loss = reference.bapo_loss_from_log_probs(
        logp, case.old_log_probs, case.advantages, live, **options
    ).loss
    (gradient,) = torch.autograd.grad(loss, logp)
    return gradient.abs().sum().item()


def quantities(
    case: Case, got: Result, same: Result, truth: Result, few_tokens: bool
) -> Iterator[Measured]:
    """Bounds, gradients, log-probs, entropy, loss, and the metric that is nearest to its budget.

    The gradient inherits the rounding of the log-prob in r; of ``few_tokens`` the reference may
    have got all right by luck. What is summed from log-probs inherits their rounding.
    """
    results = got, same, truth
    yield "bounds", _difference(got.output.bounds, truth.output.bounds), 0.0
    log_probs = truth.output.log_probs
    operand = _largest(log_probs[log_probs.isfinite()])
    for name, *gradients in zip(
        ("gradient", "weight gradient"), *(r.gradients for r in results), strict=False
    ):
        of_ratio = EPS[torch.float32] * operand * _largest(gradients[2].nan_to_num())
        yield name, *error_and_budget(*gradients, inherited=few_tokens * of_ratio)
    operands = {"entropy": operand, "loss": operand * loss_sensitivity(case, truth)}
    for name in ("log_probs", "entropy", "loss"):
        parts = (getattr(r.output, name) for r in results)
        yield name, *error_and_budget(*parts, operand=operands.get(name, 0.0))
    metrics = []
    for name, value in truth.output.metrics.items():
        size = max(1.0, value.abs().nan_to_num(posinf=0.0).item())  # of a ratio of sums
        parts = (r.output.metrics[name] for r in results)
        metrics.append((f"metric {name}", *error_and_budget(*parts, operand=operand * size)))
    yield max(metrics, key=lambda m: (not m[1] <= m[2], m[1] / m[2]))


def _loss(
    loss: Loss, dtype: torch.dtype, device: str, options: dict[str, Any]
) -> Iterator[Measured]:
    case = make_case(dtype=dtype, device=device, **options)
    yield from _compare(loss, reference.bapo_loss, case, (case.logits,), few_tokens=False)


def _compare(
    loss: Loss, expected: Loss, case: Case, parameters: tuple[Tensor, ...], few_tokens: bool
) -> Iterator[Measured]:
    got, again = (evaluate(loss, case, parameters) for _ in range(2))
    same, truth = (evaluate(expected, case, parameters, d) for d in (None, torch.float64))
    yield from quantities(case, got, same, truth, few_tokens)
    pairs = zip(_tensors(got), _tensors(again), strict=True)
    yield "second run", float(sum(not torch.equal(a, b) for a, b in pairs)), 0.0


def _tensors(result: Result) -> list[Tensor]:
    """All that a loss returned, NaN made comparable."""
    loss, log_probs, entropy, bounds, metrics = result.output
    tensors = (loss, log_probs, entropy, *bounds, *metrics.values(), *result.gradients)
    return [t.detach().nan_to_num(nan=1e30) for t in tensors if t is not None]


def _of_slice(logits: Tensor, *arguments: Any, **options: Any) -> BAPOOutput:
    longer = torch.cat([logits, logits[:, :1]], 1)
    return bapo_loss(longer[:, :-1], *arguments, **options)


def _inplace(logits: Tensor, *arguments: Any, **options: Any) -> BAPOOutput:
    return bapo_loss(logits.clone(), *arguments, inplace=True, **options)


def _all_options() -> dict[str, Any]:
    config = BAPOConfig.recipe(
        temperature=0.9,
        final_logit_softcapping=20.0,
        kl_loss_coef=0.05,
        kl_loss_type="low_var_kl",
        entropy_coef=0.01,
        loss_agg_mode="seq-mean-token-mean",
    )
    return dict(
        config=config,
        ref_log_probs=per_token(),
        rollout_is_weights=per_token(low=0.2, high=2.0),
        rollout_log_probs=per_token(seed=2),
    )


def _packed() -> dict[str, Any]:
    config = BAPOConfig(loss_agg_mode="seq-mean-token-mean")
    return dict(shape=(20,), config=config, cu_seqlens=torch.tensor([0, 5, 5, 12, 20]))


def _log_probs(backend: str, dtype: torch.dtype, device: str, V: int) -> Iterator[Measured]:
    case = make_case((2, 4), V, dtype, device, poison=False)
    weights = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(0)).to(device)

    def of(function: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        x = case.logits.to(dtype, copy=True).requires_grad_()
        outputs = function(x, case.labels)
        incoming = [w.to(outputs[0].dtype) for w in weights]
        return *outputs, *torch.autograd.grad(outputs, x, incoming)

    got = of(partial(log_probs, backend=backend), dtype)
    same, truth = of(reference.log_probs, dtype), of(reference.log_probs, torch.float64)
    operands = (0.0, _largest(truth[0]), 0.0)
    names = ("log_probs", "entropy", "gradient")
    for name, operand, *parts in zip(names, operands, got, same, truth, strict=True):
        yield name, *error_and_budget(*parts, operand=operand)


def _linear(backend: str, dtype: torch.dtype, device: str) -> Iterator[Measured]:
    """Chunks and a replay. The logits are multiples of 1/2, exact in every dtype, and so is r."""
    g, shape, V, H = torch.Generator().manual_seed(0), (3, 12), 193, 16
    hidden = torch.randint(-1, 2, (*shape, H), generator=g).to(device, dtype)
    weight = (torch.randint(-2, 3, (V, H), generator=g) / 2).to(device, dtype)
    logits = (hidden @ weight.T).cpu()
    case = make_case(shape, V, device=device, logits=logits, staleness=0.5)
    loss = partial(bapo_linear_loss, backend=backend, chunk_tokens=8)
    parameters = hidden, weight
    yield from _compare(loss, reference.bapo_linear_loss, case, parameters, few_tokens=True)


def _search(backend: str, device: str, config: BAPOConfig, batches: int) -> Iterator[Measured]:
    """Every second batch has a target at which its search stops between the ends."""
    g = torch.Generator().manual_seed(0)
    errors = []
    for i in range(batches):
        old = -5 * torch.rand(20 + i, generator=g)
        staleness = (0.0, 1.0, 0.1, 0.5)[i % 4]
        logp = old + staleness * torch.randn(old.shape, generator=g)
        A, share = torch.randn(old.shape, generator=g), torch.rand((), generator=g).item()
        target = config.target
        if i % 2:
            probe = reference.Contributions(config, logp, old, A, None)
            start = probe.quantity(config.ratio_lower_start, config.ratio_upper_start)
            end = probe.quantity(config.ratio_lower_max, config.ratio_upper_max)
            target = start + share * (end - start)
        tokens = [t.to(device) for t in (logp, old, A)]
        found, expected = (
            search(*tokens, config=replace(config, target=target))
            for search in (partial(_bounds, backend), reference.find_clip_bounds)
        )
        errors.append(_difference(found, expected))
    yield "bounds", _largest(torch.tensor(errors)), 0.0


def _bounds(backend: str, *tokens: Tensor, config: BAPOConfig) -> ClipBounds:
    """Of ``find_clip_bounds`` where it takes this backend; it cannot be told to."""
    if choose(None, tokens[0], "log_probs") == backend:
        return find_clip_bounds(*tokens, config=config)
    return bapo_loss_from_log_probs(*tokens, config=config, backend=backend).bounds


def _beyond_32_bits(backend: str, device: str) -> Iterator[Measured]:
    """Rows whose offsets overflow 32 bits."""
    N, V, g = 2**31 // VOCABULARY + 64, VOCABULARY, torch.Generator(device).manual_seed(0)
    logits = torch.empty(N, V, dtype=torch.bfloat16, device=device)
    for rows in logits.split(1024):
        rows.normal_(0, 3, generator=g)
    labels = torch.randint(V, (N,), device=device, generator=g)
    noise, A = torch.randn(2, N, device=device, generator=g)
    old = log_probs(logits, labels, backend=backend)[0] + 0.3 * noise
    last = slice(-32, None)
    case = Case(logits[last].clone(), labels[last], old[last], A[last], None)
    options: dict[str, Any] = dict(batch_num_tokens=1.0)
    out = bapo_loss(logits, labels, old, A, inplace=True, backend=backend, **options)
    case = case.with_options(bounds=out.bounds, **options)
    same, truth = (
        evaluate(reference.bapo_loss, case, (case.logits,), d) for d in (None, torch.float64)
    )
    log_probs_of = (r.output.log_probs for r in (same, truth))
    yield "log_probs", *error_and_budget(out.log_probs[last], *log_probs_of)
    yield "gradient", *error_and_budget(logits[last], same.gradient, truth.gradient)
