"""Machine code of NVIDIA GPUs (SASS), as cuobjdump lists it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

LINE = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z]\w*(?:\.\w+)*)\s*(.*?)\s*;"
    r"(?:\s*/\* 0x[0-9a-f]{16} \*/\s*/\* 0x([0-9a-f]{16}) \*/)?"
)

REGISTER = re.compile(r"\bR(\d+)")
CONSTANTS = re.compile(r"^\.nv\.constant2\.(\S+)\n((?:(?:0x[0-9a-f]+ *)+\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Instruction:
    """One instruction; ``predicate`` is empty where it is unconditional."""

    address: int
    predicate: str
    opcode: str
    operands: str
    # What the compiler says of its timing: cycles until the next instruction, and the scoreboards
    # that it waits for, and that its result and its reading of operands release; 7 is none.
    stall: int = 1
    waits: int = 0
    writes: int = 7
    reads: int = 7

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
        Instruction(int(at, 16), guard, opcode, operands, *(_control(high) if high else ()))
        for at, guard, opcode, operands, high in LINE.findall(listing)
    ]


def _control(high: str) -> tuple[int, int, int, int]:
    """The control code in the upper half of an encoding, the same since Volta."""
    bits = int(high, 16) >> 41
    return bits & 15, bits >> 11 & 63, bits >> 5 & 7, bits >> 8 & 7


def cuobjdump() -> str | None:
    """The one on the path, or the one in the package of Triton."""
    if found := shutil.which("cuobjdump"):
        return found
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    brought = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump"
    return str(brought) if brought.exists() else None


@dataclass(frozen=True)
class Code:
    """A kernel.

    Attributes:
        constants: the banks of constant memory that came with it, as {number: {offset: content}}.
    """

    instructions: list[Instruction]
    constants: dict[int, dict[int, bytes]]

    @property
    def registers(self) -> int:
        return 1 + max(int(n) for i in self.instructions for n in REGISTER.findall(i.operands))


def disassemble(binary: Path, *options: str) -> dict[str, Code]:
    """Every kernel in a library or a cubin, by mangled name."""
    tool = cuobjdump()
    if tool is None:
        raise FileNotFoundError("needs cuobjdump, from the CUDA toolkit or the package of Triton")

    def run(what: str) -> str:
        command = [tool, what, *options, str(binary)]
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
