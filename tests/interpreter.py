"""Triton's interpreter without what it repeats: four times as fast, same results."""

import math
from functools import cache

import triton.language as tl
from triton.runtime import interpreter


def save_time() -> None:
    """The interpreter patches Triton's language at every call of a device function: once per launch
    and module is enough. It computes checks of integer overflow, whose assertion is off: skip them.
    It makes a table of NumPy's dtypes at every look-up, and new constants for each tensor's shape.
    """
    patched: set[int] = set()
    patch, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore

    def patch_once(function):
        if id(function.__globals__) in patched:
            return interpreter._LangPatchScope()
        patched.add(id(function.__globals__))
        return patch(function)

    def restore_after_launch(scope):
        patched.clear()
        restore(scope)

    interpreter._patch_lang = patch_once
    interpreter._LangPatchScope.restore = restore_after_launch
    options = interpreter.interpreter_builder.options
    if not options.debug:
        object.__setattr__(options, "sanitize_overflow", False)
    look_up, of_number = interpreter._get_np_dtype, cache(interpreter._get_np_dtype)

    def numpy_dtype(dtype):
        return look_up(dtype) if dtype.scalar.is_ptr() else of_number(dtype.scalar)

    interpreter._get_np_dtype = numpy_dtype

    @cache
    def size_and_shape(sizes):
        return tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])

    def new_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = size_and_shape(tuple(type.shape) if type.is_block() else ())

    tl.tensor.__init__ = new_tensor
