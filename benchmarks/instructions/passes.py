"""The passes over a row, found among the loops of a kernel, and their instructions per element.

Of the loops of a pass the one with the most elements per iteration counts; the others run the rest
of a row. Work outside the loops is not counted: it is done once per row.
"""

from __future__ import annotations

from dataclasses import dataclass

from .paths import Iteration, Releases, executed_paths
from .sass import Instruction
from .units import NAMES, by_unit

FIRST, SECOND = "first pass", "second pass"
ENTROPY, LOG_PROBS = "second pass, entropy gradient", "log-probs alone"
PASSES = (FIRST, SECOND, ENTROPY, LOG_PROBS)
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Variant:
    """A row kernel as compiled."""

    kernel: str  # "CUDA cluster", "CUDA generic" or "Triton"
    arch: str
    dtype: str
    softcap: bool

    def __str__(self) -> str:
        return f"{self.kernel}, {self.dtype}" + ", soft cap" * self.softcap

    @property
    def exps(self) -> int:
        """Per element; a soft cap is a tanh, which takes one more."""
        return 2 if self.softcap else 1

    def elements(self, path: Iteration) -> int:
        """Elements of a thread in one iteration, by its 16-byte accesses and by its exps."""
        elements = (path.stores or path.loads) * 16 // BYTES[self.dtype]
        # The first pass has some more, which move its sums to a new maximum.
        if not 0 <= path.exps - self.exps * elements <= elements:
            raise ValueError(f"{self}: {path.exps} exps for {elements} elements")
        return elements


@dataclass(frozen=True)
class Count:
    """Instructions of one pass."""

    variant: Variant
    of: str
    elements: int
    path: Iteration

    @property
    def issued(self) -> float:
        """Per element."""
        return len(self.path.instructions) / self.elements

    def __str__(self) -> str:
        return f"{self.variant}, {self.of}"

    def record(self) -> dict[str, object]:
        units = by_unit(self.path.instructions)
        return {
            **vars(self.variant),
            "pass": self.of,
            "elements": self.elements,
            "issued": self.issued,
            **{name: units[name] / self.elements for name in NAMES},
        }


def count(variant: Variant, code: list[Instruction]) -> list[Count]:
    """The counts of every pass that the kernel has."""
    kept = [path for path in executed_paths(code, Releases.FEWEST) if not path.stores]
    released = list(executed_paths(code, Releases.MOST))
    alone = [path for path in released if not path.stores]
    found = {  # the two may have loops of their own
        FIRST: [path for path in kept if not path.releases] or kept,
        LOG_PROBS: [path for path in alone if path.releases] or alone,
    }
    second = {path: _arithmetic(variant, path) for path in released if path.stores}
    if second:
        least, most = min(second.values()), max(second.values())
        found[SECOND] = [path for path, work in second.items() if work < least + 0.5]
        if most >= least + 0.5:
            found[ENTROPY] = [path for path, work in second.items() if work > most - 0.5]
    longest = {name: _longest(variant, paths) for name, paths in found.items()}
    return [Count(variant, name, variant.elements(path), path) for name, path in longest.items()]


def _longest(variant: Variant, paths: list[Iteration]) -> Iteration:
    return max(paths, key=lambda path: (variant.elements(path), -len(path.instructions)))


def _arithmetic(variant: Variant, path: Iteration) -> float:
    """Floating-point operations per element, of which the entropy gradient has more."""
    names = ("FFMA", "FMUL", "FADD", "FMNMX")
    return sum(i.name in names for i in path.instructions) / variant.elements(path)
