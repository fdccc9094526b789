"""The tables of ``docs/internals/numerics.md``, from the records of the study."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from ..records import RESULTS as FOLDER
from ..records import Record, load
from ..tables import filled, markdown
from .figures import BUDGET, LARGE, frames

RESULTS = FOLDER / "numerics.jsonl"
PAGE = Path(__file__).parents[2] / "docs" / "internals" / "numerics.md"
SHOWN = ("float32", "bfloat16")  # the figure has float16
LONG_NAMES = re.compile(r"^PyTorch |^(TRL|verl|Liger) (?:selective|logprobs|chunked|scaled).*")


def page(records: list[Record] | None = None) -> str:
    """The page with the tables of the records."""
    return filled(PAGE.read_text(), blocks(load(RESULTS) if records is None else records))


def blocks(records: list[Record]) -> dict[str, str]:
    errors, decisions = frames(records)
    of_gradient = errors.quantity.str.contains("gradient")
    shown = errors.assign(error=errors.relative.where(of_gradient, errors.error))
    shown = shown.replace({"quantity": {"log_probs": "log-prob"}})
    shown = shown[(shown.method != BUDGET) & (shown.quantity != "bounds")]
    logits, hidden, head = (shown[shown.part == part] for part in ("logits", "hidden", "head"))
    large = logits[logits.V == LARGE]
    of_kinds = large[large["dtype"].isin(SHOWN)].groupby("quantity")
    standard = logits[(logits.rows == "std 3") & (logits["dtype"] == "float32")]
    hidden = hidden[(hidden.quantity != "entropy") & hidden["dtype"].isin(SHOWN)]
    return {
        "log-probs": table(of_kinds.get_group("log-prob"), "rows", "dtype"),
        "entropy": table(of_kinds.get_group("entropy"), "rows", "dtype"),
        "gradient": table(of_kinds.get_group("gradient"), "rows", "dtype"),
        "loss": table(large[large.quantity == "loss"], "dtype"),
        "vocabulary": table(standard[standard.quantity == "log-prob"], "V"),
        "budgets": against_budgets(errors),
        "hidden": table(hidden, "quantity", "dtype"),
        "head": table(head.astype({"H": int}), "H"),
        "margins": margins(decisions),
        "flips": flips(decisions),
        "measured": measured(records),
    }


def table(errors: pd.DataFrame, column: str, group: str | None = None) -> str:
    """The largest errors, with one line per group and method."""
    cells = errors.assign(group=errors[group] if group else "")
    cells["error"] = cells.error.where(cells.finite, math.inf)
    wide = cells.pivot_table("error", ["group", "method"], column, aggfunc="max", sort=False)
    wide.columns = [f"{c:,}" if isinstance(c, int) else c for c in wide.columns]
    return joined(wide.map(lambda x: "" if pd.isna(x) else "NaN" if x == math.inf else f"{x:.1e}"))


def joined(lines: pd.DataFrame) -> str:
    """A Markdown table of lines by group and method; those with the same cells become one."""
    names: dict[tuple[str, ...], list[str]] = {}
    for (group, method), cells in zip(lines.index, lines.values, strict=True):
        names.setdefault((group, *cells), []).append(LONG_NAMES.sub(r"\1", method))
    index = [f"{group}: " * bool(group) + "; ".join(of) for (group, *_), of in names.items()]
    rows = [cells for _, *cells in names]
    return markdown(pd.DataFrame(rows, index=pd.Index(index), columns=lines.columns))


def against_budgets(errors: pd.DataFrame) -> str:
    """Our largest error relative to its budget, by quantity and input."""
    keys = ["part", "dtype", "V", "rows", "quantity"]
    ours = errors[(errors.method == "bapo_kernels cpu") & (errors.quantity != "bounds")]
    both = ours.merge(errors[errors.method == BUDGET], on=keys, suffixes=("", "_budget"))
    both["share"] = both.error / both.error_budget
    wide = both.pivot_table("share", "quantity", "part", aggfunc="max", sort=False)
    wide = wide.rename(index={"log_probs": "log-prob"}).rename_axis("")[["logits", "hidden"]]
    return markdown(wide.map(lambda share: "" if pd.isna(share) else f"{share:.2f}"))


def margins(decisions: Mapping[str, Record]) -> str:
    return "; ".join(
        f"{preset}: {len(r['differ'])} of {r['batches']:,} differ, {r['ties']} exact ties, "
        f"least margin {r['least_margin']:.1e}"
        for preset, r in decisions.items()
    )


def flips(decisions: Mapping[str, Record]) -> str:
    """How many decisions change, by the source of the log-probs."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for preset, record in decisions.items():
        for source, found in record["sources"].items():
            method, _, logits = source.partition(", ")
            if logits or "(" in method:  # a method, or rounding to a dtype
                line = lines.setdefault((logits.removesuffix(" logits"), method), {})
                line["rms error"] = f"{found['rms']:.1e}"
                line[f"{preset}: all targets"] = in_words(found["all_targets"])
                line[f"{preset}: observed"] = f"{found['observed']:,}"
    return joined(pd.DataFrame(lines).T)


def in_words(count: float) -> str:
    return f"{count:,.0f}" if count >= 10 else f"{count:.2g}"


def measured(records: list[Record]) -> str:
    """The machine of the last record, and the commits of all parts."""
    parts: dict[str, list[str]] = {}
    for part, record in {record["part"]: record for record in records}.items():
        parts.setdefault(record["commit"], []).append(part)
    commits = "; ".join(f"{', '.join(of)}: commit {commit}" for commit, of in parts.items())
    return f"{records[-1]['machine']}, torch {records[-1]['torch']}; {commits}."
