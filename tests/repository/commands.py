"""Whether the commands that a page shows can be run as they stand."""

import importlib
import re
import shlex
from pathlib import Path

import typer
from pages import ROOT

from bapo_kernels.tools import cli

MADE = {".venv", "build", "dist", "out"}  # by commands of the repository


def commands(script):
    """The words of each command, without comments and assignments."""
    found = []
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = []
        for word in [*lexer, ";"]:
            if not set(word) <= set("();<>|&"):
                if words or not re.match(r"\w+=", word):
                    words.append(word)
            elif words:
                found.append(words)
                words = []
    return found


def check(words):
    """Raises if a command of this repository does not exist, or does not take its arguments."""
    name, *others = words
    name = Path(name).name
    if name == "make":
        known = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        for target in others:
            assert target in known or "=" in target, f"make has no target {target!r}"
    elif name in ("python", "python3") and others[:1] == ["-m"]:
        _check_module(*others[1:])
    elif name == "pip":
        _check_extras(others)
    for word in words:
        top = word.partition("/")[0]
        if "/" in word and top not in MADE and (ROOT / top).is_dir():
            assert (ROOT / word).exists(), f"{word} does not exist"


def _check_module(name, *words):
    path = ROOT / name.replace(".", "/")
    if not (ROOT / name.partition(".")[0]).is_dir():
        return  # of another project
    assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"no {name}"
    if words not in ((), ("--help",)):
        parse(name, *words)


def application(name):
    """The command line of a module of this repository."""
    if name == "bapo_kernels":
        return cli.commands()
    is_folder = (ROOT / name.replace(".", "/")).is_dir()
    module = importlib.import_module(f"{name}.__main__" if is_folder else name)
    if hasattr(module, "app"):
        return module.app
    made = typer.Typer()
    made.command()(module.main)
    return made


def parse(name, *words):
    """Raises if a module does not take these arguments."""
    command = typer.main.get_command(application(name))
    if hasattr(command, "commands"):
        assert words[0] in command.commands, f"{name} has no command {words[0]!r}"
        command, *words = command.commands[words[0]], *words[1:]
    command.make_context(name, list(words))


def _check_extras(words):
    text = (ROOT / "pyproject.toml").read_text()
    known = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    for word in words:
        for extra in re.findall(r"(?:^\.|bapo-kernels)\[([\w,-]+)\]", word):
            assert all(re.search(rf"^{e} =", known, re.MULTILINE) for e in extra.split(",")), word
