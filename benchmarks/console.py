"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def wide_console() -> Console:
    """A console of the terminal's width, or wide enough for a table."""
    return Console(width=None if Console().is_terminal else 140)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """The first column is aligned left, the others right."""
    made = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left")
    for row in rows:
        made.add_row(*map(str, row))
    return made


def digits(value: float | None, unit: float = 1.0) -> str:
    """With three digits, in a unit."""
    if value is None:
        return ""
    value /= unit
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread(times: dict[str, float]) -> str:
    """The 20 and 80 percentiles."""
    return f"{digits(times['ms_20'])} .. {digits(times['ms_80'])}"
