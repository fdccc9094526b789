"""The operators: their schemas for all backends, how they are implemented, and how they are called.

Imports the config alone. A schema stands here, in ``csrc/binding*.h`` and in the launchers of
``backends/triton``: the three must change together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..config import Options

_C: Any = torch._C

# The package's own name: a copy of it under another name has operators of its own. Its library must
# be built for them (BAPO_NAMESPACE in csrc/binding.h).
NATIVE = __name__.partition(".")[0]
NAMESPACES = {"cuda": NATIVE, "triton": f"{NATIVE}_triton", "cpu": NATIVE}

# The arguments of the kernels, besides their results:
#
# rows: Tensor logits [batches, rows, V]; with offsets the values of sampling sets, float32 [K], of
#     which row n has values[offsets[n]:offsets[n + 1]]. Rows without a set are then not touched.
# tokens: float32 [len(FIELDS), N], what is known of each token. Field k is given if bit k of
#     present is set, and may hold anything otherwise. Apart from it: counted, bool, and weights,
#     float64.
# options: the numbers of a config, in the order of config.Options.
FIELDS = (
    "advantages",
    "old_log_probs",
    "rollout_log_probs",
    "rollout_is_weights",
    "ref_log_probs",
    "temperatures",  # each in the place of that of the options
    "lower",  # bounds of each token, both or none, in the place of those of all tokens
    "upper",
)
_TOKENS = "Tensor tokens, int present"
_TEMPERATURES = "Tensor? tokens, int present"  # of which no other field is read
_OPTIONS = "float[] options"
# labels: columns, or positions in the sets, where rows are sets. Those of row_statistics and
#     row_gradient are [N], or [N, K], and so is what belongs to each of them. Those of -100 get 0.
_ROWS = "Tensor? offsets, Tensor labels"
_STATISTICS = "Tensor(a!) log_probs, Tensor(b!) entropy, Tensor(c!) stats"
# bounds: float32 [2], of all tokens.
_ROW_PASS = (
    f"{_ROWS}, Tensor counted, Tensor weights, {_TOKENS}, Tensor? bounds, {_OPTIONS}, "
    f"{_STATISTICS}, Tensor(d!) undecided"
)
# drawn: float64 [N, 4], of rows that are samples, in the units of their stats (csrc/params.h).
_ROW_GRADIENT = (
    f"{_ROWS}, Tensor stats, Tensor entropy, Tensor dlog_probs, Tensor? dentropy, Tensor? only, "
    f"Tensor? drawn, {_TEMPERATURES}, {_OPTIONS}"
)
# log_ratios: float64 [N], in the place of log_probs - old_log_probs.
_SEARCHED = f"Tensor log_probs, Tensor counted, Tensor? log_ratios, {_TOKENS}, {_OPTIONS}"
# Each row of tokens is one sequence of `length`, or packed tokens are of those of cu_seqlens.
_SEQUENCES = "SymInt length, Tensor? cu_seqlens"

# Sampling masks (CSR): the ids of row n are token_ids[offsets[n]:offsets[n + 1]], ascending; a row
# without ids has the whole vocabulary, and no operator on sets touches it. The values of a set are
# float32 logits, or their gradients. shard: int64 (first column, columns of all ranks).
_SETS = "Tensor token_ids, Tensor offsets"
_HEAD_OPERANDS = "Tensor hidden, Tensor weight, Tensor? bias"

SCHEMAS = {
    # The first pass over each counted row: its log-probs, entropy and (maximum, sum).
    "row_statistics": (
        f"Tensor logits, {_ROWS}, Tensor counted, {_TEMPERATURES}, {_OPTIONS}, {_STATISTICS}"
    ),
    # The same, and the second pass over each decided row, which writes its gradient; rows whose
    # gradient depends on the bounds that the search will find are marked undecided.
    "row_pass": f"Tensor logits, {_ROW_PASS}, Tensor(e!) dlogits",
    "row_pass_": f"Tensor(e!) logits, {_ROW_PASS}",
    # Gradient of the logits from the gradients of log-probs and entropy, in all rows or in some. A
    # label without a column adds to the gradients of the others alone.
    "row_gradient": f"Tensor logits, {_ROW_GRADIENT}, Tensor(a!) dlogits",
    "row_gradient_": f"Tensor(a!) logits, {_ROW_GRADIENT}",
    # Makes the inputs per token of the others, flat: masks, labels, weights and fields. The given
    # ones are matrices of any dtype and strides, with cu_seqlens also vectors of one per sequence.
    "prepare": (
        "Tensor labels_or_log_probs, Tensor? response_mask, Tensor?[] fields, Tensor? cu_seqlens, "
        f"float scale, float? divisor, Tensor? device_divisor, Tensor? bounds, bool live, "
        f"{_OPTIONS}, Tensor(a!) unmasked, Tensor(b!)? counted, Tensor(c!)? labels, "
        "Tensor(d!)? weights, Tensor(e!)? tokens, Tensor(f!)? ticket"
    ),
    # Writes the mean of log_probs - old_log_probs over the counted tokens of its sequence to each
    # of these, and 0 to the others.
    "sequence_log_ratios": (
        f"Tensor log_probs, Tensor counted, {_TOKENS}, {_SEQUENCES}, Tensor(a!) log_ratios"
    ),
    # The reverse: adds to each counted token's gradient the mean of dlog_ratios over its sequence.
    "add_sequence_means_": (
        f"Tensor dlog_ratios, Tensor counted, {_SEQUENCES}, Tensor(a!) dlog_probs"
    ),
    # Writes row `rank` of the table, and zeros into the others: the negative mass at every point of
    # the lower grid, then the positive mass at every point of the upper grid.
    "contributions": f"{_SEARCHED}, int rank, Tensor(a!) table",
    # Finds the bounds at which Algorithm 1 stops on the sum of the rows of the table; masses: the
    # positive and the negative one at these, at the starting bounds and at the last points.
    "solve": f"Tensor table, {_OPTIONS}, Tensor(a!) bounds, Tensor(b!) masses",
    # Both, for tokens that are searched alone.
    "search": f"{_SEARCHED}, Tensor(a!) bounds, Tensor(b!) masses",
    # Loss and metrics of tokens, the gradients of log-probs and entropy, and both as the
    # caller gets them. The ticket counts finished blocks; before and after it is 0. With
    # dlog_ratios the gradient of the policy term goes there, and dlog_probs has the others.
    "token_loss": (
        "Tensor log_probs, Tensor? entropy, Tensor counted, Tensor? unmasked, Tensor weights, "
        f"Tensor? log_ratios, {_TOKENS}, Tensor? bounds, Tensor? masses, {_OPTIONS}, "
        "Tensor(a!) ticket, Tensor(b!) report, Tensor(c!) dlog_probs, Tensor(d!)? dentropy, "
        "Tensor(e!)? outputs, Tensor(f!)? dlog_ratios"
    ),
    # Where each label is in the set of its row: -1 if nowhere, -2 if it is no token; -100 stays.
    "find_labels": f"Tensor labels, {_SETS}, int vocab, Tensor(a!) positions",
    # The logits of the sets of counted rows; NaN for an id that is no token or not above the one
    # before, -inf for one of another rank.
    "gather_sets": f"Tensor logits, Tensor counted, {_SETS}, Tensor? shard, Tensor(a!) values",
    "multiply_sets": (
        f"{_HEAD_OPERANDS}, Tensor counted, {_SETS}, Tensor? shard, Tensor(a!) values"
    ),
    # Gradients of the sets of counted rows into rows of zeros.
    "scatter_sets": f"Tensor dvalues, Tensor counted, {_SETS}, Tensor? shard, Tensor(a!) dlogits",
    # multiply_sets, row_pass_ of the values, and sets_dhidden of decided rows; on a CPU row by row,
    # while the head is in the cache.
    "head_sets_pass": (
        f"{_HEAD_OPERANDS}, Tensor token_ids, {_ROW_PASS}, Tensor(e!) values, Tensor(f!) dhidden"
    ),
    # dhidden[n] = sum of dvalues[k]*weight[id_k] over the set of row n, where it has one.
    "sets_dhidden": (
        f"Tensor dvalues, Tensor weight, {_SETS}, Tensor? shard, Tensor? only, Tensor(a!) dhidden"
    ),
    # dweight[v] = sum of dvalues[order[i]]*hidden[rows[i]] for i in segments[v]:segments[v + 1], in
    # this order, in float32; or added to dweight. dbias likewise, always added.
    "sets_dweight": (
        "Tensor dvalues, Tensor hidden, Tensor order, Tensor rows, Tensor segments, bool add, "
        "Tensor(a!) dweight, Tensor(b!)? dbias"
    ),
    # Draws the samples of rows that reference/sampled.py defines: the ids that are kept, in the
    # whole vocabulary, ascending, and their logits, in the first places of each row of ids and
    # values, [N, places]. labels ascend in each row; beside: 1 - p of the labels, float64 [N];
    # seeds: int32 [N]. A row that needs more places has a value of NaN.
    "sample_rows": (
        "Tensor logits, Tensor labels, Tensor stats, Tensor beside, Tensor seeds, Tensor? shard, "
        f"int gradient_samples, {_TEMPERATURES}, {_OPTIONS}, Tensor(a!) counts, Tensor(b!) ids, "
        "Tensor(c!) values, Tensor(d!) drawn"
    ),
    # x *= factor; a factor of 1 returns at once.
    "scale_": "Tensor(a!) x, Tensor factor",
}

# The kernels write into tensors that the caller allocated, so their fakes have nothing to compute.
_libraries = {
    name: torch.library.Library(name, "DEF") for name in dict.fromkeys(NAMESPACES.values())
}


def _fake(*args: object) -> None:
    return None


for _namespace, _library in _libraries.items():
    for _name, _arguments in SCHEMAS.items():
        _library.define(f"{_name}({_arguments}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"{_namespace}::{_name}", _fake, lib=_library)

_HEAD = (
    f"{_HEAD_OPERANDS}, Tensor labels, Tensor counted, {_TEMPERATURES}, {_OPTIONS}, "
    "ScalarType dtype, ScalarType logits_dtype, int? chunk_tokens, int? gradient_samples, "
    "str backend, Tensor? shard_sizes, str? group, Tensor? token_ids, Tensor? offsets"
)

# The loops over chunks in ``head``, for all backends. They read from the device how many rows are
# counted, which a compiler cannot trace.
HEAD_SCHEMAS = {
    # Returns log-probs, entropy and stats, as row_statistics; if unscaled, the gradient of each
    # log-prob with respect to its hidden state, otherwise the values of the sets; empty tensors for
    # the rest. Several labels per row get both, and of the gradient the part that they share. With
    # gradient_samples also the sample (values, token_ids, offsets, drawn), and no gradient.
    "head_forward": (
        f"(bool unscaled, {_HEAD}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor[])"
    ),
    # Returns the gradients of hidden, weight and bias that are needed.
    "head_backward": (
        "(Tensor? dlog_probs, Tensor? dentropy, Tensor[] statistics, Tensor values, "
        f"Tensor[] sample, Tensor? unscaled, bool[] needs, {_HEAD}) -> Tensor[]"
    ),
    # Returns log-probs and ids [N, k].
    "head_top_k": f"(SymInt k, {_HEAD}) -> (Tensor, Tensor)",
}


def _fake_head_forward(
    unscaled: bool, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    log_probs = torch.empty_like(labels, dtype=torch.float64)
    entropy = log_probs.new_empty(labels.shape[:1])
    gradient = hidden.new_empty(hidden.shape if unscaled else 0)
    *_, gradient_samples, _, _, _, token_ids, _ = args
    keeps = token_ids is not None and (not unscaled or labels.ndim == 2)
    values = hidden.new_empty(token_ids.shape if keeps else 0, dtype=torch.float32)
    sample = []
    if gradient_samples is not None:
        N, entries = labels.shape[0], torch.library.get_ctx().new_dynamic_size()
        kept = labels.new_empty(entries, dtype=torch.int32), labels.new_empty(N + 1)
        sample = [hidden.new_empty(entries, dtype=torch.float32), *kept, log_probs.new_empty(N, 4)]
    return log_probs, entropy, log_probs.new_empty((*entropy.shape, 2)), gradient, values, sample


def _fake_head_backward(*args: Any) -> list[Tensor]:
    needs, parameters = args[6], args[7:10]
    return [p.new_empty(p.shape) for p, n in zip(parameters, needs, strict=True) if n]


def _fake_head_top_k(
    k: int, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *args: Any
) -> tuple[Tensor, Tensor]:
    ids = labels.new_empty(labels.shape[0], k)
    return torch.empty_like(ids, dtype=torch.float64), ids


_HOST_READS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
for _name, _arguments in HEAD_SCHEMAS.items():
    _libraries[NATIVE].define(_name + _arguments, tags=_HOST_READS)
torch.library.register_fake(f"{NATIVE}::head_forward", _fake_head_forward, lib=_libraries[NATIVE])
torch.library.register_fake(f"{NATIVE}::head_backward", _fake_head_backward, lib=_libraries[NATIVE])
torch.library.register_fake(f"{NATIVE}::head_top_k", _fake_head_top_k, lib=_libraries[NATIVE])

# The values of sets by their columns, as sets_dweight takes them. On a GPU PyTorch sorts.
_libraries[NATIVE].define(
    f"sort_sets({_SETS}, Tensor? shard, Tensor(a!) order, Tensor(b!) rows, Tensor(c!) segments)"
    " -> ()"
)
torch.library.register_fake(f"{NATIVE}::sort_sets", _fake, lib=_libraries[NATIVE])
# The instruction set of the CPU kernels in use; a name selects another, "" does not.
_libraries[NATIVE].define("instruction_set(str name) -> str")
_libraries[NATIVE].define("layout() -> str")  # the names in csrc/params.h, in their order


def as_rows(logits: Tensor) -> Tensor:
    """``[B, S, V]`` with stride 1 in the last dimension; a view wherever there is one."""
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        logits = logits.contiguous()
    if logits.ndim < 3:
        return logits[(None,) * (3 - logits.ndim)]
    return logits if logits.ndim == 3 else logits.flatten(0, -3)


def _torch_ops(backend: str) -> Any:
    return getattr(torch.ops, NAMESPACES[backend])


_eager = {
    backend: SimpleNamespace(**{name: getattr(_torch_ops(backend), name) for name in SCHEMAS})
    for backend in NAMESPACES
}


def implement(
    backend: str,
    name: str,
    kernel: Callable[..., Any],
    keys: Iterable[str],
    unchecked: Callable[..., None] | None = None,
) -> None:
    """``kernel`` is operator ``name`` of a backend, for tensors of these dispatch keys.

    Args:
        unchecked: what :func:`ops_of` runs in its place, which relies on its arguments.
    """
    for key in keys:
        _libraries[NAMESPACES[backend]].impl(name, kernel, key)
    if name in SCHEMAS:
        operator = getattr(_torch_ops(backend), name)
        setattr(_eager[backend], name, _on_plain_tensors(unchecked or kernel, operator))


def ops_of(backend: str) -> Any:
    """The operators of a backend, for callers that have checked their arguments.

    Those written in Python are functions here, because the dispatcher would take the host longer
    than they do; but a trace, a mode, a function transform, a profiler and a subclass of tensors
    see the operators.
    """
    if (
        torch.compiler.is_compiling()
        or _C._len_torch_dispatch_stack()
        or _C._are_functorch_transforms_active()
        or _C._autograd._profiler_enabled()
    ):
        return _torch_ops(backend)
    return _eager[backend]


def _on_plain_tensors(
    function: Callable[..., None], operator: Callable[..., None]
) -> Callable[..., None]:
    """The function, but the operator where a tensor is of a subclass, which may have no memory."""

    def run(*arguments: Any) -> None:
        given = chain(arguments, *(each for each in arguments if type(each) is list))
        (function if _PLAIN.issuperset(map(type, given)) else operator)(*arguments)

    return run


_PLAIN = {Tensor, torch.nn.Parameter, type(None), bool, int, float, list, tuple, Options}
