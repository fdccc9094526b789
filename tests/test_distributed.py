"""Data x tensor parallel grids of real processes against one process in float64."""

import pytest
import torch
from helpers import (
    DEVICES,
    EPS,
    KERNELS,
    assert_within_budget,
    loss_sensitivity,
    per_token,
    run_reference,
)
from shards import CASES, COLUMNS, SEQUENCES, B, S, head, linear_case, of_rank, part, whole_case
from world import grid

import bapo_kernels
from bapo_kernels import bapo_loss, reference

pytestmark = pytest.mark.xdist_group("world")

GRIDS = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1)]
BACKENDS = [*(name for name in KERNELS if DEVICES[name] == "cpu"), "reference"]
# What ranks exchange does not depend on the backend.
GRIDS_OF_BACKENDS = [
    (backend, *ranks) for backend in BACKENDS for ranks in (GRIDS if backend == "cpu" else [(2, 2)])
]


def outputs_on_cpu(out):
    return dict(
        loss=out.loss.detach().cpu(),
        bounds=torch.stack(tuple(out.bounds)).cpu(),
        log_probs=out.log_probs.cpu(),
        entropy=out.entropy.cpu(),
        metrics={name: value.cpu() for name, value in out.metrics.items()},
    )


def logits_rank(rank, name, dtype, backend, data, tensor, inplace, device):
    mesh = grid(data, tensor, device)
    d, t = divmod(rank, tensor)
    case = whole_case(name, dtype)
    rows, columns, arguments, options = of_rank(case, data, tensor, d, t, mesh)
    arguments = tuple(x.to(device) for x in arguments)
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    leaf = case.logits[rows, :, columns].to(device, copy=True).requires_grad_()
    logits = leaf.clone() if inplace else leaf
    out = bapo_loss(logits, *arguments, backend=backend, inplace=inplace, **options)
    out.loss.backward()
    assert leaf.grad.dtype == dtype
    return outputs_on_cpu(out) | dict(gradient=leaf.grad.cpu())


def gathered(parts, data, tensor, key="gradient"):
    """The ranks' blocks as one tensor; the gradient is the mean over data-parallel ranks."""
    rows = [torch.cat([parts[d * tensor + t][key] for t in range(tensor)], -1) for d in range(data)]
    return torch.cat(rows) / data


def check_outputs(parts, case, same, truth, data, tensor):
    operand = truth.output.log_probs[truth.output.log_probs.isfinite()].abs().max().item()
    for d in range(data):
        group = [parts[d * tensor + t] for t in range(tensor)]
        for other in group[1:]:  # the same bits on every tensor-parallel rank
            for key in ("loss", "bounds", "log_probs", "entropy"):
                assert torch.equal(other[key].nan_to_num(7), group[0][key].nan_to_num(7)), key
        rows = part(SEQUENCES[data], d)
        if rows.start < rows.stop:
            for key in ("log_probs", "entropy"):
                of = (getattr(r.output, key)[rows] for r in (same, truth))
                assert_within_budget(key, group[0][key], *of, operand=operand)
    expected = torch.stack(tuple(truth.output.bounds)).float()
    assert all(torch.equal(p["bounds"], expected) for p in parts)
    sensitivity = operand * loss_sensitivity(case, truth)
    for key, values in [("loss", [p["loss"] for p in parts])] + [
        (key, [p["metrics"][key] for p in parts]) for key in ("pg_loss", "kl_loss")
    ]:
        true = [r.output.loss if key == "loss" else r.output.metrics[key] for r in (same, truth)]
        assert_within_budget(key, torch.stack(values).mean(), *true, operand=sensitivity)
    for key in (k for k in truth.output.metrics if k.startswith("bapo_")):
        searches = "bounds" not in case.options and case.options["config"].has_bounds
        if not searches and key not in ("bapo_clip_low", "bapo_clip_high"):
            continue  # each rank's own: without a search there is no collective
        true = [r.output.metrics[key] for r in (same, truth)]
        size = max(1.0, true[1].abs().nan_to_num(posinf=0.0).item())
        for p in parts:
            assert_within_budget(key, p["metrics"][key], *true, operand=operand * size)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("backend", "data", "tensor"), GRIDS_OF_BACKENDS)
def test_loss_of_logits(worlds, backend, data, tensor, name):
    check_logits_level(worlds, name, torch.float32, backend, data, tensor)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_shard(worlds, backend):
    assert COLUMNS[4][1] == 0
    check_logits_level(worlds, "paper", torch.float32, backend, 1, 4)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes(worlds, backend, dtype, inplace):
    check_logits_level(worlds, "paper", dtype, backend, 2, 2, inplace)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["paper", "given bounds"])
@pytest.mark.parametrize(("data", "tensor"), [(1, 1), *GRIDS])
@pytest.mark.parametrize("backend", KERNELS)
def test_nccl(worlds, backend, data, tensor, name):
    if DEVICES[backend] != "cuda" or torch.cuda.device_count() < data * tensor:
        pytest.skip(f"needs {data * tensor} GPUs and a backend that runs on them")
    check_logits_level(worlds, name, torch.bfloat16, backend, data, tensor, device="cuda")


def check_logits_level(worlds, name, dtype, backend, data, tensor, inplace=False, device="cpu"):
    ranks = worlds(data * tensor, device)
    parts = ranks.run(logits_rank, name, dtype, backend, data, tensor, inplace, device)
    case = whole_case(name, dtype)
    same, truth = run_reference(case), run_reference(case, torch.float64)
    if not torch.isfinite(truth.output.loss):
        for p in parts[:tensor]:  # the ranks that hold the bad token
            assert p["loss"].isnan()
        return
    if name == "paper":
        assert truth.output.bounds.upper > 1.2, "the case must need a search"
    if truth.gradient.any():
        check_outputs(parts, case, same, truth, data, tensor)
    got = gathered(parts, data, tensor)
    assert_within_budget("gradient", got.to(dtype), same.gradient, truth.gradient)


def gradients_of_head(loss_of, leaves, case_arguments, frozen=False, **options):
    """Output of a loss, and gradients of hidden states, weight and bias."""
    hidden, weight, bias = (
        x.clone().requires_grad_(not (frozen and i)) for i, x in enumerate(leaves)
    )
    out = loss_of(hidden, weight, *case_arguments, bias=bias, **options)
    out.loss.backward()
    return out, [leaf.grad for leaf in (hidden, weight, bias)]


def linear_rank(rank, name, dtype, backend, data, tensor, frozen=False):
    mesh = grid(data, tensor)
    d, t = divmod(rank, tensor)
    rows, columns, arguments, options = of_rank(linear_case(name, dtype), data, tensor, d, t, mesh)
    # Chunks of given rows or of given bytes: equally many on every rank, though shards are uneven.
    options.update(backend=backend, chunk_tokens=5 if name == "paper" else None)
    chunk_bytes = 4 * max(COLUMNS[tensor]) * dtype.itemsize
    hidden, weight, bias = head(dtype)
    leaves = hidden[rows], weight[columns], bias[columns]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bapo_kernels.core.head.CHUNK_BYTES", chunk_bytes)
        loss_of = bapo_kernels.bapo_linear_loss
        out, gradients = gradients_of_head(loss_of, leaves, arguments, frozen, **options)
    return outputs_on_cpu(out) | dict(gradients=gradients)


def run_linear_reference(name, dtype, work):
    case, leaves = linear_case(name, dtype), [x.to(work) for x in head(dtype)]
    return gradients_of_head(reference.bapo_linear_loss, leaves, case.arguments(), **case.options)


OF_HIDDEN = (
    *("paper", "recipe", "a search that stops early"),
    *("given bounds", "KL, entropy, soft cap", "ratios of sequences"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OF_HIDDEN)
@pytest.mark.parametrize(("backend", "data", "tensor"), GRIDS_OF_BACKENDS)
def test_loss_of_hidden_states(worlds, backend, data, tensor, name, dtype):
    parts = worlds(data * tensor).run(linear_rank, name, dtype, backend, data, tensor)
    same, truth = (run_linear_reference(name, dtype, work) for work in (dtype, torch.float64))
    size = truth[0].log_probs.abs().max().item()
    expected = torch.stack(tuple(truth[0].bounds)).float()
    if name == "a search that stops early":
        assert 1.2 < expected[1] < 3
    rank = [[parts[d * tensor + t] for t in range(tensor)] for d in range(data)]
    for group in rank:
        for part_ in group:
            assert torch.equal(part_["bounds"], expected)
            for key in ("loss", "log_probs", "entropy"):
                assert torch.equal(part_[key], group[0][key]), key
            assert torch.equal(part_["gradients"][0], group[0]["gradients"][0])
    # The gradient of hidden states is the rank's own, that of parameters a mean over data ranks.
    dhidden = torch.cat([group[0]["gradients"][0] for group in rank]) / data
    of_shards = []
    for i in (1, 2):
        sums = [sum(of_t[t]["gradients"][i].double() for of_t in rank) for t in range(tensor)]
        of_shards.append(torch.cat(sums) / data)
    # Each data rank rounds its gradient of a parameter to the dtype.
    rounded = data * EPS[dtype]
    for key, got, *of in zip(
        ("hidden", "weight", "bias"), (dhidden, *of_shards), same[1], truth[1], strict=True
    ):
        largest = of[1].abs().max().item()
        inherited = (EPS[torch.float32] * size + (0 if key == "hidden" else rounded)) * largest
        assert_within_budget(f"d{key}", got.to(dtype), *of, inherited=inherited)
    if dtype == torch.float32:
        loss = torch.stack([group[0]["loss"] for group in rank]).double().mean()
        torch.testing.assert_close(loss, truth[0].loss.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OF_HIDDEN)
@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_head(worlds, backend, name):
    """The gradients of log-probs that forward makes are sums over ranks, and scaled later."""
    frozen, trained = (
        worlds(4).run(linear_rank, name, torch.float32, backend, 2, 2, choice)
        for choice in (True, False)
    )
    for part_, whole in zip(frozen, trained, strict=True):
        assert torch.equal(part_["loss"], whole["loss"])
        dhidden, *of_head = part_["gradients"]
        assert of_head == [None, None]
        expected = whole["gradients"][0]
        error = (dhidden - expected).abs().max()
        assert error <= 4 * EPS[torch.float32] * expected.abs().max()


def log_probs_of(module, leaves, labels, frozen=False, **options):
    """Log-probs, entropy and gradients of logits, or of hidden states, weight and bias."""
    leaves = [x.detach().clone().requires_grad_(not (frozen and i)) for i, x in enumerate(leaves)]
    function = module.log_probs
    if len(leaves) > 1:
        function, options["bias"] = module.linear_log_probs, leaves[2]
    logp, entropy = function(*leaves[:2], labels, **options)
    value = logp * per_token((B, S), 7)
    if not frozen:
        value = value + 0.3 * entropy * per_token((B, S), 8)
    value.sum().backward()
    return (logp.detach(), entropy.detach()), [leaf.grad for leaf in leaves]


def shards_of_log_probs(rank, tensor, level, dtype, backend, frozen=False, **options):
    case, columns = whole_case(dtype=dtype), part(COLUMNS[tensor], rank)
    options.update(vocab_group=grid(1, tensor).get_group("tensor"), backend=backend)
    leaves = [case.logits[..., columns]]
    if level == "linear":
        hidden, weight, bias = head(dtype)
        leaves = hidden, weight[columns], bias[columns]
        options.update(chunk_tokens=7)
    return log_probs_of(bapo_kernels, leaves, case.labels, frozen, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probs_of_a_frozen_head(worlds, backend):
    of_dtypes = []
    for work in (torch.float32, torch.float64):
        leaves = [x.to(work) for x in head()]
        _, (dhidden, *_) = log_probs_of(reference, leaves, whole_case().labels, frozen=True)
        of_dtypes.append(dhidden)
    given = 2, "linear", torch.float32, backend, True
    for _, (dhidden, *of_head) in worlds(2).run(shards_of_log_probs, *given):
        assert of_head == [None, None]
        assert_within_budget("gradient of hidden", dhidden, *of_dtypes)


TEMPERATURES = {2: 0.8, 4: per_token((B, S), 9, 0.5, 2.0)}  # by the number of shards


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", ["logits", "linear"])
@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probs(worlds, backend, tensor, level, dtype):
    case, options = whole_case(dtype=dtype), dict(temperature=TEMPERATURES[tensor])
    given = tensor, level, dtype, backend
    outputs, gradients = zip(
        *worlds(tensor).run(shards_of_log_probs, *given, **options), strict=True
    )
    leaves = [case.logits] if level == "logits" else head(dtype)
    same, truth = (
        log_probs_of(reference, [x.to(work) for x in leaves], case.labels, **options)
        for work in (dtype, torch.float64)
    )
    size = truth[0][0].abs().max().item()
    inherited = 2.0**-22 * size if level == "linear" else 0.0  # sums of 16 products
    for i, key in enumerate(("log_probs", "entropy")):
        for other in outputs:
            assert torch.equal(other[i], outputs[0][i])
        of = (same[0][i], truth[0][i])
        assert_within_budget(key, outputs[0][i], *of, operand=size, inherited=inherited)
    if level == "logits":
        got = [torch.cat([dlogits for (dlogits,) in gradients], -1)]
    else:
        got = [gradients[0][0], *(torch.cat([of[i] for of in gradients]) for i in (1, 2))]
    for of_leaf in zip(got, same[1], truth[1], strict=True):
        largest = of_leaf[2].abs().max().item()
        inherited = EPS[torch.float32] * size * largest
        assert_within_budget("gradient", *of_leaf, inherited=inherited)
