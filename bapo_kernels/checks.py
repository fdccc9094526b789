"""Checks of single arguments: an error names the argument, its rule and the value got.

The lowest layer: imports nothing of the package. All messages get their form here.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable
from functools import cache, wraps
from numbers import Integral, Real
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_C: Any = torch._C

F = TypeVar("F", bound=Callable[..., Any])
_PLAIN = (Tensor, torch.nn.Parameter)  # no subclass, so no DTensor
_WRAPPERS = ("FakeTensor", "FunctionalTensor", "AsyncCollectiveTensor")  # of torch, around one each
_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OFFSETS = (torch.int32, torch.int64)
INTEGERS = (
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)
NUMBERS = (*INTEGERS, *_FLOATING)


def runs_while_traced(function: F) -> F:
    """Marks a function of host values that ``torch.compile`` calls instead of tracing it.

    The same as ``torch.compiler.assume_constant_result``, whose use imports the compiler and would
    add 1.5 s to every import of the package.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def outside_inference_mode(function: F) -> F:
    """Makes what ``function`` keeps ordinary tensors, which later calls may change and save."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


# What takes the place of an argument that a function does not have.
_INSTEAD = {
    "config": "not be given: pass temperature=, and **head.transform for scale and soft cap",
    "mask": "be called response_mask",
}


def names_instead(function: F) -> F:
    """Makes ``function`` say which argument is meant by some that it does not have."""
    has = inspect.signature(function).parameters
    unknown = {name: rule for name, rule in _INSTEAD.items() if name not in has}

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name, rule in unknown.items():
            if name in kwargs:
                refuse(name, rule, type(kwargs[name]).__name__, TypeError)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def require(
    ok: bool, name: str, rule: str | tuple[Any, ...], got: Any, error: type[Exception] = ValueError
) -> None:
    """Raises ``error`` with name, rule and the value got.

    A rule may be a template and its values, as of :mod:`logging`. They become text only where it is
    broken: ``torch.compile`` cannot write the sizes of dynamic shapes.
    """
    if not ok:
        refuse(name, rule, got, error)


def refuse(
    name: str, rule: str | tuple[Any, ...], got: Any, error: type[Exception] = ValueError
) -> NoReturn:
    """Raises as :func:`require` does where a rule is broken.

    For checks of every call: its condition comes first, and what the message says is not computed.
    """
    if isinstance(rule, tuple):
        template, *values = rule
        rule = template.format(*map(_shown, values))
    raise error(f"{name} must {rule}, got {_shown(got)}")


def number(name: str, value: Any) -> float:
    """Converts a number of Python or numpy to ``float``; refuses bools, tensors and arrays."""
    if not isinstance(value, Real) or isinstance(value, bool):
        is_array = hasattr(value, "ndim")
        rule = "be a number (.item() of a tensor or array)" if is_array else "be a number"
        is_number = hasattr(value, "__float__") and not is_array and not isinstance(value, bool)
        require(is_number, name, rule, typed(value))
    try:
        return float(value)
    except OverflowError:
        refuse(name, "be in the range of float64", f"a larger {type(value).__name__}")


def count(name: str, value: Any, rule: str = "be an integer >= 1") -> int:
    """Converts an integer >= 1 of Python or numpy to ``int``; refuses bools."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or value < 1:
        refuse(name, rule, value if is_integer else typed(value))
    return int(value)


def typed(value: Any) -> str:
    """The value got, with its type, for errors whose cause is the type."""
    kind = type(value).__name__
    is_array = hasattr(value, "ndim") and not isinstance(value, Real)
    return kind if is_array else f"{value!r} ({kind})"


def is_dtensor(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor, without importing the module that defines them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_tensor(name: str, tensor: Any, sharded: bool = False) -> None:
    """Requires a dense tensor, local to this rank unless it may be ``sharded`` over several."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested:
        return
    require(isinstance(tensor, Tensor), name, "be a tensor", type(tensor).__name__)
    rule = "be a local tensor (.to_local() or .full_tensor())"
    require(sharded or not is_dtensor(tensor), name, rule, "a DTensor")
    is_masked = isinstance(tensor, torch.masked.MaskedTensor)
    require(not is_masked, name, "be an ordinary tensor (.to_tensor(value))", "a MaskedTensor")
    require(tensor.layout == torch.strided, name, "be a dense tensor", tensor.layout)
    require(not tensor.is_nested, name, "be a dense tensor", "a nested tensor")
    kind = type(tensor._local_tensor if is_dtensor(tensor) else tensor)
    rule = "be an ordinary tensor (.dequantize() of a quantised one)"
    require(not _holds_others(kind), name, rule, kind.__name__)


@runs_while_traced
def _holds_others(kind: type[Tensor]) -> bool:
    """Whether tensors of a class may hold others: around two, all but the last result is lost."""
    known = kind.__module__.startswith("torch.") and kind.__name__ in _WRAPPERS
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and not known


def check_floating(name: str, tensor: Any, sharded: bool = False) -> None:
    """Requires a dense floating-point tensor, local unless it may be ``sharded``."""
    check_tensor(name, tensor, sharded)
    if tensor.dtype not in _FLOATING:
        require(tensor.is_floating_point(), name, "be floating point", tensor.dtype)
        refuse(name, "be float64, float32, bfloat16 or float16", tensor.dtype)


def check_dtype(name: str, tensor: Any, dtypes: tuple[torch.dtype, ...], rule: str) -> None:
    """Requires a dense, local tensor of one of the dtypes, which the rule names."""
    check_tensor(name, tensor)
    if tensor.dtype not in dtypes:
        refuse(name, rule, tensor.dtype)


def check_like(name: str, tensor: Any, like: Tensor, like_name: str) -> None:
    """Requires a floating-point tensor with the shape and on the device of ``like``."""
    check_floating(name, tensor)
    if tensor.shape != like.shape:
        refuse(name, ("have the shape of {} {}", like_name, like.shape), tensor.shape)
    check_device(name, tensor, like, like_name)


def check_device(name: str, tensor: Tensor, like: Tensor, like_name: str) -> None:
    """Requires both tensors to be on the same device."""
    if tensor.device != like.device:
        refuse(name, f"be on the device of {like_name} ({like.device})", tensor.device)


def is_readable(tensor: Tensor) -> bool:
    """Whether the host can read the values without a wait: on a CPU, where nothing is traced."""
    traced = torch.compiler.is_compiling() or _C._len_torch_dispatch_stack()
    return tensor.is_cpu and not traced


def check_no_transform(backend: str) -> None:
    """Requires the reference inside of ``torch.func.grad``, ``vjp``, ``jvp`` and others."""
    if not torch.compiler.is_compiling() and _C._are_functorch_transforms_active():
        rule = "be 'reference' inside of torch.func (kernels need backward() or autograd.grad())"
        refuse("backend", rule, repr(backend))


def check_group(name: str, group: Any) -> None:
    """Requires ``None`` or a process group that this rank is in."""
    if group is None:
        if name == "process_group":
            _warn_without_group()
        return
    ok = dist.is_available() and isinstance(group, dist.ProcessGroup)
    rule = "be None or a torch.distributed.ProcessGroup that this rank is in (mesh.get_group())"
    require(ok, name, rule, type(group).__name__)


@runs_while_traced
def _warn_without_group() -> None:
    """Warns where ``None`` may be ``dist.group.WORLD``, read before the ranks were set up."""
    ranks = os.environ.get("WORLD_SIZE", "1")  # torchrun sets it
    if ranks not in ("", "1") and dist.is_available() and not dist.is_initialized():
        warn_once(
            f"process_group is None and torch.distributed is not initialised, though WORLD_SIZE is "
            f"{ranks}: a search covers the tokens of this process alone. dist.group.WORLD is None "
            "before init_process_group(): call that first, then pass the group."
        )


@cache
def warn_once(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns once per process, and points at the line of the user's code that led here."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level + 1)


# This package, torch, and code that dataclasses generate: frames that are not the user's.
_LIBRARIES = (os.path.dirname(__file__), os.path.dirname(torch.__file__), "<")


def _shown(value: Any) -> Any:
    return tuple(value) if isinstance(value, torch.Size) else value
