"""Yardsticks: a copy, or the bare matrix products, in memory that previous calls have touched.

A frozen head needs two products, a trained one three, gradients from samples one. With a sampling
mask no product is of whole matrices: the yardstick is a copy, of the head from hidden states,
beside zeros over the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import torch

from bapo_kernels import log_probs
from bapo_kernels.core import rows as passes

from ..cases import Batch
from ..floor import Floor
from .method import Method

MOST = 8_192  # rows whose logits fit


def copied(batch: Batch) -> Callable[[], object]:
    """Of the logits, or of the head."""
    source = batch.inputs[-1].detach()
    return partial(torch.empty_like(source).copy_, source)


def zeroed(batch: Batch) -> Callable[[], object]:
    """The memory that methods in place write to, which is restored before each of them."""
    return batch.overwritable.inputs[0].detach().zero_


def one_label(batch: Batch) -> Callable[[], object]:
    """The gradient of a single log-prob per row, by our default backend."""
    leaf, weights = batch.inputs[0], torch.ones_like(batch.old)

    def call() -> None:
        leaf.grad = None
        log_probs(leaf, batch.labels)[0].backward(weights)

    return call


def products(batch: Batch, chunks: int, number: int) -> Callable[[], object]:
    """``h W'``, ``z W``, and for a trained head ``z' h``; so many of them."""
    hidden, weight = (leaf.detach().flatten(0, -2) for leaf in batch.inputs)
    most = min(batch.case.N, MOST)
    size, logits = -(-most // chunks), hidden.new_empty(most, batch.case.V)
    gradients = torch.empty_like(hidden), torch.empty_like(weight)

    def call() -> None:
        for h, dh in zip(hidden.split(size), gradients[0].split(size), strict=True):
            z = logits[: h.shape[0]]
            torch.mm(h, weight.T, out=z)
            if number > 1:
                torch.mm(z, weight, out=dh)
            if number > 2:
                torch.mm(z.T, h, out=gradients[1])

    return call


def row_pass(batch: Batch, method: Method) -> Callable[[], object]:
    """The operator of the first pass, with the arguments of a call of ours."""
    ops_of, seen = passes.ops_of, list[Callable[[], object]]()

    def recording(backend: str) -> mock.Mock:
        ops = ops_of(backend)

        def operator(*arguments: object) -> None:
            seen.append(partial(ops.row_pass, *arguments))
            seen[-1]()

        return mock.Mock(wraps=ops, row_pass=operator)

    with mock.patch.object(passes, "ops_of", recording):
        method.step(batch)
    if not seen:
        raise ValueError("the dtype takes two passes over all rows")
    return seen[0]


def _bytes(batch: Batch, passes: int) -> Floor:
    return Floor(float(passes * batch.inputs[-1].nbytes), 0.0)


def _of_products(number: int, chunks: int = 1) -> Method:
    name = ["one matrix product", "two matrix products", "three matrix products"][number - 1]
    name += ", four chunks" if chunks > 1 else ""

    def need(batch: Batch) -> Floor:
        return Floor(0.0, 2.0 * number * batch.case.N * batch.case.V * batch.case.H)

    made = partial(products, chunks=chunks, number=number)
    return Method(name, yardstick=made, need=need)


COPY = Method("copy", yardstick=copied, need=partial(_bytes, passes=2))
ZEROS = Method("zeros", yardstick=zeroed, need=partial(_bytes, passes=1))
ONE_LABEL = Method("bapo_kernels, one label", yardstick=one_label, need=partial(_bytes, passes=3))
ONE, TWO, THREE = map(_of_products, (1, 2, 3))
IN_CHUNKS = {2: _of_products(2, 4), 3: _of_products(3, 4)}
