"""``python -m benchmarks.host_time``: the time of a tiny call, which is that of the host.

Forward and backward of ``bapo_loss`` on 16 tokens with V = 64, where kernels have nothing to do.
The backend ``triton`` compiles for sm_90 and launches as on a GPU, except that the driver library
below the launcher answers every call and does nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from bapo_kernels import bapo_loss
from bapo_kernels.backends import triton as triton_backend
from bapo_kernels.core.operators import SCHEMAS, TRITON, register

B, S, V = 2, 8, 64
# What Triton calls. The device has two multiprocessors.
_LIBCUDA = """
#include <unistd.h>
#define OK(name) int name(void) { return 0; }
OK(cuCtxGetCurrent) OK(cuCtxGetLimit) OK(cuCtxSetCurrent) OK(cuCtxSetLimit) OK(cuDeviceGet)
OK(cuDeviceGetCount) OK(cuDevicePrimaryCtxRetain) OK(cuDriverGetVersion) OK(cuFuncSetAttribute)
OK(cuFuncSetCacheConfig) OK(cuInit) OK(cuModuleGetFunction) OK(cuModuleUnload)
OK(cuOccupancyMaxActiveClusters)
OK(cuPointerGetAttributes) OK(cuTensorMapEncodeIm2col) OK(cuTensorMapEncodeTiled)
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cuDeviceGetAttribute(int *value, int attribute) {
    *value = attribute == 16 ? 2 : 232448;  // bytes of shared memory, and enough of the rest
    return 0;
}
int cuFuncGetAttribute(int *value) { *value = 1024; return 0; }
int cuPointerGetAttribute(void **value, int attribute, void *pointer) {
    *value = pointer;
    return 0;
}
int loads, load_error, load_milliseconds;
int cuModuleLoadData(void) {
    ++loads;
    usleep(1000 * load_milliseconds);
    return load_error;
}
int cuGetErrorString(int error, const char **text) { *text = "an error"; return 0; }
int (*launched)(const unsigned *config, void **parameters);
int cuLaunchKernelEx(const unsigned *config, void *function, void **parameters) {
    return launched ? launched(config, parameters) : 0;
}
"""


def absent_gpu(capability: int = 90) -> ctypes.CDLL:
    """Lets Triton launch on CPU tensors, for a GPU of which only the driver library is there.

    Nothing runs, so that results hold anything; or what ``launched`` of the library points to,
    which takes the configuration of the launch and the addresses of the parameters. The library
    also counts ``loads`` of modules, each of which takes ``load_milliseconds`` and returns
    ``load_error``.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    class AbsentGPU(CudaDriver):
        def __init__(self) -> None:
            super().__init__()
            self.get_current_device = lambda: 0
            self.get_current_stream = lambda device: 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

    folder = tempfile.mkdtemp()
    library = Path(folder, "libcuda.so.1")
    command = ["gcc", "-shared", "-fPIC", "-w", "-xc", "-", f"-Wl,-soname,{library.name}"]
    subprocess.run([*command, "-o", library], input=_LIBCUDA, text=True, check=True)
    loaded = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    os.environ["TRITON_LIBCUDA_PATH"] = folder
    triton.runtime.driver.set_active(AbsentGPU())
    return loaded


def install_absent_gpu() -> None:
    """The same for the operators of this package."""
    absent_gpu()
    triton_backend.why_not, triton_backend.INTERPRETED = lambda: None, True  # takes CPU tensors
    for name in SCHEMAS:
        register(TRITON, name, triton_backend.operator(name), ["CPU"])


def tiny_call(backend: str) -> Callable[[], tuple[float, float]]:
    """A function that takes the seconds of forward and of backward."""
    torch.manual_seed(0)
    logits = torch.randn(B, S, V, requires_grad=True)
    labels = torch.randint(0, V, (B, S))
    old, advantages = torch.randn(2, B, S)
    mask = torch.ones(B, S)

    def run() -> tuple[float, float]:
        logits.grad = None
        begin = time.perf_counter()
        loss = bapo_loss(logits, labels, old, advantages, mask, backend=backend).loss
        middle = time.perf_counter()
        loss.backward()
        return middle - begin, time.perf_counter() - middle

    return run


def main(
    backend: Literal["cpu", "triton"] = "cpu",
    calls: int = 2_000,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Median microseconds of forward, backward and both."""
    torch.set_num_threads(1)
    if backend == "triton":
        install_absent_gpu()
    run = tiny_call(backend)
    for _ in range(100):
        run()
    forward, backward = zip(*(run() for _ in range(calls)), strict=True)
    both = [sum(pair) for pair in zip(forward, backward, strict=True)]
    times = {"forward": forward, "backward": backward, "both": both}
    medians = {name: round(1e6 * statistics.median(values), 1) for name, values in times.items()}
    if as_json:
        print(json.dumps({"backend": backend, "torch": torch.__version__, **medians}))
    else:
        print(f"{backend}: " + ", ".join(f"{name} {us} us" for name, us in medians.items()))


if __name__ == "__main__":
    typer.run(main)
