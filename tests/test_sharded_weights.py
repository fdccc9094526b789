"""Heads that FSDP2, tensor parallelism and ZeRO-3 have sharded."""

import pytest
import torch
from helpers import EPS, assert_within_budget, per_token
from shards import B, H, S, V, head, linear_case, of_rank, whole_case
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from world import grid

import bapo_kernels
from bapo_kernels import reference

pytestmark = pytest.mark.xdist_group("world")


class Model(torch.nn.Module):
    """Returns hidden states; the loss applies the head."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(V, H)
        self.block = torch.nn.Sequential(torch.nn.Linear(H, H), torch.nn.GELU())
        self.lm_head = torch.nn.Linear(H, V)

    def forward(self, tokens):
        return self.block(self.embedding(tokens))


def model_and_case(dtype=torch.float32, frozen=False):
    torch.manual_seed(3)
    model = Model()
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    case = whole_case("paper", torch.float32)
    tokens = torch.randint(0, V, (B, S))
    with torch.no_grad():
        logp, _ = reference.linear_log_probs(
            model(tokens), model.lm_head.weight, case.labels, bias=model.lm_head.bias
        )
    case.old_log_probs = logp + 0.3 * torch.randn(B, S)
    model.lm_head.requires_grad_(not frozen)
    return model.to(dtype), tokens, case


def train(model, tokens, arguments, options, backend, kind=torch.nn.Parameter):
    """Losses of three optimizer steps, and unsharded parameters by name. ``kind`` of the weight."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        hidden = model(tokens)
        assert isinstance(model.lm_head.weight, kind)
        out = bapo_kernels.bapo_linear_loss(
            hidden,
            model.lm_head.weight,
            *arguments,
            bias=model.lm_head.bias,
            backend=backend,
            chunk_tokens=11,
            **options,
        )
        out.loss.backward()
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                assert parameter.grad is None, name
                continue
            assert type(parameter.grad) is type(parameter.detach()), name
            assert getattr(parameter.grad, "placements", None) == getattr(
                parameter, "placements", None
            )
        optimizer.step()
        losses.append(out.loss.item())
    whole = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
        for name, p in model.named_parameters()
    }
    return losses, whole


def fsdp_rank(rank, data, tensor, head_alone, reshard, vocab_parallel, frozen, temperature):
    mesh = grid(data, tensor)
    d, t = divmod(rank, tensor)
    model, tokens, case = model_and_case(frozen=frozen)
    rows, _, arguments, options = of_rank(case, data, tensor, d, t, mesh)
    options["temperature"] = None if temperature is None else temperature[rows]
    if vocab_parallel:
        parallelize_module(model, mesh["tensor"], {"lm_head": ColwiseParallel()})
    else:
        options["vocab_group"] = None
    fully_shard(model.block, mesh=mesh["data"])
    if head_alone:
        fully_shard(model.lm_head, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"], reshard_after_forward=reshard)
    whole = (data, tensor) == (1, 1) or not (head_alone or vocab_parallel)
    kind = torch.nn.Parameter if whole else DTensor
    return train(model, tokens[rows], arguments, options, "cpu", kind)


@pytest.mark.parametrize("head_alone", [False, True])
@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize(
    ("data", "tensor", "vocab_parallel"),
    [(2, 1, False), (4, 1, False), (2, 2, False), (2, 2, True), (1, 2, True)],
)
def test_fsdp2(worlds, data, tensor, vocab_parallel, head_alone, reshard):
    """Three steps agree, whether the head is unsharded after the root's forward or a DTensor."""
    check_fsdp2(worlds, data, tensor, head_alone, reshard, vocab_parallel)


@pytest.mark.parametrize(("data", "tensor", "vocab_parallel"), [(2, 1, False), (2, 2, True)])
def test_fsdp2_of_a_frozen_head(worlds, data, tensor, vocab_parallel):
    """Each sequence has a temperature of its own."""
    T = torch.linspace(0.8, 1.2, B)
    check_fsdp2(worlds, data, tensor, True, False, vocab_parallel, True, T)


def check_fsdp2(
    worlds, data, tensor, head_alone, reshard, vocab_parallel, frozen=False, temperature=None
):
    layout = data, tensor, head_alone, reshard, vocab_parallel
    results = worlds(data * tensor).run(fsdp_rank, *layout, frozen, temperature)
    model, tokens, case = model_and_case(frozen=frozen)
    case = case.with_options(temperature=temperature)
    plain = train(model, tokens, case.arguments(), case.options, "cpu")
    model, tokens, _ = model_and_case(torch.float64, frozen)
    truth = train(model, tokens, case.arguments(), case.options, "reference")
    for losses, parameters in results:
        for name, values in parameters.items():
            expected = truth[1][name]
            # Three steps and the mean over ranks round a few times where one process does once.
            inherited = 16 * EPS[torch.float32] * expected.abs().max().item()
            assert_within_budget(name, values, plain[1][name], expected, inherited=inherited)
        assert len(losses) == 3
    for step in range(3):
        mean = sum(results[d * tensor][0][step] for d in range(data)) / data
        assert mean == pytest.approx(truth[0][step], rel=1e-5, abs=1e-6)
    assert max(abs(a - b) for a, b in zip(truth[0], truth[0][1:], strict=False)) > 1e-3


def gathers_rank(rank):
    mesh = grid(2, 2)
    case, (hidden, weight, _) = linear_case("paper", torch.float32), head(torch.float32)
    model = torch.nn.Sequential(torch.nn.Linear(H, V, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(weight)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    assert model[0].weight.placements[0] != Shard(0), "strided: vocabulary first"
    with CommDebugMode() as forward:
        out = bapo_kernels.bapo_linear_loss(
            hidden,
            model[0].weight,
            *case.arguments(),
            vocab_group=mesh.get_group("tensor"),
            **case.options,
        )
    with CommDebugMode() as backward:
        out.loss.backward()
    with CommDebugMode() as no_grad, torch.no_grad():
        bapo_kernels.linear_log_probs(
            hidden, model[0].weight, case.labels, vocab_group=mesh.get_group("tensor")
        )
    return [
        [(str(op), n) for op, n in mode.get_comm_counts().items() if "functional" in str(op)]
        for mode in (forward, backward, no_grad)
    ]


def test_head_of_fsdp_and_shards_is_gathered_once(worlds):
    """Only over the data ranks: no rank ever holds more than its shard of the vocabulary."""
    for forward, backward, no_grad in worlds(4).run(gathers_rank):
        assert forward == no_grad == [("c10d_functional.all_gather_into_tensor", 1)]
        assert backward == [("c10d_functional.reduce_scatter_tensor", 1)]


def zero3(function):
    """A weight that exists during forward and, gathered again, during backward only."""
    case = linear_case("paper", torch.float32)
    hidden, whole, bias = head(torch.float32)
    weight = torch.nn.Parameter(torch.empty(0))
    weight.data = whole.clone()
    options = case.options if function == "bapo_linear_loss" else {}
    tokens = case.arguments() if options else (case.labels,)
    out = getattr(bapo_kernels, function)(hidden, weight, *tokens, bias=bias, **options)
    weight.data = torch.empty(0)
    weight.data = whole.clone()
    out[0].sum().backward()
    return weight.grad


@pytest.mark.parametrize("function", ["bapo_linear_loss", "linear_log_probs"])
def test_zero3(function):
    got = zero3(function)
    case = linear_case("paper", torch.float32)
    hidden, weight, bias = head(torch.float32)
    weight.requires_grad_()
    options = case.options if function == "bapo_linear_loss" else {}
    tokens = case.arguments() if options else (case.labels,)
    out = getattr(bapo_kernels, function)(hidden, weight, *tokens, bias=bias, **options)
    out[0].sum().backward()
    assert torch.equal(got, weight.grad)


def mask_of_labels(labels):
    """Sets of the label and two others, empty in every fifth row."""
    sets = [{int(label), 1, V - 1} for label in labels.flatten().clamp(min=0)]
    return bapo_kernels.SamplingMask.from_lists(
        [[] if n % 5 == 0 else sorted(s) for n, s in enumerate(sets)]
    )


def dtensor_rank(rank, function, masked):
    mesh = grid(1, 2)["tensor"]
    case = linear_case("paper", torch.float32)
    hidden, *parameters = head(torch.float32)
    weight, bias = (torch.nn.Parameter(distribute_tensor(x, mesh, [Shard(0)])) for x in parameters)
    mask = mask_of_labels(case.labels) if masked else None
    options = dict(vocab_group=mesh.get_group(), bias=bias, sampling_mask=mask)
    if function == "linear_log_probs":
        logp, _ = bapo_kernels.linear_log_probs(hidden, weight, case.labels, **options)
        loss = (logp * per_token((B, S), 7)).sum()
    else:
        loss = bapo_kernels.bapo_linear_loss(
            hidden, weight, *case.arguments(), **options, **case.options
        ).loss
    loss.backward()
    gradients = weight.grad, bias.grad
    assert all(g.placements == (Shard(0),) for g in gradients)
    return [g.full_tensor() for g in gradients]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("function", ["bapo_linear_loss", "linear_log_probs"])
def test_vocabulary_sharded_as_a_dtensor(worlds, function, masked):
    parts = worlds(2).run(dtensor_rank, function, masked)
    case = linear_case("paper", torch.float32)
    hidden, weight, bias = head(torch.float32)
    weight.requires_grad_(), bias.requires_grad_()
    mask = mask_of_labels(case.labels) if masked else None
    if function == "linear_log_probs":
        logp, _ = reference.linear_log_probs(
            hidden, weight, case.labels, bias=bias, sampling_mask=mask
        )
        loss = (logp * per_token((B, S), 7)).sum()
    else:
        loss = reference.bapo_linear_loss(
            hidden, weight, *case.arguments(), bias=bias, sampling_mask=mask, **case.options
        ).loss
    loss.backward()
    for got in parts:
        torch.testing.assert_close(got, [weight.grad, bias.grad], rtol=2e-5, atol=1e-6)
