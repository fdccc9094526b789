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
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imports_of(name):
    """The modules of the package that a file names in an import, wherever that stands."""
    here = ["", *name.split(".")] if name != "__init__" else [""]
    if FILES[name].name != "__init__.py":
        here = here[:-1]
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        base = here[: len(here) - node.level + 1]
        target = ".".join([*base[1:], *([node.module] if node.module else [])])
        for alias in node.names:
            full = f"{target}.{alias.name}".removeprefix(".")
            yield full if full in FILES else target or "__init__"


def level(name):
    """Of a module, or of the nearest folder that stands for it."""
    while name not in LEVELS:
        name = name.rpartition(".")[0]
    return LEVELS[name]


def folder(name):
    return next((each for each in FOLDERS if f"{name}.".startswith(f"{each}.")), name)


@pytest.mark.parametrize("name", FILES)
def test_imports_point_downwards(name):
    for imported in imports_of(name):
        assert folder(imported) == folder(name) or level(imported) < level(name), imported
