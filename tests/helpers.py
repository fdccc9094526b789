"""The backends that can run here, and checks of a case against the error budget."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accuracy import assert_quantities
from accuracy import assert_within_budget as assert_within_budget
from hypothesis import settings
from torch import Tensor

import bapo_kernels
from bapo_kernels import BAPOConfig, SamplingMask, checks, reference
from bapo_kernels.backends import native
from bapo_kernels.config import IGNORE_INDEX
from bapo_kernels.core.memory import Memory
from bapo_kernels.tools.budget import EPS as EPS
from bapo_kernels.tools.budget import Case, Result, evaluate
from bapo_kernels.tools.budget import in_some_orders as in_some_orders
from bapo_kernels.tools.budget import make_case as make_case
from bapo_kernels.tools.budget import per_token as per_token


def examples(count: int) -> int:
    """Of a property under the default profile of hypothesis; others make as many times more."""
    return max(1, count * settings.default.max_examples // 100)


def exhaustive_unless(kept: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """Cases of a test: `make test-all` has those ``kept``, `make exhaustive` the others."""
    marks = {True: (), False: pytest.mark.exhaustive}
    each = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=marks[kept(*case)]) for case in each]


# Backends that have their own kernels and can run here; the reference is what they are checked
# against.
KERNELS = [
    name
    for name, reason in bapo_kernels.available_backends().items()
    if reason is None and name != "reference"
]
PTX = "TRITON_PTX" in os.environ  # compiled Triton kernels run on the CPU (tests/ptx)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not PTX
DEVICES = {"cpu": "cpu", "triton": "cpu" if INTERPRETED or PTX else "cuda", "cuda": "cuda"}


def not_tested_on_the_gpu() -> dict[str, str]:
    """Of a machine with a GPU: the backends for it that cannot run, and why."""
    names = ["cuda", "triton"] if torch.version.cuda else ["triton"]
    if PTX or torch.cuda.device_count() == 0:
        return {}
    reasons = bapo_kernels.available_backends()
    return {name: str(reasons[name]) for name in names if reasons[name] is not None}


def real_in_turns(table: Iterable[str], name: str, *others: int) -> float | None:
    """The temperature of real rows in every second case of a table, ``None`` in the others.

    It is so low that probabilities are subnormal, and 0.
    """
    return 0.3 if ([*table].index(name) + sum(others)) % 2 else None


# Logits of the same values with unusual strides and offsets.
LAYOUTS = {
    "shifted": lambda x: torch.cat([x, x[..., :1, :]], -2)[..., :-1, :],
    "padded vocabulary": lambda x: torch.nn.functional.pad(x, (0, 13))[..., :-13],
    "misaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "transposed rows": lambda x: x.transpose(0, -2).contiguous().transpose(0, -2),
    "every second row": lambda x: x.repeat_interleave(2, -2)[..., ::2, :],
}

if "triton" in KERNELS and INTERPRETED:
    import interpreter

    interpreter.save_time()

# The CPU kernels run as on a processor without wider instructions: in every process of the tests.
if (chosen := os.environ.get("INSTRUCTION_SET", "widest")) != "widest":
    torch.ops.bapo_kernels.instruction_set(chosen)

needs_native = pytest.mark.skipif(
    bapo_kernels.available_backends()["cpu"] is not None, reason="the native library is absent"
)


def needs_gpu_memory(gigabytes: float) -> None:
    """Skips a test that takes this much; other processes may hold a part of the GPU."""
    torch.cuda.empty_cache()  # of earlier tests
    free, total = (size / 1e9 for size in torch.cuda.mem_get_info())
    if free < gigabytes:
        are_free = f"{free:.1f} of {total:.1f} GB are free"
        pytest.skip(f"needs {gigabytes:.1f} GB of GPU memory, {are_free}")


def needs_machine_code(target: str) -> None:
    """Skips a test of the CUDA kernels as built for ``target``, such as sm_90; needs no GPU."""
    built = native.build_info().get("cuda")
    if built is None:
        pytest.skip(str(native.why_no_cuda()))
    if not re.search(rf"\b{target}\b", built):
        pytest.skip(f"the CUDA kernels are built for {built.split(' for ')[1]}, not for {target}")


def fixed_bounds(low: float, high: float) -> dict[str, float]:
    """Options of a config by which the search can only return these."""
    names = ("ratio_lower_start", "ratio_lower_max", "ratio_upper_start", "ratio_upper_max")
    config = BAPOConfig.fixed(low, high)
    return {name: getattr(config, name) for name in (*names, "target")}


def unmasked_tokens(case: Case) -> Tensor:
    unmasked = case.labels != IGNORE_INDEX
    return unmasked if case.response_mask is None else unmasked & (case.response_mask != 0)


def transform_of(config: BAPOConfig) -> dict[str, Any]:
    """What a config does to logits, as options of the reference's log-probs."""
    names = ("temperature", "logit_scale", "final_logit_softcapping")
    return {name: getattr(config, name) for name in names}


def run_kernel(case: Case, backend: str, scale: float = 1.0, **extra: Any) -> Result:
    leaf = case.logits.detach().clone().requires_grad_()
    logits = leaf.clone() if extra.get("inplace") else leaf
    options = case.options | extra
    output = bapo_kernels.bapo_loss(logits, *case.arguments(), backend=backend, **options)
    (output.loss * scale).backward()
    assert leaf.grad.dtype == leaf.dtype
    return Result(output, (leaf.grad,))


@cache
def plain_result(backend, shape=(3, 7), V=257, dtype=torch.float32, **extra: Any) -> Result:
    """A kernel's result for ``make_case(...)``, which many tests expect and none may change."""
    return run_kernel(make_case(shape, V, dtype, DEVICES[backend]), backend, **extra)


def run_reference(case: Case, dtype: torch.dtype | None = None, **extra: Any) -> Result:
    return evaluate(reference.bapo_loss, case.with_options(**extra), (case.logits,), dtype)


def sets_of(labels: Tensor, V: int, outside: bool = True, seed: int = 0) -> list[list[int]]:
    """A set for each label: of one id, of few, of many, of all, empty ones, in no order.

    With ``outside`` every fifth set lacks the label.
    """
    g, sets = torch.Generator().manual_seed(seed), []
    for n, label in enumerate(labels.flatten().tolist()):
        size = (1, 2, 0, 5, 17, V // 2, V)[n % 7]
        ids = torch.randperm(V, generator=g)[:size].tolist()
        if outside and n % 5 == 4:
            ids = [i for i in ids if i != label]
        elif 0 <= label < V and ids and label not in ids:
            ids[-1] = label
        sets.append(ids)
    return sets


def allowed_by(sets: list[list[int]], V: int) -> Tensor:
    """bool ``[N, V]``: what each set allows, an empty one everything."""
    allowed = torch.zeros(len(sets), V, dtype=torch.bool)
    for row, ids in zip(allowed, sets, strict=True):
        row[ids or slice(None)] = True
    return allowed


def case_with_sets(
    shape=(3, 7), V=257, dtype=torch.float32, device="cpu", *, sets=None, outside=True, **options
) -> tuple[Case, SamplingMask]:
    """A case whose logits are -inf outside of its sets, and the sets; by default :func:`sets_of`.

    The old log-probs are finite, those of labels outside of their sets too.
    """
    seed = options.get("seed", 0)
    real = options.pop("real", None)
    rows = make_case(shape, V, real=real, seed=seed, poison=False)
    options |= {"labels": rows.labels} if real else {}
    if sets is None:
        labels = make_case(shape, V, logits=rows.logits.clone(), **options).labels
        sets = sets_of(labels, V, outside, seed)
    forbidden = ~allowed_by(sets, V).view(*shape, V)
    logits = rows.logits.masked_fill(forbidden, -torch.inf).to(dtype)
    case = make_case(shape, V, dtype, device, logits=logits, **options)
    case.old_log_probs = case.old_log_probs.masked_fill(case.old_log_probs == -torch.inf, -3.0)
    return case, SamplingMask.from_lists(sets, device)


def run_kernel_with_sets(case: Case, mask: SamplingMask, backend: str, **extra: Any) -> Result:
    """Of a case whose logits are -inf outside of the sets: here they are NaN, never read."""
    logits = case.logits.masked_fill(case.logits == -torch.inf, torch.nan)
    return run_kernel(replace(case, logits=logits), backend, sampling_mask=mask, **extra)


def check_with_sets(
    case: Case, mask: SamplingMask, backend: str, inplace: bool = False, **extra: Any
) -> Result:
    """:func:`check_against_reference`, which sees logits of -inf and no mask.

    Zero gradients outside of the sets, and the metric of labels there.
    """
    case = case.with_options(**extra)
    got = run_kernel_with_sets(case, mask, backend, inplace=inplace)
    labels = case.labels.clamp(0, case.logits.shape[-1] - 1)[..., None]
    outside = unmasked_tokens(case) & (case.logits.gather(-1, labels)[..., 0] == -torch.inf)
    assert got.output.metrics["label_outside_mask"] == outside.sum()
    check_result(case, got, {"label_outside_mask"})
    assert not got.gradient[case.logits == -torch.inf].any()
    return got


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors, those allocated in C++ too, are full of NaN or of the largest integer.

    So is memory of earlier calls that is used again, also where it is longer than its tensor.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()

    def poisoned(self, shape, dtype, device, original=Memory.empty):
        values = original(self, shape, dtype, device)
        if self.last and checks.is_readable(values):  # not if torch has just made it
            self.last[-1].memory.fill_(255)
        return values

    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    try:
        with patch.object(Memory, "empty", poisoned):
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic)


def check_against_reference(
    case: Case, backend: str, inplace: bool = False, **extra: Any
) -> Result:
    """Check loss, gradient, log-probs, entropy, bounds and metrics of one case."""
    case = case.with_options(**extra)
    run = partial(run_kernel, case, backend, inplace=inplace)
    got = run()
    try:
        check_result(case, got)
    except AssertionError:  # is it wrong because nothing has written there?
        with poisoned_memory(), suppress(RuntimeError):  # a GPU may lack a deterministic operator
            check_result(case, run())
        raise
    return got


def check_result(case: Case, got: Result, more: Collection[str] = ()) -> None:
    """Within the budget; it has the metrics of the reference and ``more``."""
    truth = run_reference(case, torch.float64)
    assert_quantities(case, got, partial(run_reference, case), truth)
    assert set(got.output.metrics) == {*truth.output.metrics, *more}
    for value in got.output.metrics.values():
        assert (value.ndim, value.dtype, value.requires_grad) == (0, torch.float32, False)
