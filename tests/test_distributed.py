"""Data x tensor parallel grids of real processes against one process, whole, in float64."""

from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from helpers import (
    DEVICES,
    EPS,
    KERNELS,
    assert_within_budget,
    loss_sensitivity,
    make_case,
    per_token,
    run_reference,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from world import grid, world

import bapo_kernels
from bapo_kernels import BAPOConfig, ClipBoundSearch, bapo_loss, find_clip_bounds, reference

pytestmark = pytest.mark.xdist_group("world")

B, S, V, H = 6, 5, 67, 16
# Uneven, one part empty; sequences of the data-parallel ranks.
COLUMNS = {1: [V], 2: [40, 27], 4: [20, 0, 30, 17]}
SEQUENCES = {1: [B], 2: [5, 1], 4: [2, 0, 3, 1]}
GRIDS = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1)]
BACKENDS = [*KERNELS, "reference"]
# What ranks exchange does not depend on the backend: the slow ones take the grids with empty parts.
GRIDS_OF_BACKENDS = [
    (backend, *ranks)
    for backend in BACKENDS
    for ranks in (GRIDS if backend == "cpu" else [(2, 2), (1, 4)])
]

CASES = {
    "paper": dict(config=BAPOConfig.paper(target=0.6)),
    "recipe": dict(config=BAPOConfig.recipe()),
    "given bounds": dict(bounds=(0.75, 1.3)),
    "a rank without tokens": dict(config=BAPOConfig.paper(target=0.6), masked_sequences=[5]),
    "no token at all": dict(masked_sequences=range(B)),
    "KL, entropy, soft cap": dict(
        config=BAPOConfig.paper(
            target=0.6,
            kl_loss_coef=0.1,
            entropy_coef=0.05,
            final_logit_softcapping=8.0,
            temperature=0.7,
        ),
        ref_log_probs=per_token((B, S), 3),
    ),
    "sequence means": dict(
        config=BAPOConfig.paper(target=0.6, loss_agg_mode="seq-mean-token-mean"),
        rollout_is_weights=per_token((B, S), 4, 0.5, 2.0),
    ),
    "live": dict(config=BAPOConfig.paper(target=0.6), statistics="live"),
    "forbidden tokens": dict(config=BAPOConfig.paper(target=0.6), forbidden=True),
    "a NaN": dict(bad=torch.nan),
    "a label outside": dict(label=V),
}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Process groups by number of ranks, started when first asked for."""
    with ExitStack() as stack:

        def start(ranks, device="cpu"):
            return stack.enter_context(world(ranks, tmp_path_factory.mktemp("ranks"), device))

        yield cache(start)


def whole_case(name, dtype):
    options = dict(CASES[name])
    masked = options.pop("masked_sequences", [])
    forbidden, bad = options.pop("forbidden", False), options.pop("bad", None)
    label = options.pop("label", None)
    config = options.pop("config", BAPOConfig.paper())
    case = make_case(
        (B, S), V, dtype, staleness=0.4, seed=2, config=config, poison=False, **options
    )
    for sequence in masked:
        case.response_mask[sequence] = False
    live = case.response_mask & (case.labels != -100)
    if forbidden:
        case.logits[0, :, 40:] = -torch.inf  # the whole part of a rank
        case.logits[1, :, ::3] = -torch.inf
    place = tuple(live.nonzero()[0].tolist()) if live.any() else None
    if bad is not None:
        case.logits[(*place, 3)] = bad
    if label is not None:
        case.labels[place] = label
    counts = dict(batch_num_tokens=max(1, int(live.sum())))
    if config.loss_agg_mode.startswith("seq"):
        counts = dict(global_batch_size=int(live.any(1).sum()))
    return case.with_options(**counts)


def part(sizes, index):
    return slice(sum(sizes[:index]), sum(sizes[: index + 1]))


def of_rank(case, data, tensor, d, t, mesh):
    rows, columns = part(SEQUENCES[data], d), part(COLUMNS[tensor], t)
    options = {
        k: v[rows] if isinstance(v, torch.Tensor) and v.ndim else v for k, v in case.options.items()
    }
    options.update(dp_size=data, process_group=mesh.get_group("data"))
    options.update(vocab_group=mesh.get_group("tensor"))
    arguments = tuple(x[rows] for x in case.arguments())
    return rows, columns, arguments, options


def facts(out):
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
    return facts(out) | dict(gradient=leaf.grad.cpu())


def put_together(parts, data, tensor, key="gradient"):
    """Blocks of the ranks as one tensor; the gradient is the mean over data-parallel ranks."""
    rows = [torch.cat([parts[d * tensor + t][key] for t in range(tensor)], -1) for d in range(data)]
    return torch.cat(rows) / data


def check_outputs(parts, case, same, truth, data, tensor):
    operand = truth.output.log_probs[truth.output.log_probs.isfinite()].abs().max().item()
    for d in range(data):
        beside = [parts[d * tensor + t] for t in range(tensor)]
        for other in beside[1:]:  # the same bits on every rank of a shard
            for key in ("loss", "bounds", "log_probs", "entropy"):
                assert torch.equal(other[key].nan_to_num(7), beside[0][key].nan_to_num(7)), key
        rows = part(SEQUENCES[data], d)
        if rows.start < rows.stop:
            for key in ("log_probs", "entropy"):
                of = (getattr(r.output, key)[rows] for r in (same, truth))
                assert_within_budget(key, beside[0][key], *of, operand=operand)
    expected = torch.stack(tuple(truth.output.bounds)).float()
    assert all(torch.equal(p["bounds"], expected) for p in parts)
    sensitivity = operand * loss_sensitivity(case, truth)
    for key, values in [("loss", [p["loss"] for p in parts])] + [
        (key, [p["metrics"][key] for p in parts]) for key in ("pg_loss", "kl_loss")
    ]:
        true = [r.output.loss if key == "loss" else r.output.metrics[key] for r in (same, truth)]
        assert_within_budget(key, torch.stack(values).mean(), *true, operand=sensitivity)
    for key in (k for k in truth.output.metrics if k.startswith("bapo_")):
        if "bounds" in case.options and key not in ("bapo_clip_low", "bapo_clip_high"):
            continue  # of the rank: without a search there is no collective
        true = [r.output.metrics[key] for r in (same, truth)]
        size = max(1.0, true[1].abs().nan_to_num(posinf=0.0).item())
        for p in parts:
            assert_within_budget(key, p["metrics"][key], *true, operand=operand * size)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("backend", "data", "tensor"), GRIDS_OF_BACKENDS)
def test_logits(worlds, backend, data, tensor, name):
    check_logits_level(worlds, name, torch.float32, backend, data, tensor)


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
        for p in parts[:tensor]:  # the ranks of the bad token
            assert p["loss"].isnan()
        return
    if name == "paper":
        assert truth.output.bounds.upper > 1.2, "the case must need a search"
    if truth.gradient.any():
        check_outputs(parts, case, same, truth, data, tensor)
    got = put_together(parts, data, tensor)
    assert_within_budget("gradient", got.to(dtype), same.gradient, truth.gradient)


def head(dtype):
    g = torch.Generator().manual_seed(5)
    hidden = torch.randn(B, S, H, generator=g).to(dtype)
    weight = (0.7 * torch.randn(V, H, generator=g)).to(dtype)
    return hidden, weight, torch.randn(V, generator=g).to(dtype)


def linear_case(name, dtype):
    """The tokens of a case, stale to the log-probs of the head."""
    case = whole_case(name, torch.float32)
    hidden, weight, bias = (x.double() for x in head(dtype))
    config = case.options["config"]
    transform = {
        key: getattr(config, key)
        for key in ("temperature", "logit_scale", "final_logit_softcapping")
    }
    logp, _ = reference.linear_log_probs(hidden, weight, case.labels, bias=bias, **transform)
    noise = 0.4 * torch.randn(B, S, generator=torch.Generator().manual_seed(6))
    return replace(case, old_log_probs=(logp + noise).float())


def linear_rank(rank, name, dtype, backend, data, tensor, chunk_tokens):
    mesh = grid(data, tensor)
    d, t = divmod(rank, tensor)
    rows, columns, arguments, options = of_rank(linear_case(name, dtype), data, tensor, d, t, mesh)
    hidden, weight, bias = head(dtype)
    leaves = hidden[rows].clone(), weight[columns].clone(), bias[columns].clone()
    for leaf in leaves:
        leaf.requires_grad_()
    out = bapo_kernels.bapo_linear_loss(
        leaves[0],
        leaves[1],
        *arguments,
        bias=leaves[2],
        backend=backend,
        chunk_tokens=chunk_tokens,
        **options,
    )
    out.loss.backward()
    return facts(out) | dict(gradients=[leaf.grad for leaf in leaves])


def run_linear_reference(name, dtype, work):
    case = linear_case(name, dtype)
    leaves = [x.to(work).requires_grad_() for x in head(dtype)]
    out = reference.bapo_linear_loss(
        leaves[0], leaves[1], *case.arguments(), bias=leaves[2], **case.options
    )
    out.loss.backward()
    return out, [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["paper", "recipe", "given bounds", "KL, entropy, soft cap"])
@pytest.mark.parametrize(("backend", "data", "tensor"), GRIDS_OF_BACKENDS)
def test_linear(worlds, backend, data, tensor, name, dtype):
    chunk_tokens = 5 if tensor > 1 else None
    parts = worlds(data * tensor).run(linear_rank, name, dtype, backend, data, tensor, chunk_tokens)
    same, truth = (run_linear_reference(name, dtype, work) for work in (dtype, torch.float64))
    size = truth[0].log_probs.abs().max().item()
    expected = torch.stack(tuple(truth[0].bounds)).float()
    rank = [[parts[d * tensor + t] for t in range(tensor)] for d in range(data)]
    for beside in rank:
        for part_ in beside:
            assert torch.equal(part_["bounds"], expected)
            for key in ("loss", "log_probs", "entropy"):
                assert torch.equal(part_[key], beside[0][key]), key
            assert torch.equal(part_["gradients"][0], beside[0]["gradients"][0])
    # Hidden states have the gradient of their rank; parameters the mean over the data ranks.
    dhidden = torch.cat([beside[0]["gradients"][0] for beside in rank]) / data
    of_shards = [
        torch.cat(
            [sum(rank[d][t]["gradients"][i].double() for d in range(data)) for t in range(tensor)]
        )
        / data
        for i in (1, 2)
    ]
    # A data rank rounds the gradient of a parameter to its dtype.
    rounded = data * EPS[dtype]
    for key, got, *of in zip(
        ("hidden", "weight", "bias"), (dhidden, *of_shards), same[1], truth[1], strict=True
    ):
        largest = of[1].abs().max().item()
        inherited = (EPS[torch.float32] * size + (0 if key == "hidden" else rounded)) * largest
        assert_within_budget(f"d{key}", got.to(dtype), *of, inherited=inherited)
    if dtype == torch.float32:
        loss = torch.stack([beside[0]["loss"] for beside in rank]).double().mean()
        torch.testing.assert_close(loss, truth[0].loss.detach(), rtol=1e-5, atol=1e-6)


def log_probs_rank(rank, level, dtype, backend, tensor):
    mesh = grid(1, tensor)
    case, columns = whole_case("paper", dtype), part(COLUMNS[tensor], rank)
    options = dict(vocab_group=mesh.get_group("tensor"), backend=backend, temperature=0.8)
    if level == "logits":
        leaves = [case.logits[..., columns].clone()]
        function = bapo_kernels.log_probs
    else:
        hidden, weight, bias = head(dtype)
        leaves = [hidden.clone(), weight[columns].clone(), bias[columns].clone()]
        function = bapo_kernels.linear_log_probs
        options.update(bias=leaves[2].requires_grad_(), chunk_tokens=7)
    for leaf in leaves:
        leaf.requires_grad_()
    logp, entropy = function(*leaves[:2], case.labels, **options)
    (logp * per_token((B, S), 7) + 0.3 * entropy * per_token((B, S), 8)).sum().backward()
    return dict(outputs=(logp.detach(), entropy.detach()), gradients=[x.grad for x in leaves])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", ["logits", "linear"])
@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probs(worlds, backend, tensor, level, dtype):
    parts = worlds(tensor).run(log_probs_rank, level, dtype, backend, tensor)
    case = whole_case("paper", dtype)

    def whole(work):
        leaves = [case.logits] if level == "logits" else head(dtype)
        leaves = [x.detach().to(work).requires_grad_() for x in leaves]
        if level == "logits":
            function, options = reference.log_probs, {}
        else:
            function, options = reference.linear_log_probs, dict(bias=leaves[2])
        logp, entropy = function(*leaves[:2], case.labels, temperature=0.8, **options)
        (logp * per_token((B, S), 7) + 0.3 * entropy * per_token((B, S), 8)).sum().backward()
        return (logp.detach(), entropy.detach()), [x.grad for x in leaves]

    same, truth = whole(dtype), whole(torch.float64)
    size = truth[0][0].abs().max().item()
    inherited = 2.0**-22 * size if level == "linear" else 0.0  # sums of 16 products
    for i, key in enumerate(("log_probs", "entropy")):
        for p in parts:
            assert torch.equal(p["outputs"][i], parts[0]["outputs"][i])
        of = (same[0][i], truth[0][i])
        assert_within_budget(key, parts[0]["outputs"][i], *of, operand=size, inherited=inherited)
    if level == "logits":
        got = [torch.cat([p["gradients"][0] for p in parts], -1)]
    else:
        got = [parts[0]["gradients"][0]]
        got += [torch.cat([p["gradients"][i] for p in parts]) for i in (1, 2)]
    for gradients in zip(got, same[1], truth[1], strict=True):
        largest = gradients[2].abs().max().item()
        inherited = EPS[torch.float32] * size * largest
        assert_within_budget("gradient", *gradients, inherited=inherited)


class Model(torch.nn.Module):
    """Returns hidden states; the loss meets the head."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(V, H)
        self.block = torch.nn.Sequential(torch.nn.Linear(H, H), torch.nn.GELU())
        self.lm_head = torch.nn.Linear(H, V)

    def forward(self, tokens):
        return self.block(self.embedding(tokens))


def model_and_case(dtype=torch.float32):
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
    return model.to(dtype), tokens, case


def train(model, tokens, arguments, options, backend, kind=torch.nn.Parameter):
    """Three optimizer steps; parameters by name, whole. ``kind`` of weight meets the loss."""
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


def fsdp_rank(rank, data, tensor, head_alone, reshard, vocab_parallel):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = grid(data, tensor)
    d, t = divmod(rank, tensor)
    model, tokens, case = model_and_case()
    rows, _, arguments, options = of_rank(case, data, tensor, d, t, mesh)
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
    """fully_shard: the head is whole after the root's forward, or a DTensor; same three steps."""
    results = worlds(data * tensor).run(
        fsdp_rank, data, tensor, head_alone, reshard, vocab_parallel
    )
    model, tokens, case = model_and_case()
    plain = train(model, tokens, case.arguments(), case.options, "cpu")
    model, tokens, case = model_and_case(torch.float64)
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


def dtensor_rank(rank, function):
    mesh = grid(1, 2)["tensor"]
    case = linear_case("paper", torch.float32)
    hidden, *parameters = head(torch.float32)
    weight, bias = (torch.nn.Parameter(distribute_tensor(x, mesh, [Shard(0)])) for x in parameters)
    options = dict(vocab_group=mesh.get_group(), bias=bias)
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


@pytest.mark.parametrize("function", ["bapo_linear_loss", "linear_log_probs"])
def test_vocabulary_of_a_dtensor(worlds, function):
    parts = worlds(2).run(dtensor_rank, function)
    case = linear_case("paper", torch.float32)
    hidden, weight, bias = head(torch.float32)
    weight.requires_grad_(), bias.requires_grad_()
    if function == "linear_log_probs":
        logp, _ = reference.linear_log_probs(hidden, weight, case.labels, bias=bias)
        loss = (logp * per_token((B, S), 7)).sum()
    else:
        loss = reference.bapo_linear_loss(
            hidden, weight, *case.arguments(), bias=bias, **case.options
        ).loss
    loss.backward()
    for got in parts:
        torch.testing.assert_close(got, [weight.grad, bias.grad], rtol=2e-5, atol=1e-6)


def misuse_rank(rank):
    mesh = grid(1, 2)
    group = mesh.get_group("tensor")
    case = whole_case("paper", torch.float32)
    hidden, weight, _ = head(torch.float32)
    logits = distribute_tensor(case.logits, mesh["tensor"], [Shard(2)])
    other_way = distribute_tensor(weight, mesh["tensor"], [Shard(1)])
    messages = []
    for call in (
        lambda: bapo_loss(logits, *case.arguments()),
        lambda: bapo_loss(case.logits, *case.arguments(), vocab_group=mesh["tensor"]),
        lambda: bapo_loss(case.logits, *case.arguments(), process_group=mesh),
        lambda: find_clip_bounds(case.labels.float(), None, case.advantages, process_group=0),
        lambda: bapo_kernels.linear_log_probs(hidden, other_way, case.labels, vocab_group=group),
    ):
        with pytest.raises(ValueError) as raised:
            call()
        messages.append(str(raised.value))
    return messages


def test_misuse_raises_before_any_collective(worlds):
    for messages in worlds(2).run(misuse_rank):
        assert "logits must be a local tensor (.to_local() or .full_tensor())" in messages[0]
        assert "vocab_group must be None or a torch.distributed.ProcessGroup" in messages[1]
        assert "got DeviceMesh" in messages[2]
        assert "process_group must be" in messages[3]
        assert "lm_head_weight must be sharded along dimension 0 over vocab_group" in messages[4]


COLLECTIVES = ("all_reduce", "all_gather_single", "all_gather_into_tensor")


def collectives_rank(rank, backend):
    """Names and elements of the collectives of each kind of call."""
    mesh = grid(2, 2)
    data, tensor = mesh.get_group("data"), mesh.get_group("tensor")
    case = whole_case("paper", torch.float32)
    d, t = divmod(rank, 2)
    rows, columns = part(SEQUENCES[2], d), part(COLUMNS[2], t)
    arguments = tuple(x[rows] for x in case.arguments())
    logits = case.logits[rows]
    hidden, weight, _ = head(torch.float32)
    hidden, weight = hidden[rows].requires_grad_(), weight[columns].requires_grad_()
    made = []
    real = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}

    def counting(name):
        def call(tensor, *args, **kwargs):
            made.append((name[:10], tensor.numel()))
            return real[name](tensor, *args, **kwargs)

        return call

    results = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in real:
            patch.setattr(dist, name, counting(name))

        def count(name, call):
            made.clear()
            out = call()
            forward = list(made)
            made.clear()
            (
                out[0].sum() if out[0].requires_grad else torch.zeros((), requires_grad=True)
            ).backward()
            results[name] = forward, list(made)

        options = dict(backend=backend)
        count("alone", lambda: bapo_loss(logits, *arguments, **options))
        count("search", lambda: bapo_loss(logits, *arguments, process_group=data, **options))
        bounds = dict(process_group=data, bounds=(0.7, 1.3))
        count("bounds", lambda: bapo_loss(logits, *arguments, **bounds, **options))
        empty = tuple(x[:0] for x in arguments)
        some = empty if rank == 0 else arguments
        x = logits[:0] if rank == 0 else logits
        count("a rank without rows", lambda: bapo_loss(x, *some, process_group=data, **options))
        both = dict(process_group=data, vocab_group=tensor, **options)
        leaf = case.logits[rows, :, columns].clone().requires_grad_()
        count("shards", lambda: bapo_loss(leaf, *arguments, **both))
        linear = bapo_kernels.bapo_linear_loss
        count("linear", lambda: linear(hidden, weight, *arguments, **both))
        of_chunks = dict(chunk_tokens=1, **both)
        count("chunks", lambda: linear(hidden, weight, *arguments, **of_chunks))
        logp = bapo_kernels.linear_log_probs
        sharded = dict(vocab_group=tensor, backend=backend)
        count("log-probs", lambda: logp(hidden, weight, arguments[0], **sharded))
    live = int(((arguments[3] != 0) & (arguments[0] != -100)).sum())
    return results, arguments[0].numel(), live, int((arguments[0] != -100).sum()), hidden.numel()


def test_collectives(worlds):
    """How many, and of which size: none that some ranks make and others do not."""
    config = BAPOConfig()
    table = len(config.lower_grid) + len(config.upper_grid)
    search, sizes = ("all_reduce", 2 * table), ("all_gather", 2)
    for results, N, live, labelled, elements in worlds(4).run(collectives_rank, "cpu"):

        def combine(tokens):
            return ("all_gather", 2 * 4 * tokens)

        assert results["alone"] == results["bounds"] == ([], [])
        assert results["search"] == results["a rank without rows"] == ([search], [])
        assert results["shards"] == ([sizes, combine(N), search], [])
        dhidden = ("all_reduce", elements)
        assert results["linear"] == ([sizes, combine(live), search, dhidden], [])
        chunks = [combine(1)] * live
        assert results["chunks"] == ([sizes, *chunks, search, dhidden], [])
        assert results["log-probs"] == ([sizes, combine(labelled)], [dhidden])


def rank_order_rank(rank):
    from bapo_kernels.distributed import sum_over_ranks

    values = torch.randn(4, 1000, dtype=torch.float64) * 10.0 ** torch.randint(-9, 9, (4, 1000))
    got = sum_over_ranks(values[rank], dist.group.WORLD)
    return got, values.sum(0)


def test_sums_are_in_rank_order(worlds):
    for got, expected in worlds(4).run(rank_order_rank):
        assert torch.equal(got, expected)


def scopes_rank(rank, scope, statistics):
    """Rank r has MICRO_BATCHES[r] micro-batches."""
    case = whole_case("paper", torch.float32)
    config = case.options["config"]
    search = ClipBoundSearch(config, scope, dist.group.WORLD, device="cpu")
    first = sum(MICRO_BATCHES[:rank])
    mine = [
        (case.logits[i : i + 1], tuple(x[i : i + 1] for x in case.arguments()))
        for i in range(first, first + MICRO_BATCHES[rank])
    ]

    def gather(log_probs, labels, old, advantages, mask):
        search.update(log_probs, old, advantages, mask.bool() & (labels != -100))

    decided = []
    for _ in range(2):
        if scope == "step":
            for logits, arguments in mine:
                with torch.no_grad():
                    gather(bapo_kernels.log_probs(logits, arguments[0])[0], *arguments)
            search.step()
        for logits, arguments in mine:
            out = bapo_loss(logits, *arguments, statistics=statistics, **search.options)
            decided.append([float(b) for b in out.bounds])
            if scope == "lagged":
                gather(out.log_probs, *arguments)
        state = search.state_dict()
        search = ClipBoundSearch(config, scope, dist.group.WORLD)  # resumed
        search.load_state_dict(state)
        if scope == "lagged":
            search.step()
    return decided


MICRO_BATCHES = [2, 0, 1, 3]


@pytest.mark.parametrize("statistics", ["all", "live"])
@pytest.mark.parametrize("scope", ["step", "lagged"])
def test_scopes_with_unequal_micro_batches(worlds, scope, statistics):
    results = worlds(4).run(scopes_rank, scope, statistics)
    truth = run_reference(whole_case("paper", torch.float32), torch.float64).output
    expected = [b.float().item() for b in truth.bounds]
    start = [torch.tensor(b).item() for b in (0.6, 1.2)]
    for count, decided in zip(MICRO_BATCHES, results, strict=True):
        first = start if scope == "lagged" else expected
        assert decided == [first] * count + [expected] * count


def test_scope_call():
    case = whole_case("paper", torch.float32)
    search = ClipBoundSearch(case.options["config"])
    assert search.bounds is None
    out = bapo_loss(case.logits, *case.arguments(), **search.options)
    search.update(out.log_probs, *case.arguments()[1:])
    search.step()
    assert search.bounds is None
    search.load_state_dict(search.state_dict())
    whole = run_reference(case, torch.float64).output.bounds
    assert [b.item() for b in out.bounds] == [b.float().item() for b in whole]


def test_scope_misuse():
    search = ClipBoundSearch(scope="step")
    with pytest.raises(RuntimeError, match="has no bounds yet"):
        search.options  # noqa: B018
    with pytest.raises(ValueError, match="scope must be call, step or lagged, got batch"):
        ClipBoundSearch(scope="batch")
    with pytest.raises(ValueError, match="scope must be 'step', got 'lagged'"):
        search.load_state_dict(ClipBoundSearch(scope="lagged").state_dict())
    other = ClipBoundSearch(BAPOConfig.recipe(), scope="step", device="cpu")
    with pytest.raises(ValueError, match=r"table must have shape \(54,\), as the grids"):
        search.load_state_dict(other.state_dict())


def bad_value_rank(rank):
    mesh = grid(1, 2)
    case = whole_case("a NaN", torch.float32)
    columns = part(COLUMNS[2], rank)
    check = bapo_kernels.debug.check_inputs
    group = mesh.get_group("tensor")
    with pytest.raises(ValueError) as raised:
        check(case.logits[..., columns], *case.arguments(), vocab_group=group)
    case = whole_case("forbidden tokens", torch.float32)
    check(case.logits[..., columns], *case.arguments(), vocab_group=group)
    return str(raised.value)


def test_check_inputs_of_shards(worlds):
    first, second = worlds(2).run(bad_value_rank)
    assert first == second
    assert "logits must be finite or -inf, got nan" in first


def raising_rank(rank, level):
    """One rank has a bad argument: it raises before its collective."""
    mesh = grid(1, 2)
    group = mesh.get_group("tensor")
    case = whole_case("paper", torch.float32)
    advantages = case.advantages[:, :-1] if rank == 1 else case.advantages
    arguments = case.labels, case.old_log_probs, advantages, case.response_mask
    if level == "search":
        bapo_loss(case.logits, *arguments, process_group=group)
    else:
        bapo_loss(case.logits, *arguments, vocab_group=group)


@pytest.mark.parametrize("level", ["search", "shards"])
def test_a_rank_that_raises_does_not_leave_others_hanging(tmp_path, level):
    with world(2, tmp_path, timeout=2) as ranks:
        (fine0, error0), (fine1, error1) = ranks.answers(raising_rank, level)
    assert not fine0
    assert not fine1
    assert "advantages must have the shape of labels" in error1
    assert "imed out" in error0


def gathers_rank(rank):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = grid(2, 2)
    case, (hidden, weight, _) = linear_case("paper", torch.float32), head(torch.float32)
    model = torch.nn.Sequential(torch.nn.Linear(H, V, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(weight)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    assert not model[0].weight.placements[0] == Shard(0), "strided: vocabulary first"
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
    return [
        [(str(op), n) for op, n in mode.get_comm_counts().items() if "functional" in str(op)]
        for mode in (forward, backward)
    ]


def test_a_head_of_fsdp_and_shards_is_gathered_once(worlds):
    """Over the data ranks alone: no rank ever holds more than its part of the vocabulary."""
    for forward, backward in worlds(4).run(gathers_rank):
        assert forward == [("c10d_functional.all_gather_into_tensor", 1)]
        assert backward == [("c10d_functional.reduce_scatter_tensor", 1)]
