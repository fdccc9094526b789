"""Tables of the generated pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import pandas as pd


def markdown(table: pd.DataFrame) -> str:
    """A Markdown table: the index is the first column, numbers are aligned right, ours is bold."""
    name = table.index.name if table.index.name not in (None, "method") else ""
    table = table.rename_axis(name, axis=0).rename_axis(None, axis=1)
    table = table.rename(index=lambda row: f"**{row}**" if "bapo" in str(row) else row)
    align = ["left", *("right" for _ in table.columns)]
    return str(table.reset_index().to_markdown(index=False, colalign=align, disable_numparse=True))


def filled(text: str, blocks: Mapping[str, Iterable[str]]) -> str:
    """The text of a page, with the tables between ``<!-- NAME -->`` and ``<!-- /NAME -->``."""
    pattern = re.compile(r"(<!-- (\S+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
    return pattern.sub(lambda mark: mark[1] + "\n\n".join([*blocks[mark[2]], mark[3]]), text)


def by_column(times: pd.DataFrame, caption: str, peaks: pd.DataFrame | None = None) -> str:
    """Milliseconds by method and ``column``, the fastest first, then MiB of the peaks."""
    if peaks is not None:
        mib = peaks.assign(ms=peaks.peak_bytes / 2**20, column="MiB, " + peaks.column)
        times = pd.concat([times, mib])
    times = times[times.ms.notna()]
    table = times.pivot_table("ms", "method", "column")[list(times.column.unique())]
    table = table.sort_values(table.columns[0], kind="stable").map(number)
    return markdown(table.rename_axis(caption))


def number(value: float) -> str:
    """With three digits, without powers of ten."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return "" if pd.isna(value) else f"{value:,.{digits}f}"


def machine(frame: pd.DataFrame) -> str:
    """The machine of the results, versions and commits."""
    last = frame.iloc[-1]
    versions = frame[["method", "version"]].dropna().drop_duplicates("version", keep="last")
    packages = sorted({f"{method.split()[0].split(',')[0]} {v}" for method, v in versions.values})
    words = [", ".join([f"torch {last.torch}", *packages])]
    for commit in frame["commit"].value_counts().index:  # most have the first, others name tasks
        of_commit = frame[frame["commit"] == commit]
        tasks = ", ".join(of_commit.task.unique()) + ": " if words[1:] else ""
        words.append(f"{tasks}commit {commit}, {of_commit.date.max()[:10]}")
    return f"{last.machine}, {last.threads} threads, {'; '.join(words)}."


def sizes(frame: pd.DataFrame) -> str:
    """Of the last row; H matters from hidden states only."""
    last = frame.iloc[-1]
    return f"N = {last.N:,}, V = {last.V:,}" + f", H = {last.H:,}" * (last.level == "hidden")
