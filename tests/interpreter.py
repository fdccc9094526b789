"""Triton's interpreter without what it repeats: two and a half times as fast, same results."""

from functools import cache

from triton.runtime import interpreter


def save_time() -> None:
    """The interpreter patches Triton's language at every call of a device function: once per launch
    and module is enough. It computes checks of integer overflow, whose assertion is off: skip them.
    It makes a table of NumPy's dtypes at every look-up.
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
