"""The model on public kernels whose times are published.

The kernels are taken from wheels on PyPI, which are installed into a temporary folder, and compiled
ahead of time by the installed Triton.
"""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import torch
import triton
from triton.backends.compiler import GPUTarget

from .gpus import GPUS
from .launch import LABELS, ROWS, Plan, traces
from .model import CASES, first_loads, predict, steps
from .sass import Code, disassemble

# Published times: what of them is the host's extrapolates to no rows, or to V = 0.
TIMES = Path(__file__).with_suffix(".csv")
SOURCES = {
    "records": "[Liger](https://github.com/linkedin/Liger-Kernel/tree/ead96b6/benchmark/data)",
    "figure": "[QuACK](https://github.com/Dao-AILab/quack/tree/9649d34/media)",
    "thread": "[TRL, a prototype](https://github.com/huggingface/trl/issues/7244)",
}
# Of their arguments, pointers are regions of launch.py; others are absent.
LOGITS, OUTPUT, RESULTS = *ROWS, 8


def cross_entropy(V: int) -> dict[str, float | str]:
    return {
        **dict(X_ptr=LOGITS, Y_ptr=LABELS, loss_ptr=RESULTS, X_stride=V, n_cols=V),
        **dict(Y_stride=1, loss_stride=1, ignore_index=-100, reduction="mean"),
        **dict(n_non_ignore=8_192, sum_non_ignore_weight=8_192.0, weight_sum=0.0),
        **dict(lse_square_scale=0.0, label_smoothing=0.0, HAS_GRADIENTS=True),
        **dict(BLOCK_SIZE=min(32_768, triton.next_power_of_2(V)), num_warps=32),
    }


def softmax(V: int) -> dict[str, float | str]:
    block = triton.next_power_of_2(V)
    return {
        **dict(X_ptr=LOGITS, Y_ptr=OUTPUT, X_row_stride=V, Y_row_stride=V, n_cols=V),
        **dict(BLOCK_SIZE=block, num_warps=32 if block >= 32_768 else 16 if block >= 8_192 else 8),
    }


def log_probs_and_entropy(V: int) -> dict[str, float | str]:
    outputs = ("logprobs_ptr", "entropy_ptr", "log_z_ptr", "expected_logit_ptr")
    return {
        **dict(logits_ptr=LOGITS, index_ptr=LABELS, row_mask_ptr=LABELS, n_cols=V),
        **dict.fromkeys(outputs, RESULTS),
        **dict(logits_batch_stride=1_024 * V, logits_row_stride=V, index_batch_stride=1_024),
        **dict(index_row_stride=1, mask_batch_stride=0, mask_row_stride=0, rows_per_batch=1_024),
        **dict(TEMPERATURE=1.0, BLOCK_SIZE=1_024, num_warps=4),
    }


# Where a wheel has a kernel, and what a launcher gives it.
KERNELS = {
    "liger_cross_entropy_kernel": ("liger_kernel/ops/cross_entropy.py", cross_entropy),
    "_softmax_single_block_forward_kernel": ("liger_kernel/ops/softmax.py", softmax),
    "_forward_kernel": ("trl/kernels/logprob_entropy.py", log_probs_and_entropy),
}


def module(file: str, folder: Path) -> ModuleType:
    """That of a wheel, whatever version is installed."""
    for name in [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]:
        del sys.modules[name]
    (folder / "liger_kernel").mkdir(exist_ok=True)
    (folder / "liger_kernel" / "__init__.py").touch()
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("peer", folder / file)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    sys.path.remove(str(folder))
    return found


def compiled(peer: Any, arch: str, folder: Path) -> tuple[Code, int, bytes]:
    """The kernel, its number of warps, and its parameters."""
    target = GPUTarget("cuda", int(arch[3:]), 32)
    asked = dict(get_current_target=lambda: target, get_current_device=lambda: 0)
    triton.runtime.driver.set_active(SimpleNamespace(**asked, get_current_stream=lambda device: 0))
    file, arguments = KERNELS[peer.kernel]
    function, known = getattr(module(file, folder), peer.kernel), arguments(peer.V)
    dtypes = dict.fromkeys(ROWS, getattr(torch, peer.dtype))
    dtypes |= {LABELS: torch.int64, RESULTS: torch.float32}
    warps = known.pop("num_warps")
    given = {n: dtypes[v] if n.endswith("_ptr") else v for n, v in known.items()}
    kernel = function.warmup(*map(given.get, function.arg_names), grid=(1,), num_warps=warps)
    parameters = b""
    for name, kind in kernel.src.signature.items():
        if kind == "constexpr":
            continue
        form = "Q" if kind[0] == "*" else {"i32": "i", "i64": "q", "fp32": "f"}[kind]
        parameters += bytes(-len(parameters) % struct.calcsize(form))
        parameters += struct.pack(form, known[name] << 32 if form == "Q" else known[name])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        (code,) = disassemble(Path(file.name)).values()
    return code, warps, parameters + bytes(24)  # no scratch memory


def line(peer: Any, folder: Path) -> dict[str, str]:
    gpu = next(gpu for gpu in GPUS if gpu.name == peer.gpu)
    code, warps, parameters = compiled(peer, gpu.arch, folder)
    plan = Plan(peer.V, peer.dtype, 0, 0, gpu.resident(warps, code.registers), warps, 0)
    found = traces(code, gpu.arch, plan, parameters)
    first = first_loads(found)
    executed = [steps(trace, first=first) for trace in found]
    predictions = (predict(executed, plan, gpu, case) for case in CASES)
    of_one = 1e3 * peer.rows / gpu.multiprocessors
    times = [each.cycles / each.clock * of_one for each in predictions]
    return {
        "kernel": f"{peer.wheel.replace('==', ' ')}, {Path(KERNELS[peer.kernel][0]).stem}",
        "GPU": peer.gpu,
        "rows x V": f"{peer.rows:,} x {peer.V:,} {peer.dtype}",
        "published": f"{peer.ms:.3f} ms" + f", {peer.host:.2f} of it host" * bool(peer.host),
        "predicted": f"{times[0]:.3f} ms ({min(times):.3f}-{max(times):.3f})",
        "deviation": f"{100 * (times[0] / (peer.ms - peer.host) - 1):+.0f} %",
        "source": SOURCES[peer.source],
    }


def table() -> pd.DataFrame:
    """Takes minutes, and wheels from the network."""
    lines = []
    for (wheel, sha256), peers in pd.read_csv(TIMES).groupby(["wheel", "sha256"], sort=False):
        with tempfile.TemporaryDirectory() as folder:
            locked = Path(folder, "requirements.txt")
            locked.write_text(f"{wheel} --hash=sha256:{sha256}\n")
            pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            options = ["--no-deps", "--require-hashes", "--target", folder, "-r", locked]
            subprocess.run([*pip, *options], check=True)
            lines += [line(peer, Path(folder)) for peer in peers.itertuples(index=False)]
    return pd.DataFrame(lines).set_index("kernel")
