"""What ranks send, in which scope they decide, and what happens when one is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import run_reference
from shards import COLUMNS, SEQUENCES, head, part, whole_case
from torch.distributed.tensor import Shard, distribute_tensor
from world import grid, world

import bapo_kernels
from bapo_kernels import BAPOConfig, ClipBoundSearch, bapo_loss, find_clip_bounds
from bapo_kernels.distributed import sum_over_ranks

pytestmark = pytest.mark.xdist_group("world")

COLLECTIVES = ("all_reduce", "all_gather_single", "all_gather_into_tensor")
MICRO_BATCHES = [2, 0, 1, 3]  # of each rank


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


@pytest.mark.parametrize("scope", ["step", "lagged"])
def test_example(scope):
    """The example trains, and its scopes decide as they say."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = Path(__file__).parent.parent / "examples/many_ranks.py"
    command += [str(script), "--tensor", "2", "--scope", scope]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, timeout=300
    )
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines() if line.startswith("step")]
    losses = [float(line[3]) for line in lines]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert (lines[0][5:] == ["0.60", "..", "1.20"]) == (scope == "lagged")


def test_step_forgets_the_tokens():
    """Other tokens in the next step: their decision is theirs alone."""
    case = whole_case("paper", torch.float32)
    logp = bapo_kernels.log_probs(case.logits, case.labels)[0]
    mask = case.response_mask & (case.labels != -100)
    search = ClipBoundSearch(case.options["config"], "step")
    expected = []
    for advantages in (case.advantages, case.advantages.abs() - 0.01):
        tokens = logp, case.old_log_probs, advantages, mask
        search.update(*tokens)
        search.step()
        expected.append(find_clip_bounds(*tokens, config=case.options["config"]))
        assert search.bounds == expected[-1]
    assert expected[0] != expected[1]
