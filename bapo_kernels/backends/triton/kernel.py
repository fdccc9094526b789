"""Launches kernels with little work on the host.

May import nothing of the package. Decides which arguments specialise a kernel: with one more, a
training run compiles kernels at later steps too.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch
import triton
from torch import Tensor


class Kernel:
    """A function in Triton's language, launched as ``kernel[grid](*arguments, **limits(...))``.

    Triton's own launch inspects every argument, which takes the host several times as long as the
    launch. So values do not specialise a kernel here, except those named in ``specialised``: what
    was compiled then follows from the dtypes, the constants and the device alone.

    Parameters are pointers without annotation, the first of them never None, then numbers, then
    constants.
    """

    def __init__(self, function: Callable[..., None], specialised: Sequence[str] = ()) -> None:
        parameters = inspect.signature(function).parameters.values()
        self._names = [parameter.name for parameter in parameters]
        constants = [p.name for p in parameters if "constexpr" in str(p.annotation)]
        self._pointers = sum(parameter.annotation is parameter.empty for parameter in parameters)
        self._constants = len(self._names) - len(constants)
        self._specialised = [self._names.index(name) for name in specialised]
        general = [name for name in self._names if name not in (*constants, *specialised)]
        self._function = triton.jit(function, do_not_specialize=general)
        self._interpreted = not isinstance(self._function, triton.runtime.JITFunction)
        self._loading = threading.RLock()
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, (*grid, 1, 1)[:3])

    def _launch(self, grid: tuple[int, ...], *values: Any, **limits: int) -> None:
        if self._interpreted:
            self._function[grid](*values)
            return
        key = (
            values[0].device,
            *limits.values(),
            *map(getattr, values[: self._pointers], repeat("dtype"), repeat(None)),
            *[_specialisation(values[index]) for index in self._specialised],
            *values[self._constants :],
        )
        compiled = self.compiled.get(key)
        if compiled is None:
            compiled = self.compile(key, grid, values, limits)
        if compiled is not None:
            self.run(compiled, grid, values)

    def compile(
        self,
        key: tuple[Any, ...],
        grid: tuple[int, ...],
        values: tuple[Any, ...],
        limits: dict[str, int],
    ) -> Any:
        """Compiles with Triton, for these arguments and all of the same key, and loads the result.

        A load may fail, and another thread may wait for it: ``self.compiled`` has what is loaded.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self._function.fn.__name__} is not loaded yet, which the capture of a CUDA "
                "graph does not allow: call bapo_kernels.warm_up(function, ...) before the capture"
            )
        with self._loading:
            compiled = self.compiled.get(key)
            if compiled is None:
                # Versions of Triton differ in whether they fuse by default.
                options = {**limits, "enable_fp_fusion": True}
                compiled = self._function.warmup(*values, grid=grid, **options)
                if compiled is not None:  # a hook of the user may keep Triton from compiling
                    self.load(compiled)
                    self.compiled[key] = compiled
        return compiled

    @staticmethod
    def load(compiled: Any) -> None:
        """Loads what was compiled onto the current device; launches nothing."""
        compiled[1, 1, 1]

    @staticmethod
    def run(compiled: Any, grid: tuple[int, ...], values: tuple[Any, ...]) -> None:
        """Does what ``compiled[grid](*values)`` does, but gathers no arguments for absent hooks."""
        runtime = triton.knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        # Each is a chain of functions, in older versions one function or None.
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            compiled[grid](*values)
            return
        driver = triton.runtime.driver.active
        stream = driver.get_current_stream(driver.get_current_device())
        function, metadata = compiled.function, compiled.packed_metadata
        compiled.run(*grid, stream, function, metadata, None, None, None, *values)


def _specialisation(value: Tensor | int | None) -> tuple[bool, bool] | None:
    """The facts by which Triton specialises: alignment, on AMD GPUs also 32-bit addresses."""
    if value is None:
        return None
    if isinstance(value, int):
        return value % 16 == 0, value == 1
    is_small = torch.version.hip is not None and value.untyped_storage().nbytes() < 2**31
    return value.data_ptr() % 16 == 0, is_small
