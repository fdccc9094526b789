"""Data x tensor parallel grids of real processes against one process in float64."""

from functools import partial

import pytest
import torch
from accuracy import assert_quantities, assert_same, assert_within_budget
from helpers import DEVICES, EPS, KERNELS, exhaustive_unless, in_some_orders
from shards import CASES, COLUMNS, case_of, of_rank, outputs_and_loss
from torch.utils._pytree import tree_map_only

import bapo_kernels
from bapo_kernels import BAPOOutput, reference
from bapo_kernels.core.head import head
from bapo_kernels.tools.budget import Result

pytestmark = pytest.mark.xdist_group("world")

GRIDS = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1)]
BACKENDS = [*(name for name in KERNELS if DEVICES[name] == "cpu"), "reference"]
# What ranks exchange does not depend on the backend.
GRIDS_OF_BACKENDS = exhaustive_unless(
    lambda backend, *ranks: ranks in [(2, 2), (1, 4)],
    [(of, *ranks) for of in BACKENDS for ranks in (GRIDS if of == "cpu" else [(2, 2)])],
)


def evaluated(module, function, leaves, arguments, frozen=False, inplace=False, **options):
    """Outputs, and the gradients of copies of the leaves."""
    leaves = [x.detach().clone().requires_grad_(not (frozen and i)) for i, x in enumerate(leaves)]
    given = leaves
    if inplace:
        given, options["inplace"] = [leaves[0].clone()], True
    out, loss = outputs_and_loss(module, function, given, arguments, **options)
    loss.backward()
    out |= dict(gradients=[x.grad for x in leaves])
    return tree_map_only(torch.Tensor, lambda x: x.detach().cpu(), out)


def loss_rank(rank, function, name, dtype, backend, data, tensor, device="cpu", **kind):
    case, leaves = case_of(function, name, dtype)
    rows, columns, mine = of_rank(case, rank, data, tensor, device)
    if "linear" in function:
        hidden, *of_head = leaves
        leaves = hidden[rows], *(x[columns] for x in of_head)
        # Chunks of given rows or of given bytes: equally many on every rank, of any shards.
        kind.update(chunk_tokens=5 if name == "paper" else None)
    else:
        leaves = (mine.logits,)
    given = leaves, mine.arguments(), mine.options
    leaves, arguments, options = tree_map_only(torch.Tensor, lambda x: x.to(device), given)
    with pytest.MonkeyPatch.context() as patch:
        chunk_bytes = 4 * max(COLUMNS[tensor]) * dtype.itemsize
        patch.setattr(head, "CHUNK_BYTES", chunk_bytes)
        options.update(backend=backend, **kind)
        return evaluated(bapo_kernels, function, leaves, arguments, **options)


def gathered(parts, data, tensor):
    """As of one process: tokens and gradients of all ranks, and means of losses and metrics."""
    first = parts[::tensor]
    whole = {key: torch.cat([of[key] for of in first]) for key in ("log_probs", "entropy")}
    if "loss" in parts[0]:
        loss = torch.stack([of["loss"] for of in parts]).mean()
        every = [of["metrics"] for of in parts]
        metrics = {key: torch.stack([of[key] for of in every]).mean() for key in every[0]}
        whole |= dict(loss=loss, bounds=parts[0]["bounds"], metrics=metrics)
    # By tensor-parallel ranks, then by data-parallel ones.
    shards = [[outputs["gradients"] for outputs in parts[t::tensor]] for t in range(tensor)]
    if len(parts[0]["gradients"]) == 1:
        gradients = [torch.cat([torch.cat([dx for (dx,) in ranks]) for ranks in shards], -1)]
    else:
        gradients = [torch.cat([dhidden for dhidden, *_ in shards[0]])]
        for leaf in (1, 2):
            of_leaf = [[gradients[leaf] for gradients in ranks] for ranks in shards]
            if of_leaf[0][0] is not None:
                sums = [torch.stack(ranks).double().sum(0) for ranks in of_leaf]
                gradients.append(torch.cat(sums))
    return whole | dict(gradients=[gradient / data for gradient in gradients])


def check(worlds, function, name, dtype, backend, data, tensor, device="cpu", **kind):
    given = function, name, dtype, backend, data, tensor, device
    parts = worlds(data * tensor, device).run(loss_rank, *given, **kind)
    case, leaves = case_of(function, name, dtype)
    frozen, several = kind.get("frozen", False), kind.get("several", False)

    def expected(work):
        given = [x.to(work) for x in leaves], case.arguments()
        more = case.options | dict(several=several)
        return evaluated(reference, function, *given, frozen=frozen, **more)

    same, truth = in_some_orders(partial(expected, dtype)), expected(torch.float64)
    if "loss" in truth and not truth["loss"].isfinite():
        for outputs in parts[:tensor]:  # the ranks that hold the bad token
            assert outputs["loss"].isnan()
        return
    for i, outputs in enumerate(parts):  # the same bits on every tensor-parallel rank
        first = parts[i - i % tensor]
        for key in {"loss", "log_probs", "entropy"} & first.keys():
            assert_same(outputs[key].nan_to_num(7), first[key].nan_to_num(7), key)
        if len(leaves) > 1:
            dhidden, *of_head = outputs["gradients"]
            assert_same(dhidden, first["gradients"][0])
            assert not frozen or of_head == [None, None]
    got = gathered(parts, data, tensor)
    size = truth["log_probs"].nan_to_num(neginf=0.0).abs().max().item()
    if "loss" in truth:
        check_loss(case, parts, got, same, truth, len(leaves) == 1 or dtype == torch.float32)
        outside = [r["metrics"].get("label_outside_mask", 0) for r in (got, truth)]
        assert data * outside[0] == outside[1]
        expected = truth["bounds"].float()
        for outputs in parts:
            assert_same(outputs["bounds"], expected, "bounds")
        assert name != "paper" or expected[1] > 1.2, "the case must need a search"
        if len(leaves) > 1 and name == "a search that stops early":
            assert 1.2 < expected[1] < 3
    else:
        for key in ("log_probs", "entropy"):
            of = [of_order[key] for of_order in same]
            assert_within_budget(key, got[key], of, truth[key], operand=size)
    for i, (gradient, exact) in enumerate(zip(got["gradients"], truth["gradients"], strict=False)):
        of = [of_order["gradients"][i] for of_order in same]
        # The rounding of the log-prob; each data rank rounds its gradient of a parameter.
        relative = EPS[torch.float32] * size + (data * EPS[dtype] if i and data > 1 else 0.0)
        inherited = relative * exact.abs().max().item()
        assert_within_budget(f"gradient {i}", gradient.to(dtype), of, exact, inherited=inherited)


def check_loss(case, parts, got, same, truth, sums):
    """All but the gradient; without a search there is no collective for the other metrics."""
    searches = "bounds" not in case.options and case.options["config"].has_bounds
    prefix = "bapo_" if searches else "bapo_clip_"
    same_everywhere = [key for key in got["metrics"] if key.startswith(prefix)]
    for key in same_everywhere:
        assert len({outputs["metrics"][key].item() for outputs in parts}) == 1, key
    names = "pg_loss", "kl_loss", *same_everywhere

    def result(values):
        metrics = {key: values["metrics"][key] for key in names}
        given = values["loss"], values["log_probs"], values["entropy"], values["bounds"].unbind()
        return Result(BAPOOutput(*given, metrics), ())

    assert_quantities(case, result(got), list(map(result, same)), result(truth), sums)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("backend", "data", "tensor"), GRIDS_OF_BACKENDS)
def test_loss_of_logits(worlds, backend, data, tensor, name):
    check(worlds, "bapo_loss", name, torch.float32, backend, data, tensor)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes(worlds, backend, dtype, inplace):
    check(worlds, "bapo_loss", "paper", dtype, backend, 2, 2, inplace=inplace)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["paper", "given bounds"])
@pytest.mark.parametrize(("data", "tensor"), [(1, 1), *GRIDS])
@pytest.mark.parametrize("backend", KERNELS)
def test_nccl(worlds, backend, data, tensor, name):
    if DEVICES[backend] != "cuda" or torch.cuda.device_count() < data * tensor:
        pytest.skip(f"needs {data * tensor} GPUs and a backend that runs on them")
    check(worlds, "bapo_loss", name, torch.bfloat16, backend, data, tensor, "cuda")


OF_HIDDEN = (
    *("paper", "recipe", "a search that stops early"),
    *("given bounds", "KL, entropy, soft cap", "ratios of sequences", "sampling mask"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OF_HIDDEN)
@pytest.mark.parametrize(("backend", "data", "tensor"), GRIDS_OF_BACKENDS)
def test_loss_of_hidden_states(worlds, backend, data, tensor, name, dtype):
    check(worlds, "bapo_linear_loss", name, dtype, backend, data, tensor)


@pytest.mark.parametrize("name", OF_HIDDEN)
@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_head(worlds, backend, name):
    """The gradients of log-probs that forward makes are sums over ranks, and scaled later."""
    check(worlds, "bapo_linear_loss", name, torch.float32, backend, 2, 2, frozen=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", ["logits", "hidden states", "frozen head"])
@pytest.mark.parametrize(("tensor", "name"), [(2, "paper"), (4, "temperatures")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probs(worlds, backend, tensor, name, level, dtype):
    function = "log_probs" if level == "logits" else "linear_log_probs"
    frozen = level == "frozen head"
    check(worlds, function, name, dtype, backend, 1, tensor, frozen=frozen)


@pytest.mark.parametrize("level", ["logits", "hidden states", "frozen head"])
@pytest.mark.parametrize(("tensor", "name"), [(2, "sampling mask"), (4, "temperatures")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_several_labels(worlds, backend, tensor, name, level):
    function = "log_probs" if level == "logits" else "linear_log_probs"
    options = dict(frozen=level == "frozen head", several=True)
    check(worlds, function, name, torch.float32, backend, 1, tensor, **options)


def top_k_rank(rank, backend, tensor, name):
    case, leaves = case_of("linear_log_probs", name, torch.float32)
    _, columns, mine = of_rank(case, rank, 1, tensor)
    options = {k: mine.options.get(k) for k in ("vocab_group", "sampling_mask")}
    return top_k_of(bapo_kernels, leaves, columns, backend=backend, chunk_tokens=7, **options)


def top_k_of(module, leaves, columns=slice(None), **options):
    hidden, weight, bias = leaves
    return module.linear_top_k(hidden, weight[columns], 9, bias=bias[columns], **options)


@pytest.mark.parametrize("name", ["paper", "sampling mask"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_top_k(worlds, backend, name):
    """Of shards with fewer columns than ids, of which one is empty."""
    parts = worlds(4).run(top_k_rank, backend, 4, name)
    case, leaves = case_of("linear_log_probs", name, torch.float32)
    mask = case.options.get("sampling_mask")
    same = in_some_orders(partial(top_k_of, reference, leaves, sampling_mask=mask))
    truth = top_k_of(reference, [x.double() for x in leaves], sampling_mask=mask)
    size = truth[0].nan_to_num(neginf=0.0).abs().max().item()
    for logp, ids in parts:
        assert_same(ids, truth[1])
        assert_within_budget("log-probs", logp, [x for x, _ in same], truth[0], operand=size)
