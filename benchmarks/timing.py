"""Timing on the CPU, and what a record needs to be understood later."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bapo_kernels


def measure(
    run: Callable[[], Any], *, prepare: Callable[[], Any] | None = None, seconds: float = 3.0
) -> dict[str, float]:
    """Median and 20/80 percentiles of ``run`` in milliseconds; ``prepare`` is not timed.

    At least 3 and at most 50 repetitions after one that warms up, for about ``seconds``.
    """
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 4 or (len(times) < 51 and time.perf_counter() - begin < seconds):
        if prepare is not None:
            prepare()
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    low, median, high = np.percentile(times[1:], [20, 50, 80])
    return {"ms": median, "ms_20": low, "ms_80": high, "repetitions": len(times) - 1}


def environment() -> dict[str, Any]:
    """Machine, versions and commit."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "bapo_kernels": bapo_kernels.__version__,
        "commit": commit(),
        "malloc": "retains" if "MALLOC_MMAP_THRESHOLD_" in os.environ else "default",
    }


def processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    features = torch.backends.cpu.get_cpu_capability()
    return f"{names[0] if names else platform.processor()}, {len(names)} cores, {features}"


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return run.stdout.strip() or "unknown"


def append(path: Path, records: list[dict[str, Any]]) -> None:
    """Adds records to a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
