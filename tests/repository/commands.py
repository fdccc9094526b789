"""Whether the commands that a page shows can be run as they stand."""

import importlib
import re
import shlex
from pathlib import Path

import typer
from pages import ROOT

# Not part of the repository, but of what its commands make.
MADE = {".venv", "build", "dist", "out"}


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
        _check_targets(others)
    elif name in ("python", "python3") and others[:1] == ["-m"]:
        _check_module(*others[1:])
    elif name == "pip":
        _check_extras(others)
    for word in words:
        top = word.partition("/")[0]
        if "/" in word and top not in MADE and (ROOT / top).is_dir():
            assert (ROOT / word).exists(), f"{word} does not exist"


def _check_targets(words):
    folder = ROOT
    if words[:1] == ["-C"]:
        folder, words = ROOT / words[1], words[2:]
    known = re.findall(r"^([\w-]+):", (folder / "Makefile").read_text(), re.MULTILINE)
    for target in words:
        assert target in known or "=" in target, f"make has no target {target!r}"


def _check_module(module, *words):
    if not (ROOT / module.partition(".")[0]).is_dir():
        return  # of another project
    path = ROOT / module.replace(".", "/")
    assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"no {module}"
    if words in ((), ("--help",)):
        return
    command = _command_line(f"{module}.__main__" if path.is_dir() else module)
    if hasattr(command, "commands"):
        assert words[0] in command.commands, f"{module} has no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    command.make_context(module, list(words))


def _command_line(module):
    if module == "bapo_kernels.__main__":
        from bapo_kernels.tools.cli import commands as application

        return typer.main.get_command(application())
    imported = importlib.import_module(module)
    if hasattr(imported, "app"):
        return typer.main.get_command(imported.app)
    application = typer.Typer()
    application.command()(imported.main)
    return typer.main.get_command(application)


def _check_extras(words):
    text = (ROOT / "pyproject.toml").read_text()
    known = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    for word in words:
        for extra in re.findall(r"(?:^\.|bapo-kernels)\[([\w,-]+)\]", word):
            assert all(re.search(rf"^{e} =", known, re.MULTILINE) for e in extra.split(",")), word
