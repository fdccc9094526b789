"""Compiles every Triton kernel for a GPU that need not be there, through its launcher.

Run by test_triton_compile.py in a process of its own, because pytest's interprets the kernels:
``python compile_triton.py cuda:90`` prints what the disassembly says, as JSON; with ``extremes``
of fewer variants.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from test_triton_compile import HEAD_KERNELS, ROW_KERNELS
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from bapo_kernels.backends.triton import (
    head_sets,
    policy,
    prepare,
    row_gradient,
    row_pass,
    search,
    sequences,
    sets,
)
from bapo_kernels.backends.triton.kernel import Kernel
from bapo_kernels.output import REPORT

TARGETS = {
    "cuda:80": GPUTarget("cuda", 80, 32),
    "cuda:89": GPUTarget("cuda", 89, 32),
    "cuda:90": GPUTarget("cuda", 90, 32),
    "cuda:100": GPUTarget("cuda", 100, 32),
    "cuda:103": GPUTarget("cuda", 103, 32),
    "cuda:120": GPUTarget("cuda", 120, 32),
    "hip:gfx942": GPUTarget("hip", "gfx942", 64),
}
V, H = 151_936, 4_096
# More than 2 GB, as real logits are: AMD GPUs address smaller tensors in another way. The memory is
# never touched.
N = 9_000
LOWER, UPPER_START, UPPER_STEP = (0.6, 0.9, 0.02), 1.2, 0.05
GRIDS = (*LOWER, UPPER_START, 3.0, UPPER_STEP)
CLIP, CISPO, SAPO = range(3)
OF_ROWS = (*ROW_KERNELS, *HEAD_KERNELS)  # of logits or of a matrix


class AbsentGPU:
    """A driver: what Triton asks before it compiles, and what launchers ask."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.utils = self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"multiprocessor_count": 132}

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Compiles every kernel that a launcher launches, and launches none."""

    def __init__(self) -> None:
        self.kernels: dict[str, tuple[str, str, object]] = {}
        self.variant = ""
        self.unaligned = False
        run, compile_kernel = JITFunction.run, Kernel.compile

        def compile_only(function, *args, grid, warmup, **options):
            if self.unaligned:
                args = [one_element_further(value) for value in args]
                options = {name: one_element_further(value) for name, value in options.items()}
            kernel = run(function, *args, grid=grid, warmup=True, **options)
            name = function.fn.__name__
            self.kernels.setdefault(kernel.hash, (name, self.variant, kernel))
            return kernel

        def compile_anew(kernel, *arguments):
            """Asks Triton at every launch, so that arguments that specialise a kernel show."""
            compiled = compile_kernel(kernel, *arguments)
            kernel.compiled.clear()
            return compiled

        JITFunction.run, Kernel.compile = compile_only, compile_anew
        Kernel.load = Kernel.run = lambda *arguments: None


def one_element_further(value: object) -> object:
    """A tensor that is not 16-byte aligned instead of every tensor but the rows and matrices."""
    if not isinstance(value, torch.Tensor) or value.shape[-1:] in ((V,), (H,)):
        return value
    return torch.empty(value.numel() + 1, dtype=value.dtype)[1:]


def f32(n: int = N) -> torch.Tensor:
    return torch.zeros(n)


def f64(*shape: int) -> torch.Tensor:
    return torch.zeros(*(shape or (N,)), dtype=torch.float64)


def one_row_statistics(dtype, softcap=None):
    row_pass.row_statistics(
        torch.empty(1, N, V, dtype=dtype),
        torch.zeros(N, dtype=torch.long),
        torch.ones(N, dtype=torch.bool),
        *(1.0, 1.0, softcap, None),
        f64(),
        f64(),
        f64(N, 2),
    )


def bounds_of(everything, own, n):
    """Of the tokens, of all, or not known yet."""
    if own:
        return torch.zeros(2, n)
    return None if everything else f32(2)


def one_row_pass(
    dtype,
    softcap=None,
    everything=False,
    kl=0,
    n=N,
    temperature=1.0,
    clip=3.0,
    per_row=False,
    surrogate=CLIP,
    own=False,
):
    """``per_row``: with a temperature of each row; ``own``: with bounds of each."""
    logits = torch.empty(1, n, V, dtype=dtype)
    on = (lambda: f32(n)) if everything else (lambda: None)
    row_pass.row_pass(
        logits,
        torch.zeros(n, dtype=torch.long),
        torch.ones(n, dtype=torch.bool),
        on(),
        f32(n),
        f64(n),
        on(),
        on(),
        bounds_of(everything, own, n),
        (*LOWER, UPPER_START, clip, UPPER_STEP),
        surrogate,
        kl,
        (clip if everything else math.inf, temperature, 1.05, 0.1 * everything, 0.01 * everything),
        *(temperature, 1.0, softcap, f32(n) if per_row else None),
        f64(n),
        f64(n),
        f64(n, 2),
        torch.zeros(n, dtype=torch.uint8),
        torch.empty_like(logits),
    )


def one_row_gradient(
    dtype, softcap=None, entropy=False, only=True, n=N, temperature=1.0, per_row=False
):
    logits = torch.empty(1, n, V, dtype=dtype)
    row_gradient.row_gradient(
        logits,
        torch.zeros(n, dtype=torch.long),
        f64(n, 2),
        f64(n),
        f64(n),
        f64(n) if entropy else None,
        torch.zeros(n, dtype=torch.uint8) if only else None,
        *(temperature, 1.0, softcap, f32(n) if per_row else None),
        torch.empty_like(logits),
    )


def one_search(uniform=False, gradient=False, n=N, target=0.4, start=0, of_sequences=False):
    """``start``: of the tokens in their memory, which need not be aligned."""
    tokens = (
        f64(n + start)[start:],
        torch.ones(n, dtype=torch.bool),
        None if uniform else f32(n + start)[start:],
        f64(n) if of_sequences else None,
        f32(n + start)[start:],
        None if gradient else f32(n + start)[start:],
        GRIDS,
        uniform,
        gradient,
    )
    table, goal = f64(2, 54), (target, uniform, not uniform)
    search.contributions(*tokens, 1, table)
    search.solve(table, GRIDS, *goal, f32(2), f64(4))
    search.search(*tokens, *goal, f32(2), f64(4))


def one_policy(
    everything=False,
    kl=0,
    n=N,
    target=0.4,
    kl_coef=0.1,
    start=0,
    surrogate=CLIP,
    own=False,
    of_sequences=False,
):
    def given(wanted=True):
        return f32(n + start)[start:] if wanted else None

    policy.policy(
        f64(n),
        f64(n) if everything else None,
        torch.ones(n, dtype=torch.bool),
        given(everything),
        f64(n) if of_sequences else None,
        given(),
        f64(n),
        given(everything),
        given(everything),
        given(everything),
        bounds_of(False, own, n),
        None if everything else f64(6),
        GRIDS,
        *(not everything, everything, target, everything),
        surrogate,
        kl,
        (3.0 if everything else math.inf, target, 1.05, kl_coef * everything, 0.01 * everything),
        torch.ones(n, dtype=torch.bool) if everything else None,
        torch.zeros(1, dtype=torch.int32),
        f32(len(REPORT)),
        f64(n),
        f64(n) if everything else None,
        torch.zeros(1 + everything, n),
        f64(n) if of_sequences else None,
    )


def one_mean_of_sequences(packed=False, on_policy=False, n=N):
    """Of log-ratios, and added to gradients."""
    tokens = f64(n), torch.ones(n, dtype=torch.bool)
    of = n, torch.tensor([0, 5, n], dtype=torch.int32) if packed else None
    sequences.sequence_log_ratios(*tokens, None if on_policy else f32(n), *of, f64(n))
    sequences.add_sequence_means_(*tokens, *of, f64(n))


def one_prepare(mode=0, packed=False, given=None, n=N, scale=1.0, own=False):
    shape = (1, n) if packed else (2, n // 2)
    tokens = torch.zeros(shape, dtype=torch.int64 if given is None else torch.bfloat16)
    N = tokens.numel()
    flag = partial(torch.zeros, N, dtype=torch.bool)
    prepare.prepare(
        tokens,
        torch.zeros(shape, dtype=torch.int64) if packed else torch.zeros(shape[::-1]).t(),
        [
            torch.zeros(3 if packed else shape),
            torch.zeros(shape, dtype=torch.float16),
            *([torch.zeros(3)] if packed else []),
            *([torch.zeros(shape)] * 2 if own else []),
        ],
        torch.tensor([0, 5, 7, N], dtype=torch.int32) if packed else None,
        mode,
        scale,
        scale + 1,
        given,
        None,
        None if packed else f32(2),
        own,
        packed,
        flag(),
        flag() if packed else None,
        torch.zeros(N, dtype=torch.int64) if given is None else None,
        f64(N),
        f32((2 + packed + 2 * own) * N),
        torch.zeros(1, dtype=torch.int32),
    )


def i64(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.long)


def one_pass_over_sets(
    softcap=None,
    everything=False,
    kl=0,
    n=N,
    temperature=1.0,
    clip=3.0,
    per_row=False,
    surrogate=CLIP,
    own=False,
):
    """Statistics, pass and gradient; the last as in ``one_row_pass``."""
    values, offsets, positions = f32(8 * n), i64(n + 1), i64(n)
    counted, results = torch.ones(n, dtype=torch.bool), (f64(n), f64(n), f64(n, 2))
    transform = temperature, 1.0, softcap, f32(n) if per_row else None
    on = (lambda: f32(n)) if everything else (lambda: None)
    undecided = torch.zeros(n, dtype=torch.uint8)
    sets.sets_statistics(values, offsets, positions, counted, *transform, *results)
    sets.sets_pass_(
        *(values, offsets, positions, counted, on(), f32(n), f64(n), on(), on()),
        *(bounds_of(everything, own, n), (*LOWER, UPPER_START, clip, UPPER_STEP)),
        *(surrogate, kl),
        (clip if everything else math.inf, temperature, 1.05, 0.1 * everything, 0.01 * everything),
        *(*transform, *results, undecided),
    )
    sets.sets_gradient_(
        *(values, offsets, positions, f64(n, 2), f64(n), f64(n)),
        *(f64(n) if everything else None, undecided if everything else None, *transform),
    )


def one_move_of_sets(dtype, shard=False, n=N):
    logits, counted = torch.empty(1, n, V, dtype=dtype), torch.ones(n, dtype=torch.bool)
    token_ids, offsets = torch.zeros(8 * n, dtype=torch.int32), i64(n + 1)
    others = counted, token_ids, offsets, i64(2) if shard else None
    sets.find_labels(i64(n), token_ids, offsets, V, i64(n))
    sets.gather_sets(logits, *others, f32(8 * n))
    sets.scatter_sets(f32(8 * n), *others, logits)


def one_head_of_sets(dtype, out, everything=False, n=N):
    hidden, weight = torch.empty(n, H, dtype=dtype), torch.empty(V, H, dtype=dtype)
    token_ids, offsets = torch.zeros(8 * n, dtype=torch.int32), i64(n + 1)
    values, counted = f32(8 * n), torch.ones(n, dtype=torch.bool)
    bias, shard = (f32(V), i64(2)) if everything else (None, None)
    only = torch.zeros(n, dtype=torch.uint8) if everything else None
    dhidden, dweight = torch.empty(n, H, dtype=out), torch.empty(V, H, dtype=out)
    head_sets.multiply_sets(hidden, weight, bias, counted, token_ids, offsets, shard, values)
    head_sets.sets_dhidden(values, weight, token_ids, offsets, shard, only, dhidden)
    rows, segments = torch.zeros(8 * n, dtype=torch.int32), i64(V + 1)
    dbias = f32(V) if everything else None
    head_sets.sets_dweight(values, hidden, i64(8 * n), rows, segments, everything, dweight, dbias)


class Variants(NamedTuple):
    """What is compiled: all, or the extremes."""

    dtypes: list[torch.dtype]
    options: list[tuple[float | None, bool]]  # softcap, everything
    softcaps: list[float | None]  # with a temperature per row
    aggregations: list[int]

    @classmethod
    def of(cls, extremes: bool) -> Variants:
        if not extremes:
            dtypes = [torch.bfloat16, torch.float16, torch.float32]
            return cls(dtypes, [*product((None, 30.0), (False, True))], [None, 30.0], [*range(5)])
        dtypes = [torch.bfloat16, torch.float32]
        return cls(dtypes, [(None, False), (30.0, True)], [30.0], [4])


def compile_sets(compiled: Compiled, variants: Variants) -> None:
    for softcap, everything in variants.options:
        compiled.variant = f"sets, softcap {softcap}, everything {everything}"
        one_pass_over_sets(softcap, everything, kl=2)
    for softcap in variants.softcaps:
        compiled.variant = f"sets, softcap {softcap}, a temperature per row"
        one_pass_over_sets(softcap, kl=2, per_row=True)
    for dtype in variants.dtypes:
        for everything in (False, True):
            compiled.variant = f"sets, {dtype}, everything {everything}"
            one_move_of_sets(dtype, everything)
            one_head_of_sets(dtype, torch.float32 if everything else dtype, everything)


def compile_policies(compiled: Compiled) -> None:
    """What is not compiled for the default policy."""
    for surrogate, own in ((CISPO, False), (SAPO, False), (CLIP, True)):
        given = dict(everything=True, kl=2, surrogate=surrogate, own=own)
        compiled.variant = f"surrogate {surrogate}, own bounds {own}"
        one_row_pass(torch.bfloat16, **given)
        one_policy(**given, of_sequences=True)
        compiled.variant = f"sets, surrogate {surrogate}, own bounds {own}"
        one_pass_over_sets(**given)
    compiled.variant = "sequences"
    one_search(of_sequences=True)
    for packed in (False, True):
        one_mean_of_sequences(packed)
    one_mean_of_sequences(on_policy=True)
    one_prepare(packed=True, own=True)


def compile_variants(compiled: Compiled, variants: Variants) -> None:
    for dtype in variants.dtypes:
        for softcap, everything in variants.options:
            compiled.variant = f"{dtype}, softcap {softcap}, everything {everything}"
            one_row_pass(dtype, softcap, everything, kl=2)
            one_row_gradient(dtype, softcap, entropy=everything, only=not everything)
        for softcap in variants.softcaps:
            compiled.variant = f"{dtype}, softcap {softcap}, a temperature per row"
            one_row_pass(dtype, softcap, kl=2, per_row=True)
            one_row_gradient(dtype, softcap, per_row=True)
        compiled.variant = f"{dtype}"
        one_row_statistics(dtype)
        row_gradient.scale_(torch.empty(N, V, dtype=dtype), f32(1))
    for kl in (0, 1, 2):
        compiled.variant = f"kl {kl}"
        one_row_pass(torch.bfloat16, everything=True, kl=kl)
        one_policy(everything=True, kl=kl)
    compiled.variant = "tokens"
    one_policy()
    for uniform in (False, True):
        for gradient in (False, True):
            one_search(uniform, gradient)
    for packed in (False, True):
        for mode in variants.aggregations:
            for n in (N, 100):  # the second in one program
                one_prepare(mode, packed, n=n)
        one_prepare(packed=packed, given=7.0)
    compile_sets(compiled, variants)
    compile_policies(compiled)


def compile_other_values(compiled: Compiled, variants: Variants) -> list[str]:
    """Names of kernels that are compiled again for other values, numbers of tokens, addresses."""
    before = set(compiled.kernels)
    # On AMD GPUs logits of less than 2 GB have other kernels, with addresses of 32 bits.
    least = N - 1 if triton.runtime.driver.active.get_current_target().backend == "hip" else 1
    for n, value in ((N - 1, 0.7), (2 * N, 2.5), (2, 1.3), (1, 1.0)):
        of_rows = dict(n=max(n, least), temperature=value)
        one_row_pass(torch.bfloat16, 30.0, True, kl=2, clip=2 + value, **of_rows)
        one_row_gradient(torch.bfloat16, 30.0, True, False, **of_rows)
        one_search(n=n, target=value / 3, start=1)
        one_policy(everything=True, kl=2, n=n, target=value, kl_coef=value, start=1)
        one_prepare(4, packed=True, n=n, scale=value)
        one_prepare(4, n=n, scale=value)
        one_pass_over_sets(30.0, True, kl=2, n=n, temperature=value, clip=2 + value)
        one_move_of_sets(torch.bfloat16, n=n)
        one_head_of_sets(torch.bfloat16, torch.bfloat16, n=n)
        one_mean_of_sequences(n=n)
    compiled.unaligned = True
    compile_variants(compiled, variants)
    return [name for key, (name, _, _) in compiled.kernels.items() if key not in before]


def resources(kernel: object, in_loops: bool) -> dict[str, object]:
    """Registers, bytes of stack and spills, and memory instructions inside loops, if wanted."""
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        number = {k: int(v) for k, v in re.findall(r"\.(\w+):\s+(\d+)\s*$", text, re.MULTILINE)}
        return {
            "registers": number["vgpr_count"],
            "stack": number["private_segment_fixed_size"] + number["vgpr_spill_count"],
            "in_loops": Counter(amd_accesses_in_loops(text)),
        }
    # Of the environment, whatever version compiles: that of Triton 3.6 does not know sm_103.
    tools = Path(sysconfig.get_path("purelib"), "triton/backends/nvidia/bin")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()

        def listed(flag: str) -> str:
            command = [tools / "cuobjdump", flag, file.name]
            return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)

        found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", listed("-res-usage"))
        registers, stack, local = map(int, found.groups())
        # The disassembler takes 0.4 s per kernel.
        text = listed("-sass") if in_loops or stack + local else ""
    return {
        "registers": registers,
        "stack": stack + local,  # spills are on the stack
        "in_loops": Counter(nvidia_accesses_in_loops(text)),
        "limited": kernel.metadata.maxnreg is not None,
    }


def nvidia_accesses_in_loops(sass: str) -> Iterator[str]:
    """Loads, stores and exchanges of innermost loops, but for loops over rows, which read flags."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", sass)
    instructions = [instruction for _, instruction in lines]
    loops = nvidia_loops(
        instructions, {int(at, 16): number for number, (at, _) in enumerate(lines)}
    )
    innermost = [loop for loop in loops if not any(other < loop for other in loops)]
    for loop in innermost:
        text = "\n".join(instructions[number] for number in loop)
        if not set(re.findall(r"\b(?:LDG|STG)\b[\w.]*", text)) <= {"LDG.E.U8"}:
            yield from re.findall(r"\b(?:LDG|STG|LDL|STL|LDS|STS|SHFL|BAR)\b[\w.]*", text)


def nvidia_loops(instructions: list[str], at: dict[int, int]) -> list[set[int]]:
    """Of every target of backward branches: it, and what leads to them without passing it.

    If the entry does, the branch returns from code out of line.
    """
    before = [set(), *({number} for number in range(len(instructions)))]
    backwards = defaultdict(set)
    for number, instruction in enumerate(instructions):
        if re.match(r"(BRA 0x|EXIT|RET)", instruction):  # unconditional
            before[number + 1].discard(number)
        if found := re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", instruction):
            target = at[int(found[1], 16)]
            before[target].add(number)
            if target < number:
                backwards[target].add(number)
    loops = []
    for target, leading in backwards.items():
        loop = {target}
        while leading:
            loop |= leading
            leading = set().union(*(before[one] for one in leading)) - loop
        if 0 not in loop:
            loops.append(loop)
    return loops


def amd_accesses_in_loops(assembly: str) -> Iterator[str]:
    """Loads and stores in blocks that LLVM marks as part of an innermost loop."""
    blocks = re.split(r"^(?=\.LBB|; %bb)", assembly, flags=re.MULTILINE)
    heads = [re.split(r"^\s+[a-z]", block, maxsplit=1, flags=re.MULTILINE)[0] for block in blocks]
    inner = {re.match(r"\.L(\w+)", head)[1] for head in heads if "Inner Loop Header" in head}
    for block, head in zip(blocks, heads, strict=True):
        header = re.search(r"Header=(\w+)", head) or re.match(r"\.L(\w+)", head)
        if header and header[1] in inner:
            yield from re.findall(r"\b(?:global|buffer|flat)_(?:load|store)_\w+", block)


def main() -> None:
    triton.runtime.driver.set_active(AbsentGPU(TARGETS[sys.argv[1]]))
    compiled, variants = Compiled(), Variants.of(extremes="extremes" in sys.argv)
    compile_variants(compiled, variants)
    again = compile_other_values(compiled, variants)
    report = [
        {"kernel": name, "variant": variant, **resources(kernel, name in OF_ROWS)}
        for name, variant, kernel in compiled.kernels.values()
    ]
    print(json.dumps({"kernels": report, "compiled_again": again}))


if __name__ == "__main__":
    main()
