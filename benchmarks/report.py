"""The tables of ``docs/internals/benchmarks.md`` and of the README, from records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from .cases import DISTILLATION, GAUSSIAN, HEAD, POLICIES, REAL, SAMPLING_MASK, WHOLE_VOCABULARY
from .frames import latest, measured_in, plain_losses
from .plot import LEVELS
from .records import RESULTS, WITHOUT_AVX512, load
from .tables import by_column, filled, machine, markdown, number

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "internals" / "benchmarks.md"
README = ROOT / "README.md"
KINDS = ["zero advantage", "clip", "log_probs", *POLICIES]  # columns of their own


def write() -> list[Path]:
    """Writes the tables of the page and of the README."""
    PAGE.write_text(filled(PAGE.read_text(), blocks()))
    README.write_text(filled(README.read_text(), {"records": readme_block()}))
    return [PAGE, README]


def blocks() -> dict[str, str]:
    """The tables of the page by their marks; those of a GPU are together."""
    sections = {"losses": losses, "search": search, "head": forms, "masks": masks}
    sections |= {"distillation": distilled, "training": training}
    made = {name: "\n\n".join(tables("cpu")) for name, tables in sections.items()}
    of_gpu = (table for tables in sections.values() for table in tables("cuda"))
    return made | {"avx2": "\n\n".join(avx2()), "gpu": "\n\n".join(of_gpu)}


def losses(device: str) -> Iterator[str]:
    """Of the first model, the largest vocabulary and the widest head; then of kinds of cases."""
    frame = latest(device)
    if frame.empty:
        return
    done = frame[(frame.status == "measured") & ~frame.method.str.contains("reference")]
    for level, words in LEVELS.items():
        mine = done[(done.level == level) & done.sweep.isna()]
        plain = plain_losses(mine).assign(column=lambda f: f.model + ", " + f["dtype"])
        half = plain[plain["dtype"] == "bfloat16"]
        if half.empty:
            continue
        first = half.model.iloc[0]
        half = half[half.model.isin([first, *half.model[[half.V.idxmax(), half.H.idxmax()]]])]
        sizes = [f"{m} ({V:,} x {H:,})" for m, V, H in half[["model", "V", "H"]].values]
        times = pd.concat([half.assign(column=sizes), plain[plain["dtype"] == "float32"]])
        caption = f"Loss and gradients {words}, N = {half.N.iloc[0]:,}"
        yield f"{words.capitalize()}: {machine(mine)}"
        yield by_column(times, f"{caption}, ms", half.assign(column=half.model))
        layout = mine.layout.where(mine.layout != "dense", mine.data)
        mine = mine.assign(column=layout.where(mine.task == "loss", mine.task))
        mine = mine[(mine.model == first) & mine.column.isin(KINDS)]
        if len(mine):
            yield by_column(mine, f"{first} {words}, ms")
        real = plain_losses(latest(device, REAL)).assign(column=lambda f: f["dtype"])
        real = real[(real.level == level) & ~real.method.str.contains("reference")]
        if len(real):
            yield f"{words.capitalize()}, {REAL}: {machine(real)}"
            yield by_column(real, f"{first} {words}, {REAL}, ms", real)
    many = done[done.sweep == "many tokens"].assign(column="ms")
    if len(many):
        row = many.iloc[0]
        caption = f"From hidden states, N = {row.N:,}, V = {row.V:,}, H = {row.H:,}"
        yield by_column(many, caption, many.assign(column="peak"))
    failed = frame[frame.status != "measured"]
    if len(failed):
        kinds = failed.groupby(["method", "status", "why"], sort=False).size()
        yield markdown(kinds.reset_index(name="cases").set_index("method"))


def search(device: str) -> Iterator[str]:
    """The search alone, by where it stops."""
    frame = latest(device)
    found = frame[(frame.task == "search") & (frame.status == "measured")]
    if len(found):
        yield machine(found)
    for end, of_end in found.groupby("model", sort=False):
        yield by_column(of_end.assign(column=of_end.N.map("N = {:,}".format)), f"Stops {end}, ms")


def forms(device: str) -> Iterator[str]:
    """The forms of the head in bfloat16, by what is trained."""
    frame = measured_in(device, HEAD)
    frame = frame[frame["dtype"] == "bfloat16"].copy()
    if frame.empty:
        return
    yield machine(frame)
    first = frame.iloc[0]
    caption = f"N = {first.N:,}, V = {first.V:,}, H = {first.H:,}, ms"
    heads = frame.frozen.map({True: "frozen", False: "trained"})
    frame["column"] = heads.where(frame.layout == "dense", heads + ", " + frame.layout)
    frame["method"] = frame.method.str.replace("^(two|three) ", "", regex=True)
    yield by_column(frame, caption, frame)


def masks(device: str) -> Iterator[str]:
    """With a sampling mask, by dtype and head, with the floor at the rate of the copy."""
    frame = measured_in(device, SAMPLING_MASK, WHOLE_VOCABULARY)
    if frame.empty:
        return
    frame = frame[frame.layout == "dense"]
    masked, ours = frame.sweep == SAMPLING_MASK, frame.method.str.startswith("bapo")
    first = frame[masked].iloc[0]
    ids = first.shares["allowed"] * first.V
    sizes = f"N = {first.N:,}, V = {first.V:,}, H = {first.H:,}; {ids:.1f} ids per set"
    yield f"{sizes}; {machine(frame)}"
    heads = frame.frozen.map({True: ", frozen", False: ", trained"})
    frame = frame.assign(
        column=frame["dtype"] + heads.where(frame.level == "hidden", ""),
        peak_bytes=frame.peak_bytes - frame.gradient_bytes,
        method=frame.method.where(masked, frame.method + ", whole vocabulary"),
    )
    floors = frame[masked & ours & (frame.bytes > 0)].drop_duplicates(["level", "column"])
    floors = floors.assign(method="floor", ms=floors.share * floors.ms, peak_bytes=float("nan"))
    frame = pd.concat([frame[masked | ours], floors])
    for level, of_level in frame.groupby("level", sort=False):
        peaks = of_level[of_level["dtype"] == "bfloat16"]
        yield by_column(of_level, f"Loss and gradients {LEVELS[str(level)]}, ms", peaks)


def distilled(device: str) -> Iterator[str]:
    """With several labels per row; peaks of 64, and of the whole vocabulary."""
    for file in (device, WITHOUT_AVX512) if device == "cpu" else (device,):
        frame = measured_in(file, DISTILLATION)
        if frame.empty:
            continue
        yield machine(frame)
        # Tables: logits first, then by N and by the head. Columns: by K, the whole vocabulary last.
        frame = frame.assign(order=frame.K.mask(frame.K == 0, frame.V))
        frame = frame.sort_values(["N", "frozen", "order"], kind="stable")
        frame = frame.sort_values("level", ascending=False, kind="stable")
        labels = frame.K.map("K = {}".format).where(frame.K > 0, "whole vocabulary")
        frame["column"] = labels.where(frame.level == "hidden", frame["dtype"] + ", " + labels)
        frame["method"] = frame.method.str.replace("^(two|three) ", "", regex=True)
        tasks = frame.task.replace("forward_kl", "forward_kl_topk")
        tables = frame.groupby([tasks, "level", "model", "N", "frozen"], sort=False)
        for (task, level, model, N, frozen), mine in tables:
            head = ["trained head, ", "frozen head, "][frozen] if level == "hidden" else ""
            caption = f"{task} {LEVELS[level]}, {head}{model}, N = {N:,}, ms"
            yield by_column(mine, caption, mine[mine.K.isin([0, 64])])


def avx2() -> Iterator[str]:
    """The cases that were measured on both kinds of processor, side by side."""
    frames = {"AVX-512": latest("cpu"), "AVX2": latest(WITHOUT_AVX512)}
    if frames["AVX2"].empty:
        return
    both = [f.assign(column="bfloat16, " + kind) for kind, f in frames.items()]
    keys = ["level", "N", "V", "H", "dtype", "method"]
    both = plain_losses(pd.concat(both)).sort_values("column", kind="stable")
    both = both[(both["dtype"] == "bfloat16") & ~both.method.str.contains("reference")]
    both = both[both.groupby(keys).column.transform("nunique") == 2]
    for (level, N, V, H), case in both.groupby(keys[:4], sort=False):
        of_head = f", H = {H:,}" if level == "hidden" else ""
        yield machine(case[case.column.str.endswith("AVX2")])
        yield by_column(case, f"{LEVELS[level].capitalize()}, N = {N:,}, V = {V:,}{of_head}, ms")


def training(device: str) -> Iterator[str]:
    """What is trained on a device, and the last record of every trainer."""
    frame = pd.DataFrame(load(RESULTS / "trl.jsonl"))
    frame = frame[frame.device == device]
    if frame.empty:
        return
    last = frame.iloc[-1]
    yield (
        f"V = {last.V:,}, H = {last.H:,}, layers: {last.layers}, {last['dtype']}; {last.B} answers "
        f"of {last['T'] // 2:,} to {last['T']:,} tokens; TRL {last.trl}, transformers "
        f"{last.transformers}, torch {last.torch}, {last.machine}, commit {last.commit}."
    )
    peak = "peak of the process, MiB" if device == "cpu" else "peak of the step, MiB"
    columns = {"step_ms": "step, ms", "ms": "loss and backward, ms", "peak_MiB": peak}
    frame = frame.drop_duplicates("case", keep="last").sort_values("step_ms")
    frame = frame.set_index(frame.case.str.removeprefix("TRL micro-batch: ").rename("method"))
    yield markdown(frame[list(columns)].map(number).rename(columns=columns))


def readme_block() -> str:
    """The tables of the README: the first model on every device, in both dtypes.

    Of real rows where these have been measured.
    """
    parts = []
    for device in ("cuda", "cpu"):
        frame = pd.concat([latest(device, profile) for profile in (REAL, GAUSSIAN)])
        frame = plain_losses(frame[frame.sweep.isna()])
        frame = frame[frame.model.str.startswith("Qwen3")]
        for level, words in LEVELS.items():
            mine = frame[(frame.level == level) & ~frame.method.str.contains("reference")]
            if mine.empty:
                continue
            first = mine.iloc[0]
            mine = mine[mine.profile == first.profile]
            H = f", H = {first.H:,}" if level == "hidden" else ""
            head = f"{words}, {first.profile}, N = {first.N:,}, V = {first.V:,}{H}, ms"
            table = mine.pivot_table(index="method", columns="dtype", values="ms")
            dtypes = [dtype for dtype in ("float32", "bfloat16") if dtype in table]
            table = table[dtypes].sort_values(dtypes[-1]).map(number)
            parts.append(markdown(table.rename_axis(f"Loss and gradients {head}")))
            parts.append(machine(mine))
    return "\n\n".join(parts)
