"""The package imports downwards only, TYPE_CHECKING and imports inside of functions included."""

import ast
from importlib.util import resolve_name
from pathlib import Path

import pytest

import bapo_kernels

PACKAGE = Path(bapo_kernels.__file__).parent
# From bottom to top; modules of a line do not import each other. A folder stands for its files.
LAYERS = """
checks
config output distillation
sampling_mask core.operators core.memory core.distributed core.head.gemm
backends.triton backends.native core.call core.autograd
backends core.arguments.options core.arguments.ranks core.arguments.single core.tokens
core.arguments.together core.rows
reference core.arguments.prepare core.head.head
core.head.sets
core.head.sampled
core.head.hidden
core.head.log_probs
core.head.top_k
functional linear bounds lora
modules scopes lm_head warmup
debug
__init__
tools integrations
__main__
"""
LEVELS = {
    f"bapo_kernels.{name}".removesuffix(".__init__"): level
    for level, line in enumerate(LAYERS.strip().splitlines())
    for name in line.split()
}
FILES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imports_of(path):
    """The modules of the package that a file names in an import, wherever that stands."""
    here = ".".join(path.parent.relative_to(PACKAGE.parent).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            module = resolve_name("." * node.level + (node.module or ""), here)
            names = [f"{module}.{alias.name}" for alias in node.names]
            yield from (name if name in FILES else module for name in names)


def listed(name):
    """The module itself, or the nearest folder that stands for it."""
    while name not in LEVELS:
        name = name.rpartition(".")[0]
    return name


@pytest.mark.parametrize("name", FILES)
def test_imports_point_downwards(name):
    for imported in map(listed, imports_of(FILES[name])):
        assert imported == listed(name) or LEVELS[imported] < LEVELS[listed(name)], imported


@pytest.mark.parametrize("name", FILES)
def test_headers_are_short_and_name_the_imports(name):
    header = ast.get_docstring(ast.parse(FILES[name].read_text()))
    assert "mport" in header
    assert len(list(filter(None, header.splitlines()))) <= 3


def test_emulations_import_no_benchmark():
    """Benchmarks build on them (benchmarks/emulation.py)."""
    tests = Path(__file__).parents[1]
    for path in (*tests.glob("ptx/*.py"), *tests.glob("cuda_on_host/*.py")):
        lines = path.read_text().splitlines()
        found = [
            line
            for line in lines
            if line.split()[:2] in (["from", "benchmarks"], ["import", "benchmarks"])
        ]
        assert found == [], path
