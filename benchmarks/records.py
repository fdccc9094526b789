"""Records of measurements: JSON lines with the machine and the commit of the measurement."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bapo_kernels

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Record = dict[str, Any]


def environment(device: str = "cpu") -> Record:
    """Machine, versions and commit."""
    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "machine": processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "bapo_kernels": bapo_kernels.__version__,
        "commit": commit(),
        "malloc": "retains" if "MALLOC_MMAP_THRESHOLD_" in os.environ else "default",
    }
    if device == "cuda":
        facts |= {"machine": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return facts


def processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    features = torch.backends.cpu.get_cpu_capability()
    features += " by ATEN_CPU_CAPABILITY" if "ATEN_CPU_CAPABILITY" in os.environ else ""
    return f"{names[0] if names else platform.processor()}, {len(names)} cores, {features}"


def commit() -> str:
    """From BAPO_COMMIT, from git, or from the file COMMIT of a copy without history."""
    if os.environ.get("BAPO_COMMIT"):
        return os.environ["BAPO_COMMIT"]
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    except OSError:  # git is not installed
        described = ""
    file = ROOT / "COMMIT"
    return described or (file.read_text().strip() if file.exists() else "unknown")


def append(path: Path, records: list[Record]) -> None:
    """Appends records to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")


def load(path: Path) -> list[Record]:
    """All records of a file; an empty list if the file does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary(samples: list[float]) -> dict[str, float]:
    """Median and 20/80 percentiles of milliseconds."""
    low, median, high = np.percentile(samples, [20, 50, 80])
    return {"ms": median, "ms_20": low, "ms_80": high, "repetitions": len(samples)}
