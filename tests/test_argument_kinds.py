"""Every tensor argument of every public function, in kinds that it may not have.

It works as if it were of the right kind, or the error names the argument, its rule and what it got.
"""

import inspect
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from accuracy import assert_same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from bapo_kernels import (
    BAPOConfig,
    ClipBoundSearch,
    ContributionHistogram,
    SamplingMask,
    bapo_linear_loss,
    bapo_loss,
    bapo_loss_from_log_probs,
    find_clip_bounds,
    linear_log_probs,
    linear_top_k,
    log_probs,
    reference,
)
from bapo_kernels.bounds import empty_table
from bapo_kernels.core.arguments import options
from bapo_kernels.debug import check_inputs

B, S, V, H = 2, 6, 11, 4
CONFIG = BAPOConfig(kl_loss_coef=0.1, entropy_coef=0.1)


def search_update(*args, **kwargs):
    search = ClipBoundSearch(scope="step")
    search.update(*args, **kwargs)
    search.step()
    return search.bounds


def histogram_update(*args, **kwargs):
    return ContributionHistogram().update(*args, **kwargs).solve()


search_update.__signature__ = inspect.signature(ClipBoundSearch(scope="step").update)
histogram_update.__signature__ = inspect.signature(ContributionHistogram().update)
FUNCTIONS = {
    function.__name__: function
    for function in (
        *(bapo_loss, bapo_linear_loss, bapo_loss_from_log_probs, log_probs, linear_log_probs),
        *(find_clip_bounds, check_inputs, search_update, histogram_update),
    )
}
FUNCTIONS |= {f"reference.{n}": getattr(reference, n) for n in reference.__all__ if n.islower()}
FUNCTIONS["linear_top_k"] = partial(linear_top_k, k=3)
FUNCTIONS["reference.linear_top_k"] = partial(reference.linear_top_k, k=3)


def tensors(dtype=torch.float32, packed=False):
    """All arguments that are tensors, in their right kinds."""
    g = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.rand(*shape, generator=g)

    given = dict(
        logits=(4 * random(B, S, V)).to(dtype),
        hidden_states=(random(B, S, H) - 0.5).to(dtype),
        lm_head_weight=(random(V, H) - 0.5).to(dtype),
        bias=random(V).to(dtype),
        labels=torch.randint(V, (B, S), generator=g),
        log_probs=-random(B, S),
        old_log_probs=-random(B, S),
        advantages=torch.tensor([[1.0], [-2.0]]).repeat(1, S),
        response_mask=torch.arange(S).expand(B, S) > 0,
        rollout_log_probs=-random(B, S),
        rollout_is_weights=random(B, S),
        ref_log_probs=-random(B, S),
        entropy=random(B, S),
        temperature=torch.tensor([[0.5], [2.0]]).repeat(1, S),
    )
    if packed:
        given = {
            name: x.flatten(0, 1) if name not in ("lm_head_weight", "bias") else x
            for name, x in given.items()
        }
        given["cu_seqlens"] = torch.tensor([0, S, B * S])
    sets = [[label, *range(3)] if label > 2 else range(5) for label in given["labels"].flatten()]
    return given | dict(
        bounds=(torch.tensor(0.0), torch.tensor(2.0)),
        batch_num_tokens=torch.tensor(7.0),
        global_batch_size=torch.tensor(2.0),
        sampling_mask=SamplingMask.from_lists([list(map(int, ids)) for ids in sets]),
    )


def made_in_inference_mode(value):
    with torch.inference_mode():
        if isinstance(value, SamplingMask):
            return SamplingMask(value.token_ids.clone(), value.offsets.clone())
        return value.clone()


def dtensor(value):
    return DTensor.from_local(value, init_device_mesh("cpu", (1,)))


class Packed(torch.Tensor):
    """As torchao's: it says float32 and holds int8, and has hardly any operator."""

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return Packed(args[0])
        raise NotImplementedError(f"{function} of a Packed")


DTYPES = {
    str(dtype).removeprefix("torch."): lambda x, dtype=dtype: x.float().to(dtype)
    for dtype in (torch.bool, torch.int32, torch.complex64, torch.float8_e4m3fn, torch.float32)
}
SHAPES = {
    "x[0]": lambda x: x[0],
    "x[:, 0]": lambda x: x[:, 0],
    "x[None]": lambda x: x[None],
    "x[:1]": lambda x: x[:1],
    "x[..., :1]": lambda x: x[..., :1],
}
KINDS = {
    **DTYPES,
    **SHAPES,
    "qint8": lambda x: torch.empty(x.shape, dtype=torch.qint8),
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "DTensor": dtensor,
    "nested": lambda x: torch.nested.nested_tensor([x[None]]),
    "jagged": lambda x: torch.nested.nested_tensor([x[None]], layout=torch.jagged),
    "packed": Packed,
    "sharded packed": lambda x: dtensor(Packed(x)),
    "pair": lambda x: TwoTensor(x, x.clone()),
    "masked": lambda x: torch.masked.masked_tensor(x, x == x),
    "list": lambda x: x.tolist(),
    "ndarray": lambda x: x.numpy(),
    "inference": made_in_inference_mode,
}
PER_SEQUENCE, COUNTS = ("advantages", "temperature"), ("batch_num_tokens", "global_batch_size")
RIGHT = {  # by the kind, the arguments that may have it; all may be inference tensors
    "bool": ["response_mask"],
    "int32": ["response_mask", "labels", "cu_seqlens", "bounds", *COUNTS],
    "float32": ["response_mask"],
    "x[:, 0]": PER_SEQUENCE,
    "x[None]": ["bounds", *COUNTS],
    "list": ["bounds", *COUNTS],  # numbers
    "DTensor": ["lm_head_weight", "bias"],
}
OF_SETS = {  # kinds of a sampling mask
    "list": lambda mask: [[1]],
    "x[:1]": lambda mask: mask[:1],
    "meta": lambda mask: mask.to("meta"),
    "inference": made_in_inference_mode,
}


def in_kind(value, kind):
    """The value in another kind; ``None`` where it has none such, or is of it."""
    if isinstance(value, tuple):
        values = tuple(in_kind(each, kind) for each in value)
        return None if values[0] is None else values
    if isinstance(value, SamplingMask):
        return OF_SETS[kind](value) if kind in OF_SETS else None
    if kind in DTYPES and str(value.dtype) == f"torch.{kind}":
        return None
    try:
        return KINDS[kind](value)
    except IndexError:
        return None


def results(function, given):
    """What a function returns, and the gradients of its leaves."""
    leaves = [x for x in given.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    made = function(**given)
    values = [x for x in (made or ())[:3] if isinstance(x, torch.Tensor)]
    if leaves and values and values[0].requires_grad:
        values += torch.autograd.grad(values[0].sum(), leaves, allow_unused=True)
    return values


def arguments_of(function, packed=False):
    parameters = inspect.signature(function).parameters
    names = list(parameters)
    if "options" in names:  # Unpack[LossOptions], or of others
        names += getattr(options, parameters["options"].annotation[7:-1]).__optional_keys__
    given = {name: x for name, x in tensors(packed=packed).items() if name in names}
    return given | ({"config": CONFIG} if "config" in names and "bounds" in names else {})


CELLS = [
    (name, argument)
    for name, function in FUNCTIONS.items()
    for argument in arguments_of(function, packed=True)
    if argument != "config"
]


@pytest.fixture(scope="module", autouse=True)
def _one_rank():
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*(quantized|MaskedTensor|nested):UserWarning")
@pytest.mark.parametrize(("name", "argument"), CELLS)
def test_kinds(name, argument):
    function, packed = FUNCTIONS[name], argument == "cu_seqlens"
    right = arguments_of(function, packed)
    expected = results(function, dict(right))
    for kind in KINDS:
        value = in_kind(right[argument], kind)
        if value is None or (argument, kind) == ("logits", "x[..., :1]"):  # a vocabulary of one
            continue
        given = right | {argument: value}
        if kind == "inference" or argument in RIGHT.get(kind, ()):
            for got, wanted in zip(results(function, given), expected, strict=True):
                assert_same(got, wanted, kind)
            continue
        with pytest.raises((ValueError, TypeError)) as caught:
            function(**given)
        message = str(caught.value)
        found = re.match(r"([\w.]+) must (.|\n)+, got .+", message)
        assert found, (kind, message)
        names = right if kind == "meta" or kind in SHAPES else [argument]
        assert found[1].split(".")[0] in names, (kind, message)


IDS = torch.arange(4)
KEPT = {  # by the argument, what keeps it, and a right value
    "token_ids": (SamplingMask.from_padded, IDS),
    "allowed": (SamplingMask.from_bool, IDS > 1),
    "counts": (partial(SamplingMask.from_counts, IDS), torch.tensor([3, 1])),
    "offsets": (partial(SamplingMask, IDS), torch.tensor([0, 4])),
    "table": (ContributionHistogram().load, empty_table(BAPOConfig(), "cpu")),
}


@pytest.mark.filterwarnings("ignore:.*(quantized|MaskedTensor|nested):UserWarning")
@pytest.mark.parametrize("name", KEPT)
def test_kinds_of_what_is_kept(name):
    function, value = KEPT[name]
    function(value)
    for kind in KINDS.keys() - DTYPES.keys() - SHAPES.keys() - {"meta", "inference"}:
        with pytest.raises(ValueError, match=rf"^{name} must (.|\n)+, got "):
            function(KINDS[kind](value))


TRAINED = {"logits", "hidden_states", "lm_head_weight", "bias", "log_probs", "entropy"}


OF_DATA = "find_clip_bounds", "check_inputs", "search_update", "histogram_update"  # no gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # made in forward, in backward
@pytest.mark.parametrize("name", [n for n in FUNCTIONS if not n.endswith(OF_DATA)])
def test_inference_tensors(name, dtype):
    """Each of the arguments, where the others are trained."""
    function = FUNCTIONS[name]
    for argument in arguments_of(function).keys() - {"config"}:
        of_dtype = tensors(dtype)
        given = {k: of_dtype.get(k, v) for k, v in arguments_of(function).items()}
        for leaf in given.keys() & TRAINED - {argument}:
            given[leaf].requires_grad_()
        expected = results(function, given)
        changed = given | {argument: in_kind(given[argument], "inference")}
        for got, wanted in zip(results(function, changed), expected, strict=True):
            assert_same(got, wanted, argument)
