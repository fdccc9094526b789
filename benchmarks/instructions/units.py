"""The unit of a multiprocessor that executes an instruction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .sass import Instruction

# By opcode without modifiers; what is not listed is ALU.
UNITS = {
    "exp": "MUFU",
    "FMA": "FFMA FMUL FADD FFMA2 FMUL2 FADD2 IMAD HFMA2 HMUL2",
    "conversion": "F2F F2FP F2I I2F I2FP FRND HADD2",
    "shared": "LDS STS LDSM STSM ATOMS",
    "global": "LDG STG LD ST LDGSTS CCTL",
    "control": "BRA BRX BRXU JMP EXIT RET CALL BSSY BSYNC BREAK BMOV WARPSYNC COLLECTIVE "
    "ENDCOLLECTIVE SYNCS BAR DEPBAR LDGDEPBAR MEMBAR FENCE ERRBAR YIELD NANOSLEEP NOP VOTE SHFL "
    "ELECT S2R CS2R LDC",
}
ALU, UNIFORM = "ALU", "uniform"
NAMES = ("exp", "FMA", ALU, "conversion", "shared", "global", UNIFORM, "control")
UNIT_OF = {opcode: unit for unit, opcodes in UNITS.items() for opcode in opcodes.split()}


def unit(instruction: Instruction) -> str:
    """The name of its unit; MUFU stands for the unit of the exp, which has other functions too."""
    name = instruction.name
    if name in UNIT_OF:
        return UNIT_OF[name]
    return UNIFORM if name.startswith("U") or name in ("R2UR", "S2UR", "LDCU") else ALU


def by_unit(instructions: Iterable[Instruction]) -> Counter[str]:
    return Counter(map(unit, instructions))
