"""``docs/internals/benchmarks.md`` and the tables of the README, from records."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from . import scaling
from .frames import forms_of_the_head, latest, plain_losses, sampling_masks
from .mask_tables import of_masks
from .plot import FIGURES, LEVELS, YARDSTICKS
from .records import RESULTS, WITHOUT_AVX512, load
from .tables import machine, markdown, number

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "internals" / "benchmarks.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- from the records: python -m benchmarks report -->", "<!-- end of the records -->"
NAMES = {"cpu": "CPU", "cuda": "GPU"}
CAPTIONS = {
    "speedup": "Time relative to ours",
    "roofline": "Share of the roofline",
    "time_over_tokens": "Time over tokens",
    "time_over_vocabulary": "Time over the vocabulary",
    "memory_over_tokens": "Memory over tokens",
}

INTRODUCTION = """# Benchmarks

This page is written by `python -m benchmarks report` from the records in `benchmarks/results/`, and
its figures by `python -m benchmarks plot`; neither needs the machine of the records. To measure
your own machine:

```sh
make bench
# Or, in an environment with the baselines installed:
python -m benchmarks run                # every method on every case, on the CPU
python -m benchmarks run --device cuda  # on a GPU
python -m benchmarks run --only bapo_kernels --case "loss from logits, Qwen3"
python -m benchmarks run --case head    # the forms of the head
python -m benchmarks run --case "sampling mask"
pytest benchmarks/test_cpu.py           # our CPU cases as pytest-benchmark
```

**Every method computes the same quantity.** `loss` is BAPO's loss with the search for its bounds,
and the gradients of all inputs; `clip` is the same with fixed bounds, which packages with a GRPO
loss compute. Packages that provide log-probs only are completed with the paper's search (a loop on
the host) and the token loss in plain PyTorch, at the cost of some kilobytes next to the logits.
Every method runs with its default settings, except that cut-cross-entropy runs without its filter,
which drops small gradients. `in place` and `live` are options of ours. Only `in place` and Liger's
cross entropy overwrite the logits, which are restored before each call.

**A method is timed only after its result has passed the check.** Values and gradients of a small
case, and the value of the case itself, are compared with float64; the error is listed with the
time.

**Methods take turns**, at least three each. A time is the median of all calls, and the spread runs
from the 20th to the 80th percentile. Logits are far larger than the caches. Peak memory is what a
call needs beyond its inputs, gradients included, as counted by torch's allocator. Memory that our
calls on a CPU take over from the call before is counted.

**The model behind the rates.** From logits it counts bytes: each unmasked row is read once, each
undecided row a second time, and each row of the gradient is written once. From hidden states it
counts FLOPs: `2*V*H` per unmasked row, and `4*V*H`, or `2*V*H` with a frozen head, per row that has
a gradient once the bounds are known. The rate of every method counts these, not what the method
itself moves or computes. Shares are relative to the rate of a copy of the logits, or of the three
bare matrix products, two with a frozen head, in the same run. Both write to memory that earlier
calls have touched.
"""
OLDER = "The matrix products of this section wrote to fresh memory: page faults are counted.\n"
FORMS = """{N:,} tokens from hidden states of {H:,}, V = {V:,}; {machine}

The weight of a frozen head requires no gradient. In the rows "trained, zero advantage" a quarter of
the tokens is masked, and 40 % of the sequences have no advantage. The bare products are those of
all rows, two or three, in one chunk and in four; a ratio to them is per FLOP that the rows of the
method need. FLOPs are those of all matrix products of a call, as PyTorch's profiler counts them, in
units of `N*V*H`; it does not know those of Triton kernels. With a trained head of half precision
up to `2*H` rows are one chunk, whatever `chunk_tokens` is, because
[that takes less memory](../hidden_states.md#memory).
"""

PROCESSORS = """{machine}

The columns of AVX-512 are from the records above. Without instructions for half precision
[our products are made in float32](../hidden_states.md#rounding).
"""


def write() -> list[Path]:
    """Writes the pages, the tables of the README, and the figure of the scaling page."""
    PAGE.write_text(page())
    README.write_text(with_block(README.read_text(), readme_block()))
    scaling.PAGE.write_text(scaling.page())
    return [PAGE, README, scaling.PAGE, scaling.draw()]


def page() -> str:
    """The text of ``docs/internals/benchmarks.md``."""
    sections = [INTRODUCTION]
    if latest("cuda").empty:
        sections.append("**No GPU has been measured yet.** All numbers are from a CPU.\n")
    for device in ("cuda", "cpu"):
        frame = latest(device)
        if not frame.empty:
            sections.append("\n".join(of_device(device, frame)))
        forms = forms_of_the_head(device)
        if not forms.empty:
            sections.append("\n".join(of_forms(device, forms)))
        masks = sampling_masks(device)
        if not masks.empty:
            sections.append("\n".join(of_masks(NAMES[device], masks)))
    sections.append("\n".join(of_processors()))
    sections.append("\n".join(others()))
    return "\n".join(sections).rstrip() + "\n"


def of_device(device: str, frame: pd.DataFrame) -> Iterator[str]:
    """The section of a device."""
    yield f"## {NAMES[device]}\n"
    yield machine(frame) + "\n"
    products = frame[frame.method == YARDSTICKS["hidden"]]
    if "product_flops" not in products or products.product_flops.isna().any():
        yield OLDER
    for name, caption in CAPTIONS.items():
        path = FIGURES / f"{device}_{name}.png"
        if path.exists():
            yield f"![{caption}]({os.path.relpath(path, PAGE.parent)})\n"
    done = frame[frame.status == "measured"]
    half = done[done["dtype"] == "bfloat16"]
    for level, words in LEVELS.items():
        of_level = half[half.level == level]
        if of_level.empty:
            continue
        models = plain_losses(of_level[of_level.sweep.isna()])
        if models.empty:
            continue
        yield f"### Loss and gradients {words}, {models.N.iloc[0]:,} tokens\n"
        yield "Milliseconds in bfloat16, by model:\n"
        yield pivot(models, "model", "ms", _heads(models)) + "\n"
        yield f"Rate relative to the {YARDSTICKS[level]}, in %:\n"
        yield pivot(models.assign(percent=100 * models.share), "model", "percent") + "\n"
        yield "Peak memory beyond the inputs, in MiB:\n"
        mib = models[models.peak_bytes.notna()].assign(MiB=lambda f: f.peak_bytes / 2**20)
        yield pivot(mib, "model", "MiB") + "\n"
        first = models.model.iloc[0]
        mine = of_level[(of_level.model == first) & of_level.sweep.isna()]
        kinds = mine[mine.task == "loss"]
        kinds = kinds.assign(kind=kinds.data.where(kinds.layout == "dense", kinds.layout))
        yield f"Milliseconds by kind of data, {first}:\n"
        yield pivot(kinds, "kind", "ms") + "\n"
        tasks = mine[(mine.layout == "dense") & (mine.data == "stale")]
        yield "Milliseconds by task (`log_probs` has no gradient):\n"
        yield pivot(tasks, "task", "ms") + "\n"
        single = done[(done.level == level) & (done["dtype"] == "float32") & (done.task == "loss")]
        if not single.empty:
            yield f"{first} in float32, and errors of both dtypes against float64:\n"
            yield precision(pd.concat([single, models[models.model == first]])) + "\n"
    many = done[done.sweep == "many tokens"]
    if not many.empty:
        first = many.iloc[0]
        yield f"### {first.N:,} tokens from hidden states of {first.H:,}\n"
        yield "Methods that do not hold the logits of all tokens at once:\n"
        many = many.assign(MiB=lambda f: f.peak_bytes / 2**20)
        table = many.set_index("method")[["ms", "MiB"]].sort_values("ms").map(number)
        yield markdown(table.rename(columns={"MiB": "peak beyond the inputs, MiB"})) + "\n"
    searches = done[done.task == "search"]
    if not searches.empty:
        yield "### The search alone\n"
        for end, of_end in searches.groupby("model", sort=False):
            yield f"Milliseconds by number of tokens, for a search that stops {end}:\n"
            yield pivot(of_end, "N", "ms") + "\n"
    failed = frame[frame.status != "measured"]
    if not failed.empty:
        yield "### Failures\n"
        yield failures(failed) + "\n"


def of_forms(device: str, frame: pd.DataFrame) -> Iterator[str]:
    """The section on the forms of the head: a table per dtype."""
    first = frame.iloc[0]
    yield f"### Forms of the head, {NAMES[device]}\n"
    yield FORMS.format(N=first.N, H=first.H, V=first.V, machine=machine(frame))
    for dtype, of_dtype in frame.groupby("dtype", sort=False):
        yield f"{dtype}:\n"
        yield form_table(of_dtype) + "\n"


def form_table(frame: pd.DataFrame) -> str:
    """Time, FLOPs and memory of each form, by what is trained."""
    parts = []
    for (frozen, layout), case in frame.groupby(["frozen", "layout"], sort=False):
        in_four = case[case.method.str.endswith(" products, four chunks")]
        share_in_four = in_four.share.iloc[0] if len(in_four) else float("nan")
        rows = "frozen" if frozen else "trained"
        rows += "" if layout == "dense" else f", {layout}"
        table = pd.DataFrame(
            {
                "head": rows,
                "ms": case.ms.map(number),
                "x bare products": (1 / case.share).map(number),
                "x those in four chunks": (share_in_four / case.share).map(number),
                "FLOPs, NVH": (case.product_flops / (case.N * case.V * case.H)).map(number),
                "peak MiB": (case.peak_bytes / 2**20).map(number),
            }
        )
        parts.append(table.set_index(case.method).loc[case.sort_values("ms").method])
    return markdown(pd.concat(parts))


def of_processors() -> Iterator[str]:
    """The cases that were measured on both kinds of processor, side by side."""
    kinds = {"AVX-512": latest("cpu"), "AVX2": latest(WITHOUT_AVX512)}
    if kinds["AVX2"].empty:
        return
    yield "### With AVX2 alone, CPU\n"
    yield PROCESSORS.format(machine=machine(kinds["AVX2"]))
    frames = [f.assign(kind=f["dtype"] + ", " + kind) for kind, f in kinds.items()]
    both = plain_losses(pd.concat(frames)).sort_values("kind")
    for (level, N, V, H), case in both.groupby(["level", "N", "V", "H"], sort=False):
        case = case[case["dtype"].isin(case[case.kind.str.endswith("AVX2")]["dtype"])]
        if len(case):
            of_head = f", H = {H:,}" if level == "hidden" else ""
            yield f"Loss and gradients {LEVELS[level]}, N = {N:,}, V = {V:,}{of_head}, ms:\n"
            yield pivot(case, "kind", "ms") + "\n"


def pivot(frame: pd.DataFrame, column: str, value: str, heads: dict[Any, str] | None = None) -> str:
    """Methods by a column, sorted by the first column, fastest first."""
    table = frame.pivot_table(index="method", columns=column, values=value, observed=True)
    table = table[list(dict.fromkeys(frame[column]))]
    ascending = value != "percent"
    table = table.sort_values(list(table.columns[:1]), ascending=ascending, na_position="last")
    heads_of_sizes = {size: f"{size:,}" for size in table.columns if not isinstance(size, str)}
    return markdown(table.map(number).rename(columns=heads or heads_of_sizes))


def precision(frame: pd.DataFrame) -> str:
    """Times in float32, and errors in both dtypes."""
    wide = frame.pivot_table(
        index="method", columns="dtype", values=["ms", "value_error", "gradient_error"]
    )
    table = pd.DataFrame(
        {
            "ms, float32": wide["ms", "float32"].map(number),
            "loss error, float32": wide["value_error", "float32"].map(_error),
            "gradient error, float32": wide["gradient_error", "float32"].map(_error),
            "loss error, bfloat16": wide["value_error", "bfloat16"].map(_error),
            "gradient error, bfloat16": wide["gradient_error", "bfloat16"].map(_error),
        }
    )
    return markdown(table.loc[wide["ms", "float32"].sort_values().index])


def failures(failed: pd.DataFrame) -> str:
    """Methods that failed or were wrong, with the reason and the number of cases."""
    kinds = failed.groupby(["method", "status", "why"], sort=False).size()
    return markdown(kinds.reset_index(name="cases").set_index("method"))


def others() -> Iterator[str]:
    """Benchmarks with records in a file of their own."""
    training = pd.DataFrame(load(RESULTS / "trl.jsonl"))
    if not training.empty:
        yield "## Training steps in TRL\n"
        for device in ("cuda", "cpu"):
            of_device = training[training.device == device]
            if not of_device.empty:
                yield from training_steps(device, of_device)
    yield "## The search over ranks\n"
    yield "See [distributed.md](../distributed.md), and [scaling.md](scaling.md) for many GPUs.\n"


def training_steps(device: str, frame: pd.DataFrame) -> Iterator[str]:
    """What is trained on a device, and the last record of every trainer."""
    last = frame.iloc[-1]
    option = "" if device == "cpu" else f" --device {device}"
    yield (
        f"`python -m benchmarks.trl_trainer{option}`: a Qwen3 with random weights, V = {last.V:,}, "
        f"H = {last.H:,}, layers: {last.layers}, {last['dtype']}; TRL {last.trl}, transformers "
        f"{last.transformers}, torch {last.torch}, {last.machine}, commit {last.commit}. Given are "
        f"{last.B} answers of {last['T'] // 2:,} to {last['T']:,} tokens per micro-batch, half of "
        "them without advantage. A step is four micro-batches and the optimizer.\n"
    )
    peak = "peak of the process, MiB" if device == "cpu" else "peak of the step, MiB"
    columns = {"step_ms": "step, ms", "ms": "loss and backward, ms", "ms_mean": "mean, ms"}
    columns["peak_MiB"] = peak
    frame = frame.drop_duplicates("case", keep="last").sort_values("step_ms")
    frame = frame.set_index(frame.case.str.removeprefix("TRL micro-batch: ").rename("method"))
    yield markdown(frame[list(columns)].map(number).rename(columns=columns)) + "\n"


def readme_block() -> str:
    """The tables of the README: the first model on every device, in both dtypes."""
    lines = []
    for device in ("cuda", "cpu"):
        frame = latest(device)
        if frame.empty:
            continue
        of_machine = machine(frame)
        searches = frame[(frame.task == "search") & (frame.status == "measured")]
        frame = plain_losses(frame[frame.sweep.isna()])
        for level, words in LEVELS.items():
            mine = frame[(frame.level == level) & frame.model.str.startswith("Qwen3")]
            if mine.empty:
                continue
            first = mine.iloc[0]
            H = f", H = {first.H:,}" if level == "hidden" else ""
            head = f"{words}, N = {first.N:,}, V = {first.V:,}{H}, ms"
            table = mine.pivot_table(index="method", columns="dtype", values="ms")
            dtypes = [dtype for dtype in ("float32", "bfloat16") if dtype in table]
            table = table[dtypes].sort_values(dtypes[-1]).map(number)
            lines.append(markdown(table.rename_axis(f"Loss and gradients {head}")) + "\n")
        tokens = searches.N.max()
        longest = searches[searches.N.eq(tokens) & (searches.model == "at the maximum bounds")]
        times = longest.set_index("method").ms
        search = ""
        if {"bapo_kernels", "the paper's loop"} <= set(times.index):
            ours, loop = number(times["bapo_kernels"]), number(times["the paper's loop"])
            search = (
                f"The search over {tokens:,} tokens takes {ours} ms, the paper's loop {loop} ms. "
            )
        lines.append(f"{search}[All benchmarks](docs/internals/benchmarks.md).\n\n{of_machine}")
    return "\n".join(lines)


def with_block(text: str, block: str) -> str:
    """The text, with the block between the two marks replaced."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n{block}\n{END}", text)


def _error(value: float) -> str:
    return "" if pd.isna(value) else f"{value:.0e}"


def _heads(frame: pd.DataFrame) -> dict[Any, str]:
    sizes = frame.drop_duplicates("model").set_index("model")
    return {model: f"{model} ({row.V:,} x {row.H:,})" for model, row in sizes.iterrows()}
