"""``python -m benchmarks.report``: the tables of docs/internals/benchmarks.md and of the README."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pandas as pd

from .cases import (
    DISTILLATION,
    HEAD,
    POLICIES,
    REAL,
    SAMPLES,
    SAMPLING_MASK,
    STEPS,
    WHOLE_VOCABULARY,
)
from .plot import LEVELS
from .reading import plain_losses, results, shorten
from .records import RESULTS, load
from .tables import by_column, filled, machine, markdown, number, sizes

ROOT = Path(__file__).parents[1]
PRODUCTS = "^(two|three) (?=matrix products)"  # a frozen head needs two
KINDS = [*POLICIES, "log_probs", "zero advantage"]  # columns of their own


def page() -> dict[str, list[str]]:
    """The tables of the page by their marks; those of a GPU are together."""
    cpu, avx2, cuda = map(results, ("cpu", "avx2", "cuda"))
    sections = losses, search, head, samples, masks, distillation, steps
    made = {tables.__name__: [*tables(cpu)] for tables in sections}
    made["distillation"] += distillation(avx2)
    made |= {"avx2": [*without_avx512(cpu, avx2)], "training": [*training("cpu")]}
    of_gpu = (table for tables in sections for table in tables(cuda))
    return made | {"gpu": [*of_gpu, *training("cuda")]}


def losses(frame: pd.DataFrame) -> Iterator[str]:
    """Of the first model, the largest vocabulary and the widest head; then of kinds of cases."""
    for level, words in LEVELS.items():
        mine = frame[(frame.level == level) & frame.sweep.isna() & (frame.data == "stale")]
        plain = plain_losses(mine).assign(column=lambda f: f.model + ", " + f["dtype"])
        half = plain[plain["dtype"] == "bfloat16"]
        if half.empty:
            continue
        first = half.model.iloc[0]
        half = half[half.model.isin([first, *half.model[[half.V.idxmax(), half.H.idxmax()]]])]
        columns = [f"{m} ({V:,} x {H:,})" for m, V, H in half[["model", "V", "H"]].values]
        times = pd.concat([half.assign(column=columns), plain[plain["dtype"] == "float32"]])
        caption = f"Loss and gradients {words}, N = {half.N.iloc[0]:,}"
        real = plain_losses(mine, REAL).assign(column=lambda f: f["dtype"])
        mine = mine[mine.profile != REAL]
        yield f"{words.capitalize()}: {machine(mine)}"
        yield by_column(times, f"{caption}, ms", half.assign(column=half.model))
        kinds = mine.assign(column=mine.task.where(mine.task != "loss", mine.layout))
        kinds = pd.concat([kinds[kinds.column == kind] for kind in KINDS])
        if len(kinds):
            yield by_column(kinds, f"{first} {words}, ms")
        if len(real):
            yield f"{words.capitalize()}, {REAL}: {machine(real)}"
            yield by_column(real, f"{first} {words}, {REAL}, ms", real)
    many = frame[frame.sweep == "many tokens"].assign(column="ms")
    if len(many):
        yield by_column(many, f"From hidden states, {sizes(many)}", many.assign(column="peak"))


def search(frame: pd.DataFrame) -> Iterator[str]:
    """The search alone, by where it stops."""
    found = frame[frame.task == "search"]
    if len(found):
        yield machine(found)
    for end, of_end in found.groupby("model", sort=False):
        yield by_column(of_end.assign(column=of_end.N.map("N = {:,}".format)), f"Stops {end}, ms")


def head(frame: pd.DataFrame) -> Iterator[str]:
    """The forms of the head in bfloat16, by what is trained."""
    frame = frame[(frame.sweep == HEAD) & (frame["dtype"] == "bfloat16")]
    if frame.empty:
        return
    yield machine(frame)
    heads = frame.frozen.map({True: "frozen", False: "trained"})
    columns = heads.where(frame.layout == "dense", heads + ", " + frame.layout)
    frame = frame.assign(column=columns, method=frame.method.replace(PRODUCTS, "", regex=True))
    yield by_column(frame, f"{sizes(frame)}, ms", frame)


def samples(frame: pd.DataFrame) -> Iterator[str]:
    """Gradients from samples beside exact ones, in multiples of one product too."""
    frame = frame[frame.sweep == SAMPLES]
    if frame.empty:
        return
    yield machine(frame)
    heads = frame.frozen.map({True: ", frozen head", False: ""})
    frame = frame.assign(column=frame["dtype"] + ", N = " + frame.N.map("{:,}".format) + heads)
    first = frame[frame.N.min() == frame.N]
    yield by_column(frame, "Loss and gradients, real rows, ms", first[~first.frozen])


def masks(frame: pd.DataFrame) -> Iterator[str]:
    """With a sampling mask, by dtype and head, with the floor at the rate of the copy."""
    frame = frame[frame.sweep.isin([SAMPLING_MASK, WHOLE_VOCABULARY]) & (frame.layout == "dense")]
    if frame.empty:
        return
    masked, ours = frame.sweep == SAMPLING_MASK, frame.method.str.startswith("bapo")
    overwritten = frame.method.str.contains("in place")
    ids = frame.V.iloc[0] * frame[masked].shares.dropna().iloc[0]["allowed"]
    yield f"{sizes(frame)}; {ids:.1f} ids per set; {machine(frame)}"
    heads = frame.frozen.map({True: ", frozen", False: ", trained"})
    frame = frame.assign(
        column=frame["dtype"] + heads.where(frame.level == "hidden", ""),
        peak_bytes=frame.peak_bytes - frame.gradient_bytes.mask(overwritten, 0.0),
        method=frame.method.where(masked, frame.method + ", whole vocabulary"),
    )
    floors = frame[masked & ours & (frame.bytes > 0)].drop_duplicates(["level", "column"])
    floors = floors.assign(method="floor", ms=floors.share * floors.ms, peak_bytes=float("nan"))
    frame = pd.concat([frame[masked | ours], floors])
    for level, of_level in frame.groupby("level", sort=False):
        peaks = of_level[of_level["dtype"] == "bfloat16"]
        yield by_column(of_level, f"Loss and gradients {LEVELS[level]}, ms", peaks)


def distillation(frame: pd.DataFrame) -> Iterator[str]:
    """With several labels per row; peaks of 64, and of the whole vocabulary."""
    frame = frame[frame.sweep == DISTILLATION]
    if frame.empty:
        return
    yield machine(frame)
    labels = frame.K.map("K = {}".format).where(frame.K > 0, "whole vocabulary")
    columns = labels.where(frame.level == "hidden", frame["dtype"] + ", " + labels)
    frame = frame.assign(column=columns, method=frame.method.replace(PRODUCTS, "", regex=True))
    tasks = frame.task.replace("forward_kl", "forward_kl_topk")
    tables = frame.groupby([tasks, "level", "model", "N", "frozen"], sort=False)
    for (task, level, model, N, frozen), mine in tables:
        form = ["trained head, ", "frozen head, "][frozen] if level == "hidden" else ""
        caption = f"{task} {LEVELS[level]}, {form}{model}, N = {N:,}, ms"
        yield by_column(mine, caption, mine[mine.K.isin([0, 64])])


def steps(frame: pd.DataFrame) -> Iterator[str]:
    """Steps of a language model, by the length of its sequences."""
    frame = frame[frame.sweep.isin(STEPS)]
    if len(frame):
        yield machine(frame)
    for _, case in frame.groupby(["dtype", "N"], sort=False):
        length = STEPS[case.sweep.iloc[0]]
        caption = f"{case['dtype'].iloc[0]}, {case.N.iloc[0] // length} x {length} tokens"
        head_ms = case.head_seconds.map(lambda each: 1e3 * median(each) if each else math.nan)
        columns = {
            "head and loss, ms": head_ms,
            "step, ms": case.ms,
            "tokens/s": 1e3 * case.N / case.ms,
            "peak of the process, MiB": case.peak_bytes / 2**20,
        }
        table = case.assign(**columns).set_index("method")[[*columns]].dropna(subset="step, ms")
        table = table.sort_values("head and loss, ms", na_position="first")
        yield markdown(table.map(number).rename_axis(caption))


def without_avx512(cpu: pd.DataFrame, avx2: pd.DataFrame) -> Iterator[str]:
    """The first case of a level that was measured on both kinds of processor, side by side."""
    both = pd.concat([cpu.assign(column="bfloat16, AVX-512"), avx2.assign(column="bfloat16, AVX2")])
    both = plain_losses(both).query("dtype == 'bfloat16'")
    keys = ["level", "N", "V", "H"]
    both = both[both.groupby([*keys, "method"]).column.transform("nunique") == 2]
    for level, of_level in both.groupby("level", sort=False):
        case = next(case for _, case in of_level.groupby(keys, sort=False))
        yield machine(case[case.column.str.endswith("AVX2")])
        yield by_column(case, f"{LEVELS[level].capitalize()}, {sizes(case)}, ms")


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
    peak = f"peak of the {'process' if device == 'cpu' else 'step'}, MiB"
    columns = {"step_ms": "step, ms", "ms": "loss and backward, ms", "peak_MiB": peak}
    frame = frame.drop_duplicates("case", keep="last").sort_values("step_ms")
    frame = frame.set_index(frame.case.str.removeprefix("TRL micro-batch: ").rename("method"))
    yield markdown(frame[list(columns)].map(number).rename(columns=columns))


def readme() -> dict[str, list[str]]:
    """The first model on every device in both dtypes; real rows where these have been measured."""
    made = []
    for frame in map(results, ("cuda", "cpu")):
        frame = frame[frame.sweep.isna() & frame.model.str.startswith("Qwen3")]
        real = plain_losses(frame, REAL)
        mine = plain_losses(frame) if real.empty else real
        for (level, profile), of_level in mine.groupby(["level", "profile"], sort=False):
            caption = f"Loss and gradients {LEVELS[level]}, {profile}, {sizes(of_level)}, ms"
            table = of_level.pivot_table("ms", "method", "dtype").filter(["float32", "bfloat16"])
            table = table.sort_values("bfloat16").map(number).rename_axis(caption)
            made += [markdown(table), machine(of_level)]
    return {"records": made}


PAGES = {ROOT / "docs/internals/benchmarks.md": page, ROOT / "README.md": readme}

if __name__ == "__main__":
    shorten()
    for path, tables in PAGES.items():
        path.write_text(filled(path.read_text(), tables()))
