"""What ranks exchange, in which scope they decide, and what happens when one fails."""

import gc
import io
import os
import runpy
import subprocess
import sys
import warnings
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import causal_lm
import pytest
import torch
import torch.distributed as dist
from helpers import EPS, assert_within_budget, run_reference
from shards import COLUMNS, SEQUENCES, B, S, head, of_rank, part, whole_case
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from world import grid

import bapo_kernels
from bapo_kernels import (
    BAPOConfig,
    BAPOOutput,
    ClipBoundSearch,
    LMHead,
    bapo_loss,
    find_clip_bounds,
    linear_log_probs,
)
from bapo_kernels.core import distributed
from bapo_kernels.core.checks import warn_once
from bapo_kernels.core.distributed import rows_of_ranks

pytestmark = [pytest.mark.xdist_group("world"), pytest.mark.slow]

COLLECTIVES = ("all_reduce", "all_gather_single", "all_gather_into_tensor")
MICRO_BATCHES = [2, 0, 1, 3]  # of each rank


def message_of(call, *args, **options):
    """Of the error that a call raises."""
    with pytest.raises(ValueError) as raised:
        call(*args, **options)
    return str(raised.value)


def collectives_rank(rank, backend):
    """Name and number of elements of each collective, per kind of call."""
    mesh = grid(2, 2)
    data, tensor = mesh.get_group("data"), mesh.get_group("tensor")
    case = whole_case()
    d, t = divmod(rank, 2)
    rows, columns = part(SEQUENCES[2], d), part(COLUMNS[2], t)
    batch = tuple(x[rows] for x in (case.logits, *case.arguments()))
    shard = case.logits[rows, :, columns].clone().requires_grad_()
    hidden, weight, _ = head()
    hidden, weight = hidden[rows].requires_grad_(), weight[columns].requires_grad_()
    made, results = [], {}
    real = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}

    def counting(name):
        def call(tensor, *args, **kwargs):
            made.append((name[:10], tensor.numel()))
            return real[name](tensor, *args, **kwargs)

        return call

    def count(name, groups, tensors=batch, function=bapo_loss, **options):
        """Of a second call; the first one compares the ranks of its groups."""
        distributed._AGREED.clear()
        forward = []
        for _ in range(2):
            made.clear()
            out = function(*tensors, backend=backend, **options)
            forward.append(list(made))
        assert forward[0] == [("all_gather", 2 * 64 * 2)] * groups + forward[1]
        made.clear()
        if out[0].requires_grad:
            out[0].sum().backward()
        results[name] = forward[1], list(made)

    with pytest.MonkeyPatch.context() as patch:
        for name in real:
            patch.setattr(dist, name, counting(name))
        count("alone", 0)
        count("search", 1, process_group=data)
        count("bounds", 0, process_group=data, bounds=(0.7, 1.3))
        lower = torch.full(batch[0].shape[:1], 0.7)
        count("own bounds", 0, process_group=data, bounds=(lower, 1.3))
        some = [x[:0] if rank == 0 else x for x in batch]
        count("a rank without rows", 1, some, process_group=data)
        both = dict(process_group=data, vocab_group=tensor)
        count("shards", 2, (shard, *batch[1:]), **both)
        of_head = hidden, weight, *batch[1:]
        count("linear", 2, of_head, bapo_kernels.bapo_linear_loss, **both)
        count("chunks", 2, of_head, bapo_kernels.bapo_linear_loss, chunk_tokens=1, **both)
        count("log-probs", 1, of_head[:3], linear_log_probs, vocab_group=tensor)
    labelled = batch[1] != -100
    unmasked = (batch[4] != 0) & labelled
    return results, labelled.numel(), int(unmasked.sum()), int(labelled.sum()), hidden.numel()


def test_collectives_of_every_kind_of_call(worlds):
    """How many, and of which size: every rank makes the same collectives."""
    config = BAPOConfig()
    table = len(config.lower_grid) + len(config.upper_grid)
    search, sizes = ("all_reduce", 2 * table), ("all_gather", 2)
    for results, N, unmasked, labelled, elements in worlds(4).run(collectives_rank, "cpu"):

        def combine(tokens):
            return ("all_gather", 2 * 4 * tokens)

        assert results["alone"] == results["bounds"] == results["own bounds"] == ([], [])
        assert results["search"] == results["a rank without rows"] == ([search], [])
        assert results["shards"] == ([sizes, combine(N), search], [])
        dhidden = ("all_reduce", elements)
        assert results["linear"] == ([sizes, combine(unmasked), search, dhidden], [])
        chunks = [combine(1)] * unmasked
        assert results["chunks"] == ([sizes, *chunks, search, dhidden], [])
        assert results["log-probs"] == ([sizes, combine(labelled)], [dhidden])


def differing_rank(rank, function, changes):
    """What calls raise whose arguments differ on rank 1, each with new groups; then the loss."""
    case, columns = whole_case(), part(COLUMNS[2], rank)
    logits = case.logits[..., columns]
    hidden, weight, _ = head()
    call, x, *more = {
        "bapo_loss": (bapo_loss, logits),
        "bapo_linear_loss": (bapo_kernels.bapo_linear_loss, hidden, weight[columns]),
        "check_inputs": (bapo_kernels.debug.check_inputs, logits),
    }[function]
    names, messages = ("labels", "old_log_probs", "advantages", "response_mask"), []
    for change in changes:
        good = dict(zip(names, case.arguments(), strict=True)) | case.options
        good["vocab_group"] = dist.new_group()
        rows, given = slice(None), dict(good)
        if rank == 1 and change == "shape":
            rows = slice(5)
            for name in names:
                given[name] = given[name][rows]
        elif rank == 1:
            name, changed = CHANGES[change]
            given[name] = changed(given.get(name))
        messages.append(message_of(call, x[rows], *more, **given))
        loss = bapo_loss(logits, **good).loss
    return messages, loss


SETS = bapo_kernels.SamplingMask.from_lists([[]] * (B * S))
CHANGES = {
    "labels": ("labels", lambda y: y.where(y < 0, (y + 1) % 67)),
    "labels of the shard": ("labels", lambda y: y.where(y < 0, y - 40)),
    "shape": (),
    "the unmasked tokens": ("response_mask", torch.ones_like),
    "advantages": ("advantages", lambda A: A.roll(1)),
    "old_log_probs": ("old_log_probs", lambda old: old - 0.01),
    "ref_log_probs": ("ref_log_probs", lambda _: torch.zeros(B, S)),
    "temperatures": ("temperature", lambda _: torch.full((B,), 0.7)),
    "the normalisers": ("batch_num_tokens", lambda count: count + 1),
    "bounds": ("bounds", lambda _: (0.8, 1.2)),
    "statistics": ("statistics", lambda _: "live"),
    "sampling_mask": ("sampling_mask", lambda _: SETS),
    "config.target": ("config", lambda config: replace(config, target=0.3)),
    "config.surrogate": ("config", lambda config: replace(config, surrogate="cispo")),
}


@pytest.mark.parametrize("function", ["bapo_loss", "bapo_linear_loss", "check_inputs"])
def test_shards_of_different_calls(worlds, function):
    """Every rank of a vocab_group says what differs, and can go on."""
    results = worlds(2).run(differing_rank, function, list(CHANGES))
    for rank, (messages, loss) in enumerate(results):
        assert loss == results[0][1]
        for change, message in zip(CHANGES, messages, strict=True):
            name = change.removesuffix(" of the shard")
            rule = f"{name} must be the same on all ranks of vocab_group, got another on ranks [1]"
            assert message.startswith(rule)
            if name == "config.target":
                assert message.endswith(f"than on rank 0 ({(0.6, 0.3)[rank]} on this rank)")


def search_rank(rank):
    """What the calls of a process_group raise that differ on rank 1; the groups that are left."""
    case, messages = whole_case(), []
    logp = bapo_kernels.log_probs(case.logits, case.labels)[0]
    rest = case.old_log_probs, case.advantages, case.response_mask
    logp, *batch = (x[rank:] for x in (logp, *rest))  # its own number of rows is fine

    def loss(**options):
        bapo_kernels.bapo_loss_from_log_probs(logp, *batch, batch_num_tokens=9 + rank, **options)

    def find(**options):
        find_clip_bounds(logp, *batch, **options)

    def lagged(**options):
        search = ClipBoundSearch(scope="lagged", **options)
        search.update(logp, *batch)
        search.step()

    grids = dict(config=BAPOConfig(ratio_upper_max=3.0 - rank))
    for call, options in ((loss, grids), (find, grids), (lagged, grids), ((loss, find)[rank], {})):
        group = dist.new_group()
        messages.append(message_of(call, process_group=group, **options))
        loss(process_group=group)  # both can go on
        dist.destroy_process_group(group)
    del group
    gc.collect()
    known = dist.distributed_c10d._world.pg_map
    return messages, [group for group in distributed._AGREED if group not in known]


def test_searches_of_different_calls(worlds):
    for rank, (messages, left) in enumerate(worlds(2).run(search_rank)):
        assert left == []
        for message in messages[:3]:
            rule = "config.ratio_upper_max must be the same on all ranks of process_group, got"
            got = f"another on ranks [1] than on rank 0 ({3.0 - rank} on this rank)"
            assert message == f"{rule} {got}"
        assert messages[3].startswith("function and backend must be the same on all ranks of")


def grid_rank(rank, changed):
    """A config of its own on rank 1 of a grid: ranks that do not share a group with it say so."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("data", "tensor"))
    case = whole_case()
    d, t = divmod(rank, 2)
    _, _, arguments, options = of_rank(case, 2, 2, d, t, mesh)
    logits = case.logits[part(SEQUENCES[2], d), :, part(COLUMNS[2], t)]
    target = 0.3 if rank == 1 and changed == "config" else 0.6
    if rank == 1 and changed == "labels":
        arguments = arguments[0].roll(1), *arguments[1:]
    options["config"] = BAPOConfig(target=target)
    return message_of(bapo_loss, logits, *arguments, **options)


@pytest.mark.parametrize("changed", ["config", "labels"])
def test_every_rank_of_a_grid_raises(worlds, changed):
    first, second, *others = worlds(4).run(grid_rank, changed)
    fact = "config.target" if changed == "config" else "the unmasked tokens"
    for message in (first, second):
        assert message.startswith(f"{fact} must be the same on all ranks of vocab_group, got")
    for message in others:
        assert message.startswith("agreement in vocab_group must be the same on all ranks of pro")


def rank_order_rank(rank):
    values = torch.randn(4, 1000, dtype=torch.float64) * 10.0 ** torch.randint(-9, 9, (4, 1000))
    return rows_of_ranks(values[rank], dist.group.WORLD), values


def test_rows_of_ranks_are_in_order(worlds):
    for got, expected in worlds(4).run(rank_order_rank):
        assert torch.equal(got, expected)


def scopes_rank(rank, scope, statistics):
    """Rank r has MICRO_BATCHES[r] micro-batches."""
    case = whole_case()
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


@pytest.mark.parametrize("statistics", ["all", "live"])
@pytest.mark.parametrize("scope", ["step", "lagged"])
def test_scopes_with_unequal_micro_batches(worlds, scope, statistics):
    results = worlds(4).run(scopes_rank, scope, statistics)
    truth = run_reference(whole_case(), torch.float64).output
    expected = [b.float().item() for b in truth.bounds]
    start = [torch.tensor(b).item() for b in (0.6, 1.2)]
    for count, decided in zip(MICRO_BATCHES, results, strict=True):
        first = start if scope == "lagged" else expected
        assert decided == [first] * count + [expected] * count


def misuse_rank(rank):
    mesh = grid(1, 2)
    case = whole_case()
    hidden, weight, _ = head()
    logits = distribute_tensor(case.logits, mesh["tensor"], [Shard(2)])
    other_way = distribute_tensor(weight, mesh["tensor"], [Shard(1)])
    sharded = dict(vocab_group=mesh.get_group("tensor"))
    whole = case.logits, *case.arguments()
    return {
        "logits must be a local tensor (.to_local() or .full_tensor())": message_of(
            bapo_loss, logits, *case.arguments()
        ),
        "vocab_group must be None or a torch.distributed.ProcessGroup": message_of(
            bapo_loss, *whole, vocab_group=mesh["tensor"]
        ),
        "got DeviceMesh": message_of(bapo_loss, *whole, process_group=mesh),
        "process_group must be": message_of(
            find_clip_bounds, case.old_log_probs, None, case.advantages, process_group=0
        ),
        "lm_head_weight must be sharded along dimension 0 over vocab_group": message_of(
            linear_log_probs, hidden, other_way, case.labels, **sharded
        ),
    }


def test_misuse_raises_before_any_collective(worlds):
    for messages in worlds(2).run(misuse_rank):
        for rule, message in messages.items():
            assert rule in message


def bad_value_rank(rank):
    check, columns = bapo_kernels.debug.check_inputs, part(COLUMNS[2], rank)
    group = grid(1, 2).get_group("tensor")
    bad, good = whole_case("NaN logit"), whole_case("forbidden tokens")
    check(good.logits[..., columns], *good.arguments(), vocab_group=group)
    return message_of(check, bad.logits[..., columns], *bad.arguments(), vocab_group=group)


def test_check_inputs_of_shards(worlds):
    first, second = worlds(2).run(bad_value_rank)
    assert first == second
    assert "logits must be finite or -inf, got nan" in first


def raising_rank(rank, name):
    """One rank has a bad argument and raises before its collective."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    case = whole_case()
    advantages = case.advantages[:, :-1] if rank == 1 else case.advantages
    arguments = case.labels, case.old_log_probs, advantages, case.response_mask
    bapo_loss(case.logits, *arguments, **{name: group})


@pytest.mark.parametrize("name", ["process_group", "vocab_group"])
def test_rank_that_raises_does_not_leave_others_hanging(worlds, name):
    (fine0, error0), (fine1, error1) = worlds(2).answers(raising_rank, name)
    assert not fine0
    assert not fine1
    assert "advantages must have the shape of labels" in error1
    assert "imed out" in error0


EXAMPLE = Path(__file__).parent.parent / "examples/many_ranks.py"


def torchrun():
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, *command, str(EXAMPLE), "--tensor", "2", "--scope", "step"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def example_rank(rank):
    """What the example prints in a process group that already runs."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output):
        for name in ("init_process_group", "destroy_process_group"):
            patch.setattr(dist, name, lambda **_: None)
        example = runpy.run_path(str(EXAMPLE))
        example["main"](tensor=2, scope=example["Scope"].lagged)
    return output.getvalue()


@pytest.mark.parametrize("scope", ["step", "lagged"])
def test_example(worlds, scope):
    """The example trains, and each scope decides when it says it does."""
    output = torchrun() if scope == "step" else worlds(2).run(example_rank)[0]
    lines = [line.split() for line in output.splitlines() if line.startswith("step")]
    losses = [float(line[3]) for line in lines]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert (lines[0][5:] == ["0.60", "..", "1.20"]) == (scope == "lagged")


def policy_of(tied=False):
    torch.manual_seed(5)
    return causal_lm.recipe()(causal_lm.CausalLM(tied=tied), target=0.6)


def policy_batch():
    """Tokens, old log-probs, advantages, mask of 6 sequences; the number of unmasked tokens."""
    g = torch.Generator().manual_seed(7)
    tokens = torch.randint(causal_lm.V, (6, 6), generator=g)
    old = -3.4 + 0.5 * torch.randn(6, 5, generator=g)
    mask = torch.rand(6, 5, generator=g) < 0.8
    return (tokens, old, torch.randn(6, generator=g), mask), int(mask.sum())


def policy_gradients(policy, micro_batches, wrapped, **options):
    """Unsharded, by name, of one optimizer step."""
    policy.zero_grad()
    for i, batch in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        fsdp = hasattr(policy, "set_requires_gradient_sync")
        if fsdp:
            policy.set_requires_gradient_sync(last)
        with nullcontext() if last or fsdp or not wrapped else policy.no_sync():
            out = policy(*batch, **options)
            assert type(out) is BAPOOutput
            assert out.metrics["pg_loss"].shape == out.bounds.upper.shape == ()
            assert out.log_probs.shape == batch[3].shape
            out.loss.backward()
    whole = {name: getattr(p, "grad", None) for name, p in policy.named_parameters()}
    return {
        name.removeprefix("module."): g.full_tensor() if isinstance(g, DTensor) else g.clone()
        for name, g in whole.items()
    }


def inside_rank(rank, kind, tied):
    """Gradients of the whole batch, then of two micro-batches."""
    mesh = grid(2, 1)["data"]
    policy = policy_of(tied)
    if kind.startswith("FSDP2"):
        fully_shard(policy.model.model.block, mesh=mesh)
        if kind == "FSDP2, the head alone":
            fully_shard(policy.model.lm_head, mesh=mesh)
        fully_shard(policy, mesh=mesh)
    else:
        options = {} if kind == "DDP" else {kind: True}
        policy = DistributedDataParallel(policy, **options)
    arguments, count = policy_batch()
    mine = [x[part(SEQUENCES[2], rank)] for x in arguments]
    counts = dict(batch_num_tokens=count, dp_size=2)
    made = [policy_gradients(policy, [mine], True, process_group=mesh.get_group(), **counts)]
    if kind != "static_graph":  # DDP refuses no_sync with it
        halves = [[x[:1] for x in mine], [x[1:] for x in mine]]
        made.append(policy_gradients(policy, halves, True, bounds=(0.7, 1.3), **counts))
    return made


INSIDE = [
    (kind, tied)
    for kind in ("DDP", "find_unused_parameters", "static_graph", "FSDP2")
    for tied in (False, True)
]


# FSDP2 refuses tied weights in two groups.
@pytest.mark.parametrize(("kind", "tied"), [*INSIDE, ("FSDP2, the head alone", False)])
def test_loss_inside_the_forward(worlds, kind, tied):
    """The recipe of docs/distributed.md has the gradients of one process, also in micro-batches."""
    ranks = worlds(2).run(inside_rank, kind, tied)
    arguments, count = policy_batch()
    exact = [x.double() if x.is_floating_point() else x for x in arguments]
    truths, plain = [], []
    for options in ({}, dict(bounds=(0.7, 1.3))):
        options = dict(batch_num_tokens=count, **options)
        plain.append(policy_gradients(policy_of(tied), [arguments], False, **options))
        options |= dict(backend="reference")
        truths.append(policy_gradients(policy_of(tied).double(), [exact], False, **options))
    for made in ranks:
        for got, reference, truth in zip(made, plain, truths, strict=False):
            assert got.keys() == truth.keys()
            for name, gradient in got.items():
                # The mean over ranks and micro-batches rounds a few times, one process once.
                inherited = 16 * EPS[torch.float32] * truth[name].abs().max().item()
                assert_within_budget(
                    name, gradient, reference[name], truth[name], inherited=inherited
                )


def warning_rank(rank, kind):
    """Warnings of two calls of a kind, and how far its gradients are from the mean over ranks."""
    mesh = grid(2, 1)["data"]
    warn_once.cache_clear()
    policy = policy_of()
    model, head = policy.model, policy.head
    arguments, count = policy_batch()
    tokens, *batch = (x[part(SEQUENCES[2], rank)] for x in arguments)
    options = dict(batch_num_tokens=count, dp_size=2, bounds=(0.7, 1.3))

    def outside(decoder=head.decoder):
        hidden = decoder(tokens).last_hidden_state[:, :-1]
        given = hidden, head.weight, tokens[:, 1:]
        if kind == "log-probs outside DDP":
            return linear_log_probs(*given)[0].sum()
        return bapo_kernels.bapo_linear_loss(*given, *batch, **options).loss

    def inside():
        return wrapper(tokens, *batch, **options).loss

    loss, wrapper = outside, None
    if kind == "frozen head outside DDP":
        model.lm_head.requires_grad_(False)
    if kind == "inside FSDP2":
        wrapper = fully_shard(policy, mesh=mesh)
    elif kind == "DDP of another model":
        wrapper = DistributedDataParallel(policy_of())
    elif kind == "hidden states from DDP":
        loss = partial(outside, decoder=DistributedDataParallel(policy.model.model))
    elif kind != "no DDP":
        wrapper = DistributedDataParallel(policy)
    if kind.startswith("inside"):
        loss = inside
    if kind.endswith("after old log-probs"):
        with torch.no_grad():
            wrapper(tokens, None, batch[1])

    scans, apart = [], 0.0
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(gc, "get_objects", lambda real=gc.get_objects: scans.append(1) or real())
        with torch.set_grad_enabled(kind != "no gradient"):
            losses = [loss(), loss()]
    if kind != "no gradient":
        losses[-1].backward()
        gradient = model.model.block[0].weight.grad
        gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        mean = rows_of_ranks(gradient, mesh.get_group()).mean(0)
        apart = (gradient - mean).abs().max().item()
    messages = [
        (Path(w.filename).name, str(w.message)) for w in caught if "outside" in str(w.message)
    ]
    return messages, len(scans), apart


@pytest.mark.parametrize(
    ("kind", "expected_scans", "synchronised"),
    [
        ("outside DDP", 1, "no, and warns"),
        ("log-probs outside DDP", 1, "no, and warns"),
        ("frozen head outside DDP", 1, "no, and warns"),
        ("outside DDP after old log-probs", 1, "no, and warns"),
        ("no DDP", 1, "no, as is meant"),
        ("DDP of another model", 1, "no, as is meant"),
        ("no gradient", 0, "yes"),
        ("inside DDP", 1, "yes"),
        ("inside DDP after old log-probs", 1, "yes"),
        ("inside FSDP2", 1, "yes"),
        ("hidden states from DDP", 1, "yes"),
    ],
)
def test_loss_outside_the_forward_of_ddp_warns(worlds, kind, expected_scans, synchronised):
    """Once, at the line of the call; the gradients are indeed not synchronised."""
    for messages, scans, apart in worlds(2).run(warning_rank, kind):
        assert scans == expected_scans
        assert apart > 1e-4 or synchronised != "no, and warns"
        assert apart == 0 or synchronised != "yes"
        assert len(messages) == (synchronised == "no, and warns")
        for file, message in messages:
            assert file == "test_ranks.py"
            assert "gradients are not averaged over the ranks" in message


def test_one_process_and_a_compiler_scan_nothing(monkeypatch):
    monkeypatch.setattr(gc, "get_objects", pytest.fail)
    hidden = torch.randn(3, 4, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(5, 4))
    linear_log_probs(hidden, weight, torch.zeros(3, dtype=torch.int64))
    monkeypatch.setattr(dist, "is_initialized", pytest.fail)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    bapo_kernels.core.distributed.warn_if_not_synchronised(hidden, weight)


def placed_rank(rank):
    """Heads of models that DDP, FSDP2 and tensor parallelism have wrapped."""
    mesh = grid(2, 1)["data"]
    model, messages = causal_lm.CausalLM(), []
    tokens = policy_batch()[0][0]
    messages.append(message_of(LMHead.of, DistributedDataParallel(model)))

    model = causal_lm.CausalLM()
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel()})
    assert isinstance(LMHead.of(model).weight, DTensor)

    model = causal_lm.CausalLM()
    early = LMHead.of(model)
    for module in (model.lm_head, model):
        fully_shard(module, mesh=mesh)
    for late in (early, LMHead.of(model)):
        assert isinstance(late.weight, DTensor)
        messages.append(message_of(getattr, late, "decoder"))
        with torch.no_grad():
            model(tokens)  # gathers the weights
        with pytest.raises(ValueError, match="LMHead.decoder must be used inside"):
            late.decoder(tokens)
    inside = []
    model.tail = lambda logits: inside.append(late.decoder(tokens)) or logits
    model(tokens)
    assert inside

    model = causal_lm.CausalLM()
    for module in (model.model, model):
        fully_shard(module, mesh=mesh)
    LMHead.of(model).decoder(tokens)  # FSDP2 wraps the decoder too

    model = fully_shard(causal_lm.CausalLM(), mesh=mesh)  # what torch does without LMHead
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        model.model(tokens)
    with torch.no_grad():
        model(tokens)
    hidden, weight = model.model(tokens).last_hidden_state[:, :-1], model.lm_head.weight
    linear_log_probs(hidden, weight, tokens[:, 1:])[0].sum().backward()
    model.reshard()
    assert all(parameter.grad is None for parameter in model.parameters())
    return messages


def test_heads_of_wrapped_models(worlds):
    for of_ddp, early, late in worlds(2).run(placed_rank):
        assert "LMHead must be used inside of the forward that DDP wraps" in of_ddp
        assert "got a DistributedDataParallel" in of_ddp
        assert early == late
        assert "LMHead.decoder must be used inside of the forward that FSDP2 wraps" in early


def rounded_rank(rank, cast):
    """The divergence of a policy from its own log-probs under mixed precision."""
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=cast)
    policy = fully_shard(policy_of(), mesh=grid(2, 1)["data"], mp_policy=precision)
    (tokens, _, advantages, _), _ = policy_batch()
    with torch.no_grad():
        old = policy(tokens, None, advantages).log_probs
        rounded = old - old.bfloat16().float()
        return policy(tokens, old, advantages).metrics["ppo_kl"], rounded.mean(), old


def test_mixed_precision_of_fsdp2(worlds):
    """docs/distributed.md names the option under which the old log-probs are not rounded."""
    for divergence, _, old in worlds(2).run(rounded_rank, False):
        assert divergence.abs() <= EPS[torch.float32] * old.abs().max()
    for divergence, rounded, old in worlds(2).run(rounded_rank, True):
        assert (divergence + rounded).abs() <= 2 * EPS[torch.float32] * old.abs().max()
        assert divergence.abs() > 1e-4
