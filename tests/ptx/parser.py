"""PTX as a table of instructions whose operands are numbers of registers.

Takes what Triton and nvcc write for kernels that call no function and have no local memory. What
it does not know raises :class:`UnknownError`, which names the statement.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np

GLOBAL, SHARED, PARAMETER = range(3)
STRONG, ACQUIRE, RELEASE, DEVICE, CLUSTER = 1, 2, 4, 8, 16
NOTHING, CONSTANT, THREAD, BLOCK_INDEX, GRID = 0, 1, 2, 3, 6  # of three axes the last two
RANK, CLUSTER_SIZE = 9, 10

SPECIAL = {"%tid.x": THREAD, "%cluster_ctarank": RANK, "%cluster_nctarank": CLUSTER_SIZE}
SPECIAL |= {f"%ctaid.{axis}": BLOCK_INDEX + i for i, axis in enumerate("xyz")}
SPECIAL |= {f"%nctaid.{axis}": GRID + i for i, axis in enumerate("xyz")}

_SPACES = {"global": GLOBAL, "shared": SHARED, "shared::cta": SHARED, "param": PARAMETER}
_FLAGS = {"weak": 0, "cta": 0, "cluster": CLUSTER, "gpu": DEVICE, "gl": DEVICE, "sys": DEVICE}
_FLAGS |= {"relaxed": STRONG, "volatile": STRONG, "acquire": STRONG | ACQUIRE}
_FLAGS |= {"release": STRONG | RELEASE, "acq_rel": STRONG | ACQUIRE | RELEASE}
_VECTORS = {f"{kind}{n}": n for kind in "vx" for n in (1, 2, 4)}
# Of caches, and of matrices, which have one shape: no effect on results.
_HINTS = dict.fromkeys(["ca", "cg", "cs", "L1::evict_first", "L1::evict_last"])
_HINTS |= dict.fromkeys(["L1::no_allocate", "L2::cache_hint", "sync", "aligned", "m8n8"])

# Opcodes that are executed as another, or whose modifiers say nothing that their operands do not.
_FORMS = r"""bra(.uni)? ret exit bar(rier)?(.cta)?.sync bar.warp.sync membar.(cta|gl|sys)
    mapa.shared::cluster.u32
    fence.(sc|acq_rel).(cta|cluster|gpu|sys) fence.mbarrier_init.release.cluster
    barrier.cluster.(arrive(.release)?|wait(.acquire)?).aligned cvta.to.global.u64
    mbarrier.(init|arrive(.expect_tx)?|try_wait.parity.acquire.(cta|cluster)).shared::cta.b64
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes(.L2::cache_hint)?
    st.async(.weak)?.shared::cluster.mbarrier::complete_tx::bytes(.v2)?.[bf](32|64)
    createpolicy.fractional.L2::evict_(first|last|normal|unchanged).b64"""
_FORM = re.compile("|".join(_FORMS.replace(".", r"\.").split()))
_FORMED = ["bra", "ret", "exit", "bar", "barrier", "membar", "fence", "mapa", "cvta", "mbarrier"]
_FORMED += ["cp", "createpolicy"]
_EXPECT = "mbarrier.arrive.expect_tx"
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|^\s*\.(?:loc|file)\b[^\n]*$", re.DOTALL | re.M)
_ENTRY = re.compile(r"\s+(\S+?)\s*\((.*?)\)(.*?)\{(.*)\}", re.DOTALL)  # the rest of the module
_DIRECTIVE = re.compile(r"\.(maxntid|reqntid|minnctapersm|maxnreg)\s+([\d,\s]+)")
_ARRAY = r"\.[bufs](\d+)\b[^;,]*?([\w$]+)(\[\d*\])?\s*"
_PARAMETER = re.compile(rf"\.param\s+(?:\.align\s+(\d+)\s+)?{_ARRAY}(?:,|$)")
_SHARED = re.compile(rf"\.shared\s+\.align\s+(\d+)\s+{_ARRAY};")
_STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)")
_OPERAND = re.compile(r"(?:\{[^}]*\}|[^,{])+")
_ADDRESS = re.compile(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+)\s*)?\]")
_NUMBER = re.compile(r"0[fFdD]([0-9a-fA-F]{8,16})|(-?(?:0[xX][0-9a-fA-F]+|\d+))U?")


class UnknownError(Exception):
    """A statement that cannot be executed."""


class Instruction(NamedTuple):
    """Operands are numbers of registers, -1 for none. Sources of memory begin with the address."""

    operation: str
    to: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    predicate: int = -1
    negated: bool = False
    target: int = -1  # of a branch; -1 returns
    participants: int = -1  # the mask of the lanes that take part
    space: int = GLOBAL
    bytes: int = 0  # of an element
    vector: int = 1
    flags: int = 0
    offset: int = 0


@dataclass
class Kernel:
    """A decoded entry; of each register what it holds at first, a kind and a constant."""

    name: str
    parameters: list[tuple[int, int]] = field(default_factory=list)  # offset and bytes of each
    code: list[Instruction] = field(default_factory=list)
    text: list[str] = field(default_factory=list)  # of each instruction
    initial: list[tuple[int, int]] = field(default_factory=list)
    parameter_bytes: int = 0
    shared_bytes: int = 0  # besides those that a launch asks for
    directives: dict[str, int] = field(default_factory=dict)  # such as .maxntid, of all axes
    arrays: tuple[np.ndarray, ...] = ()  # code and initial values, as the machine takes them


def parse(text: str, name: str | None = None) -> Kernel:
    """An entry of a module, the first by default."""
    variables, *entries = _split(text)
    for entry in entries:
        if (found := _ENTRY.match(entry)) and name in (None, found[1]):
            return _Decoder(*found.groups(), variables).kernel
    raise UnknownError(f"no .entry {name or ''}")


@cache
def _split(text: str) -> list[str]:
    code = re.split(r"^\s*\.section\b", text, maxsplit=1, flags=re.MULTILINE)[0]  # then debugging
    return re.split(r"\.entry\b", _COMMENT.sub("", code))


def _parts(pattern: re.Pattern[str], text: str) -> tuple[str, ...]:
    if found := pattern.fullmatch(text):
        return found.groups()
    raise ValueError(text)


def _placed(end: int, align: str, bits: str, count: str) -> tuple[int, int]:
    """Begin and end of a variable behind others; an array of unknown size is empty."""
    size = int(bits) // 8
    begin = -(-end // int(align or size)) * int(align or size)
    return begin, begin + size * (int(count[1:-1] or "0") if count else 1)


def _statements(body: str) -> Iterator[str]:
    """Labels end in a colon. Scopes and directives are left out; names of scopes do not repeat."""
    body = re.sub(r"(^|[;{}])\s*([$\w]+):(?!:)", r"\1\2:;", body, flags=re.MULTILINE)
    # Braces stay where they enclose operands.
    body = re.sub(r"(;)\s*\}", r"\1", re.sub(r"\{\s*(\.reg[^;]*;)", r"\1", body))
    for statement in body.split(";"):
        statement = " ".join(statement.split()).lstrip("{ ")
        if statement and not statement.startswith((".reg", ".pragma", ".shared", "}")):
            yield statement


class _Decoder:
    def __init__(
        self, name: str, parameters: str, directives: str, body: str, variables: str
    ) -> None:
        self.kernel = Kernel(name)
        if unknown := _DIRECTIVE.sub("", directives).strip():
            raise UnknownError(f"{name}: {unknown}")
        for directive, numbers in _DIRECTIVE.findall(directives):
            self.kernel.directives[directive] = math.prod(map(int, numbers.split(",")))
        self.numbers: dict[str, int] = {}  # of registers and constants
        self.symbols: dict[str, int] = {}
        self.labels: dict[str, int] = {}
        scopes = " ".join(re.findall(r"\.reg\s+\.\w+\s+([^;]*);", body))
        self.declared = set(re.findall(r"(?<!%)\b[a-z]\w*", scopes))
        for align, bits, symbol, count in _PARAMETER.findall(parameters):
            self.symbols[symbol], self.kernel.parameter_bytes = _placed(
                self.kernel.parameter_bytes, align, bits, count
            )
            begin = self.symbols[symbol]
            self.kernel.parameters.append((begin, self.kernel.parameter_bytes - begin))
        shared = [each for each in _SHARED.findall(variables + body) if each[2] in body]
        for align, bits, symbol, count in sorted(shared, key=lambda each: each[3] == "[]"):
            # What a launch asks for comes last, and has no size here.
            self.symbols[symbol], self.kernel.shared_bytes = _placed(
                self.kernel.shared_bytes, align, bits, count
            )
        for statement in [*_statements(body), "ret"]:
            if statement.endswith(":"):
                self.labels[statement[:-1]] = len(self.kernel.text)
            else:
                self.kernel.text.append(statement)
        for statement in self.kernel.text:
            try:
                negated, predicate, opcode, rest = _parts(_STATEMENT, statement)
                decoded = self.instruction(opcode, [x.strip() for x in _OPERAND.findall(rest)])
                results = [each for each in decoded.to if each >= 0]
                if len(set(results)) < len(results):
                    raise ValueError("one register takes two results")
                predicates = dict(predicate=self.operand(predicate), negated=bool(negated))
                self.kernel.code.append(decoded._replace(**predicates))
            except (KeyError, IndexError, ValueError) as failure:
                raise UnknownError(f"{name}: {statement}: {failure}") from failure

    def instruction(self, name: str, operands: list[str]) -> Instruction:
        base, *parts = name.split(".")
        if (base in _FORMED or parts[:1] == ["async"]) and not _FORM.fullmatch(name):
            raise ValueError("no form that is known")
        match base:
            case "bra":
                return Instruction("bra", target=self.labels[operands[0]])
            case "ret" | "exit":
                return Instruction("bra")
            case "bar" | "barrier" if parts in (["sync"], ["cta", "sync"]):
                return Instruction(f"{base}.sync", sources=self.operands(operands))
            case "fence" if parts[0] == "mbarrier_init":
                return Instruction("fence.mbarrier_init")
            case "fence" | "membar":
                return Instruction("fence", flags=_FLAGS[parts[-1]])
            case "barrier":
                return Instruction(f"barrier.cluster.{parts[1]}")
            case "mbarrier" | "cp" | "mapa":
                return self.of_cluster(base, parts, operands)
            case "st" if parts[0] == "async":
                return self.of_cluster(base, parts, operands)
            case "createpolicy":
                if not 0 < float(operands[1]) <= 1:
                    raise ValueError("the fraction is not in (0, 1]")
                return self.instruction("mov.b64", [operands[0], "0"])
            case "cvta":
                return self.instruction("mov.b64", operands)
            case "ld" | "ldmatrix" | "atom":
                return self.memory(base, parts, operands[:1], *operands[1:])
            case "st" | "stmatrix":
                return self.memory(base, parts, [], *operands)
            case "red":
                return self.memory("atom", parts, [], *operands)
        participants = -1
        if base in ("shfl", "redux", "vote", "elect") or name == "bar.warp.sync":
            participants = self.operand(operands.pop())
        elif base == "mov" and any(operand.startswith("{") for operand in operands):
            name = ("unpack." if operands[0].startswith("{") else "pack.") + parts[-1]
        elif base in ("min", "max") and len(operands) == 4:
            name = name.replace(base, f"{base}3")
        to, sources = self.operands(operands[:1]), self.operands(operands[1:])
        return Instruction(name, to, sources, participants=participants)

    def of_cluster(self, base: str, parts: list[str], operands: list[str]) -> Instruction:
        """Barriers in shared memory, what completes on them, and addresses in other blocks."""
        kinds = ("init", "arrive", "expect_tx", "try_wait", "async", "bulk")
        name = ".".join([base, *(part for part in parts if part in kinds)])
        if "arrive" in parts and operands[0] != "_":
            raise ValueError("keeps the state")
        operands = [operand.strip("[]") for operand in operands]
        has_result = base == "mapa" or name in ("mbarrier.arrive", "mbarrier.try_wait", _EXPECT)
        to = self.operands(operands[:has_result])
        decoded = Instruction(name, to, self.operands(operands[has_result:]))
        flags = CLUSTER if "acquire" in parts and "cluster" in parts else 0
        size = int(parts[-1].lstrip("bfu")) // 8 if base == "st" else 0
        return decoded._replace(flags=flags, bytes=size, vector=_VECTORS.get(parts[-2], 1))

    def memory(
        self, base: str, parts: list[str], to: list[str], address: str, *sources: str
    ) -> Instruction:
        *parts, kind = parts
        rest = [part for part in parts if part not in _SPACES | _VECTORS | _FLAGS | _HINTS]
        name = ".".join([base, *rest, *([kind] if base == "atom" or kind[0] == "s" else [])])
        size = int(kind.lstrip("bufs")) // 8
        space, vector, flags = GLOBAL, 1, 0
        if base == "atom":
            flags = STRONG if "cta" in parts else STRONG | DEVICE
        for part in parts:
            space, vector = _SPACES.get(part, space), _VECTORS.get(part, vector)
            flags |= _FLAGS.get(part, 0)
        if vector * size > 16:
            raise ValueError(vector)
        register, offset = _parts(_ADDRESS, address)
        decoded = Instruction(name, self.operands(to), self.operands([register, *sources]))
        where = dict(space=space, bytes=size, vector=vector, offset=int(offset or "0", 0))
        return decoded._replace(flags=flags, **where)

    def operands(self, texts: list[str]) -> tuple[int, ...]:
        """Of operands, which may be vectors, or two results."""
        parts = re.split(r"[{},|\s]+", ",".join(texts))
        return tuple(self.operand(part) for part in parts if part)

    def operand(self, text: str | None) -> int:
        """The number of a register; constants are registers too."""
        if text in (None, "_"):
            return -1
        if text not in self.numbers:
            self.numbers[text] = len(self.numbers)
            self.kernel.initial.append(self.at_first(text))
        return self.numbers[text]

    def at_first(self, text: str) -> tuple[int, int]:
        if text in SPECIAL:
            return SPECIAL[text], 0
        if text in self.symbols:
            return CONSTANT, self.symbols[text]
        if text in self.declared or re.fullmatch(r"%[a-z]+\d+|%temp", text):
            return NOTHING, 0
        pattern, number = _parts(_NUMBER, text)
        value = int(pattern, 16) if pattern else int(number, 0)
        return CONSTANT, (value + 2**63) % 2**64 - 2**63
