"""Heads that FSDP2, tensor parallelism and ZeRO-3 have sharded."""

from functools import cache
from itertools import product

import pytest
import torch
from accuracy import assert_as_reference, assert_same
from causal_lm import CausalLM
from helpers import in_some_orders, sets_of
from shards import B, H, S, V, check_means, head, linear_case, of_rank, outputs_and_loss, whole_case
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from world import grid, whole_tensor

import bapo_kernels
from bapo_kernels import reference

pytestmark = pytest.mark.xdist_group("world")
CALLS = ("bapo_linear_loss", {}), ("linear_log_probs", {}), ("linear_log_probs", {"several": True})


class Model(CausalLM):
    def forward(self, tokens):
        """Hidden states; the loss applies the head."""
        return self.model(tokens).last_hidden_state


def model_and_case(dtype=torch.float32, frozen=False):
    """With a frozen head each sequence has a temperature of its own."""
    torch.manual_seed(3)
    model = Model(bias=True, V=V, H=H)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
        case, tokens = whole_case(), torch.randint(0, V, (B, S))
        logp, _ = reference.log_probs(model.lm_head(model(tokens)), case.labels)
    case.old_log_probs = logp + 0.3 * torch.randn(B, S)
    case = case.with_options(temperature=torch.linspace(0.8, 1.2, B) if frozen else None)
    model.lm_head.requires_grad_(not frozen)
    return model.to(dtype), tokens, case


def train(model, tokens, arguments, options, backend, kind=torch.nn.Parameter):
    """Losses of three steps, and unsharded parameters, by name. ``kind`` of the weight."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses, options = [], options | dict(backend=backend, chunk_tokens=11)
    for _ in range(3):
        optimizer.zero_grad()
        hidden = model(tokens)
        assert isinstance(model.lm_head.weight, kind)
        leaves = hidden, model.lm_head.weight, model.lm_head.bias
        _, loss = outputs_and_loss(bapo_kernels, CALLS[0][0], leaves, arguments, **options)
        loss.backward()
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                assert parameter.grad is None, name
                continue
            assert type(parameter.grad) is type(parameter.detach()), name
            placements = (getattr(x, "placements", None) for x in (parameter, parameter.grad))
            assert len(set(placements)) == 1, name
        optimizer.step()
        losses.append(loss.detach())
    parameters = {name: whole_tensor(p.detach()) for name, p in model.named_parameters()}
    return parameters | dict(losses=torch.stack(losses))


def fsdp_rank(rank, data, tensor, vocab_parallel, head_alone, reshard, frozen):
    mesh = grid(data, tensor)
    model, tokens, case = model_and_case(frozen=frozen)
    rows, _, mine = of_rank(case, rank, data, tensor)
    if vocab_parallel:
        parallelize_module(model, mesh["tensor"], {"lm_head": ColwiseParallel()})
    else:
        mine.options["vocab_group"] = None
    fully_shard(model.model.block, mesh=mesh["data"])
    if head_alone:
        fully_shard(model.lm_head, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"], reshard_after_forward=reshard)
    whole = (data, tensor) == (1, 1) or not (head_alone or vocab_parallel)
    kind = torch.nn.Parameter if whole else DTensor
    return train(model, tokens[rows], mine.arguments(), mine.options, "cpu", kind)


@cache
def trained(frozen):
    """By one process: in some orders, and in float64."""

    def run(dtype, backend):
        model, tokens, case = model_and_case(dtype, frozen)
        return train(model, tokens, case.arguments(), case.options, backend)

    return in_some_orders(lambda: run(torch.float32, "cpu")), run(torch.float64, "reference")


LAYOUTS = [(2, 1, False), (4, 1, False), (2, 2, False), (2, 2, True), (1, 2, True)]


@pytest.mark.parametrize(
    ("layout", "head_alone", "reshard", "frozen"),
    [*product(LAYOUTS, (False, True), (False, True), (False,))]
    + [(layout, True, False, True) for layout in (LAYOUTS[0], LAYOUTS[3])],
)
def test_fsdp2(worlds, layout, head_alone, reshard, frozen):
    """Three steps agree, whether the head is unsharded after the root's forward or a DTensor."""
    data, tensor, _ = layout
    results = worlds(data * tensor).run(fsdp_rank, *layout, head_alone, reshard, frozen)
    same, truth = trained(frozen)
    losses = torch.stack([got["losses"] for got in results[::tensor]]).mean(0)
    for got in results:
        check_means(got | dict(losses=losses), same, truth)
    assert truth["losses"].diff().abs().max() > 1e-3


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


def loss_of_head(module, function, *leaves, **options):
    case = linear_case()
    options |= case.options
    return outputs_and_loss(module, function, leaves, case.arguments(), **options)[1]


@pytest.mark.parametrize(
    ("function", "options"),
    [*CALLS, *((function, {"gradient_samples": 9}) for function, _ in CALLS[:2])],
)
def test_zero3(function, options):
    """A weight that exists during forward and, gathered again, during backward only."""
    hidden, whole, bias = head()
    plain, gathered = (torch.nn.Parameter(x) for x in (whole.clone(), torch.empty(0)))
    gathered.data = whole.clone()
    weights = plain, gathered
    losses = [loss_of_head(bapo_kernels, function, hidden, x, bias, **options) for x in weights]
    gathered.data = torch.empty(0)
    gathered.data = whole.clone()
    sum(losses).backward()
    assert_same(plain.grad, gathered.grad)


def dtensor_rank(rank, function, options):
    mesh = grid(1, 2)["tensor"]
    hidden, *parameters = head()
    parameters = [torch.nn.Parameter(distribute_tensor(x, mesh, [Shard(0)])) for x in parameters]
    options = options | dict(vocab_group=mesh.get_group())
    loss_of_head(bapo_kernels, function, hidden, *parameters, **options).backward()
    assert all(x.grad.placements == (Shard(0),) for x in parameters)
    return [x.grad.full_tensor() for x in parameters]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("function", "options"), CALLS)
def test_vocabulary_sharded_as_a_dtensor(worlds, function, options, masked):
    sets = sets_of(linear_case().labels, V, outside=False) if masked else None
    mask = bapo_kernels.SamplingMask.from_lists(sets) if masked else None
    options = options | dict(sampling_mask=mask)
    parts = worlds(2).run(dtensor_rank, function, options)

    def expected(kind):
        hidden, *parameters = (x.to(kind).requires_grad_() for x in head())
        loss = loss_of_head(reference, function, hidden, *parameters, **options)
        return torch.autograd.grad(loss, parameters)

    for got in parts:
        assert_as_reference(got, expected)
