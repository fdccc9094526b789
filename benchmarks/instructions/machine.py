"""A machine that executes SASS as one lane of a warp: the executed path of a kernel, without rules.

All lanes are taken to be alike: a shuffle or a reduction returns the lane's own value, a ballot is
full, a wait succeeds at once. Branches for diverged warps are not taken. Known are the instructions
of the row kernels; another one, as of a spill, raises `NotImplementedError`.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .sass import Instruction

WORD = 0xFFFFFFFF
COMPARE = {
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b and a == a and b == b,
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "NUM": lambda a, b: a == a and b == b,
    "NAN": lambda a, b: a != a or b != b,
}
# Executed, but without effect on the path.
NOTHING = frozenset(
    "NOP YIELD BSSY BSYNC BREAK BMOV WARPSYNC BAR MEMBAR ERRBAR CGAERRBAR FENCE CCTL DEPBAR "  # noqa: SIM905
    "UCGABAR_ARV UCGABAR_WAIT UBLKCP ENDCOLLECTIVE".split()
)

# On uniform registers, and of lanes that are alike.
SAME = {f"U{name}": name for name in "SHF MOV SEL LEA LOP3 IADD3 IMAD ISETP PRMT PLOP3".split()}  # noqa: SIM905
SAME |= dict.fromkeys(("R2UR", "REDUX", "CREDUX"), "MOV") | dict.fromkeys(("ULDC", "LDCU"), "LDC")


def to_float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def float_bits(value: float) -> int:
    try:
        return struct.unpack("<I", struct.pack("<f", value))[0]
    except OverflowError:
        return 0x7F800000 if value > 0 else 0xFF800000


def to_double(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


def double_bits(value: float) -> int:
    return struct.unpack("<Q", struct.pack("<d", value))[0]


def signed(value: int, bits: int = 32) -> int:
    value &= (1 << bits) - 1
    return value - (value >> (bits - 1) << bits)


def power(x: float) -> float:
    return 2.0**x if x < 1024 else math.inf


def inverse(x: float) -> float:
    return 1 / x if x else math.copysign(math.inf, x)


def logic(table: int, a: int, b: int, c: int) -> int:
    """By a truth table of three bits."""
    result = 0
    for case in range(8):
        if table >> case & 1:
            x = a if case & 4 else ~a
            y = b if case & 2 else ~b
            result |= x & y & (c if case & 1 else ~c)
    return result


def permuted(low: int, table: int, high: int) -> int:
    content = (low | high << 32).to_bytes(8, "little")
    picked = bytes(content[table >> 4 * i & 7] for i in range(4))
    return int.from_bytes(picked, "little")


INTEGERS: dict[str, Callable[..., int]] = {
    "MOV": lambda a, *_: a,
    "VIADD": lambda a, b: a + b,
    "IABS": lambda a: abs(signed(a)),
    "BREV": lambda a: int(f"{a:032b}"[::-1], 2),
    "PRMT": permuted,
}
FLOATS: dict[str, Callable[..., float]] = {
    "ADD": lambda a, b: a + b,
    "MUL": lambda a, b: a * b,
    "FMA": lambda a, b, c: a * b + c,
}
FUNCTIONS = {"EX2": power, "RCP": inverse, "LG2": math.log2, "RSQ": lambda x: x**-0.5}


@dataclass
class Machine:
    """A lane.

    Args:
        constants: the banks of constant memory, by number, as {offset: byte string}.
        special: values of special registers.
        regions: the 32-bit word that memory has where nothing was stored, by the upper half of
            the address; shared memory is region 0.
    """

    code: list[Instruction]
    constants: dict[int, dict[int, bytes]]
    special: dict[str, int]
    regions: dict[int, int]
    registers: dict[str, int] = field(default_factory=dict)
    memory: dict[int, int] = field(default_factory=dict)

    def run(self, most: int = 10_000_000) -> Iterator[tuple[Instruction, bool, int]]:
        """The executed instructions, each with its predicate's value, and the address of a barrier
        or of an access to global memory."""
        at = {one.address: number for number, one in enumerate(self.code)}
        parsed = [_operands(one) for one in self.code]
        position = 0
        for _ in range(most):
            one = self.code[position]
            active = not one.predicate or self.predicate(one.predicate)
            addressed = active and one.name in ("SYNCS", "LDG", "STG")
            yield one, active, self.address(one.operands) if addressed else 0
            position += 1
            if not active or one.name in NOTHING:
                continue
            if one.name == "EXIT":
                return
            if one.name in ("BRA", "CALL", "RET"):
                target = self.branch(one, parsed[position - 1])
                if target is not None:
                    position = at[target]
                continue
            try:
                self.execute(one, parsed[position - 1])
            except (KeyError, ValueError, IndexError, struct.error) as error:
                raise NotImplementedError(f"{one}: {error!r}") from error
        raise RuntimeError(f"no end after {most} instructions")

    # Operands.

    def predicate(self, name: str) -> bool:
        if name.startswith("!"):
            return not self.predicate(name[1:])
        return name in ("PT", "UPT") or bool(self.registers.get(name, 0))

    def word(self, name: str, offset: int = 0, carry: bool = False) -> int:
        """An integer operand; with carry, a negative one is 2^32 minus its value."""
        sign = name[0] if name[0] in "-~" and not name.startswith("-0x") else ""
        bare = name.removeprefix(sign)
        if bare[0] == "|":
            bare = bare.strip("|")
        if bare[0] in "RU" and bare not in ("RZ", "URZ"):
            value = self.registers.get(_next(bare, offset), 0)
        elif bare in ("RZ", "URZ", "SRZ"):
            value = 0
        elif bare.startswith("c["):
            value = self.constant(bare, offset)
        elif re.fullmatch(r"-?0x[0-9a-f]+", bare) or bare == "0":
            value = (int(bare, 16) >> 32 * offset) & WORD
        else:
            value = float_bits(_number(bare))
        if sign == "~":
            value ^= WORD
        if sign == "-":
            value = (1 << 32) - value
        return value if carry else value & WORD

    def pair(self, name: str) -> int:
        bare = name.removeprefix("-")
        value = self.word(bare) | self.word(bare, 1) << 32
        return -value if name.startswith("-") else value

    def number(self, name: str, double: bool = False) -> float:
        """A floating-point operand."""
        bare = name.lstrip("-").strip("|")
        if bare in ("RZ", "URZ"):
            value = 0.0
        elif bare[0] in "RUc":
            value = to_double(self.pair(bare)) if double else to_float(self.word(bare))
        else:
            value = _number(bare)
        if "|" in name:
            value = abs(value)
        return -value if name.startswith("-") else value

    def constant(self, name: str, offset: int) -> int:
        bank, base, place = re.fullmatch(
            r"c\[0x(\w+)\]\[(?:(U?R\d+)\+?)?(-?0x\w+)?\]", name
        ).groups()
        start = int(place or "0", 16) + (signed(self.registers[base]) if base else 0) + 4 * offset
        for first, content in self.constants[int(bank, 16)].items():
            if first <= start < first + len(content):
                return int.from_bytes(content[start - first :][:4], "little")
        raise KeyError(name)

    def address(self, text: str) -> int:
        """Of a memory operand: its region above 32 bits, or a place in shared memory."""
        inside = re.findall(r"(?<!desc)\[([^\]]*)\]", text)[-1]
        total, region = 0, False
        for part in re.findall(r"-?[^+]+", inside):
            if ".64" in part and not part.endswith("URZ"):
                total += self.pair(part.split(".")[0])
                region = True
            elif part.startswith("-0x") or part.startswith("0x"):
                total += int(part, 16)
            else:
                total += self.word(part.split(".")[0])
        return total if region and total >> 32 else total & 0xFFFFFF

    # Results.

    def put(self, name: str, value: int, offset: int = 0) -> None:
        if name not in ("RZ", "URZ", "PT", "UPT"):
            self.registers[_next(name, offset)] = value & WORD

    def put_pair(self, name: str, value: int) -> None:
        self.put(name, value)
        self.put(name, value >> 32, 1)

    def flag(self, name: str, value: object) -> None:
        if name not in ("PT", "UPT"):
            self.registers[name] = int(bool(value))

    # Instructions.

    def branch(self, one: Instruction, operands: list[str]) -> int | None:
        words = one.opcode.split(".")
        if "DIV" in words or "CONV" in words:
            return None
        if one.name == "RET":
            return self.word(operands[0].split()[0])
        if len(operands) > 1 and not self.predicate(operands[0]):
            return None
        return int(operands[-1], 16)

    def execute(self, one: Instruction, ops: list[str]) -> None:
        name, *modifiers = one.opcode.split(".")
        name = SAME.get(name, name)
        for known in (self.integers, self.floats, self.others):
            if known(name, modifiers, ops):
                return
        raise NotImplementedError(str(one))

    def integers(self, name: str, mods: list[str], ops: list[str]) -> bool:
        word = self.word
        if name in INTEGERS:
            self.put(ops[0], INTEGERS[name](*map(word, ops[1:])))
        elif name in ("VIADDMNMX", "VIMNMX", "IMNMX"):
            # Newer ones have two more predicates.
            values = [word(o) for o in ops[1:-1] if not re.fullmatch(r"!?U?P[T\d]", o)]
            if name == "VIADDMNMX":
                values = [(values[0] + values[1]) & WORD, values[2]]
            view = (lambda x: x) if "U32" in mods else signed
            pick = min if self.predicate(ops[-1]) else max
            self.put(ops[0], pick(map(view, values[:2])))
        elif name == "IADD3":
            dest, outs, sources, ins = _carries(ops)
            total = sum(word(each, carry=True) for each in sources) + self.carry(mods, ins)
            self.put(dest, total)
            for place, out in enumerate(outs, 32):
                self.flag(out, total >> place & 1)
        elif name == "IMAD":
            self.multiply_add(mods, ops)
        elif name == "LOP3":
            flags = ops[:1] if re.fullmatch(r"U?P(T|\d)", ops[0]) else []
            dest, *sources, table = ops[len(flags) : len(flags) + 5]
            result = logic(int(table, 16), *map(word, sources)) & WORD
            self.put(dest, result)
            for each in flags:
                self.flag(each, result)
        elif name == "PLOP3":
            a, b, c = map(self.predicate, ops[2:5])
            for out, table in zip(ops[:2], ops[5:7], strict=True):
                self.flag(out, int(table, 16) >> (4 * a + 2 * b + c) & 1)
        elif name == "ISETP":
            self.compare_integers(mods, ops)
        elif name in ("SEL", "FSEL"):
            chosen = ops[1] if self.predicate(ops[3]) else ops[2]
            if name == "SEL":
                self.put(ops[0], word(chosen))
            else:  # without a change of a NaN's bits
                magnitude = word(chosen.lstrip("-")) & (0x7FFFFFFF if "|" in chosen else WORD)
                self.put(ops[0], magnitude ^ chosen.startswith("-") << 31)
        elif name == "SHF":
            low, by, high = map(word, ops[1:4])
            wide = low | high << 32
            if "L" in mods:
                value = wide << by >> 32 if "HI" in mods else low << by
            elif "HI" in mods:  # the upper word alone
                value = (signed(high) if "S32" in mods else high) >> min(by, 32)
            else:
                value = (signed(wide, 64) if {"S32", "S64"} & {*mods} else wide) >> by
            self.put(ops[0], value)
        elif name == "LEA":
            self.shift_add(mods, ops)
        elif name == "FLO":
            highest = word(ops[1]).bit_length() - 1
            self.put(ops[0], 31 - highest if "SH" in mods else highest)
        else:
            return False
        return True

    def carry(self, mods: list[str], ins: list[str]) -> int:
        return sum(map(self.predicate, ins)) if "X" in mods else 0

    def multiply_add(self, mods: list[str], ops: list[str]) -> None:
        dest, outs, sources, ins = _carries(ops)
        a, b, c = sources
        view = (lambda x: x) if "U32" in mods else signed
        if "WIDE" in mods or "HI" in mods:
            wide = 0 if c in ("RZ", "URZ") else self.pair(c)
            total = view(self.word(a)) * view(self.word(b)) + wide
            carry = total >> 64 & 1
            if "WIDE" in mods:
                self.put_pair(dest, total)
            else:
                self.put(dest, total >> 32)
        else:
            total = self.word(a) * self.word(b) + self.word(c, carry=True) + self.carry(mods, ins)
            carry = total >> 32 & 1
            self.put(dest, total)
        for out in outs:
            self.flag(out, carry)

    def shift_add(self, mods: list[str], ops: list[str]) -> None:
        dest, outs, sources, ins = _carries(ops)
        low, other, by = self.word(sources[0]), self.word(sources[1]), int(sources[-1], 16)
        if "HI" in mods:
            wide = signed(low) if "SX32" in mods else low | self.word(sources[2]) << 32
            low = wide >> (32 - by)
        else:
            low <<= by
        total = (low & WORD) + other + self.carry(mods, ins)
        self.put(dest, total)
        for out in outs:
            self.flag(out, total >> 32)

    def compare_integers(self, mods: list[str], ops: list[str]) -> None:
        kind = mods[0]
        view = (lambda x: x) if "U32" in mods else signed
        a, b = view(self.word(ops[2])), view(self.word(ops[3]))
        result = COMPARE[kind](a, b)
        if "EX" in mods:
            below = self.predicate(ops[5])
            if kind == "NE":
                result = result or below
            elif kind == "EQ":
                result = result and below
            else:
                result = below if a == b else COMPARE[kind[0] + "T"](a, b)
        self.combine(mods, ops, result)

    def combine(self, mods: list[str], ops: list[str], result: bool) -> None:
        """Both predicates of a comparison: that of the result, and that of its opposite."""
        with_other = self.predicate(ops[4])
        both = (lambda x: x or with_other) if "OR" in mods else (lambda x: x and with_other)
        self.flag(ops[0], both(result))
        self.flag(ops[1], both(not result))

    def floats(self, name: str, mods: list[str], ops: list[str]) -> bool:
        if name[0] == "D" and name[1:] in FLOATS:
            value = FLOATS[name[1:]](*(self.number(each, True) for each in ops[1:]))
            self.put_pair(ops[0], double_bits(value))
        elif name[0] == "F" and name[1:] in FLOATS:
            value = FLOATS[name[1:]](*(self.number(each) for each in ops[1:]))
            self.put(ops[0], float_bits(value))
        elif name in ("FSETP", "DSETP"):
            a, b = (self.number(each, name == "DSETP") for each in ops[2:4])
            kind = mods[0]
            unordered = kind.endswith("U") and kind != "NUM"
            result = COMPARE[kind.removesuffix("U") if unordered else kind](a, b)
            self.combine(mods, ops, result or (unordered and (a != a or b != b)))
        elif name in ("FMNMX", "FMNMX3"):
            *sources, least = ops[1:]
            pick = min if self.predicate(least) else max
            self.put(ops[0], float_bits(pick(map(self.number, sources))))
        elif name in ("HMNMX2", "VHMNMX"):
            *sources, least = ops[1:]
            words = [self.word(each) for each in sources]
            pick = min if self.predicate(least) else max
            # As floats, of which a bfloat16 is the upper half.
            low = pick(words, key=lambda w: to_float(w << 16 & WORD)) & 0xFFFF
            high = pick(words, key=lambda w: to_float(w & 0xFFFF0000)) & 0xFFFF0000
            self.put(ops[0], high | low)
        elif name == "MUFU":
            if mods[0] == "RCP64H":
                value = inverse(to_double(self.word(ops[1]) << 32))
                self.put(ops[0], double_bits(value) >> 32)
            else:
                self.put(ops[0], float_bits(FUNCTIONS[mods[0]](self.number(ops[1]))))
        elif name == "F2F" and mods[:1] == ["F64"]:
            half = mods[1] == "BF16"
            value = to_float(self.word(ops[1]) << 16 & WORD) if half else self.number(ops[1])
            self.put_pair(ops[0], double_bits(value))
        elif name == "F2F" and mods[:2] == ["F32", "F64"]:
            self.put(ops[0], float_bits(self.number(ops[1], True)))
        elif name == "F2FP":
            high, low = (float_bits(self.number(each)) >> 16 for each in ops[1:3])
            self.put(ops[0], high << 16 | low)
        elif name == "HFMA2":
            high, low = (struct.unpack("<H", struct.pack("<e", _number(o)))[0] for o in ops[3:5])
            if ops[1:3] != ["-RZ", "RZ"]:
                return False
            self.put(ops[0], high << 16 | low)
        elif name == "FRND":
            self.put(ops[0], float_bits(float(round(self.number(ops[1])))))
        elif name == "I2F":
            value = self.pair(ops[1]) if "U64" in mods else self.word(ops[1])
            value = value if any(each[0] == "U" for each in mods) else signed(value)
            bits = float_bits(value)
            self.put(ops[0], bits + (to_float(bits) < value) if "RP" in mods else bits)
        elif name == "F2I":
            put = self.put_pair if "U64" in mods else self.put
            put(ops[0], int(self.number(ops[1])))
        else:
            return False
        return True

    def others(self, name: str, mods: list[str], ops: list[str]) -> bool:
        if name == "SHFL":
            self.flag(ops[0], True)
            self.put(ops[1], self.word(ops[2]))
        elif name == "VOTE":
            self.put(ops[0], WORD * self.predicate(ops[2]))
            self.flag(ops[1], self.predicate(ops[2]))
        elif name == "P2R":  # predicates into the bits of a byte
            flags = sum(self.predicate(f"P{i}") << i for i in range(7))
            mask = self.word(ops[-1])
            self.put(ops[0], flags & mask | self.word(ops[2]) & ~mask)
        elif name == "ELECT":
            self.flag(ops[0], True)
        elif name in ("S2R", "S2UR", "CS2R"):
            self.put(ops[0], 0 if ops[1] == "SRZ" else self.special[ops[1]])
            if name == "CS2R" and "32" not in mods:
                self.put(ops[0], 0, 1)
        elif name == "LDC":
            for i in range(_words(mods)):
                self.put(ops[0], self.word(ops[1], i) & (0xFF if "U8" in mods else WORD), i)
        elif name in ("LDS", "LDG"):
            address = self.address(ops[1])
            for i in range(_words(mods)):
                value = self.memory.get(address // 4 + i, self.regions[address >> 32])
                value >>= address % 4 * 8
                self.put(ops[0], value & {"U8": 0xFF, "U16": 0xFFFF}.get(_size(mods), WORD), i)
        elif name in ("STS", "STG", "STAS"):
            # STAS takes a pair of addresses: of the value, and of a barrier.
            address = self.address(ops[0].replace(".64", "") if name == "STAS" else ops[0])
            for i in range(_words(mods)):
                value = 0 if ops[1] == "RZ" else self.word(ops[1], i)
                self.memory[address // 4 + i] = value
        elif name == "SYNCS":
            if mods[0] == "PHASECHK":
                self.flag(ops[0], True)
        else:
            return False
        return True


def _operands(one: Instruction) -> list[str]:
    text = one.operands.replace(".reuse", "")
    return [each.strip() for each in text.split(", ")] if text else []


def _next(name: str, offset: int) -> str:
    if not offset:
        return name
    letters, number = re.fullmatch(r"(U?R)(\d+)", name).groups()
    return f"{letters}{int(number) + offset}"


def _carries(ops: list[str]) -> tuple[str, list[str], list[str], list[str]]:
    """Destination, carries that are set, sources, and carries that are added."""
    flags = [bool(re.fullmatch(r"!?U?P(T|\d)", each)) for each in ops]
    first = next(i for i in range(1, len(ops)) if not flags[i])
    last = next(i for i in reversed(range(len(ops))) if not flags[i])
    return ops[0], ops[1:first], ops[first : last + 1], ops[last + 1 :]


def _size(mods: list[str]) -> str:
    return next((each for each in mods if each in ("U8", "S8", "U16", "S16", "64", "128")), "32")


def _words(mods: list[str]) -> int:
    return {"64": 2, "128": 4}.get(_size(mods), 1)


def _number(text: str) -> float:
    """A floating-point immediate."""
    text = text.strip().lstrip("+")
    if "QNAN" in text or "SNAN" in text:
        return math.nan
    if text.endswith("INF"):
        return -math.inf if text.startswith("-") else math.inf
    return float(text)
