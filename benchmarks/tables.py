"""Tables of the generated pages."""

from __future__ import annotations

import pandas as pd


def markdown(table: pd.DataFrame) -> str:
    """A Markdown table: the index is the first column, numbers are aligned right, ours is bold."""
    name = table.index.name if table.index.name not in (None, "method") else ""
    table = table.rename_axis(name, axis=0).rename_axis(None, axis=1)
    table = table.rename(index=lambda row: f"**{row}**" if "bapo" in str(row) else row)
    align = ["left", *("right" for _ in table.columns)]
    return str(table.reset_index().to_markdown(index=False, colalign=align, disable_numparse=True))


def number(value: float) -> str:
    """With three digits, without powers of ten."""
    if pd.isna(value):
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
