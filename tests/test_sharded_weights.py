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
    case = whole_case()
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
    losses, options = [], options | dict(backend=backend, chunk_tokens=11)
    for _ in range(3):
        optimizer.zero_grad()
        hidden = model(tokens)
        assert isinstance(model.lm_head.weight, kind)
        weight, options["bias"] = model.lm_head.weight, model.lm_head.bias
        out = bapo_kernels.bapo_linear_loss(hidden, weight, *arguments, **options)
        out.loss.backward()
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                assert parameter.grad is None, name
                continue
            assert type(parameter.grad) is type(parameter.detach()), name
            placements = (getattr(x, "placements", None) for x in (parameter, parameter.grad))
            assert len(set(placements)) == 1, name
        optimizer.step()
        losses.append(out.loss.item())
    whole = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
        for name, p in model.named_parameters()
    }
    return losses, whole


def fsdp_rank(rank, data, tensor, vocab_parallel, head_alone, reshard, frozen, temperature):
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


def check_fsdp2(
    worlds, data, tensor, vocab_parallel, head_alone, reshard, frozen=False, temperature=None
):
    layout = data, tensor, vocab_parallel, head_alone, reshard
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


@pytest.mark.parametrize("head_alone", [False, True])
@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize(
    "layout", [(2, 1, False), (4, 1, False), (2, 2, False), (2, 2, True), (1, 2, True)]
)
def test_fsdp2(worlds, layout, head_alone, reshard):
    """Three steps agree, whether the head is unsharded after the root's forward or a DTensor."""
    check_fsdp2(worlds, *layout, head_alone, reshard)


@pytest.mark.parametrize("layout", [(2, 1, False), (2, 2, True)])
def test_fsdp2_of_a_frozen_head(worlds, layout):
    """Each sequence has a temperature of its own."""
    check_fsdp2(worlds, *layout, True, False, frozen=True, temperature=torch.linspace(0.8, 1.2, B))


def gathers_rank(rank):
    mesh = grid(2, 2)
    case, (hidden, weight, _) = linear_case(), head()
    model = torch.nn.Sequential(torch.nn.Linear(H, V, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(weight)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    assert model[0].weight.placements[0] != Shard(0), "strided: vocabulary first"
    labels, *batch = case.arguments()
    given, options = (hidden, model[0].weight, labels), dict(vocab_group=mesh.get_group("tensor"))
    with CommDebugMode() as forward:
        out = bapo_kernels.bapo_linear_loss(*given, *batch, **options, **case.options)
    with CommDebugMode() as backward:
        out.loss.backward()
    with CommDebugMode() as no_grad, torch.no_grad():
        bapo_kernels.linear_log_probs(*given, **options)
    return [
        [(str(op), n) for op, n in mode.get_comm_counts().items() if "functional" in str(op)]
        for mode in (forward, backward, no_grad)
    ]


def test_head_of_fsdp_and_shards_is_gathered_once(worlds):
    """Only over the data ranks: no rank ever holds more than its shard of the vocabulary."""
    for forward, backward, no_grad in worlds(4).run(gathers_rank):
        assert forward == no_grad == [("c10d_functional.all_gather_into_tensor", 1)]
        assert backward == [("c10d_functional.reduce_scatter_tensor", 1)]


def loss_of_head(module, function, hidden, weight, bias, **options):
    """A loss of the package or of its reference; that of log-probs is a sum."""
    case, call = linear_case(), getattr(module, function)
    if function == "linear_log_probs":
        logp, _ = call(hidden, weight, case.labels, bias=bias, **options)
        return (logp * per_token((B, S), 7)).sum()
    return call(hidden, weight, *case.arguments(), bias=bias, **options, **case.options).loss


@pytest.mark.parametrize("function", ["bapo_linear_loss", "linear_log_probs"])
def test_zero3(function):
    """A weight that exists during forward and, gathered again, during backward only."""
    hidden, whole, bias = head()
    gradients = []
    for is_sharded in (False, True):
        weight = torch.nn.Parameter(torch.empty(0) if is_sharded else whole.clone())
        weight.data = whole.clone()
        loss = loss_of_head(bapo_kernels, function, hidden, weight, bias)
        if is_sharded:
            weight.data = torch.empty(0)
            weight.data = whole.clone()
        loss.backward()
        gradients.append(weight.grad)
    assert torch.equal(*gradients)


def mask_of_labels(labels):
    """Sets of the label and two others, empty in every fifth row."""
    sets = [{int(label), 1, V - 1} for label in labels.flatten().clamp(min=0)]
    return bapo_kernels.SamplingMask.from_lists(
        [[] if n % 5 == 0 else sorted(s) for n, s in enumerate(sets)]
    )


def dtensor_rank(rank, function, mask):
    mesh = grid(1, 2)["tensor"]
    hidden, *parameters = head()
    parameters = [torch.nn.Parameter(distribute_tensor(x, mesh, [Shard(0)])) for x in parameters]
    options = dict(vocab_group=mesh.get_group(), sampling_mask=mask)
    loss_of_head(bapo_kernels, function, hidden, *parameters, **options).backward()
    assert all(x.grad.placements == (Shard(0),) for x in parameters)
    return [x.grad.full_tensor() for x in parameters]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("function", ["bapo_linear_loss", "linear_log_probs"])
def test_vocabulary_sharded_as_a_dtensor(worlds, function, masked):
    mask = mask_of_labels(linear_case().labels) if masked else None
    parts = worlds(2).run(dtensor_rank, function, mask)
    hidden, *parameters = (x.requires_grad_() for x in head())
    loss_of_head(reference, function, hidden, *parameters, sampling_mask=mask).backward()
    for got in parts:
        torch.testing.assert_close(got, [x.grad for x in parameters], rtol=2e-5, atol=1e-6)
