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
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import triton
from operands import call, tokens_of
from test_triton_compile import HEAD_KERNELS, ROW_KERNELS
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from bapo_kernels.backends.triton import _operators
from bapo_kernels.backends.triton.kernel import Kernel
from bapo_kernels.config import SURROGATES, BAPOConfig
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


class AbsentGPU(SimpleNamespace):
    """A driver: what Triton asks before it compiles, and what launchers ask."""

    def __init__(self, target: GPUTarget) -> None:
        super().__init__(
            utils=self,
            get_device_properties=lambda device: {"multiprocessor_count": 132},
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )


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


zeros = partial(torch.zeros, dtype=torch.float64)
f32, i64 = torch.zeros, partial(torch.zeros, dtype=torch.long)
flags = partial(torch.ones, dtype=torch.bool)
u8 = partial(torch.ones, dtype=torch.uint8)
launch = partial(call, SimpleNamespace(**_operators()))


def rows(dtype, n=N):
    return torch.empty(1, n, V, dtype=dtype)


def tokens(n, *names):
    """With these fields."""
    return dict(zip(("tokens", "present"), tokens_of(n, **dict.fromkeys(names, 0.0)), strict=True))


def options(everything=False, kl=0, value=1.0, **others):
    """With a dual clip, KL and entropy if ``everything``; on ``value`` no kernel may depend."""
    if everything:
        others |= dict(clip_ratio_c=2 + value, kl_loss_coef=value / 10, entropy_coef=0.01)
    others = dict(temperature=value, target=value / 3, upper_max=2 + value) | others
    return PAPER._replace(kl_loss_type=kl, sapo_tau_pos=value, **others)


def operands(n=N, everything=False, per_row=False, own=False, **others):
    """Of many operators; ``per_row``: a temperature of each row; ``own``: bounds of each."""
    policy = "old_log_probs", "rollout_log_probs", "rollout_is_weights", "ref_log_probs"
    names = [*policy] * everything + ["temperatures"] * per_row + ["lower", "upper"] * own
    return {
        **{name: zeros(n) for name in ("weights", "log_probs", "entropy", "dlog_probs")},
        **dict(labels=i64(n), counted=flags(n), stats=zeros(n, 2), undecided=u8(n)),
        "bounds": None if everything or own else f32(2),
        "options": options(everything, **others),
        **tokens(n, "advantages", *names),
    }


def one_row_statistics(dtype):
    launch("row_statistics", operands(), logits=rows(dtype), tokens=None, present=0)


def one_row_pass(dtype, n=N, **variant):
    launch("row_pass", operands(n, **variant), logits=rows(dtype, n), dlogits=rows(dtype, n))


def one_row_gradient(dtype, n=N, everything=False, **variant):
    """With everything of all rows and of the entropy too."""
    optional = dict(dentropy=zeros(n)) if everything else dict(only=u8(n))
    optional |= dict.fromkeys(("logits", "dlogits"), rows(dtype, n))
    launch("row_gradient", operands(n, everything, **variant) | optional)


def one_pass_over_sets(n=N, everything=False, **variant):
    """Statistics, pass and gradient."""
    known = operands(n, everything, **variant) | dict(logits=f32(8 * n), offsets=i64(n + 1))
    optional = dict(dentropy=zeros(n), only=u8(n)) if everything else {}
    for operator in ("row_statistics", "row_pass_", "row_gradient_"):
        launch(operator, known | optional)


def several_labels(dtype, n=N, count=5, everything=False, of_sets=False, **variant):
    """Statistics and gradient; with everything as above."""
    known = operands(n, everything, **variant) | dict(labels=i64(n, count))
    known |= dict.fromkeys(("log_probs", "dlog_probs"), zeros(n, count))
    known |= dict(dentropy=zeros(n)) if everything else dict(only=u8(n))
    of_rows = (
        dict(logits=f32(8 * n), offsets=i64(n + 1)) if of_sets else dict(logits=rows(dtype, n))
    )
    for operator in ("row_statistics", "row_gradient_"):
        launch(operator, known | of_rows)


def one_sample(dtype, n=N, count=1, everything=False, **variant):
    """Of rows, and their gradient; with everything of a shard."""
    known = operands(n, everything, **variant) | dict(gradient_samples=2_048, labels=i64(n, count))
    known |= dict(beside=zeros(n), drawn=zeros(n, 4), shard=i64(2) if everything else None)
    known |= {name: torch.zeros(n, dtype=torch.int32) for name in ("seeds", "counts")}
    known |= dict(ids=torch.zeros(n, 4_608, dtype=torch.int32), values=f32(n, 4_608))
    launch("sample_rows", known, logits=rows(dtype, n))
    known |= dict(labels=i64(n), logits=f32(8 * n), offsets=i64(n + 1))
    launch("row_gradient_", known | (dict(dentropy=zeros(n)) if everything else {}))


def one_search(uniform=False, unclipped=False, n=N, of_sequences=False, value=1.0):
    kinds = dict(uniform_weight=uniform, unclipped_only=unclipped, target_is_ratio=uniform)
    kinds |= dict(upper_first=not uniform, upper_max=PAPER.upper_max)
    names = ["old_log_probs"] * (not uniform) + ["rollout_log_probs"] * (not unclipped)
    known = operands(n, value=value, **kinds) | tokens(n, "advantages", *names)
    known |= dict(log_ratios=zeros(n) if of_sequences else None, table=zeros(2, 54), rank=1)
    for operator in ("contributions", "solve", "search"):
        launch(operator, known | dict(masses=zeros(6)))


def one_token_loss(everything=False, n=N, own=False, of_sequences=False, **others):
    """With everything from all tensors that it takes, but for the masses."""
    others |= dict.fromkeys(("unclipped_only", "target_is_ratio"), everything)
    known = operands(n, everything, own=own, uniform_weight=not everything, **others)
    known |= dict(bounds=None if own else f32(2), ticket=torch.ones(1, dtype=torch.int32))
    known |= dict(report=f32(len(REPORT)), outputs=f32(1 + everything, n))
    if everything:
        known |= dict(unmasked=flags(n), dentropy=zeros(n))
    else:
        known |= dict(entropy=None, masses=zeros(6))
    if of_sequences:
        known |= dict(log_ratios=zeros(n), dlog_ratios=zeros(n))
    launch("token_loss", known)


def one_mean_of_sequences(packed=False, on_policy=False, n=N):
    """Of log-ratios, and added to gradients."""
    known = operands(n) | tokens(n, *[] if on_policy else ["old_log_probs"])
    known |= dict(log_ratios=zeros(n), dlog_ratios=zeros(n), length=n)
    known["cu_seqlens"] = torch.tensor([0, 5, n], dtype=torch.int32) if packed else None
    for operator in ("sequence_log_ratios", "add_sequence_means_"):
        launch(operator, known)


def one_prepare(mode=0, packed=False, divisor=None, n=N, value=1.0, own=False):
    shape = (1, n) if packed else (2, n // 2)
    has_labels, N = divisor is None, shape[0] * shape[1]
    fields = {
        "advantages": f32(3 if packed else shape),
        "old_log_probs": torch.zeros(shape, dtype=torch.float16),
        **({"temperatures": f32(3)} if packed else {}),
        **(dict.fromkeys(("lower", "upper"), f32(shape)) if own else {}),
    }
    launch(
        "prepare",
        labels_or_log_probs=torch.zeros(shape, dtype=torch.int64 if has_labels else torch.bfloat16),
        response_mask=i64(shape) if packed else f32(shape[::-1]).t(),
        fields=[fields.get(name) for name in FIELDS],
        cu_seqlens=torch.tensor([0, 5, 7, N], dtype=torch.int32) if packed else None,
        bounds=None if packed else f32(2),
        options=PAPER._replace(loss_agg_mode=mode, loss_scale_factor=value + 1),
        counted=flags(N) if packed else None,
        labels=i64(N) if has_labels else None,
        ticket=torch.ones(1, dtype=torch.int32),
        **dict(unmasked=flags(N), weights=zeros(N), tokens=tokens(N)["tokens"]),
        **dict(scale=value, divisor=divisor, live=packed),
    )


def one_move_of_sets(dtype, shard=False, n=N):
    known = operands(n) | dict.fromkeys(("logits", "dlogits"), rows(dtype, n))
    known |= dict(
        token_ids=torch.zeros(8 * n, dtype=torch.int32), offsets=i64(n + 1), positions=i64(n)
    )
    known |= dict(shard=i64(2) if shard else None, values=f32(8 * n), dvalues=f32(8 * n), vocab=V)
    for operator in ("find_labels", "gather_sets", "scatter_sets"):
        launch(operator, known)


def one_head_of_sets(dtype, out, everything=False, n=N):
    known = dict(hidden=torch.empty(n, H, dtype=dtype), weight=torch.empty(V, H, dtype=dtype))
    known |= dict(dhidden=torch.empty(n, H, dtype=out), dweight=torch.empty(V, H, dtype=out))
    known |= dict.fromkeys(("token_ids", "rows"), torch.zeros(8 * n, dtype=torch.int32))
    known |= dict.fromkeys(("values", "dvalues"), f32(8 * n))
    known |= dict(offsets=i64(n + 1), segments=i64(V + 1), order=i64(8 * n), add=everything)
    if everything:
        known |= dict(bias=f32(V), dbias=f32(V), shard=i64(2), only=u8(n))
    for operator in ("multiply_sets", "sets_dhidden", "sets_dweight"):
        launch(operator, dict(counted=flags(n)) | known)


PLAIN, FULL, HEATED = "everything False", "everything True", "a temperature per row"
OF_A_ROW = {PLAIN: {}, FULL: dict(everything=True), HEATED: dict(per_row=True)}


class Variants(NamedTuple):
    """What is compiled."""

    dtypes: list[torch.dtype]
    rows: list[tuple[float, str]]  # softcap, and a name of those above
    kinds: list[int]  # of KL
    modes: list[int]  # of aggregation


DTYPES, CAPS = [torch.bfloat16, torch.float32, torch.float16], [PAPER.softcap, 30.0]
ALL = Variants(DTYPES, [*product(CAPS, OF_A_ROW)], [0, 1, 2], [*range(5)])
EXTREMES = Variants(DTYPES[:2], [(CAPS[0], PLAIN), (CAPS[1], FULL), (CAPS[1], HEATED)], [2], [4])


def compile_sets(compiled: Compiled, variants: Variants) -> None:
    for softcap, name in variants.rows:
        compiled.variant = f"sets, softcap {softcap}, {name}"
        one_pass_over_sets(softcap=softcap, kl=2, **OF_A_ROW[name])
        several_labels(None, softcap=softcap, of_sets=True, **OF_A_ROW[name])
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
        for softcap, name in variants.rows:
            compiled.variant = f"{dtype}, softcap {softcap}, {name}"
            one_row_pass(dtype, softcap=softcap, kl=2, **OF_A_ROW[name])
            one_row_gradient(dtype, softcap=softcap, **OF_A_ROW[name])
            compiled.variant = f"several labels, {dtype}, softcap {softcap}, {name}"
            several_labels(dtype, softcap=softcap, **OF_A_ROW[name])
            compiled.variant = f"sample, {dtype}, softcap {softcap}, {name}"
            one_sample(dtype, softcap=softcap, **OF_A_ROW[name])
        compiled.variant = f"{dtype}"
        one_row_statistics(dtype)
        launch("scale_", x=torch.empty(N, V, dtype=dtype), factor=f32(1))
    for kl in variants.kinds:
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
        one_row_gradient(torch.bfloat16, everything=True, **of_rows)
        several_labels(torch.bfloat16, count=16, everything=True, **of_rows)
        one_sample(torch.bfloat16, count=16, everything=True, **of_rows)
        one_search(n=n, value=value)
        one_token_loss(everything=True, kl=2, n=n, value=value)
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
    }


def nvidia_accesses_in_loops(sass: str) -> Iterator[str]:
    """Loads, stores and exchanges of innermost loops, but for loops over rows, which read flags."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", sass)
    instructions = [instruction for _, instruction in lines]
    places = {int(at, 16): number for number, (at, _) in enumerate(lines)}
    loops = nvidia_loops(instructions, places)
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
    compiled, variants = Compiled(), EXTREMES if "extremes" in sys.argv else ALL
    compile_variants(compiled, variants)
    again = compile_other_values(compiled, variants)
    report = [
        {"kernel": name, "variant": variant, **resources(kernel, name in OF_ROWS)}
        for name, variant, kernel in compiled.kernels.values()
    ]
    print(json.dumps({"kernels": report, "compiled_again": again}))


if __name__ == "__main__":
    main()
