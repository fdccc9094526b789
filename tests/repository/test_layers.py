"""The package imports downwards only, TYPE_CHECKING and imports inside of functions included."""

import ast
from pathlib import Path

import pytest

import bapo_kernels

PACKAGE = Path(bapo_kernels.__file__).parent
# From bottom to top; modules of a line do not import each other. A folder stands for its files.
LAYERS = """
core core.checks
config output core.memory core.gemm
sampling_mask core.operators core.distributed
backends.triton backends.native
backends
core.call core.inputs
core.arguments core.rows core.tokens
reference core.prepare core.head core.logits
core.hidden
core.head_operators core.autograd
functional linear bounds lora
modules scopes alignment lm_head warmup
debug
__init__
tools integrations
__main__
"""
LEVELS = {
    name: level for level, line in enumerate(LAYERS.strip().splitlines()) for name in line.split()
}
# Inside of folders whose files have an order of their own.
FOLDERS = ("backends.triton", "reference", "tools", "integrations")


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(parts).removesuffix(".__init__"), path


NAMES = {name for name, _ in modules()}


def imports_of(name, path):
    """The modules of the package that a file names in an import, wherever that stands."""
    here = ["", *name.split(".")] if name != "__init__" else [""]
    if path.name != "__init__.py":
        here = here[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        base = here[: len(here) - node.level + 1]
        target = ".".join([*base[1:], *([node.module] if node.module else [])])
        for alias in node.names:
            full = f"{target}.{alias.name}".removeprefix(".")
            yield full if full in NAMES else target or "__init__"


def level(name):
    """Of a module, or of the nearest folder that stands for it."""
    while name not in LEVELS:
        name = name.rpartition(".")[0]
    return LEVELS[name]


def folder(name):
    return next((each for each in FOLDERS if f"{name}.".startswith(f"{each}.")), None)


@pytest.mark.parametrize(("name", "path"), [pytest.param(*each, id=each[0]) for each in modules()])
def test_imports_point_downwards(name, path):
    for imported in imports_of(name, path):
        if imported == name or (folder(name) and folder(name) == folder(imported)):
            continue
        assert level(imported) < level(name), f"{name} imports {imported}"


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_have_no_circle(name):
    graph = {
        module: {i for i in imports_of(module, path) if folder(i) == name and i != module}
        for module, path in modules()
        if folder(module) == name
    }
    while graph:
        free = [module for module, imported in graph.items() if not imported & graph.keys()]
        assert free, f"a circle among {sorted(graph)}"
        for module in free:
            del graph[module]
