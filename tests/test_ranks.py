"""What ranks exchange, in which scope they decide, and what happens when one fails."""

import gc
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from causal_lm import CausalLM, V, recipe
from helpers import EPS, in_some_orders, run_reference
from shards import COLUMNS, SEQUENCES, B, S, check_means, head, of_rank, part, whole_case
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from world import grid, resumed, whole_tensor

import bapo_kernels
from bapo_kernels import BAPOConfig, ClipBoundSearch, bapo_linear_loss, bapo_loss, linear_log_probs
from bapo_kernels.core.arguments import ranks
from bapo_kernels.debug import check_inputs
from bapo_kernels.lm_head import LMHead

pytestmark = [pytest.mark.xdist_group("world"), pytest.mark.slow]

MICRO_BATCHES = [2, 0, 1, 3]  # of each rank


def message_of(call, *args, **options):
    """Of the error that a call raises."""
    with pytest.raises(ValueError) as raised:
        call(*args, **options)
    return str(raised.value)


def collectives_rank(rank):
    """Name and number of elements of each collective, forward and backward."""
    case, made = whole_case(), []
    rows, columns, mine = of_rank(case, rank, 2, 2)
    tokens, (hidden, weight, _) = mine.arguments(), head()
    whole, shard = (case.logits[rows], *tokens), (mine.logits.clone().requires_grad_(), *tokens)
    of_head = hidden[rows].requires_grad_(), weight[columns].requires_grad_(), *tokens
    some = whole if rank else [x[:0] for x in whole]
    own_bounds = dict(bounds=(torch.full(tokens[0].shape[:1], 0.7), 1.3))
    of_data, of_shards = ({name: mine.options[name]} for name in ("process_group", "vocab_group"))
    both = of_data | of_shards
    by_token = both | dict(chunk_tokens=1)

    def combine(counted, labels=1):
        return "all_gather", 2 * (3 + labels) * int(counted.sum())

    several = *of_head[:2], tokens[0][..., None].expand(*tokens[0].shape, 3)
    frozen = several[0], several[1].detach(), several[2]
    labelled = tokens[0] != -100
    unmasked = (tokens[3] != 0) & labelled
    table = len(BAPOConfig().lower_grid) + len(BAPOConfig().upper_grid)
    search, sizes = ("all_reduce", 2 * table), ("all_gather", 2)
    dhidden = "all_reduce", of_head[0].numel()
    chunks = [combine(x) for x in unmasked.flatten() if x]

    def recorded(name, real):
        def call(tensor, *args, **kwargs):
            made.append((name[:10], tensor.numel()))
            return real(tensor, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather_single", "all_gather_into_tensor"):
            if hasattr(dist, name):
                patch.setattr(dist, name, recorded(name, getattr(dist, name)))
        for groups, function, given, options, forward, *backward in (
            (0, bapo_loss, whole, {}, []),
            (1, bapo_loss, whole, of_data, [search]),
            (0, bapo_loss, whole, of_data | dict(bounds=(0.7, 1.3)), []),
            (0, bapo_loss, whole, of_data | own_bounds, []),
            (1, bapo_loss, some, of_data, [search]),  # a rank without rows
            (2, bapo_loss, shard, both, [sizes, combine(labelled >= 0), search]),
            (2, bapo_linear_loss, of_head, both, [sizes, combine(unmasked), search, dhidden]),
            (2, bapo_linear_loss, of_head, by_token, [sizes, *chunks, search, dhidden]),
            (1, linear_log_probs, of_head[:3], of_shards, [sizes, combine(labelled)], dhidden),
            (1, linear_log_probs, several, of_shards, [sizes, combine(labelled, 3)], dhidden),
            (1, linear_log_probs, frozen, of_shards, [sizes, combine(labelled, 3)], dhidden),
        ):
            ranks._AGREED.clear()
            # The first call compares the ranks of its groups.
            for agreement in ([("all_gather", 2 * 64 * 2)] * groups, []):
                made.clear()
                out = function(*given, backend="cpu", **options)
                assert made == agreement + forward, (options, made)
            made.clear()
            if out[0].requires_grad:
                out[0].sum().backward()
            assert made == backward, (options, made)


def test_collectives_of_every_kind_of_call(worlds):
    """How many, and of which size: every rank makes the same collectives."""
    worlds(4).run(collectives_rank)


def differing_rank(rank, function):
    """Calls raise whose arguments differ on rank 1, each with new groups; then a loss."""
    case, (hidden, weight, _) = whole_case(), head()
    columns = part(COLUMNS[2], rank)
    logits = case.logits[..., columns]
    call, x, *more = {
        "bapo_loss": (bapo_loss, logits),
        "bapo_linear_loss": (bapo_linear_loss, hidden, weight[columns]),
        "check_inputs": (check_inputs, logits),
    }[function]
    names = "labels", "old_log_probs", "advantages", "response_mask"
    for change, (name, changed) in CHANGES.items():
        good = dict(zip(names, case.arguments(), strict=True)) | case.options
        good["vocab_group"] = dist.new_group()
        given, rows = dict(good), slice(5 if (rank, change) == (1, "shape") else B)
        given |= {name: good[name][rows] for name in names}
        if rank == 1:
            given[name] = changed(given.get(name))
        message = message_of(call, x[rows], *more, **given)
        fact = change.removesuffix(" of the shard")
        rule = f"{fact} must be the same on all ranks of vocab_group, got another on ranks [1]"
        assert message.startswith(rule), message
        if change == "config.target":
            assert message.endswith(f"than on rank 0 ({(0.6, 0.3)[rank]} on this rank)"), message
        loss = bapo_loss(logits, **good).loss
    if function == "bapo_linear_loss":
        more[0] = more[0].clone().requires_grad_(rank == 1)
        message = message_of(call, x, *more, **good | {"vocab_group": dist.new_group()})
        assert message.startswith("requires_grad of lm_head_weight must be the same on all ranks")
    return loss


SETS = bapo_kernels.SamplingMask.from_lists([[]] * (B * S))
CHANGES = {
    "labels": ("labels", lambda y: y.where(y < 0, (y + 1) % 67)),
    "labels of the shard": ("labels", lambda y: y.where(y < 0, y - 40)),
    "shape": ("labels", lambda y: y),
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
    first, second = worlds(2).run(differing_rank, function)
    assert first == second


def search_rank(rank):
    """What the calls of a process_group raise that differ on rank 1; no group is kept alive."""
    case, messages = whole_case(), []
    logp = bapo_kernels.log_probs(case.logits, case.labels)[0]
    rest = case.old_log_probs, case.advantages, case.response_mask
    logp, *batch = (x[rank:] for x in (logp, *rest))  # its own number of rows is fine

    def loss(**options):
        bapo_kernels.bapo_loss_from_log_probs(logp, *batch, batch_num_tokens=9 + rank, **options)

    def find(**options):
        bapo_kernels.find_clip_bounds(logp, *batch, **options)

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
    assert all(group in dist.distributed_c10d._world.pg_map for group in ranks._AGREED)
    return messages


def test_searches_of_different_calls(worlds):
    for rank, (*of_config, of_call) in enumerate(worlds(2).run(search_rank)):
        rule = "config.ratio_upper_max must be the same on all ranks of process_group, got"
        got = f"another on ranks [1] than on rank 0 ({3.0 - rank} on this rank)"
        assert of_config == [f"{rule} {got}"] * 3
        assert of_call.startswith("function and backend must be the same on all ranks of")


def grid_rank(rank, fact):
    """A call of its own on rank 1 of a grid: ranks that do not share a group with it say so."""
    ranks._AGREED.clear()
    config = BAPOConfig(target=0.3 if (rank, fact) == (1, "config.target") else 0.6)
    _, _, mine = of_rank(whole_case().with_options(config=config), rank, 2, 2)
    labels, *batch = mine.arguments()
    labels = labels.roll(1) if (rank, fact) == (1, "the unmasked tokens") else labels
    message = message_of(bapo_loss, mine.logits, labels, *batch, **mine.options)
    of_shards = f"{fact} must be the same on all ranks of vocab_group, got"
    of_data = "the result of the check of vocab_group must be the same on all ranks of process"
    assert message.startswith(of_shards if rank < 2 else of_data), message


@pytest.mark.parametrize("fact", ["config.target", "the unmasked tokens"])
def test_every_rank_of_a_grid_raises(worlds, fact):
    worlds(4).run(grid_rank, fact)


def scopes_rank(rank, scope, statistics, folder):
    """Rank r has MICRO_BATCHES[r] micro-batches."""
    case = whole_case()
    config, group = case.options["config"], dist.group.WORLD
    search = ClipBoundSearch(config, scope, group, device="cpu")
    mine = [[x[i : i + 1] for x in (case.logits, *case.arguments())] for i in range(B)]
    mine = mine[part(MICRO_BATCHES, rank)]

    def gather(log_probs, labels, old, advantages, mask):
        search.update(log_probs, old, advantages, mask.bool() & (labels != -100))

    decided = []
    for i in range(2):
        if scope == "step":
            for logits, *arguments in mine:
                with torch.no_grad():
                    gather(bapo_kernels.log_probs(logits, arguments[0])[0], *arguments)
            search = resumed(search, folder / f"in step {i}")
            search.step()
        for logits, *arguments in mine:
            out = bapo_loss(logits, *arguments, statistics=statistics, **search.options)
            decided.append([float(b) for b in out.bounds])
            if scope == "lagged":
                gather(out.log_probs, *arguments)
        search = resumed(search, folder / str(i))
        if scope == "lagged":
            search.step()
    return decided


@pytest.mark.parametrize("statistics", ["all", "live"])
@pytest.mark.parametrize("scope", ["step", "lagged"])
def test_scopes_with_unequal_micro_batches(worlds, scope, statistics, tmp_path):
    results = worlds(4).run(scopes_rank, scope, statistics, tmp_path)
    truth = run_reference(whole_case(), torch.float64).output
    expected = [b.float().item() for b in truth.bounds]
    start = [torch.tensor(b).item() for b in (0.6, 1.2)]
    for count, decided in zip(MICRO_BATCHES, results, strict=True):
        first = start if scope == "lagged" else expected
        assert decided == [first] * count + [expected] * count


A_GROUP = "vocab_group must be None or a torch.distributed.ProcessGroup"
BY_ROWS = "lm_head_weight must be sharded along dimension 0 over vocab_group"


def misuse_rank(rank):
    mesh, case, (hidden, weight, _) = grid(1, 2), whole_case(), head()
    logits = distribute_tensor(case.logits, mesh["tensor"], [Shard(2)])
    other_way = distribute_tensor(weight, mesh["tensor"], [Shard(1)])
    sharded = dict(vocab_group=mesh.get_group("tensor"))
    tokens, search = case.arguments(), (case.old_log_probs, None, case.advantages)
    parts = (of_rank(whole_case(name), rank, 1, 2)[2] for name in ("NaN logit", "forbidden tokens"))
    bad, good = ((mine.logits, *mine.arguments()) for mine in parts)
    check_inputs(*good, **sharded)
    for rule, function, given, options in (
        ("logits must be a local tensor (.to_local()", bapo_loss, (logits, *tokens), {}),
        (A_GROUP, bapo_loss, (case.logits, *tokens), dict(vocab_group=mesh["tensor"])),
        ("got DeviceMesh", bapo_loss, (case.logits, *tokens), dict(process_group=mesh)),
        ("process_group must be", bapo_kernels.find_clip_bounds, search, dict(process_group=0)),
        (BY_ROWS, linear_log_probs, (hidden, other_way, case.labels), sharded),
        ("logits must be finite or -inf, got nan", check_inputs, bad, sharded),
    ):
        message = message_of(function, *given, **options)
        assert rule in message, message
    return message


def test_misuse_of_groups_and_shards(worlds):
    """Of a group it raises before any collective; a bad logit is the same to every rank."""
    first, second = worlds(2).run(misuse_rank)
    assert first == second


def raising_rank(rank, name):
    """One rank has a bad argument and raises before its collective."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    case = whole_case()
    if rank == 1:
        case.advantages = case.advantages[:, :-1]
    bapo_loss(case.logits, *case.arguments(), **{name: group})


@pytest.mark.parametrize("name", ["process_group", "vocab_group"])
def test_rank_that_raises_does_not_leave_others_hanging(worlds, name):
    (fine0, error0), (fine1, error1) = worlds(2).answers(raising_rank, name)
    assert (fine0, fine1) == (False, False)
    assert "advantages must have the shape of labels" in error1
    assert "imed out" in error0


@pytest.mark.exhaustive
@pytest.mark.parametrize("scope", ["step", "lagged"])
def test_example(scope):
    """It trains, and decides when it says it does."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example = Path(__file__).parent.parent / "examples/many_ranks.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *torchrun, str(example), "--tensor", "2", "--scope", scope]
    output = subprocess.check_output(command, text=True, env=environment, timeout=300)
    lines = [line.split() for line in output.splitlines() if line.startswith("step")]
    losses = [float(line[3]) for line in lines]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert (lines[0][5:] == ["0.60", "..", "1.20"]) == (scope == "lagged")


def policy_of(tied=False):
    torch.manual_seed(5)
    return recipe()(CausalLM(tied=tied), target=0.6)


def policy_batch(rows=slice(None)):
    """Tokens, old log-probs, advantages and mask of some sequences; the number of all tokens."""
    g = torch.Generator().manual_seed(7)
    tokens, old = torch.randint(V, (B, S + 1), generator=g), torch.randn(B, S, generator=g)
    mask, advantages = torch.rand(B, S, generator=g) < 0.8, torch.randn(B, generator=g)
    batch = [x[rows] for x in (tokens, 0.5 * old - 3.4, advantages, mask)]
    return batch, dict(batch_num_tokens=int(mask.sum()))


def policy_gradients(policy, micro_batches, **options):
    """Unsharded, by name, of one optimizer step."""
    policy.zero_grad()
    for batch in micro_batches:
        last = batch is micro_batches[-1]
        if isinstance(policy, FSDPModule):
            policy.set_requires_gradient_sync(last)
        accumulates = isinstance(policy, DistributedDataParallel) and not last
        with policy.no_sync() if accumulates else nullcontext():
            out = policy(*batch, **options)
            assert type(out) is bapo_kernels.BAPOOutput
            assert out.metrics["pg_loss"].shape == out.bounds.upper.shape == ()
            assert out.log_probs.shape == batch[3].shape
            out.loss.backward()
    named = policy.named_parameters()
    return {name.removeprefix("module."): whole_tensor(p.grad) for name, p in named}


def inside_rank(rank, kind, tied):
    """Gradients of the whole batch, then of two micro-batches."""
    mesh = grid(2, 1)["data"]
    policy = policy_of(tied)
    if kind.startswith("FSDP2"):
        fully_shard(policy.model.model.block, mesh=mesh)
        if kind == "FSDP2, the head alone":
            fully_shard(policy.model.lm_head, mesh=mesh)
        fully_shard(policy, mesh=mesh)
        if kind == "FSDP2, compiled":
            policy.compile(backend="aot_eager")
    else:
        policy = DistributedDataParallel(policy, **({} if kind == "DDP" else {kind: True}))
    mine, counts = policy_batch(part(SEQUENCES[2], rank))
    counts |= dict(dp_size=2)
    made = [policy_gradients(policy, [mine], process_group=mesh.get_group(), **counts)]
    if kind != "static_graph":  # DDP refuses no_sync with it
        halves = [[x[:1] for x in mine], [x[1:] for x in mine]]
        made.append(policy_gradients(policy, halves, bounds=(0.7, 1.3), **counts))
    return made


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "kind",
    ["DDP", "find_unused_parameters", "static_graph"]
    + ["FSDP2", "FSDP2, the head alone", "FSDP2, compiled"],
)
def test_loss_inside_the_forward(worlds, kind, tied):
    """The recipe of docs/distributed.md has the gradients of one process, also in micro-batches."""
    if tied and kind == "FSDP2, the head alone":
        pytest.skip("FSDP2 refuses tied weights in two groups")
    ranks = worlds(2).run(inside_rank, kind, tied)
    arguments, counts = policy_batch()
    exact = [x.double() if x.is_floating_point() else x for x in arguments]
    for n, bounds in enumerate((None, (0.7, 1.3))):
        run = partial(policy_gradients, bounds=bounds, **counts)
        same = in_some_orders(partial(run, policy_of(tied), [arguments]))
        truth = run(policy_of(tied).double(), [exact], backend="reference")
        for got in (made[n] for made in ranks if n < len(made)):
            check_means(got, same, truth)


def placed_rank(rank):
    """Heads of models that DDP, FSDP2 and tensor parallelism have wrapped."""
    mesh = grid(2, 1)["data"]
    tokens = policy_batch()[0][0]
    message = message_of(LMHead.of, DistributedDataParallel(CausalLM()))
    assert "LMHead must be used inside of the forward that DDP wraps" in message
    assert "got a DistributedDataParallel" in message
    model = parallelize_module(CausalLM(), mesh, {"lm_head": ColwiseParallel()})
    assert isinstance(LMHead.of(model).weight, DTensor)

    model = CausalLM()
    early = LMHead.of(model)
    for module in (model.lm_head, model):
        fully_shard(module, mesh=mesh)
    for late in (early, LMHead.of(model)):
        assert isinstance(late.weight, DTensor)
        message = message_of(getattr, late, "decoder")
        assert "LMHead.decoder must be used inside of the forward that FSDP2 wraps" in message
        with torch.no_grad():
            model(tokens)  # gathers the weights
        with pytest.raises(ValueError, match="LMHead.decoder must be used inside"):
            late.decoder(tokens)
    inside = []
    model.tail = lambda logits: inside.append(late.decoder(tokens)) or logits
    model(tokens)
    assert inside

    model = CausalLM()
    for module in (model.model, model):
        fully_shard(module, mesh=mesh)
    LMHead.of(model).decoder(tokens)  # FSDP2 wraps the decoder too


def test_heads_of_wrapped_models(worlds):
    worlds(2).run(placed_rank)


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
