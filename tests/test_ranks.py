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
from pathlib import Path

import causal_lm
import pytest
import torch
import torch.distributed as dist
from helpers import EPS, assert_within_budget, run_reference, unmasked_tokens
from shards import COLUMNS, SEQUENCES, head, of_rank, part, whole_case
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


def collectives_rank(rank, backend):
    """Name and number of elements of each collective, per kind of call."""
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

        def count(name, call, groups):
            distributed._AGREED.clear()
            made.clear()
            call()
            first = list(made)
            made.clear()
            out = call()
            forward = list(made)
            assert first == [("all_gather", 2 * 64 * 2)] * groups + forward, "ranks are compared"
            made.clear()
            (
                out[0].sum() if out[0].requires_grad else torch.zeros((), requires_grad=True)
            ).backward()
            results[name] = forward, list(made)

        options = dict(backend=backend)
        count("alone", lambda: bapo_loss(logits, *arguments, **options), 0)
        count("search", lambda: bapo_loss(logits, *arguments, process_group=data, **options), 1)
        bounds = dict(process_group=data, bounds=(0.7, 1.3))
        count("bounds", lambda: bapo_loss(logits, *arguments, **bounds, **options), 0)
        own = dict(process_group=data, bounds=(torch.full((len(logits),), 0.7), 1.3))
        count("own bounds", lambda: bapo_loss(logits, *arguments, **own, **options), 0)
        empty = tuple(x[:0] for x in arguments)
        some = empty if rank == 0 else arguments
        x = logits[:0] if rank == 0 else logits
        count("a rank without rows", lambda: bapo_loss(x, *some, process_group=data, **options), 1)
        both = dict(process_group=data, vocab_group=tensor, **options)
        leaf = case.logits[rows, :, columns].clone().requires_grad_()
        count("shards", lambda: bapo_loss(leaf, *arguments, **both), 2)
        linear = bapo_kernels.bapo_linear_loss
        count("linear", lambda: linear(hidden, weight, *arguments, **both), 2)
        of_chunks = dict(chunk_tokens=1, **both)
        count("chunks", lambda: linear(hidden, weight, *arguments, **of_chunks), 2)
        logp = bapo_kernels.linear_log_probs
        sharded = dict(vocab_group=tensor, backend=backend)
        count("log-probs", lambda: logp(hidden, weight, arguments[0], **sharded), 1)
    labelled = arguments[0] != -100
    unmasked = int(((arguments[3] != 0) & labelled).sum())
    return results, labelled.numel(), unmasked, int(labelled.sum()), hidden.numel()


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


B, S = 6, 5


def differing_rank(rank, function, changes):
    """What calls raise whose arguments differ on rank 1, each with new groups; then the loss."""
    case, columns = whole_case("paper", torch.float32), part(COLUMNS[2], rank)
    hidden, weight, _ = head(torch.float32)
    sources = {"bapo_loss": case.logits[..., columns], "check_inputs": case.logits[..., columns]}
    messages = []
    for change in changes:
        names = "labels", "old_log_probs", "advantages", "response_mask"
        given = dict(zip(names, case.arguments(), strict=True)) | case.options
        given["vocab_group"] = dist.new_group()
        good = dict(given)
        x = sources.get(function, hidden)
        if rank == 1:
            x, given = CHANGES[change](x, given)
        more = () if function in sources else (weight[columns],)
        call = getattr(bapo_kernels.debug if function == "check_inputs" else bapo_kernels, function)
        with pytest.raises(ValueError) as raised:
            call(x, *more, **given)
        messages.append(str(raised.value))
        loss = bapo_loss(case.logits[..., columns], **good).loss
    return messages, loss


def with_changed(name, change):
    return lambda x, given: (x, given | {name: change(given.get(name))})


def with_fewer_rows(x, given):
    rows = {k: v[:5] for k, v in given.items() if isinstance(v, torch.Tensor) and v.ndim}
    return x[:5], given | rows


SETS = bapo_kernels.SamplingMask.from_lists([[]] * (B * S))
CHANGES = {
    "labels": with_changed("labels", lambda y: y.where(y < 0, (y + 1) % 67)),
    "labels of the shard": with_changed("labels", lambda y: y.where(y < 0, y - 40)),
    "shape": with_fewer_rows,
    "the unmasked tokens": with_changed("response_mask", torch.ones_like),
    "advantages": with_changed("advantages", lambda A: A.roll(1)),
    "old_log_probs": with_changed("old_log_probs", lambda old: old - 0.01),
    "ref_log_probs": with_changed("ref_log_probs", lambda _: torch.zeros(B, S)),
    "temperatures": with_changed("temperature", lambda _: torch.full((B,), 0.7)),
    "the normalisers": with_changed("batch_num_tokens", lambda count: count + 1),
    "bounds": with_changed("bounds", lambda _: (0.8, 1.2)),
    "statistics": with_changed("statistics", lambda _: "live"),
    "sampling_mask": with_changed("sampling_mask", lambda _: SETS),
    "config.target": with_changed("config", lambda config: replace(config, target=0.3)),
    "config.surrogate": with_changed("config", lambda config: replace(config, surrogate="cispo")),
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
    case, messages = whole_case("paper", torch.float32), []
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
        with pytest.raises(ValueError) as raised:
            call(process_group=group, **options)
        messages.append(str(raised.value))
        loss(process_group=group)  # both can go on
        dist.destroy_process_group(group)
    del group, raised
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
    case = whole_case("paper", torch.float32)
    d, t = divmod(rank, 2)
    _, _, arguments, options = of_rank(case, 2, 2, d, t, mesh)
    logits = case.logits[part(SEQUENCES[2], d), :, part(COLUMNS[2], t)]
    target = 0.3 if rank == 1 and changed == "config" else 0.6
    if rank == 1 and changed == "labels":
        arguments = arguments[0].roll(1), *arguments[1:]
    with pytest.raises(ValueError) as raised:
        bapo_loss(logits, *arguments, **options | dict(config=BAPOConfig(target=target)))
    return str(raised.value)


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


def test_misuse_of_scopes():
    search = ClipBoundSearch(scope="step")
    with pytest.raises(RuntimeError, match="has no bounds yet"):
        search.options  # noqa: B018
    with pytest.raises(ValueError, match="scope must be call, step or lagged, got batch"):
        ClipBoundSearch(scope="batch")
    with pytest.raises(ValueError, match="scope must be 'step' in the state too, got 'lagged'"):
        search.load_state_dict(ClipBoundSearch(scope="lagged").state_dict())
    other = ClipBoundSearch(BAPOConfig.recipe(), scope="step", device="cpu")
    with pytest.raises(
        ValueError, match="config.ratio_lower_max must be 0.9 in the state too, got"
    ):
        search.load_state_dict(other.state_dict())


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


def bad_value_rank(rank):
    mesh = grid(1, 2)
    case = whole_case("NaN logit", torch.float32)
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
    """One rank has a bad argument and raises before its collective."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    case = whole_case("paper", torch.float32)
    advantages = case.advantages[:, :-1] if rank == 1 else case.advantages
    arguments = case.labels, case.old_log_probs, advantages, case.response_mask
    if level == "search":
        bapo_loss(case.logits, *arguments, process_group=group)
    else:
        bapo_loss(case.logits, *arguments, vocab_group=group)


@pytest.mark.parametrize("level", ["search", "shards"])
def test_rank_that_raises_does_not_leave_others_hanging(worlds, level):
    (fine0, error0), (fine1, error1) = worlds(2).answers(raising_rank, level)
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


def test_step_discards_the_tokens():
    """The tokens of the next step alone decide its bounds."""
    case = whole_case("paper", torch.float32)
    logp = bapo_kernels.log_probs(case.logits, case.labels)[0]
    mask = unmasked_tokens(case)
    search = ClipBoundSearch(case.options["config"], "step")
    expected = []
    for advantages in (case.advantages, case.advantages.abs() - 0.01):
        tokens = logp, case.old_log_probs, advantages, mask
        search.update(*tokens)
        search.step()
        expected.append(find_clip_bounds(*tokens, config=case.options["config"]))
        assert search.bounds == expected[-1]
    assert expected[0] != expected[1]


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

    def outside():
        hidden = head.decoder(tokens).last_hidden_state[:, :-1]
        weight = head.weight
        if kind == "log-probs outside DDP":
            return linear_log_probs(hidden, weight, tokens[:, 1:])[0].sum()
        labels = tokens[:, 1:]
        return bapo_kernels.bapo_linear_loss(hidden, weight, labels, *batch, **options).loss

    def inside():
        return wrapper(tokens, *batch, **options).loss

    loss = outside
    if kind in ("outside DDP", "log-probs outside DDP", "no gradient"):
        wrapper = DistributedDataParallel(policy)
    if kind.endswith("after old log-probs"):
        wrapper = DistributedDataParallel(policy)
        loss = inside if kind.startswith("inside") else outside
        with torch.no_grad():
            wrapper(tokens, None, batch[1])
    if kind == "frozen head outside DDP":
        model.lm_head.requires_grad_(False)
        wrapper = DistributedDataParallel(policy)
    if kind == "DDP of another model":
        wrapper = DistributedDataParallel(policy_of())
    if kind == "inside DDP":
        wrapper, loss = DistributedDataParallel(policy), inside
    if kind == "inside FSDP2":
        wrapper, loss = fully_shard(policy, mesh=mesh), inside
    if kind == "hidden states from DDP":
        wrapper = DistributedDataParallel(policy.model.model)

        def loss():
            hidden = wrapper(tokens).last_hidden_state[:, :-1]
            labels, weight = tokens[:, 1:], model.lm_head.weight
            return bapo_kernels.bapo_linear_loss(hidden, weight, labels, *batch, **options).loss

    scans = []
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(gc, "get_objects", lambda real=gc.get_objects: scans.append(1) or real())
        with torch.set_grad_enabled(kind != "no gradient"):
            losses = [loss(), loss()]
    apart = 0.0
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
    "kind",
    [
        "outside DDP",
        "log-probs outside DDP",
        "frozen head outside DDP",
        "outside DDP after old log-probs",
    ],
)
def test_loss_outside_the_forward_of_ddp_warns(worlds, kind):
    """Once, at the line of the call; the gradients are indeed not synchronised."""
    for messages, scans, apart in worlds(2).run(warning_rank, kind):
        ((file, message),) = messages
        assert file == "test_ranks.py"
        assert "gradients are not averaged over the ranks" in message
        assert scans == 1
        assert apart > 1e-4


@pytest.mark.parametrize(
    ("kind", "expected_scans"),
    [
        ("no DDP", 1),
        ("DDP of another model", 1),
        ("no gradient", 0),
        ("inside DDP", 1),
        ("inside DDP after old log-probs", 1),
        ("inside FSDP2", 1),
        ("hidden states from DDP", 1),
    ],
)
def test_other_losses_do_not_warn(worlds, kind, expected_scans):
    for messages, scans, apart in worlds(2).run(warning_rank, kind):
        assert not messages
        assert scans == expected_scans
        assert apart == 0 or kind in ("no DDP", "DDP of another model")


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
    with pytest.raises(ValueError) as raised:
        LMHead.of(DistributedDataParallel(model))
    messages.append(str(raised.value))

    model = causal_lm.CausalLM()
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel()})
    assert isinstance(LMHead.of(model).weight, DTensor)

    model = causal_lm.CausalLM()
    early = LMHead.of(model)
    for module in (model.lm_head, model):
        fully_shard(module, mesh=mesh)
    for late in (early, LMHead.of(model)):
        assert isinstance(late.weight, DTensor)
        with pytest.raises(ValueError) as raised:
            late.decoder(tokens)
        messages.append(str(raised.value))
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
