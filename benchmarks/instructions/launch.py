"""The launch of a row pass: how a row is distributed, and what each warp of a block executes."""

from __future__ import annotations

import functools
import os
import shlex
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..emulation import CUDA_ON_HOST
from .machine import Machine
from .sass import Code, Instruction

ROOT = Path(__file__).parents[2]
DTYPE = {"float16": 5, "bfloat16": 6, "float32": 7}  # DType of params.h
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
SHARED = 228 << 10  # bytes of a multiprocessor of sm_90 and sm_100
# Where constant memory has the parameters, and what the cluster kernel reads beside them: the
# number of blocks, of clusters, and of blocks in a cluster.
PARAMETERS = {"sm_80": 0x160, "sm_90": 0x210, "sm_100": 0x380}
LAUNCH = {
    "sm_80": {"blocks": 0xC},
    "sm_90": {"blocks": 0xC, "clusters": 0x140, "cluster": 0x188},
    "sm_100": {"blocks": 0x370, "clusters": 0x36C, "cluster": 0x2CC},
}
# The stack and the descriptor of global memory.
ZEROS = {0x28: bytes(4), 0x118: bytes(8), 0x208: bytes(8), 0x37C: bytes(4), 0x358: bytes(8)}
LOG_PROBS, LABELS = 8, 7  # regions of memory, by launch_params.cpp
# A word of every region: logits are alike, rows are counted, advantages are 1 and weights 0.5.
WORDS = dict.fromkeys(range(11), 0) | {
    0: 0x3F803F80,
    1: 0x3F803F80,
    3: 0x3FE00000,
    4: 0x3F800000,
    6: 0x01010101,
}
LABEL = 11  # in another lane

ROWS = (1, 2)  # regions of logits and gradient
# Of every instruction: the value of its predicate, and the address of a barrier in shared memory or
# of an access to global memory.
Trace = list[tuple[Instruction, bool, int]]


@dataclass(frozen=True)
class Plan:
    """How a row is distributed."""

    cluster: int  # blocks; 0 for the generic kernel
    warps: int  # of a block that compute


@functools.cache
def _program() -> Path:
    program = Path(tempfile.mkdtemp()) / "launch_params"
    includes = ("-I", ROOT / "csrc", "-I", CUDA_ON_HOST)
    sources = Path(__file__).with_name("launch_params.cpp"), CUDA_ON_HOST / "runtime.cpp"
    nvcc = shlex.split(os.environ.get("NVCC", "nvcc"))
    command = [*nvcc, "-std=c++20", "--cudart=none", *includes, "-o", program, *sources]
    subprocess.run(command, check=True)
    return program


@functools.cache
def launch(
    vocabulary: int, dtype: str, arch: str, gradient: bool = True, rows: int = 8
) -> tuple[Plan, bytes]:
    """The distribution over the blocks of a GPU, and the kernel's parameters."""
    # As in row_pass.cu.
    threads = 1 << (max(32, min(1024, vocabulary * BYTES[dtype] // 256)) - 1).bit_length()
    values = (DTYPE[dtype], vocabulary, rows, int(gradient), int(arch[3:]) // 10, SHARED, threads)
    output = subprocess.check_output([_program(), *map(str, values)])
    cluster, warps = struct.unpack("<2i", output[:8])
    return Plan(cluster, warps), output[8:]


def traces(
    code: Code, arch: str, plan: Plan, parameters: bytes, memory: dict[int, int] | None = None
) -> list[Trace]:
    """Of every warp of the first block, by its first lane; the cluster kernel's last one loads."""
    word = lambda number: number.to_bytes(4, "little")  # noqa: E731
    values = {"blocks": max(plan.cluster, 1), "clusters": 1, "cluster": plan.cluster}
    bank = {PARAMETERS[arch]: parameters} | ZEROS
    bank |= {place: word(values[name]) for name, place in LAUNCH[arch].items()}
    memory = {} if memory is None else memory
    memory |= {((LABELS << 32) + 8 * row) // 4: LABEL for row in range(64)}
    machines = []
    for warp in range(plan.warps + (plan.cluster > 0)):
        special = {"SR_TID.X": 32 * warp, "SR_CTAID.X": 0, "SR_CgaCtaId": 0, "SR_CgaSize": 0}
        banks = {0: bank, **code.constants}
        machines.append(Machine(code.instructions, banks, special, WORDS, memory=memory).run())
    result: list[Trace] = [[] for _ in machines]
    running = list(zip(machines, result, strict=True))
    while running:
        for machine, trace in [*running]:  # each to the next barrier
            for step in machine:
                trace.append(step)
                if step[0].name == "BAR":
                    break
            else:
                running.remove((machine, trace))
    return result
