"""Compiles every Triton kernel for a GPU that need not be there, through its launcher.

Run by test_triton_compile.py in a process of its own, because pytest's interprets the kernels:
``python compile_triton.py cuda:90`` prints what the disassembly says, as JSON; with ``extremes``
of fewer variants.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from test_triton_compile import HEAD_KERNELS, ROW_KERNELS
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from bapo_kernels.backends.triton import (
    head_sampling_sets,
    prepare,
    row_gradient,
    row_pass,
    sampling_sets,
    search,
    sequences,
    token_loss,
)
from bapo_kernels.backends.triton.kernel import Kernel
from bapo_kernels.config import SURROGATES, BAPOConfig, Options
from bapo_kernels.core.operators import FIELDS
from bapo_kernels.output import REPORT

CAPABILITIES = 80, 89, 90, 100, 103, 120
TARGETS = {f"cuda:{capability}": GPUTarget("cuda", capability, 32) for capability in CAPABILITIES}
TARGETS["hip:gfx942"] = GPUTarget("hip", "gfx942", 64)
V, H = 151_936, 4_096
# More than 2 GB, as real logits are: AMD GPUs address smaller tensors in another way. The memory is
# never touched.
N = 9_000
PAPER = BAPOConfig().options
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


def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def f32(n: int) -> torch.Tensor:
    return zeros(n, dtype=torch.float32)


def i64(n: int) -> torch.Tensor:
    return zeros(n, dtype=torch.long)


def flags(n: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    return torch.ones(n, dtype=dtype)


def tokens(n: int, *names: str, start: int = 0) -> tuple[torch.Tensor, int]:
    """With these fields; ``start``: in their memory, which need not be aligned."""
    rows = f32(len(FIELDS) * n + start)[start:].view(len(FIELDS), n)
    return rows, sum(1 << FIELDS.index(name) for name in names)


def fields(everything: bool, per_row: bool = False, own: bool = False) -> list[str]:
    """``per_row``: with a temperature of each row; ``own``: with bounds of each."""
    policy = "old_log_probs", "rollout_log_probs", "rollout_is_weights", "ref_log_probs"
    names = [*policy] * everything + ["temperatures"] * per_row + ["lower", "upper"] * own
    return ["advantages", *names]


def options(everything: bool = False, kl: int = 0, value: float = 1.0, **others: float) -> Options:
    """With a dual clip, KL and entropy if ``everything``; of ``value`` no kernel may depend."""
    if everything:
        others |= dict(clip_ratio_c=2 + value, kl_loss_coef=value / 10, entropy_coef=0.01)
    others |= dict(temperature=value, sapo_tau_pos=value, target=value / 3)
    return PAPER._replace(kl_loss_type=kl, **others)


def one_row_statistics(dtype, **others):
    logits, results = torch.empty(1, N, V, dtype=dtype), (zeros(N), zeros(N), zeros(N, 2))
    others = options(**others)
    row_pass.row_statistics(logits, None, i64(N), flags(N), None, 0, others, *results)


def pass_arguments(n, everything=False, per_row=False, own=False, value=1.0, **others):
    """From the labels on; of ``row_pass`` and of that over sets."""
    bounds = None if everything or own else f32(2)
    present = tokens(n, *fields(everything, per_row, own))
    chosen = options(everything, value=value, upper_max=2 + value, **others)
    inputs = i64(n), flags(n), zeros(n), *present, bounds, chosen
    return *inputs, zeros(n), zeros(n), zeros(n, 2), flags(n, torch.uint8)


def one_row_pass(dtype, n=N, **others):
    logits = torch.empty(1, n, V, dtype=dtype)
    row_pass.row_pass(logits, None, *pass_arguments(n, **others), torch.empty_like(logits))


def gradient_arguments(n, entropy=False, only=True, per_row=False, **others):
    """From the labels on, as above."""
    dlog_probs, dentropy = zeros(n), zeros(n) if entropy else None
    wanted = flags(n, torch.uint8) if only else None
    known = i64(n), zeros(n, 2), zeros(n), dlog_probs, dentropy, wanted
    return *known, *tokens(n, *fields(False, per_row)), options(**others)


def one_row_gradient(dtype, n=N, **others):
    logits = torch.empty(1, n, V, dtype=dtype)
    row_gradient.row_gradient(logits, None, *gradient_arguments(n, **others), logits)


def one_pass_over_sets(n=N, softcap=PAPER.softcap, everything=False, per_row=False, **others):
    """Statistics, pass and gradient."""
    values, offsets, given = f32(8 * n), i64(n + 1), dict(softcap=softcap, per_row=per_row)
    labels, counted, _, *inputs = pass_arguments(n, everything=everything, **given, **others)
    present, results = inputs[:2], inputs[4:-1]
    row_pass.row_statistics(values, offsets, labels, counted, *present, inputs[3], *results)
    row_pass.row_pass_(values, offsets, labels, counted, zeros(n), *inputs)
    known = gradient_arguments(n, entropy=everything, only=everything, **given)
    row_gradient.row_gradient_(values, offsets, *known)


def one_search(uniform=False, unclipped=False, n=N, start=0, of_sequences=False, **others):
    names = ["old_log_probs"] * (not uniform) + ["rollout_log_probs"] * (not unclipped)
    present = tokens(n, "advantages", *names, start=start)
    chosen = options(
        **others,
        uniform_weight=uniform,
        unclipped_only=unclipped,
        target_is_ratio=uniform,
        upper_first=not uniform,
    )
    log_ratios, table = zeros(n) if of_sequences else None, zeros(2, 54)
    searched = zeros(n + start)[start:], flags(n), log_ratios, *present, chosen
    search.contributions(*searched, 1, table)
    search.solve(table, chosen, f32(2), zeros(6))
    search.search(*searched, f32(2), zeros(6))


def one_token_loss(everything=False, n=N, start=0, own=False, of_sequences=False, **others):
    """With everything from all tensors that it takes, but for the masses."""
    flag = dict.fromkeys(("unclipped_only", "target_is_ratio"), everything)
    log_ratios = [zeros(n) if of_sequences else None for _ in range(2)]
    on = (lambda made: made) if everything else (lambda made: None)
    token_loss.token_loss(
        *(zeros(n), on(zeros(n)), flags(n), on(flags(n)), zeros(n), log_ratios[0]),
        *tokens(n, *fields(everything, own=own), start=start),
        *(None if own else f32(2), None if everything else zeros(6)),
        options(everything, uniform_weight=not everything, **flag, **others),
        *(flags(1, torch.int32), f32(len(REPORT)), zeros(n), on(zeros(n))),
        *(torch.zeros(1 + everything, n), log_ratios[1]),
    )


def one_mean_of_sequences(packed=False, on_policy=False, n=N):
    """Of log-ratios, and added to gradients."""
    given = zeros(n), flags(n)
    of = n, torch.tensor([0, 5, n], dtype=torch.int32) if packed else None
    present = tokens(n, *[] if on_policy else ["old_log_probs"])
    sequences.sequence_log_ratios(*given, *present, *of, zeros(n))
    sequences.add_sequence_means_(*given, *of, zeros(n))


def one_prepare(mode=0, packed=False, divisor=None, n=N, value=1.0, own=False):
    shape = (1, n) if packed else (2, n // 2)
    has_labels, N = divisor is None, shape[0] * shape[1]
    given = {
        "advantages": torch.zeros(3 if packed else shape),
        "old_log_probs": torch.zeros(shape, dtype=torch.float16),
        **({"temperatures": torch.zeros(3)} if packed else {}),
        **(dict.fromkeys(("lower", "upper"), torch.zeros(shape)) if own else {}),
    }
    prepare.prepare(
        torch.zeros(shape, dtype=torch.int64 if has_labels else torch.bfloat16),
        torch.zeros(shape, dtype=torch.int64) if packed else torch.zeros(shape[::-1]).t(),
        [given.get(name) for name in FIELDS],
        torch.tensor([0, 5, 7, N], dtype=torch.int32) if packed else None,
        *(value, divisor, None, None if packed else f32(2), packed),
        PAPER._replace(loss_agg_mode=mode, loss_scale_factor=value + 1),
        *(flags(N), flags(N) if packed else None, i64(N) if has_labels else None, zeros(N)),
        *(tokens(N)[0], flags(1, torch.int32)),
    )


def one_move_of_sets(dtype, shard=False, n=N):
    logits, token_ids = torch.empty(1, n, V, dtype=dtype), zeros(8 * n, dtype=torch.int32)
    others = flags(n), token_ids, i64(n + 1), i64(2) if shard else None
    sampling_sets.find_labels(i64(n), *others[1:3], V, i64(n))
    sampling_sets.gather_sets(logits, *others, f32(8 * n))
    sampling_sets.scatter_sets(f32(8 * n), *others, logits)


def one_head_of_sets(dtype, out, everything=False, n=N):
    hidden, weight = torch.empty(n, H, dtype=dtype), torch.empty(V, H, dtype=dtype)
    ids, values = (zeros(8 * n, dtype=torch.int32), i64(n + 1)), f32(8 * n)
    bias, shard, dbias = (f32(V), i64(2), f32(V)) if everything else (None, None, None)
    only = flags(n, torch.uint8) if everything else None
    dhidden, dweight = torch.empty(n, H, dtype=out), torch.empty(V, H, dtype=out)
    head_sampling_sets.multiply_sets(hidden, weight, bias, flags(n), *ids, shard, values)
    head_sampling_sets.sets_dhidden(values, weight, *ids, shard, only, dhidden)
    order = i64(8 * n), ids[0], i64(V + 1)
    head_sampling_sets.sets_dweight(values, hidden, *order, everything, dweight, dbias)


class Variants(NamedTuple):
    """What is compiled: all, or the extremes."""

    dtypes: list[torch.dtype]
    options: list[tuple[float, bool]]  # softcap, everything
    softcaps: list[float]  # with a temperature per row
    modes: list[int]  # of aggregation

    @classmethod
    def of(cls, extremes: bool) -> Variants:
        softcaps, dtypes = [PAPER.softcap, 30.0], [torch.bfloat16, torch.float16, torch.float32]
        if not extremes:
            return cls(dtypes, [*product(softcaps, (False, True))], softcaps, [*range(5)])
        return cls(dtypes, [*zip(softcaps, (False, True), strict=True)], [30.0], [4])


def compile_sets(compiled: Compiled, variants: Variants) -> None:
    for softcap, everything in variants.options:
        compiled.variant = f"sets, softcap {softcap}, everything {everything}"
        one_pass_over_sets(softcap=softcap, everything=everything, kl=2)
    for softcap in variants.softcaps:
        compiled.variant = f"sets, softcap {softcap}, a temperature per row"
        one_pass_over_sets(softcap=softcap, kl=2, per_row=True)
    for dtype in variants.dtypes:
        for everything in (False, True):
            compiled.variant = f"sets, {dtype}, everything {everything}"
            one_move_of_sets(dtype, everything)
            one_head_of_sets(dtype, torch.float32 if everything else dtype, everything)


def compile_policies(compiled: Compiled) -> None:
    """What is not compiled for the default policy."""
    for name, surrogate in SURROGATES.items():
        own = name == "clip"
        given = dict(everything=True, kl=2, surrogate=surrogate, own=own)
        compiled.variant = f"surrogate {surrogate}, own bounds {own}"
        one_row_pass(torch.bfloat16, **given)
        one_token_loss(**given, of_sequences=True)
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
            one_row_pass(dtype, softcap=softcap, everything=everything, kl=2)
            one_row_gradient(dtype, softcap=softcap, entropy=everything, only=not everything)
        for softcap in variants.softcaps:
            compiled.variant = f"{dtype}, softcap {softcap}, a temperature per row"
            one_row_pass(dtype, softcap=softcap, kl=2, per_row=True)
            one_row_gradient(dtype, softcap=softcap, per_row=True)
        compiled.variant = f"{dtype}"
        one_row_statistics(dtype)
        row_gradient.scale_(torch.empty(N, V, dtype=dtype), f32(1))
    for kl in (0, 1, 2):
        compiled.variant = f"kl {kl}"
        one_row_pass(torch.bfloat16, everything=True, kl=kl)
        one_token_loss(everything=True, kl=kl)
    compiled.variant = "tokens"
    one_token_loss()
    for uniform, unclipped in product((False, True), repeat=2):
        one_search(uniform, unclipped)
    for packed in (False, True):
        for mode, n in product(variants.modes, (N, 100)):  # the second in one program
            one_prepare(mode, packed, n=n)
        one_prepare(packed=packed, divisor=7.0)
    compile_sets(compiled, variants)
    compile_policies(compiled)


def compile_other_values(compiled: Compiled, variants: Variants) -> list[str]:
    """Names of kernels that are compiled again for other values, numbers of tokens, addresses."""
    before = set(compiled.kernels)
    # On AMD GPUs logits of less than 2 GB have other kernels, with addresses of 32 bits.
    least = N - 1 if triton.runtime.driver.active.get_current_target().backend == "hip" else 1
    for n, value in ((N - 1, 0.7), (2 * N, 2.5), (2, 1.3), (1, 1.0)):
        of_rows = dict(n=max(n, least), value=value, softcap=30.0)
        one_row_pass(torch.bfloat16, everything=True, kl=2, **of_rows)
        one_row_gradient(torch.bfloat16, entropy=True, only=False, **of_rows)
        one_search(n=n, value=value, start=1)
        one_token_loss(everything=True, kl=2, n=n, value=value, start=1)
        for packed in (False, True):
            one_prepare(4, packed=packed, n=n, value=value)
        one_pass_over_sets(everything=True, kl=2, n=n, value=value, softcap=30.0)
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
