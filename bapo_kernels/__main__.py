"""``python -m bapo_kernels``: versions and backends; with a command, validation or timing.

May import ``debug``, and ``tools`` for a command. The report must not need typer and rich.
"""

import sys
from importlib.util import find_spec

from . import __version__
from .debug import environment


def main() -> None:
    """Prints the version or the report of the environment, or runs a command."""
    if sys.argv[1:] == ["--version"]:
        print(__version__)
    elif len(sys.argv) == 1:
        for name, value in environment().items():
            print(f"{name:<18}{value}")
    elif all(find_spec(name) for name in ("typer", "rich")):
        from .tools.cli import commands

        commands()()
    else:
        needed = "the commands need typer and rich (extra 'cli'): pip install 'typer>=0.19' rich"
        raise SystemExit(f"bapo_kernels: {needed}")


if __name__ == "__main__":
    main()
