"""The executed path of a loop over a row, in the kernels of Triton.

Rule: a path starts at the head of a loop, ends where it branches back there, and passes every
instruction at most once, so a loop that waits for a barrier counts one try. Of all such paths the
executed one has the most 16-byte accesses, then the most exps, and then the fewest instructions.
That leaves out what a full chunk of an aligned row does not need: the end of the row, the label's
vector, and elements taken one by one. An instruction whose predicate is false is still issued, and
counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

from .sass import Instruction

VECTOR_LOADS, VECTOR_STORES = ("LDS", "LDG", "LD"), ("STG", "ST")


@dataclass(frozen=True)
class Iteration:
    """The instructions of one iteration of a thread."""

    instructions: tuple[Instruction, ...]

    @property
    def loads(self) -> int:
        """Loads of 16 bytes."""
        return sum(is_vector(i, VECTOR_LOADS) for i in self.instructions)

    @property
    def stores(self) -> int:
        """Stores of 16 bytes to global memory."""
        return sum(is_vector(i, VECTOR_STORES) for i in self.instructions)

    @property
    def exps(self) -> int:
        return sum(map(is_exp, self.instructions))


def is_vector(instruction: Instruction, names: tuple[str, ...]) -> bool:
    return instruction.name in names and "128" in instruction.opcode.split(".")


def is_exp(instruction: Instruction) -> bool:
    return instruction.opcode == "MUFU.EX2"


def executed_paths(code: list[Instruction]) -> Iterator[Iteration]:
    """The executed path of every innermost loop that has 16-byte loads and exps."""
    graph = control_flow(code)
    for head, loop in loops(graph, graph.nodes):
        path = best_path(graph, head, loop)
        inner = (best_path(graph, *nested) for nested in loops(graph, loop - {head}))
        if on_rows(path) and not any(map(on_rows, inner)):
            yield path


def on_rows(path: Iteration) -> bool:
    return path.loads > 0 and path.exps > 0


def control_flow(code: list[Instruction]) -> nx.DiGraph:
    """Basic blocks by index, each with its instructions, and the branches between them."""
    index = {instruction.address: number for number, instruction in enumerate(code)}
    starts = {0}
    for number, instruction in enumerate(code):
        if instruction.target is not None:
            starts.add(index[instruction.target])
        if instruction.name in ("BRA", "EXIT", "RET"):
            starts.add(number + 1)
    bounds = sorted(starts | {len(code)})
    graph = nx.DiGraph()
    for first, end in pairwise(bounds):
        graph.add_node(first, code=code[first:end])
        last = code[end - 1]
        # Taken by a warp whose threads have diverged, which they have not.
        diverged = last.opcode.startswith("BRA.DIV")
        if last.target is not None and not diverged:
            graph.add_edge(first, index[last.target])
        leaves = last.name in ("BRA", "EXIT", "RET") and not conditional(last) and not diverged
        if not leaves and end < len(code):
            graph.add_edge(first, end)
    return graph


def conditional(instruction: Instruction) -> bool:
    """Guarded, or with a condition of its own as in ``BRA P5, 0x7d00``."""
    return bool(instruction.predicate) or "," in instruction.operands


def loops(graph: nx.DiGraph, nodes: object) -> Iterator[tuple[int, set[int]]]:
    """(head, blocks) of every loop within the nodes, outer ones first."""
    part = graph.subgraph(nodes)
    for loop in nx.strongly_connected_components(part):
        if len(loop) == 1 and not part.has_edge(*loop, *loop):
            continue
        entries = [n for n in loop if any(p not in loop for p in graph.predecessors(n))]
        head = min(entries or loop)
        yield head, loop
        yield from loops(graph, loop - {head})


def best_path(graph: nx.DiGraph, head: int, loop: set[int]) -> Iteration:
    """The executed path of a loop, by the rule of this module."""
    once = nx.DiGraph(graph.subgraph(loop))
    back = set(once.predecessors(head))
    for inner, blocks in [(head, loop), *loops(graph, loop - {head})]:
        once.remove_edges_from([(block, inner) for block in blocks if once.has_edge(block, inner)])
    best = {head: (value(graph.nodes[head]["code"]), (head,))}
    for node in nx.topological_sort(once):
        if node not in best:
            continue
        score, blocks = best[node]
        for after in once.successors(node):
            gain = value(graph.nodes[after]["code"])
            found = tuple(map(sum, zip(score, gain, strict=True)))
            if after not in best or found > best[after][0]:
                best[after] = found, (*blocks, after)
    _, blocks = max((best[node] for node in back if node in best), default=((), ()))
    return Iteration(tuple(i for block in blocks for i in graph.nodes[block]["code"]))


def value(code: list[Instruction]) -> tuple[int, ...]:
    """What the rule compares paths by, most important first."""
    vectors = sum(is_vector(i, VECTOR_LOADS + VECTOR_STORES) for i in code)
    return vectors, sum(map(is_exp, code)), -len(code)
