"""Machine code of NVIDIA GPUs (SASS), as cuobjdump lists it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z]\w*(?:\.\w+)*)\s*(.*?)\s*;")
CONSTANTS = re.compile(r"^\.nv\.constant2\.(\S+)\n((?:(?:0x[0-9a-f]+ *)+\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Instruction:
    """One instruction; ``predicate`` is empty where it is unconditional."""

    address: int
    predicate: str
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.split(".")[0]

    @property
    def target(self) -> int | None:
        """Where a branch goes."""
        found = re.search(r"\b0x([0-9a-f]+)$", self.operands) if self.name == "BRA" else None
        return int(found[1], 16) if found else None

    def __str__(self) -> str:
        guard = f"@{self.predicate}" if self.predicate else ""
        return f"{self.address:04x} {guard:>5} {self.opcode} {self.operands}"


def parse(listing: str) -> list[Instruction]:
    """The instructions of one kernel."""
    return [
        Instruction(int(at, 16), guard, opcode, operands)
        for at, guard, opcode, operands in LINE.findall(listing)
    ]


def cuobjdump() -> str | None:
    """The one on the path, or the one in the package of Triton."""
    if found := shutil.which("cuobjdump"):
        return found
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    brought = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump"
    return str(brought) if brought.exists() else None


class Code(NamedTuple):
    """A kernel, with banks of constant memory as {number: {offset: content}}."""

    instructions: list[Instruction]
    constants: dict[int, dict[int, bytes]]


def disassemble(binary: Path, arch: str = "") -> dict[str, Code]:
    """Every kernel in a cubin, or in a library for an architecture, by mangled name."""
    tool = cuobjdump()
    if tool is None:
        raise FileNotFoundError("needs cuobjdump, from the CUDA toolkit or the package of Triton")

    def run(what: str) -> str:
        command = [tool, what, *(("-arch", arch) if arch else ()), str(binary)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    banks = {
        name: b"".join(int(word, 16).to_bytes(4, "little") for word in words.split())
        for name, words in CONSTANTS.findall(run("-elf"))
    }
    parts = re.split(r"Function : (\S+)", run("-sass"))[1:]
    return {
        name: Code(parse(body), {2: {0: banks[name]}} if name in banks else {})
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }
