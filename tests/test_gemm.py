"""The products of a head: within a rounding of float64, whatever the processor multiplies."""

import ast
import os
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accuracy import assert_as_reference, assert_same
from helpers import needs_native, poisoned_memory
from test_linear import check, problem, rounded_product
from torch.utils._python_dispatch import TorchDispatchMode

import bapo_kernels
from bapo_kernels import BAPOConfig, bapo_linear_loss, debug, linear_log_probs, linear_top_k
from bapo_kernels.core import memory
from bapo_kernels.core.call import Products
from bapo_kernels.core.head import gemm
from bapo_kernels.core.head import head as head_module
from bapo_kernels.core.head.head import Head

HALVES = [torch.bfloat16, torch.float16]
n, H, V = 9, 24, 193
BLOCK = 50  # several, the last one smaller


@pytest.fixture(params=["as such", "in float32"])
def products(request, monkeypatch):
    """Of half precision: what the CPU has instructions for, and what it has not."""
    reason = None if request.param == "as such" else "a processor without instructions"
    reasons = dict.fromkeys(HALVES, reason)
    monkeypatch.setattr(gemm, "why_in_float32", reasons.get)  # None of float32
    monkeypatch.setattr(gemm, "_BLOCK", BLOCK)
    return request.param


def operands(dtype, V=V):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(*size, generator=g).to(dtype) for size in ((n, H), (V, H), (V,), (n, V))]


@pytest.mark.parametrize("dtype", HALVES)
def test_each_product(products, dtype):
    """Of rounded operands, with results in their dtype and in float32."""
    h, weight, bias, dlogits = operands(dtype)

    def compare(got, *operands):
        assert_as_reference(got, rounded_product(*operands), got.dtype)

    for out_dtype in (dtype, torch.float32):
        for b in (bias, None):
            out = torch.empty(n, V + 3, dtype=out_dtype)[:, :V]
            gemm.multiply(h, weight, b, out)
            compare(out, h, weight.T, 0.0 if b is None else b)
        got = gemm.hidden_gradient(dlogits, weight, out_dtype)
        assert got.dtype == out_dtype
        compare(got, dlogits, weight)
    dweight = torch.full((V, H), torch.nan, dtype=dtype)
    gemm.add_weight_gradient(dweight, dlogits, h, first=True)
    compare(dweight, dlogits.T, h)
    total = torch.full((V, H), torch.nan)
    for first in (True, False):
        gemm.add_weight_gradient(total, dlogits, h, first)
    rounded = dtype == torch.bfloat16 and products == "as such"
    compare(total.to(dtype) if rounded else total, 2 * dlogits.T, h)


@needs_native
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
@pytest.mark.parametrize("chunk_tokens", [None, 4])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_losses(products, dtype, logits_dtype, chunk_tokens, frozen):
    parameters, case = problem(dtype, "cpu", BAPOConfig())
    options = dict(chunk_tokens=chunk_tokens, logits_dtype=logits_dtype, frozen=frozen)
    check(parameters, case, "cpu", **options)


PRODUCTS = "mm", "addmm"


def without_nan_between_rows(factor):
    """Asserts it of a factor of a product, and of the 64 bytes behind the last row."""
    x = factor if factor.stride(1) == 1 else factor.T
    (rows, columns), pitch, begin = x.shape, x.stride(0), x.storage_offset()
    gaps = x.as_strided((rows - 1, max(0, pitch - columns)), (pitch, 1), begin + columns)
    end = begin + (rows - 1) * pitch + columns
    there = min(64, x.untyped_storage().nbytes() - end * x.itemsize) // x.itemsize
    assert not gaps.isnan().any()
    assert not x.as_strided((there,), (1,), end).isnan().any()


@pytest.fixture
def factors(monkeypatch):
    """The dtypes of the factors of all matrix products, each of which is checked."""
    dtypes = set()

    def checked(original, begin):
        def multiply(*args, **options):
            for factor in args[begin:]:
                without_nan_between_rows(factor)
                dtypes.add(factor.dtype)
            return original(*args, **options)

        return multiply

    monkeypatch.setattr(gemm, "torch", SimpleNamespace(**vars(torch)))
    for name in PRODUCTS:
        monkeypatch.setattr(gemm.torch, name, checked(getattr(torch, name), name == "addmm"))
    return dtypes


LENGTHS = {
    **{
        1: "less than an instruction",
        31: "a prime",
        33: "one more than a tile",
        40: "rows of 80 B",
    },
    **{123: "odd", 1_003: "several tiles", 50_257: "GPT-2"},
}


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("V", LENGTHS)
def test_products_read_what_was_written(monkeypatch, factors, dtype, V):
    """Not what is behind a row: a processor that reads on there multiplies it by zero."""
    monkeypatch.setattr(memory, "KEPT_FROM_BYTES", 0)
    monkeypatch.setattr(head_module, "SUM_BYTES", 0)  # chunks as asked for
    h, weight, bias, _ = operands(dtype, V)
    labels, advantages = torch.arange(n) % V, torch.tensor([1.0, -1, 0, 2, -2, 1, -1, 0, 1])
    old = linear_log_probs(h, weight, labels, bias=bias)[0] + 0.4 * advantages  # some undecided

    def gradients():
        """Of chunks of all rows, and of two; the last one has a single row."""
        for chunk_tokens, frozen in product((None, 2), (False, True)):
            for logits_dtype in {None, torch.float32}:
                options = dict(chunk_tokens=chunk_tokens, logits_dtype=logits_dtype, backend="cpu")
                x, head = h.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
                options["bias"] = bias.clone().requires_grad_(not frozen)
                loss = bapo_linear_loss(x, head, labels, old, advantages, **options).loss
                for ids in (labels, labels[:, None].expand(n, 2)):
                    logp, entropy = linear_log_probs(x, head, ids, **options)
                    loss = loss + logp.sum() + entropy[::2].sum()
                loss.backward()
                linear_top_k(x, head, 1, **options)
                yield from (x.grad, head.grad, options["bias"].grad)

    expected = list(gradients())
    with poisoned_memory():
        got = list(gradients())
    assert (dtype if gemm.in_own_dtype(h) else torch.float32) in factors
    assert_same(got, expected, "gradient")


def test_where_products_are_made():
    """By two functions in one file, as the test above relies on; LoRA's, of its own weights."""
    package, named = Path(bapo_kernels.__file__).parent, {}
    for file in package.rglob("*.py"):
        if {"reference", "tools", "triton"}.isdisjoint(file.relative_to(package).parts):
            tree = list(ast.walk(ast.parse(file.read_text())))
            names = {x.attr for x in tree if isinstance(x, ast.Attribute)}
            names |= {"@" for x in tree if isinstance(x, ast.MatMult)}
            named[file.name] = names & {*PRODUCTS, "@", "bmm", "einsum", "linear", "matmul", "mv"}
    assert {x: y for x, y in named.items() if y} == {
        "gemm.py": {*PRODUCTS},
        "lora.py": {"addmm", "@"},
    }


class Sizes(TorchDispatchMode):
    """The elements of each float32 tensor that is made."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.found.append(result.untyped_storage().nbytes() // 4)
        return result


@pytest.mark.parametrize("products", ["in float32"], indirect=True)
@pytest.mark.parametrize("dtype", HALVES)
def test_one_block_is_float32(products, dtype):
    h, weight, bias, dlogits = operands(dtype)
    with Sizes() as sizes:
        gemm.multiply(h, weight, bias, torch.empty_like(dlogits))
        gemm.hidden_gradient(dlogits, weight, dtype)
        gemm.add_weight_gradient(torch.empty_like(weight), dlogits, h, first=True)
    assert max(sizes.found) == BLOCK * H
    with Sizes() as sizes:  # all other rows have a sampling mask
        head = Head.of(h, weight, bias, Products(dtype, dtype))
        (rows,), memory = head.chunks(torch.arange(0))
        head.logits(rows, memory)
    assert not any(sizes.found)


@pytest.mark.parametrize(
    ("dtype", "one_dnn", "avx512_bf16", "machine", "in_float32"),
    [
        (torch.float32, False, False, "x86_64", False),
        (torch.bfloat16, False, False, "x86_64", True),  # AVX2
        (torch.bfloat16, True, False, "x86_64", True),  # AVX-512, emulated
        (torch.bfloat16, True, True, "x86_64", False),
        (torch.bfloat16, False, True, "AMD64", True),  # ONEDNN_MAX_CPU_ISA=AVX2
        (torch.bfloat16, True, False, "aarch64", False),
        (torch.float16, False, True, "x86_64", True),
        (torch.float16, True, True, "x86_64", False),
    ],
)
def test_the_rule(monkeypatch, dtype, one_dnn, avx512_bf16, machine, in_float32):
    for name in ("bf16", "fp16"):
        name = f"_is_mkldnn_{name}_supported"
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: one_dnn, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(gemm.platform, "machine", lambda: machine)
    reason = gemm.why_in_float32.__wrapped__(dtype)
    assert (reason is not None) == in_float32
    if in_float32:
        name = str(dtype).removeprefix("torch.")
        monkeypatch.setattr(gemm, "why_in_float32", lambda dtype: reason)
        assert f"{name} in float32 ({reason})" in debug.environment()["cpu products"]


@pytest.mark.skipif(os.environ.get("ONEDNN_MAX_CPU_ISA") != "AVX2", reason="as if with AVX2 alone")
@pytest.mark.parametrize("dtype", HALVES)
def test_a_limit_of_onednn_counts(dtype):
    assert gemm.why_in_float32(dtype) is not None
