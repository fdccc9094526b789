"""Machine code of NVIDIA GPUs (SASS), as cuobjdump lists it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z]\w*(?:\.\w+)*)\s*(.*?)\s*;")


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
    return [Instruction(int(at, 16), guard, *rest) for at, guard, *rest in LINE.findall(listing)]


def cuobjdump() -> str | None:
    """The one on the path, or the one in the package of Triton."""
    if found := shutil.which("cuobjdump"):
        return found
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    brought = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump"
    return str(brought) if brought.exists() else None


def disassemble(binary: Path, *options: str) -> dict[str, list[Instruction]]:
    """The instructions of every kernel in a library or a cubin, by mangled name."""
    tool = cuobjdump()
    if tool is None:
        raise FileNotFoundError("needs cuobjdump, from the CUDA toolkit or the package of Triton")
    command = [tool, "-sass", *options, str(binary)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    parts = re.split(r"Function : (\S+)", text)[1:]
    return {name: parse(body) for name, body in zip(parts[::2], parts[1::2], strict=True)}
