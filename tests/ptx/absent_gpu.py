"""Of a GPU that is not there the driver library alone, so that Triton compiles and launches for it.

`python -m benchmarks.host_time` times such launches too.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import threading
from pathlib import Path

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


class Current(threading.local):
    """The GPU of each thread, and its stream there, until the thread has others."""

    gpu, stream = 0, 0x77  # not the legacy stream


current = Current()


def absent_gpu(capability: int = 90) -> ctypes.CDLL:
    """Lets Triton launch on CPU tensors, for a GPU of which only the driver library is there.

    Nothing runs, so that results hold anything; or what ``launched`` of the library points to,
    which takes the configuration of the launch and the addresses of the parameters. The library
    also counts ``loads`` of modules, each of which takes ``load_milliseconds`` and returns
    ``load_error``.
    """
    import triton  # not before the test session has decided whether it interprets kernels
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    class AbsentGPU(CudaDriver):
        def __init__(self) -> None:
            super().__init__()
            self.get_current_device = lambda: current.gpu
            self.get_current_stream = lambda gpu: current.stream + gpu  # each has its own

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
