"""The passes over a row, found among the loops of a kernel, and their instructions per element.

Of the loops of a pass the one with the most elements per iteration counts; the others run the rest
of a row. Work outside the loops is not counted: it is done once per row.
"""

from __future__ import annotations

from dataclasses import dataclass

from .paths import Path, Releases, executed_paths
from .sass import Instruction
from .units import by_unit

FIRST, SECOND, ENTROPY, LOG_PROBS = (
    "first pass",
    "second pass",
    "second pass, entropy gradient",
    "log-probs alone",
)
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Variant:
    """A row kernel as compiled."""

    kernel: str  # "CUDA cluster", "CUDA generic" or "Triton"
    arch: str
    dtype: str
    softcap: bool

    @property
    def exps(self) -> int:
        """Per element; a soft cap is a tanh, which takes one more."""
        return 2 if self.softcap else 1

    def elements(self, path: Path) -> int:
        """Elements of a thread in one iteration, by the 16-byte accesses and by the exps."""
        vectors = path.stores or path.loads
        elements = vectors * 16 // BYTES[self.dtype]
        # In the first pass, moving the sums to a new maximum takes one more exp per addition.
        if not 0 <= path.exps - self.exps * elements <= vectors:
            raise ValueError(f"{self}: {path.exps} exps for {elements} elements")
        return elements


@dataclass(frozen=True)
class Count:
    """Instructions of one pass."""

    variant: Variant
    of: str
    elements: int
    path: Path

    @property
    def issued(self) -> float:
        """Per element."""
        return len(self.path.instructions) / self.elements

    @property
    def units(self) -> dict[str, float]:
        """Per element and unit."""
        return {k: n / self.elements for k, n in by_unit(self.path.instructions).items()}

    def record(self) -> dict[str, object]:
        return {
            **vars(self.variant),
            "pass": self.of,
            "elements": self.elements,
            "issued": self.issued,
            "units": self.units,
        }


def count(variant: Variant, code: list[Instruction]) -> list[Count]:
    """The counts of every pass that the kernel has."""
    kept = [p for p in executed_paths(code, Releases.FEWEST) if p.exps >= 1]
    released = [p for p in executed_paths(code, Releases.MOST)]
    found = {
        FIRST: _longest(variant, [p for p in kept if not p.stores]),
        LOG_PROBS: _longest(variant, [p for p in released if not p.stores]),
    }
    second = [p for p in released if p.stores]
    if second:
        work = [_arithmetic(variant, p) for p in second]
        for name, amount in ((SECOND, min(work)), (ENTROPY, max(work))):
            mine = [p for p, w in zip(second, work, strict=True) if w == amount]
            found[name] = _longest(variant, mine)
    return [Count(variant, name, variant.elements(path), path) for name, path in found.items()]


def _longest(variant: Variant, paths: list[Path]) -> Path:
    return max(paths, key=lambda p: (variant.elements(p), -len(p.instructions)))


def _arithmetic(variant: Variant, path: Path) -> int:
    """Floating-point operations per element, of which the entropy gradient has more."""
    names = ("FFMA", "FMUL", "FADD", "FMNMX")
    total = sum(i.name in names for i in path.instructions)
    return round(total / variant.elements(path))
