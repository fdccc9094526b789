"""Step time and memory of the loss on 8 to 1,024 GPUs, on paper: ``docs/scaling.md``.

Every number comes from :class:`Machine`, :class:`Job` and :class:`Way`; once a GPU has been
measured (``results/cuda.jsonl``) its rates, and shares of them, take the place of the stated ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log2
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd

from bapo_kernels import BAPOConfig

from .frames import latest, plain_losses
from .plot import FIGURES, LEVELS, RC, plain_numbers, save

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
GPUS = (8, 32, 128, 512, 1_024)
GB, TFLOP = 1e9, 1e12


@dataclass(frozen=True)
class Machine:
    """An H100 and its links; all rates are stated, not measured, unless ``measured`` says so."""

    copy: float = 3_000 * GB  # read + written, a second; QuACK's softmax reaches 3,010
    gemm: float = 700 * TFLOP  # bfloat16 under sustained load
    nvlink: float = 450 * GB  # a direction, the 8 GPUs of a node
    network: float = 50 * GB  # 400 Gbit/s a GPU
    latency: float = 15e-6  # of a collective in a node
    hop: float = 4e-6  # more, for each doubling of the nodes
    launch: float = 5e-6  # of a kernel
    readback: float = 20e-6  # the host waits for the device, and starts again
    measured: str = ""

    def __str__(self) -> str:
        """In a sentence."""
        rates = (
            f"Copy {self.copy / GB:,.0f} GB/s (read and written), matrix products "
            f"{self.gemm / TFLOP:,.0f} TFLOP/s, NVLink {self.nvlink / GB:,.0f} GB/s, network "
            f"{self.network / GB:,.0f} GB/s a GPU"
        )
        waits = (
            f"a collective {1e6 * self.latency:.0f} us in a node and {1e6 * self.hop:.0f} us more "
            f"for each doubling of the nodes; a kernel launch {1e6 * self.launch:.0f} us, waiting "
            f"for the device {1e6 * self.readback:.0f} us"
        )
        return f"{rates}; {waits}."


@dataclass(frozen=True)
class Job:
    """An optimizer step: 4,096 answers of 1,024 tokens, the head of Qwen3-8B."""

    tokens: int = 4_096 * 1_024
    micro_batch: int = 8_192  # tokens of a rank of the data-parallel group
    tensor_parallel: int = 8
    V: int = 151_936
    H: int = 4_096
    live: float = 1.0


@dataclass(frozen=True)
class Way:
    """How a loss is computed: what it moves and multiplies, and how it searches.

    Attributes:
        bytes_per_logit: moved, beyond the matrix products.
        products: of ``2*n*V*H`` FLOPs each; 0 where the logits are given.
        memory_per_logit: bytes at the peak, logits included, of the rows that exist at once.
        rows: that exist at once, at most.
        share: of the machine's rate that is reached.
        probes: collectives of a search.
        who: has the share in the records.
    """

    name: str
    bytes_per_logit: float
    products: int
    memory_per_logit: float
    rows: int
    share: float
    probes: int
    who: str = ""

    def measured(self, shares: dict[str, float]) -> Way:
        """With the share that was measured, which is of the least bytes and products."""
        if self.who not in shares:
            return self
        least = dict(bytes_per_logit=0, products=3) if self.products else dict(bytes_per_logit=4)
        return replace(self, share=shares[self.who], **least)


CHUNK = 2**30
COLOURS = ("#0b5fc0", "#5aa9f2", "#e08a2e", "#0b5fc0", "#2e8b57")
PROBES = len(BAPOConfig.paper().lower_grid) + len(BAPOConfig.paper().upper_grid)


def ways(job: Job) -> dict[str, list[Way]]:
    """Ours, and plain PyTorch or a chunked head that recomputes, under the authors' loop."""
    chunk = CHUNK // (2 * job.V // job.tensor_parallel)
    whole, ours, plain = job.micro_batch, "bapo_kernels cuda", "PyTorch cross_entropy"
    return {
        "from logits": [
            Way("bapo_loss", 4, 0, 4, whole, 1 / 1.05, 1, ours),
            Way("bapo_loss, in place", 4, 0, 2, whole, 1 / 1.05, 1, f"{ours}, in place"),
            Way("PyTorch cross_entropy, the loop", 36, 0, 14, whole, 1.0, PROBES, plain),
        ],
        "from hidden states": [
            Way("bapo_linear_loss", 8, 3, 2, min(chunk, whole), 1 / 1.05, 1, ours),
            Way(
                "a head that recomputes, the loop",
                16,
                4,
                10,
                512,
                1 / 1.05,
                PROBES,
                "TRL chunked head",
            ),
        ],
    }


def rows_time(way: Way, job: Job, machine: Machine) -> float:
    """Seconds of the rows of a micro-batch on a rank: memory traffic and matrix products."""
    logits = job.live * job.micro_batch * job.V / job.tensor_parallel
    traffic = way.bytes_per_logit * logits / machine.copy
    products = 2 * way.products * logits * job.H / machine.gemm
    return (traffic + products) / way.share


def tensor_parallel_time(way: Way, job: Job, machine: Machine) -> float:
    """Four float64 a token from every rank; the hidden states' gradient is summed in float32."""
    t, n = job.tensor_parallel, job.live * job.micro_batch
    if t == 1:
        return 0.0
    seconds = machine.latency + 32 * n * (t - 1) / machine.nvlink
    if way.products:
        seconds += machine.latency + 2 * (t - 1) / t * 4 * n * job.H / machine.nvlink
    return seconds


def search_time(way: Way, job: Job, machine: Machine, gpus: int) -> float:
    """A collective a probe over the data-parallel ranks; the loop waits for each on the host.

    One probe of the loop is two sums over the tokens, some ten kernels. The single collective has a
    row of the table for every rank.
    """
    ranks = gpus // job.tensor_parallel
    nodes = max(1, gpus // 8)
    latency = 0.0 if ranks == 1 else machine.latency + machine.hop * log2(nodes)
    floats = 2 if way.probes > 1 else PROBES * ranks
    link = machine.network if nodes > 1 else machine.nvlink
    a_probe = latency + 2 * 8 * floats / link
    if way.probes > 1:
        return way.probes * (a_probe + 10 * machine.launch + machine.readback)
    return a_probe + 4 * machine.launch


def predictions(
    job: Job, machine: Machine, shares: dict[str, dict[str, float]]
) -> Iterator[dict[str, Any]]:
    """A row for each way and number of GPUs; times in milliseconds a step, memory in MiB a rank."""
    for level, of_level in ways(job).items():
        for way in (way.measured(shares.get(level, {})) for way in of_level):
            for gpus in GPUS:
                micro_batches = job.tokens / job.micro_batch / (gpus // job.tensor_parallel)
                rows = rows_time(way, job, machine)
                tensor = tensor_parallel_time(way, job, machine)
                search = search_time(way, job, machine, gpus)
                logits = min(way.rows, job.micro_batch) * job.V / job.tensor_parallel
                yield {
                    "level": level,
                    "way": way.name,
                    "gpus": gpus,
                    "rows": 1e3 * micro_batches * rows,
                    "tensor parallel": 1e3 * micro_batches * tensor,
                    "search": 1e3 * micro_batches * search,
                    "step": 1e3 * micro_batches * (rows + tensor + search),
                    "MiB": way.memory_per_logit * logits / 2**20,
                }


def of_records() -> tuple[Machine, dict[str, dict[str, float]]]:
    """Rates of a GPU's records, and by level everybody's shares of them; stated ones without."""
    frame = latest("cuda")
    if frame.empty:
        return Machine(), {}
    frame = plain_losses(frame)
    frame = frame[(frame["dtype"] == "bfloat16") & (frame.V == Job.V)]
    copy = frame[frame.who == "copy"].GB_per_s.median() * GB
    gemm = frame[frame.who == "three matrix products"].TFLOP_per_s.median() * TFLOP
    shares = {
        words: frame[frame.level == level].groupby("who").share.median().to_dict()
        for level, words in LEVELS.items()
    }
    return replace(Machine(), copy=copy, gemm=gemm, measured=str(frame.machine.iloc[-1])), shares


def against_the_cpu() -> pd.DataFrame:
    """What the same arithmetic says of the CPU's records: measured time over predicted time."""
    frame = plain_losses(latest("cpu"))
    frame = frame[frame.sweep.isna()]
    products = {"bapo_kernels cpu": 3, "PyTorch cross_entropy": 3, "TRL chunked head": 4}
    rows = []
    for _, record in frame[(frame.level == "hidden") & frame.who.isin(products)].iterrows():
        same = (frame.level == "hidden") & (frame.model == record.model)
        same &= (frame["dtype"] == record["dtype"]) & (frame.who == "three matrix products")
        predicted = frame[same].ms.iloc[0] * products[record.who] / 3
        rows.append(
            {
                "": f"{record.model}, {record['dtype']}",
                "who": record.who,
                "measured / predicted": record.ms / predicted,
            }
        )
    return pd.DataFrame(rows)


def draw(folder: Path = FIGURES) -> list[Path]:
    """Time of a step over the number of GPUs, and the search's part in it."""
    machine, shares = of_records()
    frame = pd.DataFrame(predictions(Job(), machine, shares))
    colours = dict(zip(frame.way.unique(), COLOURS, strict=True))
    with mpl.rc_context(RC):
        figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
        for ax, (level, of_level) in zip(axes, frame.groupby("level", sort=False), strict=True):
            in_place = of_level.way.str.endswith("in place")  # takes the same time
            for way, line in of_level[~in_place].groupby("way", sort=False):
                ax.plot(line.gpus, line.step, "o-", color=colours[way], label=f"{way}: step")
                ax.plot(line.gpus, line.search, ":", color=colours[way], label="its searches")
            ax.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="milliseconds a step")
            ax.set_xticks(GPUS, [f"{g:,}" for g in GPUS])
            plain_numbers(ax.yaxis)
            ax.minorticks_off()
            ax.set_title(f"The loss {level}, on paper")
            ax.legend(fontsize=8)
        return save(figure, folder / "scaling")


def page() -> str:
    """The text of ``docs/scaling.md``."""
    from .report import markdown, number

    (machine, shares), job = of_records(), Job()
    frame = pd.DataFrame(predictions(job, machine, shares))
    rates = (
        f"measured on {machine.measured}"
        if machine.measured
        else "stated, **not measured: none of the kernels has run on a GPU yet**"
    )
    parts = [INTRODUCTION.format(machine=machine, j=job, rates=rates, probes=PROBES)]
    for level, of_level in frame.groupby("level", sort=False):
        parts.append(f"## {str(level).capitalize()}\n")
        table = of_level.pivot_table(index="way", columns="gpus", values="step", sort=False)
        parts.append("Milliseconds of the loss in a step, all micro-batches:\n")
        table = table.map(number).rename_axis("GPUs").rename(columns="{:,}".format)
        parts.append(markdown(table) + "\n")
        last = of_level[of_level.gpus == GPUS[-1]].set_index("way")
        table = last[["rows", "tensor parallel", "search", "MiB"]].map(number)
        parts.append(
            f"Where they go on {GPUS[-1]:,} GPUs, and memory of a rank at the peak, MiB:\n"
        )
        parts.append(markdown(table.rename_axis("")) + "\n")
    check = against_the_cpu()
    if not check.empty:
        parts.append(CHECK)
        wide = check.pivot_table(index="", columns="who", values="measured / predicted")
        parts.append(markdown(wide.map(number)) + "\n")
    return "\n".join(parts).rstrip() + "\n"


INTRODUCTION = """# The loss on many GPUs, on paper

Written by `python -m benchmarks report`; `benchmarks/scaling.py` has every number and formula.
Links and latencies are those of data sheets. The rates are {rates}.

![Time of a step over GPUs](figures/scaling.svg)

**Job.** {j.tokens:,} tokens an optimizer step, V = {j.V:,}, H = {j.H:,}, bfloat16, micro-batches
of {j.micro_batch:,} tokens a data-parallel rank, {j.tensor_parallel}-way tensor parallel in a node
(the vocabulary is cut), the rest data parallel, all rows live, a search a micro-batch.

**Machine.** {machine}

**Rows.** Bytes of a logit through the copy's rate, plus `2*n*V*H` FLOPs for each matrix product,
over the share of the rate that is reached: ours 4 bytes (each logit read, each gradient written) at
the target of 1/1.05 of a copy; plain PyTorch 36 bytes (float32 logits 6, log-softmax 8, zeros for
its gradient 4, the gradient 12, the cast back 6) at the full rate; a head that recomputes its
logits in backward 4 products where 3 are enough.

**Tensor parallel.** Four float64 a token are gathered from every rank, in the same way for all; the
gradient of the hidden states is summed in float32.

**Search.** Ours is one collective of {probes} float64 for each data-parallel rank, started without
the host. The authors' loop is up to {probes} probes ({probes} here), each some ten kernels, an
all-reduce of two numbers and a wait on the host. Where a search ends early the loop does fewer.

What is not in it: stragglers, of which the loop waits for the slowest at each probe; the optimizer,
the model, and the all-reduce of its gradients, which are the same for all.
"""
CHECK = """## The same arithmetic on the CPU

Measured time over the time that the count of matrix products predicts, from the three bare products
of the same run ([records](../benchmarks/results/cpu.jsonl)); the part above 1 is what the
arithmetic does not know. The predictions above stand under the same reservation.
"""
