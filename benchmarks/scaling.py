"""A model of step time and memory of the loss on 8 to 1,024 GPUs: ``docs/internals/scaling.md``.

Every number comes from :class:`Machine`, :class:`Job` and :class:`Approach`. Once a GPU has been
measured (``results/cuda.jsonl``), its rates and shares replace the stated ones.
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
from .tables import markdown, number

PAGE = Path(__file__).parents[1] / "docs" / "internals" / "scaling.md"
GPUS = (8, 32, 128, 512, 1_024)
GB, TFLOP = 1e9, 1e12
RANGE = 1.15  # of all rates and times of the machine, either way


@dataclass(frozen=True)
class Machine:
    """An H100 and its links; rates are stated, unless ``measured`` names the measured machine."""

    copy: float = 3_000 * GB  # read and written, per second; QuACK's softmax reaches 3,010
    gemm: float = 700 * TFLOP  # bfloat16 under sustained load
    nvlink: float = 450 * GB  # per direction, among the 8 GPUs of a node
    network: float = 50 * GB  # 400 Gbit/s per GPU
    latency: float = 15e-6  # of a collective inside a node
    hop: float = 4e-6  # added for each doubling of the nodes
    launch: float = 5e-6  # of a kernel
    readback: float = 20e-6  # the host waits for the device and resumes
    measured: str = ""

    def faster(self, factor: float) -> Machine:
        """All rates higher, and all times shorter."""
        values = {name: getattr(self, name) for name in ("copy", "gemm", "nvlink", "network")}
        times = {name: getattr(self, name) for name in ("latency", "hop", "launch", "readback")}
        changed = {name: factor * value for name, value in values.items()}
        return replace(self, **changed, **{name: time / factor for name, time in times.items()})

    def table(self) -> pd.DataFrame:
        """Rates in GB/s and TFLOP/s, times in microseconds."""
        row = {
            "copy, GB/s": self.copy / GB,
            "products, TFLOP/s": self.gemm / TFLOP,
            "NVLink, GB/s": self.nvlink / GB,
            "network, GB/s": self.network / GB,
            "collective, us": 1e6 * self.latency,
            "per doubling of nodes, us": 1e6 * self.hop,
            "launch, us": 1e6 * self.launch,
            "wait of the host, us": 1e6 * self.readback,
        }
        return pd.DataFrame([row], [self.measured or "stated"]).map("{:,.0f}".format)


@dataclass(frozen=True)
class Job:
    """An optimizer step on 4,096 answers of 1,024 tokens, with the head of Qwen3-8B."""

    tokens: int = 4_096 * 1_024
    micro_batch: int = 8_192  # tokens per data-parallel rank
    tensor_parallel: int = 8
    V: int = 151_936
    H: int = 4_096
    active: float = 1.0  # share of the rows


@dataclass(frozen=True)
class Approach:
    """What a way to compute the loss moves and multiplies, and how it searches.

    Attributes:
        bytes_per_logit: bytes moved, apart from the matrix products.
        products: matrix products of ``2*n*V*H`` FLOPs each; 0 if the logits are given.
        memory_per_logit: peak bytes, logits included, of the rows that are materialised at once.
        rows: number of rows that are materialised at once, at most.
        share: share of the machine's rate that is reached.
        probes: collectives per search.
        method: the method whose measured share replaces ``share``.
    """

    name: str
    bytes_per_logit: float
    products: int
    memory_per_logit: float
    rows: int
    share: float
    probes: int
    method: str = ""

    def measured(self, shares: dict[str, float]) -> Approach:
        """With the measured share, which is relative to the least bytes and products."""
        if self.method not in shares:
            return self
        least = dict(bytes_per_logit=0, products=3) if self.products else dict(bytes_per_logit=4)
        return replace(self, share=shares[self.method], **least)


CHUNK = 2**30
COLOURS = ("#0b5fc0", "#5aa9f2", "#e08a2e", "#0b5fc0", "#2e8b57")
GRID_POINTS = len(BAPOConfig.paper().lower_grid) + len(BAPOConfig.paper().upper_grid)
PROBES = GRID_POINTS - 1  # pairs of bounds that a loop tests from the start to the maxima


def approaches(job: Job) -> dict[str, list[Approach]]:
    """Ours, and plain PyTorch or a chunked head that recomputes, both with the authors' loop."""
    chunk = CHUNK // (2 * job.V // job.tensor_parallel)
    whole, ours, plain = job.micro_batch, "bapo_kernels cuda", "PyTorch cross_entropy"
    return {
        "from logits": [
            Approach("bapo_loss", 4, 0, 4, whole, 1 / 1.05, 1, ours),
            Approach("bapo_loss, in place", 4, 0, 2, whole, 1 / 1.05, 1, f"{ours}, in place"),
            Approach("PyTorch cross_entropy with the loop", 36, 0, 14, whole, 1.0, PROBES, plain),
        ],
        "from hidden states": [
            Approach("bapo_linear_loss", 8, 3, 2, min(chunk, whole), 1 / 1.05, 1, ours),
            Approach(
                "recomputing head with the loop",
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


def rows_time(approach: Approach, job: Job, machine: Machine) -> float:
    """Seconds for the rows of a micro-batch on a rank: memory traffic and matrix products."""
    logits = job.active * job.micro_batch * job.V / job.tensor_parallel
    traffic = approach.bytes_per_logit * logits / machine.copy
    products = 2 * approach.products * logits * job.H / machine.gemm
    return (traffic + products) / approach.share


def tensor_parallel_time(approach: Approach, job: Job, machine: Machine) -> float:
    """Four float64 values per token and rank; the hidden states' gradient is summed in float32."""
    t, n = job.tensor_parallel, job.active * job.micro_batch
    if t == 1:
        return 0.0
    seconds = machine.latency + 32 * n * (t - 1) / machine.nvlink
    if approach.products:
        seconds += machine.latency + 2 * (t - 1) / t * 4 * n * job.H / machine.nvlink
    return seconds


def search_time(approach: Approach, job: Job, machine: Machine, gpus: int) -> float:
    """One collective per probe over the data-parallel ranks; the loop's host waits for each.

    A probe of the loop is two sums over the tokens, some ten kernels. The single collective gathers
    a row of the table from every rank.
    """
    ranks = gpus // job.tensor_parallel
    nodes = max(1, gpus // 8)
    latency = 0.0 if ranks == 1 else machine.latency + machine.hop * log2(nodes)
    floats = 2 if approach.probes > 1 else GRID_POINTS * ranks
    link = machine.network if nodes > 1 else machine.nvlink
    a_probe = latency + 2 * 8 * floats / link
    if approach.probes > 1:
        return approach.probes * (a_probe + 10 * machine.launch + machine.readback)
    return a_probe + 4 * machine.launch


def predictions(
    job: Job, machine: Machine, shares: dict[str, dict[str, float]]
) -> Iterator[dict[str, Any]]:
    """Milliseconds per step and MiB per rank, one row per approach and number of GPUs."""
    for level, of_level in approaches(job).items():
        for approach in (approach.measured(shares.get(level, {})) for approach in of_level):
            for gpus in GPUS:
                micro_batches = job.tokens / job.micro_batch / (gpus // job.tensor_parallel)
                rows = rows_time(approach, job, machine)
                tensor = tensor_parallel_time(approach, job, machine)
                search = search_time(approach, job, machine, gpus)
                logits = min(approach.rows, job.micro_batch) * job.V / job.tensor_parallel
                yield {
                    "level": level,
                    "approach": approach.name,
                    "gpus": gpus,
                    "rows": 1e3 * micro_batches * rows,
                    "tensor parallel": 1e3 * micro_batches * tensor,
                    "search": 1e3 * micro_batches * search,
                    "step": 1e3 * micro_batches * (rows + tensor + search),
                    "MiB": approach.memory_per_logit * logits / 2**20,
                }


def of_records() -> tuple[Machine, dict[str, dict[str, float]]]:
    """Rates of a measured GPU and the shares of each method, by level; else the stated rates."""
    frame = latest("cuda")
    if frame.empty:
        return Machine(), {}
    frame = plain_losses(frame)
    frame = frame[(frame["dtype"] == "bfloat16") & (frame.V == Job.V)]
    copy = frame[frame.method == "copy"].GB_per_s.median() * GB
    gemm = frame[frame.method == "three matrix products"].TFLOP_per_s.median() * TFLOP
    shares = {
        words: frame[frame.level == level].groupby("method").share.median().to_dict()
        for level, words in LEVELS.items()
    }
    return replace(Machine(), copy=copy, gemm=gemm, measured=str(frame.machine.iloc[-1])), shares


def against_the_cpu() -> pd.DataFrame:
    """The same arithmetic on the CPU's records: measured time over predicted time."""
    frame = plain_losses(latest("cpu"))
    frame = frame[frame.sweep.isna()]
    products = {"bapo_kernels cpu": 3, "PyTorch cross_entropy": 3, "TRL chunked head": 4}
    rows = []
    for _, record in frame[(frame.level == "hidden") & frame.method.isin(products)].iterrows():
        same = (frame.level == "hidden") & (frame.model == record.model)
        same &= (frame["dtype"] == record["dtype"]) & (frame.method == "three matrix products")
        predicted = frame[same].ms.iloc[0] * products[record.method] / 3
        rows.append({"method": record.method, "measured / predicted": record.ms / predicted})
    return pd.DataFrame(rows)


def draw(folder: Path = FIGURES) -> Path:
    """Time of a step over the number of GPUs, and the part of the searches."""
    machine, shares = of_records()
    frame = pd.DataFrame(predictions(Job(), machine, shares))
    colours = dict(zip(frame.approach.unique(), COLOURS, strict=True))
    with mpl.rc_context(RC):
        figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
        for ax, (level, of_level) in zip(axes, frame.groupby("level", sort=False), strict=True):
            in_place = of_level.approach.str.endswith("in place")  # which takes the same time
            for name, line in of_level[~in_place].groupby("approach", sort=False):
                ax.plot(line.gpus, line.step, "o-", color=colours[name], label=f"{name}: step")
                ax.plot(line.gpus, line.search, ":", color=colours[name], label="searches")
            ax.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="milliseconds per step")
            ax.set_xticks(GPUS, [f"{g:,}" for g in GPUS])
            plain_numbers(ax.yaxis)
            ax.minorticks_off()
            ax.set_title(f"The loss {level} (model)")
            ax.legend(fontsize=8)
        return save(figure, folder / "scaling.png")


def model_table(machine: Machine, shares: dict[str, dict[str, float]]) -> pd.DataFrame:
    frame = pd.DataFrame(predictions(Job(), machine, shares)).set_index("approach")
    steps = frame.pivot_table("step", "approach", "gpus", sort=False)[[GPUS[0], GPUS[-1]]]
    parts = frame[frame.gpus == GPUS[-1]][["rows", "tensor parallel", "search", "MiB"]]
    return steps.rename(columns="{:,}".format).join(parts).map(number).rename_axis("GPUs")


def blocks() -> dict[str, str]:
    """The tables of the page by their marks."""
    machine, shares = of_records()
    found, least, most = (
        model_table(machine.faster(factor), shares) for factor in (1.0, RANGE, 1 / RANGE)
    )
    table = found + " (" + least + "-" + most + ")"
    table["MiB"] = found["MiB"]
    cpu = against_the_cpu().groupby("method")["measured / predicted"].agg(["min", "median", "max"])
    return {
        "machine": markdown(machine.table()),
        "model": markdown(table),
        "cpu": markdown(cpu.map(number)),
    }
