"""Checks the kernels that run on this machine against the reference in float64.

May import public modules, the reference, ``backends``, ``budget`` and ``processes``. A backend or
an option without a case here is one that users cannot check on their machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..backends import NAMES, available_backends, choose, triton, why_not
from ..backends.self_check import late
from ..bounds import find_clip_bounds
from ..config import IGNORE_INDEX, BAPOConfig
from ..debug import environment
from ..functional import bapo_loss, bapo_loss_from_log_probs, log_probs
from ..linear import bapo_linear_loss, linear_log_probs
from ..output import BAPOOutput, ClipBounds
from ..sampling_mask import SamplingMask
from . import budget
from .budget import Case, Loss, Measured, Result
from .processes import CallError, Worker
from .real_rows import real_head, real_rows

CANDIDATES = tuple(name for name in NAMES if name != "reference")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)  # training's usual dtype first
VOCABULARY = 151_936  # Qwen3
NARROWER = (10_000, 30_000, 60_000)  # with Qwen3's, one for every size of a cluster of blocks
SETS = (0, 1, 50, 10_000)  # ids of a row's set; an empty one is the whole vocabulary
VARIABLES = ("BAPO_", "TRITON_", "CUDA_", "PYTORCH_", "TORCH_", "OMP_", "ATEN_CPU_CAPABILITY")
Quantities = Iterator[Measured]


@dataclass(frozen=True)
class Check:
    """One quantity of a case; error and budget are NaN if the call raised."""

    backend: str
    case: str
    dtype: str
    quantity: str
    error: float
    budget: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is within the budget, which NaN never is."""
        return self.error <= self.budget

    @property
    def words(self) -> str:
        """What was found, in a line."""
        numbers = f"{self.quantity} off by {self.error:.1e}, budget {self.budget:.1e}"
        return self.note.partition("\n")[0][:200] or numbers


class Task(NamedTuple):
    """A case of a backend that has not run yet."""

    backend: str
    case: str
    dtype: torch.dtype
    measure: Callable[[], Iterable[Measured]]


def run(
    device: str,
    backends: Sequence[str] | None = None,
    track: Callable[[Sequence[Task]], Iterable[Task]] = iter,
    tell: Callable[[Check], None] = lambda check: None,
    limit: float = 0.0,
) -> list[Check]:
    """Runs every check of every backend; a case that raises, hangs or dies is a failed check.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        backends: defaults to every backend with kernels that can run on the device.
        track: iterates over the tasks, to show progress or to select some of them.
        tell: receives each check as it is made.
        limit: seconds that a case may take in another process; 0 runs all of them in this one.

    Raises:
        ValueError: a named backend cannot run on the device, or no backend can.
        ChildProcessError: no process starts.
    """
    found = [task for name in runnable(device, backends) for task in tasks(name, device)]
    checks: list[Check] = []
    with closing(Worker(limit)) as worker:
        for task in track(found):
            measure = partial(worker.results, task.measure) if limit else task.measure
            for check in checked(task._replace(measure=measure)):
                checks.append(check)
                tell(check)
    return checks


def checked(task: Task) -> Iterator[Check]:
    """Runs a case in this process."""
    for measured in _measured(task.measure):
        yield Check(task.backend, task.case, str(task.dtype).removeprefix("torch."), *measured)


def _measured(measure: Callable[[], Iterable[Measured]]) -> Iterator[tuple[Any, ...]]:
    try:
        yield from measure()
    except ChildProcessError:
        raise
    except CallError as error:
        yield error.args[0], math.nan, math.nan, error.args[1]
    except Exception as error:
        yield "call", math.nan, math.nan, f"{type(error).__name__}: {error}"


def machine(device: str) -> dict[str, Any]:
    """Describes this machine, without a context on a GPU, which may admit only one."""
    variables = {name: os.environ[name] for name in os.environ if name.startswith(VARIABLES)}
    facts = {**environment(), "variables": variables, "cuda of torch": torch.version.cuda}
    with suppress(ImportError):
        facts["triton"] = import_module("triton").__version__
    with suppress(OSError):
        facts["driver"] = Path("/proc/driver/nvidia/version").read_text()
    if device == "cuda":
        facts["gpu"] = str(torch.cuda.get_device_properties(device))
    return facts


def why_not_on(device: str) -> dict[str, str | None]:
    """The reason why each backend with kernels cannot run on a device; ``None`` if it can."""
    tensor = torch.empty(0, device=device)
    here = {} if torch.cuda.is_available() else available_backends()  # as CUDA has not started
    return {name: here.get(name) or why_not(name, tensor, "tensors") for name in CANDIDATES}


def runnable(device: str, names: Sequence[str] | None) -> list[str]:
    """The named backends, or every backend with kernels that can run on the device."""
    reasons = why_not_on(device)
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
    """All cases; their rows are short in Triton's interpreter, which takes milliseconds each."""
    interpreted = backend == "triton" and triton.INTERPRETED
    on_gpu = device.startswith("cuda")
    wide: dict[str, dict[str, Any]] = {  # on a GPU more rows than fit on chip at once
        f"V = {V:,}": dict(shape=(8, 3_000_000 // V) if on_gpu else (2, 4), V=V)
        for V in (*NARROWER * on_gpu, 2_503 if interpreted else VOCABULARY)
    }
    by_sequence = BAPOConfig(loss_agg_mode="seq-mean-token-mean")
    offsets, cispo = torch.tensor([0, 5, 5, 12, 20], device="cpu"), BAPOConfig(surrogate="cispo")
    bounds = budget.per_token(low=0.7, high=1.0), budget.per_token(seed=2, low=1.0, high=1.3)
    cases: dict[str, Callable[..., Quantities]] = {
        **{case: partial(_loss, bapo_loss, **rows) for case, rows in wide.items()},
        "V = 257": partial(_loss, bapo_loss),
        "real rows": partial(_loss, bapo_loss, V=10_007, real=0.3),
        "logits[:, :-1]": partial(_loss, _sliced),
        "all options": partial(_loss, bapo_loss, **_all_options()),
        "statistics=live": partial(_loss, bapo_loss, statistics="live"),
        "inplace": partial(_loss, _inplace),
        "packed": partial(_loss, bapo_loss, shape=(20,), config=by_sequence, cu_seqlens=offsets),
        "cispo, bounds per token": partial(_loss, bapo_loss, config=cispo, bounds=bounds),
        "sapo": partial(_loss, bapo_loss, config=BAPOConfig(surrogate="sapo")),
        "ratio of sequences": partial(_loss, bapo_loss, config=BAPOConfig(ratio_level="sequence")),
        "sets": partial(_loss, bapo_loss, sets=True),
        **{f"log_probs, {case}": partial(_log_probs, **rows) for case, rows in wide.items()},
        "log_probs": _log_probs,
        "log_probs, sets": partial(_log_probs, sets=True),
        "log_probs, 64 labels per row": partial(_log_probs, labels=64),
        "bapo_linear_loss": _linear,
        "bapo_linear_loss, sets": partial(_linear, sets=True),
        "bapo_linear_loss, samples": _samples,
    }
    for case, rows in wide.items() if on_gpu else ():
        cases[f"inplace, {case}"] = partial(_loss, _inplace, **rows)
        cases[f"sets, {case}"] = partial(_loss, bapo_loss, **rows, sets=True)
        cases[f"side stream, {case}"] = partial(_loss, _late, **rows)
    for dtype in DTYPES:
        for case, measure in cases.items():
            measure = partial(measure, backend=backend, dtype=dtype, device=device)
            yield Task(backend, case, dtype, measure)
    batches = 10 if interpreted else 200
    for preset in ("paper", "recipe"):
        config = getattr(BAPOConfig, preset)()
        measure = partial(_search, backend, device, config, batches)
        yield Task(backend, f"search, {preset}", torch.float32, measure)
    if on_gpu:
        measure = partial(_beyond_32_bits, backend, device)
        yield Task(backend, "2^31 logits", torch.bfloat16, measure)


def tasks_at(
    backend: str, device: str, dtype: torch.dtype, V: int, hidden: bool, frozen: bool
) -> Iterator[Task]:
    """What ``bench`` times, on a few real rows, or as few hidden states."""
    options: dict[str, Any] = dict(backend=backend, dtype=dtype, device=device)
    if hidden:
        measure = partial(_linear, real=V, frozen=frozen, **options)
        cases = {"loss": measure, "linear_log_probs": partial(measure, loss=in_two_steps)}
    else:
        options |= dict(shape=(8,), V=V, real=1.0)
        cases = {"loss": partial(_loss, bapo_loss, **options)}
        cases["in place"] = partial(_loss, _inplace, **options)
    for case, measure in cases.items():
        yield Task(backend, case, dtype, measure)


def _loss(loss: Loss, backend: str, sets: bool = False, **options: Any) -> Quantities:
    case = budget.make_case(**options)
    case = _with_sets(case) if sets else case
    yield from _compare(partial(loss, backend=backend), reference.bapo_loss, case, (case.logits,))


def _with_sets(case: Case) -> Case:
    """Returns a copy with sets that have the labels, and a policy that follows the advantages."""
    V, labels = case.logits.shape[-1], case.labels.flatten()
    counts = labels.new_tensor(SETS).clamp(max=V).repeat(len(labels))[: len(labels)]
    places = torch.arange(min(V, max(SETS)), device=labels.device)
    ids = (labels[:, None] + 7 * places) % V  # distinct: 7 divides no V here
    mask = SamplingMask.from_counts(ids[places < counts[:, None]], counts)
    logp = reference.log_probs(case.logits.double(), case.labels, sampling_mask=mask)[0]
    old = (logp - case.advantages / 2).float()
    return replace(case, old_log_probs=old).with_options(sampling_mask=mask)


def _compare(loss: Loss, expected: Loss, case: Case, parameters: tuple[Tensor, ...]) -> Quantities:
    got, again = (budget.evaluate(loss, case, parameters) for _ in range(2))
    same = budget.in_some_orders(partial(budget.evaluate, expected, case, parameters))
    truth = budget.evaluate(expected, case, parameters, torch.float64)
    yield from budget.quantities(case, got, same, truth)
    pairs = zip(_tensors(got), _tensors(again), strict=True)
    yield "second run", float(sum(not torch.equal(a, b) for a, b in pairs)), 0.0


def _tensors(result: Result) -> list[Tensor]:
    """All tensors that a loss returned, with NaN replaced by a comparable number."""
    loss, log_probs, entropy, bounds, metrics = result.output
    tensors = (loss, log_probs, entropy, *bounds, *metrics.values(), *result.gradients)
    return [t.detach().nan_to_num(nan=1e30) for t in tensors if t is not None]


def _sliced(logits: Tensor, *arguments: Any, **options: Any) -> BAPOOutput:
    longer = torch.cat([logits, logits[:, :1]], 1)
    return bapo_loss(longer[:, :-1], *arguments, **options)


def _inplace(logits: Tensor, *arguments: Any, **options: Any) -> BAPOOutput:
    return bapo_loss(logits.clone(), *arguments, inplace=True, **options)


def _late(logits: Tensor, *arguments: Any, **options: Any) -> BAPOOutput:
    return late(partial(bapo_loss, **options), logits, *arguments)


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
        ref_log_probs=budget.per_token(),
        rollout_is_weights=budget.per_token(low=0.2, high=2.0),
        rollout_log_probs=budget.per_token(seed=2),
    )


def _log_probs(
    backend: str, dtype: torch.dtype, sets: bool = False, labels: int = 1, **options: Any
) -> Quantities:
    case = budget.make_case(dtype=dtype, poison=False, **options)
    mask = _with_sets(case).options["sampling_mask"] if sets else None
    ids, g = case.labels, torch.Generator().manual_seed(0)
    if labels > 1:  # some are repeated, others -100
        others = torch.randint(-1, labels, (*ids.shape, labels), generator=g, device="cpu")
        others = others.to(ids.device)
        ids = torch.where(others < 0, -100, (ids[..., None] + others) % case.logits.shape[-1])
    randn = partial(torch.randn, generator=g, device="cpu")
    weights = [randn(shape).to(ids.device) for shape in (ids.shape, case.labels.shape)]

    def run(function: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        x = case.logits.to(dtype, copy=True).requires_grad_()
        outputs = function(x, ids, sampling_mask=mask)
        incoming = [w.to(outputs[0].dtype) for w in weights]
        return *outputs, *torch.autograd.grad(outputs, x, incoming)

    got = run(partial(log_probs, backend=backend), dtype)
    same = budget.in_some_orders(partial(run, reference.log_probs, dtype))
    truth = run(reference.log_probs, torch.float64)
    for i, name in enumerate(("log_probs", "entropy", "gradient")):
        operand = budget.largest(truth[0]) if name == "entropy" else 0.0
        theirs = [values[i] for values in same]
        yield name, *budget.error_and_budget(got[i], theirs, truth[i], operand=operand)


def _linear(
    backend: str,
    dtype: torch.dtype,
    device: str,
    sets: bool = False,
    loss: Loss = bapo_linear_loss,
    real: int = 0,
    frozen: bool = False,
) -> Quantities:
    """Takes several chunks and recomputes rows; logits are multiples of 1/2, always exact.

    With ``real``, the size of a vocabulary, they are a few rows of a language model, as exact: each
    hidden state selects a column of the head.
    """
    g, shape, V, H, labels = torch.Generator().manual_seed(0), (6, 12), 193, 16, None
    hidden = torch.randint(-1, 2, (*shape, H), generator=g, device="cpu")
    weight = torch.randint(-2, 3, (V, H), generator=g, device="cpu") / 2
    if real:
        logits, labels = real_rows(shape := (2, 4), V := real)
        hidden, weight = torch.eye(8, H, device="cpu").view(*shape, H), weight.new_zeros(V, H)
        weight[:, :8] = logits.view(8, V).T
    hidden, weight = hidden.to(device, dtype), weight.to(device, dtype)
    logits = (hidden @ weight.T).cpu()
    case = budget.make_case(shape, V, device=device, logits=logits, labels=labels, staleness=0.5)
    case = _with_sets(case) if sets else case
    loss, expected = partial(loss, backend=backend, chunk_tokens=8), reference.bapo_linear_loss
    if frozen:
        fixed = partial(_frozen, loss, weight), partial(_frozen, expected, weight)
        yield from _compare(*fixed, case, (hidden,))
    else:
        yield from _compare(loss, expected, case, (hidden, weight))


def _frozen(loss: Loss, weight: Tensor, hidden: Tensor, *tokens: Any, **options: Any) -> BAPOOutput:
    return loss(hidden, weight.to(hidden.dtype), *tokens, **options)


def _samples(backend: str, dtype: torch.dtype, device: str) -> Quantities:
    """The error of the hidden states' gradients, against its bound in the root mean square."""
    *parameters, labels = (x.to(device) for x in real_head((48,), 4_001, 64))
    hidden, weight = (x.to(dtype) for x in parameters)
    A = torch.linspace(-1.0, 1.0, labels.numel(), device=device)

    def run(samples: int | None) -> tuple[Tensor, BAPOOutput]:
        x, W = (leaf.clone().requires_grad_() for leaf in (hidden, weight))
        options: dict[str, Any] = dict(backend=backend, gradient_samples=samples)
        out = bapo_linear_loss(x, W, labels, None, A, bounds=(0.8, 1.2), **options)
        return torch.autograd.grad(out.loss, (x, W))[0].double(), out

    (exact, _), (got, out), (again, _) = run(None), run(16), run(16)
    beside = (A / labels.numel() * torch.expm1(out.log_probs.detach())).norm() / 4  # sqrt(16)
    bound = (beside * weight.float().norm(dim=1).max()).item()
    rounding = torch.finfo(dtype).eps * exact.norm().item()
    yield "gradient", (got - exact).norm().item(), 1.2 * bound + rounding
    yield "second run", float(not torch.equal(got, again)), 0.0


def in_two_steps(
    hidden: Tensor, weight: Tensor, labels: Tensor, *tokens: Any, **options: Any
) -> BAPOOutput:
    """As ``bapo_linear_loss``, through ``linear_log_probs``."""
    old, advantages, mask = tokens
    labels = labels.masked_fill(mask == 0, IGNORE_INDEX)
    of_loss = dict(config=options.pop("config", None), backend=options["backend"])
    logp, of_loss["entropy"] = linear_log_probs(hidden, weight, labels, **options)
    return bapo_loss_from_log_probs(logp, old, advantages, labels != IGNORE_INDEX, **of_loss)


def _search(backend: str, device: str, config: BAPOConfig, batches: int) -> Quantities:
    """Every second batch has a target at which its search stops inside the grids."""
    draw = dict[str, Any](generator=torch.Generator().manual_seed(0), device="cpu")
    errors = []
    for i in range(batches):
        old = -5 * torch.rand(20 + i, **draw)
        staleness = (0.0, 1.0, 0.1, 0.5)[i % 4]
        logp = old + staleness * torch.randn(old.shape, **draw)
        A, share = torch.randn(old.shape, **draw), torch.rand((), **draw).item()
        target = config.target
        if i % 2:
            probe = reference.Contributions(config, logp, old, A, None)
            start = probe.quantity(*config.options.start())
            end = probe.quantity(*config.options.maximum())
            target = start + share * (end - start)
        tokens = [t.to(device) for t in (logp, old, A)]
        found, expected = (
            search(*tokens, config=replace(config, target=target))
            for search in (partial(_bounds, backend), reference.find_clip_bounds)
        )
        errors.append(budget.difference(found, expected))
    yield "bounds", budget.largest(torch.tensor(errors, device="cpu")), 0.0


def _bounds(backend: str, *tokens: Tensor, config: BAPOConfig) -> ClipBounds:
    """Calls ``find_clip_bounds`` if it chooses this backend, else a loss that searches."""
    if choose(None, tokens[0], "log_probs") == backend:
        return find_clip_bounds(*tokens, config=config)
    return bapo_loss_from_log_probs(*tokens, config=config, backend=backend).bounds


def _beyond_32_bits(backend: str, device: str) -> Quantities:
    """Takes rows whose element offsets overflow 32 bits."""
    if (free := torch.cuda.mem_get_info(device)[0]) < 2 * 2**32:
        yield f"not run: {free} bytes are free", 0.0, 0.0
        return
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
    expected = partial(budget.evaluate, reference.bapo_loss, case, (case.logits,))
    same, truth = budget.in_some_orders(expected), expected(torch.float64)
    theirs = [result.output.log_probs for result in same]
    yield "log_probs", *budget.error_and_budget(out.log_probs[last], theirs, truth.output.log_probs)
    theirs = [result.gradient for result in same]
    yield "gradient", *budget.error_and_budget(logits[last], theirs, truth.gradient)
