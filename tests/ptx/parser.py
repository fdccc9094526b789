"""PTX as a table of instructions whose operands are numbers of registers.

Takes what Triton writes: one entry, registers declared by ``.reg``, one array of shared memory.
What it does not know raises :class:`UnknownError`, which names the statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

_COORDINATES = [f"%{name}.{axis}" for name in ("ctaid", "nctaid") for axis in "xyz"]
SPECIAL = {
    name: index
    for index, name in enumerate(["%tid.x", *_COORDINATES, "%ntid.x", "%laneid", "%warpid"])
}
GLOBAL, SHARED, PARAMETER = range(3)
STRONG, ACQUIRE, RELEASE, SIGNED = 1, 2, 4, 8
BLOCK, DEVICE = range(2)

_SPACES = {"global": GLOBAL, "shared": SHARED, "shared::cta": SHARED, "param": PARAMETER}
_SCOPES = {"cta": BLOCK, "gpu": DEVICE, "sys": DEVICE}
_ORDERS = {
    "weak": 0,
    "relaxed": STRONG,
    "volatile": STRONG,
    "acquire": STRONG | ACQUIRE,
    "release": STRONG | RELEASE,
    "acq_rel": STRONG | ACQUIRE | RELEASE,
}
# Of caches: no effect on results.
_HINTS = {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "L2::cache_hint", "L2::64B", "L2::128B"}
_HINTS |= {f"L1::{policy}" for policy in ("evict_first", "evict_last", "no_allocate")}
_REDUCTIONS = {"add", "min", "max", "and", "or", "xor", "exch", "cas"}

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+(\S+?)\s*\((.*?)\)(.*?)\n\{", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+\.([bufs])(\d+)\b.*?([\w$]+)$")
_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]")
_STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_ADDRESS = re.compile(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+)\s*)?\]")
_NUMBER = re.compile(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|-?(?:0[xX][0-9a-fA-F]+|\d+)U?")
_BITS = re.compile(r"([bufs]|bf)(\d+)$")


class UnknownError(Exception):
    """A statement that cannot be executed."""


class Instruction(NamedTuple):
    """Operands are numbers of registers, -1 for none. Sources of memory begin with the address."""

    operation: str
    to: tuple[int, ...]
    sources: tuple[int, ...]
    predicate: int = -1
    negated: bool = False
    target: int = -1  # of a branch
    space: int = GLOBAL
    bytes: int = 0  # of an element
    vector: int = 1
    flags: int = 0
    scope: int = DEVICE
    offset: int = 0


@dataclass
class Kernel:
    """A decoded entry. Registers are numbered, then come constants, then :data:`SPECIAL`."""

    name: str
    parameters: list[tuple[int, int]] = field(default_factory=list)  # offset and bytes of each
    code: list[Instruction] = field(default_factory=list)
    text: list[str] = field(default_factory=list)  # of each instruction
    registers: int = 0
    constants: list[int] = field(default_factory=list)

    @property
    def parameter_bytes(self) -> int:
        return max((offset + size for offset, size in self.parameters), default=0)


def parse(text: str) -> Kernel:
    """The first entry of a module."""
    text = _COMMENT.sub("", text)
    head = _ENTRY.search(text)
    if head is None:
        raise UnknownError("no .entry")
    return _Decoder(text, head).kernel


def _statements(body: str) -> Iterator[str]:
    """Labels end in a colon. Scopes and directives are left out; names of scopes do not repeat."""
    body = re.sub(r"^\s*\.(loc|section|file)\b[^\n]*$", "", body, flags=re.MULTILINE)
    body = re.sub(r"(^|[;{}])\s*([$\w]+):(?!:)", r"\1\2:;", body, flags=re.MULTILINE)
    # Braces stay where they enclose operands.
    body = re.sub(r"\{\s*(\.reg[^;]*;)", r"\1", body)
    body = re.sub(r"(;)\s*\}", r"\1", body)
    for statement in body.split(";"):
        statement = " ".join(statement.split()).lstrip("{ ")
        if statement and not statement.startswith((".reg", ".pragma", ".shared", "}")):
            yield statement


def _operands(text: str) -> list[str]:
    """Split at commas that are in no braces."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|[^,{])+", text) if part.strip()]


def _elements(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{} ").split(",")]


class _Decoder:
    def __init__(self, text: str, head: re.Match[str]) -> None:
        self.kernel = Kernel(head[1])
        self.numbers: dict[str, int] = {}  # of registers
        self.symbols = {name: 0 for _, name, _ in _SHARED.findall(text)}
        self.fixed: dict[int, int] = {}
        offset = 0
        for declared in filter(None, map(str.strip, head[2].split(","))):
            found = _PARAMETER.search(declared)
            if found is None:
                raise UnknownError(declared)
            size = int(found[2]) // 8
            offset = -(-offset // size) * size
            self.symbols[found[3]] = offset
            self.kernel.parameters.append((offset, size))
            offset += size
        body = text[head.end() : text.index("\n}", head.end())]
        labels: dict[str, int] = {}
        decoded: list[tuple[Instruction, str | None]] = []
        for statement in _statements(body):
            if statement.endswith(":"):
                labels[statement[:-1]] = len(decoded)
            else:
                decoded.append(self.decode(statement))
                self.kernel.text.append(statement)
        self.kernel.registers = len(self.numbers)
        for instruction, label in decoded:
            if label is not None:
                instruction = instruction._replace(target=labels[label])
            self.kernel.code.append(self.renumbered(instruction))

    def decode(self, statement: str) -> tuple[Instruction, str | None]:
        found = _STATEMENT.fullmatch(statement)
        if found is None:
            raise UnknownError(statement)
        negated, predicate, name, rest = found.groups()
        base = name.partition(".")[0]
        operands = _operands(rest)
        label = None
        try:
            if base == "bra":
                instruction, label = Instruction("bra", (), ()), operands[0]
            else:
                decode = getattr(self, f"_{base}", self._plain)
                instruction = decode(name, operands)
        except (IndexError, ValueError) as failure:
            raise UnknownError(statement) from failure
        if predicate is not None:
            number = self.register(predicate)
            instruction = instruction._replace(predicate=number, negated=bool(negated))
        return instruction, label

    # Operands. Constants have negative numbers until all registers are known.

    def register(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))

    def constant(self, value: int) -> int:
        if value not in self.fixed:
            self.fixed[value] = -2 - len(self.fixed)
            self.kernel.constants.append(value)
        return self.fixed[value]

    def operand(self, text: str) -> int:
        if text == "_":
            return -1
        if text in SPECIAL:
            return -(10**6) - SPECIAL[text]
        if text in self.symbols:
            return self.constant(self.symbols[text])
        if text.startswith("%") or text == "tmp":
            if "." in text or text.startswith(("%clock", "%global", "%lanemask", "%smid")):
                raise ValueError(text)
            return self.register(text)
        if not _NUMBER.fullmatch(text):
            raise ValueError(text)
        if text[:2] in ("0f", "0F", "0d", "0D"):
            return self.constant(int(text[2:], 16))
        return self.constant(int(text.rstrip("U"), 0) % 2**64)

    def operand_list(self, operands: list[str]) -> tuple[int, ...]:
        return tuple(map(self.operand, operands))

    def address(self, text: str) -> tuple[int, int]:
        """The register of an address, and what is added to it."""
        found = _ADDRESS.fullmatch(text)
        if found is None:
            raise ValueError(text)
        return self.operand(found[1]), int(found[2] or "0", 0)

    def renumbered(self, instruction: Instruction) -> Instruction:
        registers, constants = self.kernel.registers, len(self.kernel.constants)

        def final(number: int) -> int:
            if number >= -1:
                return number
            if number <= -(10**6):
                return registers + constants - number - 10**6
            return registers - 2 - number

        return instruction._replace(
            to=tuple(map(final, instruction.to)), sources=tuple(map(final, instruction.sources))
        )

    # Instructions, by the first part of their names.

    def _plain(self, name: str, operands: list[str]) -> Instruction:
        to = tuple(map(self.operand, operands[0].split("|")))
        return Instruction(name, to, self.operand_list(operands[1:]))

    def _mov(self, name: str, operands: list[str]) -> Instruction:
        to, source = operands
        size = _size(name)
        if to.startswith("{"):
            parts = _elements(to)
            if len(parts) != 2:
                raise ValueError(to)
            return Instruction(
                "unpack", self.operand_list(parts), (self.operand(source),), bytes=size
            )
        if source.startswith("{"):
            parts = _elements(source)
            if len(parts) != 2:
                raise ValueError(source)
            return Instruction(f"pack.b{8 * size}", (self.operand(to),), self.operand_list(parts))
        return self._plain(name, operands)

    def _memory(self, name: str, access: str, to: list[str], address: str, sources: list[str]):
        space = strong = 0
        scope, vector = DEVICE, 1
        rest = []
        *parts, kind = name.split(".")[1:]
        for part in parts:
            if part in _SPACES:
                space = _SPACES[part]
            elif part in _SCOPES:
                scope = _SCOPES[part]
            elif part in _ORDERS:
                strong |= _ORDERS[part]
            elif re.fullmatch(r"v[248]", part):
                vector = int(part[1])
            elif part not in _HINTS:
                rest.append(part)
        if access == "atom" and len(rest) == 1 and rest[0] in _REDUCTIONS:
            access = f"atom.{rest.pop()}.{kind}"
            strong |= STRONG
        if rest:
            raise ValueError(name)
        base, offset = self.address(address)
        return Instruction(
            access,
            self.operand_list(to),
            (base, *self.operand_list(sources)),
            space=space,
            bytes=_size(name),
            vector=vector,
            flags=strong | SIGNED * (kind[0] == "s"),
            scope=scope,
            offset=offset,
        )

    def _ld(self, name: str, operands: list[str]) -> Instruction:
        to = _elements(operands[0])
        return self._memory(name, "ld", to, operands[1], [])

    def _st(self, name: str, operands: list[str]) -> Instruction:
        return self._memory(name, "st", [], operands[0], _elements(operands[1]))

    def _atom(self, name: str, operands: list[str]) -> Instruction:
        return self._memory(name, "atom", operands[:1], operands[1], operands[2:])

    def _red(self, name: str, operands: list[str]) -> Instruction:
        return self._memory(name, "atom", ["_"], operands[0], operands[1:])

    def _fence(self, name: str, operands: list[str]) -> Instruction:
        scopes = [_SCOPES[part] for part in name.split(".")[1:] if part in _SCOPES]
        if operands or len(scopes) != 1:
            raise ValueError(name)
        return Instruction("fence", (), (), scope=scopes[0])

    def _membar(self, name: str, operands: list[str]) -> Instruction:
        scope = {"membar.cta": BLOCK, "membar.gl": DEVICE, "membar.sys": DEVICE}[name]
        return Instruction("fence", (), (), scope=scope)

    def _bar(self, name: str, operands: list[str]) -> Instruction:
        if name == "bar.warp.sync":
            return Instruction(name, (), self.operand_list(operands))
        if name not in ("bar.sync", "bar.cta.sync") or operands != ["0"]:
            raise ValueError(name)
        return Instruction("bar.sync", (), ())

    def _matrix(self, name: str, to: list[str], address: str, sources: list[str]) -> Instruction:
        found = re.fullmatch(r"(\w+)\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16", name)
        if found is None:
            raise ValueError(name)
        base, offset = self.address(address)
        registers = self.operand_list(to), (base, *self.operand_list(sources))
        return Instruction(found[1] + (found[2] or ""), *registers, space=SHARED, offset=offset)

    def _ldmatrix(self, name: str, operands: list[str]) -> Instruction:
        return self._matrix(name, _elements(operands[0]), operands[1], [])

    def _stmatrix(self, name: str, operands: list[str]) -> Instruction:
        return self._matrix(name, [], operands[0], _elements(operands[1]))

    def _createpolicy(self, name: str, operands: list[str]) -> Instruction:
        return Instruction("createpolicy", (self.operand(operands[0]),), (self.constant(0),))

    def _ret(self, name: str, operands: list[str]) -> Instruction:
        return Instruction("ret", (), ())

    _exit = _ret


def _size(name: str) -> int:
    """Bytes of the type at the end of a name."""
    kind = name.rpartition(".")[2]
    if kind == "pred":
        return 1
    found = _BITS.fullmatch(kind)
    if found is None:
        raise ValueError(name)
    return int(found[2]) // 8
