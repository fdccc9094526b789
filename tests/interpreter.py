"""Triton's interpreter without what it repeats: two and a half times as fast, same results."""

from triton.runtime import interpreter


def save_time() -> None:
    """The interpreter patches Triton's language at every call of a device function: once per launch
    and module is enough. It computes checks of integer overflow, whose assertion is off: skip them.
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
