"""torch.compile in one graph with dynamic shapes, and what the ops tell the compiler."""

import pytest
import torch
from helpers import KERNELS, make_case, per_token
from torch._inductor.utils import run_and_get_code
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from world import grid

from bapo_kernels import (
    BAPOConfig,
    BAPOLoss,
    ContributionHistogram,
    bapo_linear_loss,
    bapo_loss,
    bapo_loss_from_log_probs,
    find_clip_bounds,
    linear_log_probs,
    log_probs,
)
from bapo_kernels.config import Options
from bapo_kernels.core.operators import FIELDS, HEAD_SCHEMAS, SCHEMAS, torch_ops_of

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not KERNELS, reason="no kernels")]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def loss_by(names=(), aside="entropy", **fixed):
    """The loss of a batch, whose arguments beyond the mask have these names, and a metric."""

    def loss_of(logits, labels, old, advantages, mask, *more):
        options = dict(zip(names, more, strict=True)) | fixed
        out = bapo_loss(logits, labels, old, advantages, mask, **options)
        return out.loss, out.metrics[aside]

    return loss_of


def batches(sizes, V=257, **options):
    """Logits, and what a loss takes beside them, of sequences of these lengths."""
    for S in sizes:
        case = make_case((3, S), V, poison=False, **options)
        yield case.logits, *case.arguments()


def hidden_batches(sizes, dtype=torch.float32, device="cpu"):
    for _, labels, *batch in batches(sizes, 65, device=device):
        yield torch.randn(*labels.shape, 16, device=device).to(dtype), labels, *batch


def compiler(interpreted):
    """What Inductor generates around the operators does not depend on their backend."""
    return "aot_eager" if interpreted else "inductor"


def assert_equal(got, expected):
    assert torch.equal(got, expected)


def compare(function, compiled, x, *arguments, same=assert_equal):
    """Values that are added up here: a compiler adds in an order of its own."""
    results = []
    for f in (function, compiled):
        x = x.detach().clone().requires_grad_()
        value, aside = f(x, *arguments)
        value.sum().backward()
        results.append((value.detach(), aside, x.grad))
    for expected, got in zip(*results, strict=True):
        same(got, expected)


def check(function, given, compiler="inductor", dynamic=True, same=assert_equal):
    """One graph has the values and the gradient of the function, of every batch."""
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=compiler)
    for batch in given:
        compare(function, compiled, *batch, same=same)
    assert graphs() == 1


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_loss_with_dynamic_shapes(backend, device, interpreted, dtype):
    given = batches((7, 9, 12), dtype=dtype, device=device)
    check(loss_by(backend=backend), given, compiler(interpreted))


@pytest.mark.slow
def test_backward_copies_no_gradient():
    """A copy of the gradient takes as long as the whole loss."""
    case = make_case((4, 8), 65, poison=False)
    logits = case.logits.requires_grad_()
    compiled = torch.compile(lambda x: bapo_loss(x, *case.arguments()).loss)
    _, codes = run_and_get_code(lambda: compiled(logits).backward())
    assert "row_gradient" in codes[-1]
    assert "clone" not in codes[-1]


@pytest.mark.slow
def test_many_steps_do_not_recompile(backend, device, interpreted):
    """Bounds, advantages, masks and normalisers are values."""

    def given():
        for step in range(10 if interpreted else 100):
            (batch,) = batches([3], 65, device=device, seed=step)
            bounds = torch.tensor([0.9 - step / 1000, 1.1 + step / 100], device=device).unbind()
            yield *batch, bounds, batch[-1].sum() + step

    loss = loss_by(["bounds", "batch_num_tokens"], "pg_clipfrac", backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        check(loss, given(), "aot_eager")


@pytest.mark.slow
def test_new_bounds_of_tokens_do_not_recompile(backend, device):
    """Per sequence and per token."""
    given = []
    for seed, S in enumerate((7, 7, 9)):
        (batch,) = batches([S], device=device)
        bounds = per_token((3,), seed, 0.7, 1.0), per_token((3, S), seed, 1.0, 1.3)
        given.append((*batch, tuple(bound.to(device) for bound in bounds)))
    check(loss_by(["bounds"], backend=backend), given, "aot_eager")


@pytest.mark.slow
def test_log_probs(backend, device, interpreted):
    def both(logits, labels, *_):
        logp, entropy = log_probs(logits, labels, backend=backend)
        return logp + 0.1 * entropy, entropy.detach()

    check(both, batches((7, 9), device=device), compiler(interpreted))


@pytest.mark.slow
def test_linear_log_probs(backend, device):
    weight, bias = torch.randn(65, 16, device=device), torch.randn(65, device=device)

    def both(hidden, labels, *_):
        options = dict(bias=bias, backend=backend, chunk_tokens=5)
        logp, entropy = linear_log_probs(hidden, weight, labels, **options)
        return logp * entropy, entropy.detach()

    check(both, hidden_batches((7, 9), device=device), "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("level", ["logits", "hidden states"])
@pytest.mark.parametrize("per", ["token", "call", "sequence"])
def test_temperatures(backend, device, level, per):
    """Other temperatures do not compile again."""
    if backend == "triton" and per != "token":
        pytest.skip("the graph is that of the CPU but for the names of the operators")
    weight = torch.randn(65, 16, device=device)

    def loss(hidden, temperature, *arguments):
        options = dict(temperature=temperature, backend=backend)
        if level == "hidden states":
            out = bapo_linear_loss(hidden, weight, *arguments, chunk_tokens=5, **options)
            return out.loss, out.log_probs.detach()
        logits = hidden @ weight.T
        out = bapo_loss(logits, *arguments, **options)
        logp, entropy = log_probs(logits, arguments[0], **options)
        return out.loss + (logp * entropy).mean(), out.log_probs.detach()

    given = []
    for hidden, *arguments in hidden_batches((7, 9), device=device):
        shape = {"call": (), "sequence": (3,), "token": hidden.shape[:-1]}[per]
        T = per_token(shape, hidden.shape[1], 0.4, 2.0).to(device)
        given.append((hidden, T, *arguments))
    # Compiled, the gradient is made in backward, of sums in another order.
    check(loss, given, "aot_eager", same=assert_close)


@pytest.mark.slow
def test_linear_loss():
    """With Inductor; ``test_linear.py`` has the options."""
    weight = torch.randn(65, 16).bfloat16().requires_grad_()

    def loss(hidden, *arguments):
        out = bapo_linear_loss(hidden, weight, *arguments)
        return out.loss, out.metrics["pg_clipfrac"]

    check(loss, hidden_batches((7, 9), torch.bfloat16))


@pytest.mark.slow
def test_loss_from_log_probs():
    def loss(logp, old, advantages):
        out = bapo_loss_from_log_probs(logp, old, advantages, config=BAPOConfig.recipe())
        return out.loss, out.bounds.upper

    case = make_case(poison=False)
    old = case.old_log_probs
    check(loss, [(old + 0.3 * torch.randn_like(old), old, case.advantages)])


@pytest.mark.slow
def test_module():
    module = BAPOLoss(BAPOConfig.recipe(), statistics="live")

    def loss(x, *arguments):
        out = module(x, *arguments)
        return out.loss, out.metrics["live_tokens"]

    check(loss, batches([7]), dynamic=None)


@pytest.mark.slow
def test_packed_with_all_terms():
    config = BAPOConfig(
        loss_agg_mode="seq-mean-token-mean", entropy_coef=0.01, kl_loss_coef=0.1, clip_ratio_c=3.0
    )

    def loss(logits, labels, old, advantages, cu_seqlens):
        options = dict(config=config, cu_seqlens=cu_seqlens, ref_log_probs=old)
        out = bapo_loss(logits, labels, old, advantages, **options)
        return out.loss, out.metrics["kl_loss"]

    cases = {N: make_case((N,), 65, poison=False) for N in (20, 26)}
    offsets = {N: torch.tensor([0, 5, 5, 12, N]) for N in cases}
    check(loss, [(c.logits, *c.arguments()[:3], offsets[N]) for N, c in cases.items()])


@pytest.mark.slow
def test_lengths_as_normalisers_do_not_recompile():
    """Without a ``loss_scale_factor`` the padded length takes its place."""
    config = BAPOConfig(loss_agg_mode="seq-mean-token-sum-norm")
    check(loss_by(aside="pg_loss", config=config), batches((7, 9, 12)), "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("level", ["logits", "hidden states", "log-probs"])
def test_log_probs_of_a_compiled_loss_have_a_gradient(level):
    """Eager calls raise where they cannot compute it (``test_autograd.py``)."""
    case = make_case((3, 8), 65, poison=False)
    weight = torch.randn(16, 65)

    def loss(hidden):
        logits = hidden @ weight
        logp, _ = log_probs(logits, case.labels)
        if level == "logits":
            out = bapo_loss(logits, *case.arguments())
        elif level == "log-probs":
            out = bapo_loss_from_log_probs(logp, *case.arguments()[1:])
        else:
            out = bapo_linear_loss(hidden, weight.T.contiguous(), *case.arguments())
        eager = torch.where(case.response_mask, logp, 0.0)
        term = out.log_probs if torch.compiler.is_compiling() else eager
        return out.loss.detach() + 0.1 * term.sum(), term.detach()

    check(loss, [(torch.randn(3, 8, 16),)], "aot_eager", dynamic=None, same=assert_close)


N, V = 6, 40
OPTIONS = BAPOConfig(
    clip_ratio_c=3.0,
    kl_loss_coef=0.1,
    entropy_coef=0.01,
    logit_scale=1.1,
    final_logit_softcapping=30.0,
).options
GIVEN = [name for name in FIELDS if name not in ("rollout_log_probs", "lower", "upper")]
PRESENT = sum(1 << FIELDS.index(name) for name in GIVEN)
OWN_BOUNDS = 3 << FIELDS.index("lower")


def double(*shape):
    return torch.rand(*shape, dtype=torch.float64)


def moved(arguments, device):
    return tree_map_only(torch.Tensor, lambda a: a.to(device), arguments)


def sample_arguments(device="cpu"):
    torch.manual_seed(0)
    logits = torch.randn(2, 3, V)
    labels = torch.randint(0, V, (N,))
    counted = torch.ones(N, dtype=torch.bool)
    flags = torch.ones(N, dtype=torch.uint8)
    logp, entropy, stats = -double(N), double(N), double(N, 2) + 1
    tokens, weights = torch.rand(len(FIELDS), N) + 0.5, double(N)
    of_tokens = tokens, PRESENT, OPTIONS
    statistics = logp, entropy, stats
    table, bounds, masses = double(2, 54), torch.tensor([0.8, 1.2]), double(6)
    row_pass = (counted, weights, tokens, PRESENT, None, OPTIONS, *statistics, flags)
    row_gradient = (stats, entropy, double(N), double(N), flags, *of_tokens)
    log_ratios = double(N)
    searched = (logp, counted, log_ratios, *of_tokens)
    ticket = torch.zeros(1, dtype=torch.int32)
    ids, offsets = torch.arange(0, 36, 3, dtype=torch.int32), torch.arange(0, 14, 2)[: N + 1]
    values, shard = torch.randn(len(ids)), torch.tensor([0, V])
    hidden, weight, bias = torch.randn(N, 8), torch.randn(V, 8), torch.randn(V)
    where = counted, ids, offsets, shard
    order, segments = torch.arange(len(ids)), torch.arange(V + 1).clamp(max=len(ids))
    masks = torch.empty_like(counted), torch.empty_like(counted)
    fields = [tokens[k].view(2, 3) if k < 2 else None for k in range(len(FIELDS))]
    rows, sets = (logits, None, labels), (values, offsets, labels % 2)
    arguments = {
        "row_statistics": (*rows, counted, *of_tokens, *statistics),
        "row_pass": (*rows, *row_pass, torch.empty_like(logits)),
        "row_pass_": (*sets, *row_pass),
        "row_gradient": (*rows, *row_gradient, torch.empty_like(logits)),
        "row_gradient_": (*sets, *row_gradient),
        "prepare": (
            *(labels.view(2, 3), counted.view(2, 3), fields, None, 1.0, None, None, bounds, True),
            *(OPTIONS, *masks, labels.clone(), weights, torch.empty_like(tokens), ticket),
        ),
        "contributions": (*searched, 1, table),
        "search": (*searched, bounds, masses),
        "solve": (table, OPTIONS, bounds, masses),
        "token_loss": (
            *(logp, entropy, counted, counted, weights, log_ratios, tokens, PRESENT, bounds),
            *(masses, OPTIONS, ticket, torch.empty(15), double(N), double(N)),
            *(torch.empty(2, N), double(N)),
        ),
        "sequence_log_ratios": (logp, counted, tokens, PRESENT, 3, None, double(N)),
        "add_sequence_means_": (logp, counted, 0, torch.tensor([0, 4, 6]), double(N)),
        "find_labels": (labels, ids, offsets, V, labels.clone()),
        "gather_sets": (logits, *where, values),
        "multiply_sets": (hidden, weight, bias, *where, values),
        "scatter_sets": (values, *where, logits),
        "head_sets_pass": (
            *(hidden, weight, bias, ids, *sets[1:], *row_pass, values, torch.zeros_like(hidden)),
        ),
        "sets_dhidden": (values, weight, *where[1:], flags, torch.zeros_like(hidden)),
        "sets_dweight": (
            *(values, hidden, order, (order // 2).int(), segments, True),
            *(torch.zeros_like(weight), bias),
        ),
        "scale_": (logits, torch.tensor(2.0)),
    }
    return moved(arguments, device)


@pytest.mark.parametrize("name", sorted(HEAD_SCHEMAS))
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_opcheck_of_the_head(name, frozen, masked):
    hidden, weight = torch.randn(2, 3, 8), torch.randn(V, 8)
    bias = None if frozen else torch.randn(V)
    # The values of rows that are not counted may be anything.
    tokens = torch.randint(0, V, (N,)), (torch.arange(N) % 3 != 0) | masked
    options = torch.rand(len(FIELDS), N) + 0.5, PRESENT, OPTIONS, torch.float32, torch.float32
    ids, offsets = torch.arange(12, dtype=torch.int32), torch.tensor([0, 4, 4, 8, 12, 12, 12])
    mask = (ids, offsets) if masked else (None, None)
    arguments = (hidden, weight, bias, *tokens, *options, "cpu", 4, None, None, *mask)
    if name == "head_forward":
        arguments = (frozen, *arguments)
    else:
        _, *statistics, _, values = torch_ops_of("cpu").head_forward(frozen, *arguments)
        needs = [True, not frozen, not frozen]
        arguments = (-double(N), double(N), *statistics, values, needs, *arguments)
    op = getattr(torch_ops_of("cpu"), name).default
    torch.library.opcheck(op, arguments)
    assert torch.Tag.cudagraph_unsafe in op.tags, "it reads row counts on the host"


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_opcheck(backend, device, name):
    torch.library.opcheck(
        getattr(torch_ops_of(backend), name).default, sample_arguments(device)[name]
    )


def test_every_op_is_checked():
    assert set(SCHEMAS) == set(sample_arguments())


def test_ops_refuse_what_would_corrupt_memory(backend, device):
    for name, position, bad in (
        ("row_pass", 2, torch.zeros(N - 1, dtype=torch.long)),  # too few labels
        ("row_pass", 2, torch.zeros(N)),  # labels of another dtype
        ("row_pass", 5, torch.ones(len(FIELDS), N + 1)),  # fields of too many tokens
        ("row_pass", 5, torch.ones(len(FIELDS) - 1, N)),  # too few fields
        ("row_pass", 6, 0),  # no advantages
        ("row_pass", 6, PRESENT | 1 << FIELDS.index("lower")),  # one of both bounds
        ("row_pass", 7, torch.ones(2, N)),  # bounds of tokens in the place of those of all
        ("row_pass", -1, torch.empty(2, 3, V - 1)),  # another gradient shape
        ("row_statistics", -1, double(N)),  # too few statistics
        ("row_statistics", 4, None),  # no temperatures
        ("row_gradient", 3, double(N)),  # too few statistics
        ("row_pass_", 1, torch.arange(N + 1).int()),  # offsets of another dtype
        ("row_pass_", 1, torch.arange(N)),  # too few offsets
        ("row_gradient_", 0, torch.empty(12).double()),  # values of another dtype
        ("prepare", 1, torch.zeros(2, 2)),  # a mask of another shape
        ("prepare", 2, [torch.zeros(2, 3)]),  # too few fields
        ("prepare", 2, [None] * len(FIELDS)),  # no advantages to tell what is live
        ("prepare", -5, torch.zeros(N, dtype=torch.int32)),  # a mask of another dtype
        ("prepare", -2, torch.zeros(1, N)),  # room for one field
        ("prepare", -2, None),  # room for none
        ("prepare", 3, torch.tensor([0, 6])),  # offsets of padded tokens
        ("contributions", -1, double(2, 53)),  # another grid's table
        ("contributions", -2, 2),  # a rank beyond the table
        ("search", -1, double(5)),  # too few masses
        ("token_loss", -5, torch.empty(14)),  # a report of another version
        ("token_loss", -2, torch.empty(1, N)),  # no room for the entropies
        ("token_loss", 8, None),  # no bounds
        ("sequence_log_ratios", 4, 4),  # no number of sequences
        ("sequence_log_ratios", -1, double(N - 1)),  # room for too few ratios
        ("add_sequence_means_", 3, torch.tensor([0])),  # no sequence
        ("add_sequence_means_", 3, torch.tensor([0.0, 6.0])),  # offsets that are no integers
        ("find_labels", 2, torch.arange(N)),  # too few offsets
        ("gather_sets", 2, torch.arange(12)),  # ids of another dtype
        ("gather_sets", -1, torch.empty(11)),  # too few values
        ("multiply_sets", 1, torch.randn(V, 7)),  # a head of another width
        ("head_sets_pass", -1, torch.zeros(N, 8).bfloat16()),  # gradients of fewer bits
        ("sets_dhidden", -1, torch.zeros(N - 1, 8)),  # room for too few rows
        ("sets_dweight", 4, torch.arange(V)),  # too few segments
    ):
        arguments = list(sample_arguments(device)[name])
        arguments[position] = moved(bad, device)
        with pytest.raises(RuntimeError, match="must"):
            getattr(torch_ops_of(backend), name)(*arguments)


@pytest.mark.parametrize("name", [n for n in SCHEMAS if "float[] options" in SCHEMAS[n]])
def test_ops_refuse_options_of_another_version(backend, device, name):
    arguments = sample_arguments(device)[name]
    arguments = [list(a[:5]) if isinstance(a, Options) else a for a in arguments]
    with pytest.raises(RuntimeError, match="options must be 23 numbers, got 5"):
        getattr(torch_ops_of(backend), name)(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_in_place_raises(fullgraph, dtype):
    """In-place is for eager code; a compiled call must never train on a wrong gradient."""
    linear, hidden = torch.nn.Linear(8, 257, dtype=dtype), torch.randn(3, 7, 8, dtype=dtype)
    arguments = make_case(poison=False).arguments()

    def loss(hidden):
        return bapo_loss(linear(hidden), *arguments, inplace=True).loss

    with pytest.raises(RuntimeError):
        torch.compile(loss, fullgraph=fullgraph)(hidden).backward()


@pytest.mark.slow
def test_find_clip_bounds():
    def upper(logp, old, advantages):
        return find_clip_bounds(logp, old, advantages).upper

    case = make_case((8, 32), staleness=0.0, poison=False)
    old = case.old_log_probs
    arguments = (old + 0.4 * torch.randn_like(old), old, case.advantages)
    assert torch.compile(upper, fullgraph=True)(*arguments) == upper(*arguments)


@pytest.mark.slow
def test_log_probs_without_gradient_and_without_entropy():
    def both(logits, labels):
        with torch.no_grad():
            return log_probs(logits, labels, return_entropy=False)[0]

    case = make_case(poison=False)
    compiled = torch.compile(both, fullgraph=True)
    assert torch.equal(compiled(case.logits, case.labels), both(case.logits, case.labels))


@pytest.mark.slow
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("level", ["logits", "hidden states"])
def test_collectives_are_part_of_the_graph(tmp_path, level, shards):
    """They do not split it."""
    group = dict(rank=0, world_size=1, init_method=f"file://{tmp_path / 'store'}")
    torch.distributed.init_process_group("gloo", **group)
    try:
        case = make_case((4, 8), 65, staleness=0.4, poison=False)
        groups = dict(process_group=torch.distributed.group.WORLD)
        if shards:
            groups["vocab_group"] = torch.distributed.group.WORLD

        def loss(x):
            if level == "logits":
                out = bapo_loss(x, *case.arguments(), **groups)
            else:
                out = bapo_linear_loss(x, weight, *case.arguments(), **groups)
            return out.loss, out.metrics["bapo_pos_share"]

        weight = torch.randn(65, 16).bfloat16().requires_grad_()
        hidden = torch.randn(4, 8, 16).bfloat16()
        x = case.logits if level == "logits" else hidden
        check(loss, [(x,)], "aot_eager", dynamic=None)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("function", [bapo_loss, log_probs])
def test_inside_activation_checkpointing(function):
    case = make_case((3, 8), 65, poison=False)
    weight = torch.randn(16, 65)

    def of_hidden(hidden):
        logits = hidden @ weight
        if function is log_probs:
            return log_probs(logits, case.labels)[0].sum()
        return bapo_loss(logits, *case.arguments()).loss

    def loss(hidden):
        value = checkpoint(of_hidden, hidden, use_reentrant=False)
        return value, value.detach()

    check(loss, [(torch.randn(3, 8, 16),)], "aot_eager", dynamic=None)


class Policy(torch.nn.Module):
    """Log-probs and loss of a model's own logits, and of its hidden states and head."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(65, 16)
        self.lm_head = torch.nn.Linear(16, 65)

    def forward(self, tokens, labels, old, advantages, mask):
        hidden = self.embedding(tokens)
        logits = self.lm_head(hidden)
        logp, entropy = log_probs(logits, labels)
        out = bapo_loss(logits, labels, old, advantages, mask)
        head = self.lm_head.weight, labels
        of_hidden = linear_log_probs(hidden, *head, bias=self.lm_head.bias, chunk_tokens=5)
        loss = out.loss + 0.1 * of_hidden[0].mean()
        return loss, out.metrics["pg_clipfrac"], logp, entropy, *of_hidden


def tokens_and_arguments(shape=(4, 8), seed=0):
    case = make_case(shape, 65, staleness=0.0, poison=False, seed=seed)
    return case.labels.clamp(min=0), *case.arguments()


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    """The forward of a policy, for any number of tokens."""
    torch.manual_seed(0)
    policy = Policy()
    S = torch.export.Dim("S", min=2, max=64)
    with torch.no_grad():
        program = torch.export.export(
            policy, tokens_and_arguments(), dynamic_shapes=[{1: S}] * 5, strict=strict
        )
        for arguments in (tokens_and_arguments(), tokens_and_arguments((4, 11), seed=1)):
            for a, b in zip(program.module()(*arguments), policy(*arguments), strict=True):
                assert torch.equal(a, b)


def sharded_policy_rank(rank, compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    policy = Policy()
    mesh = grid(2, 1)["data"]
    fully_shard(policy.lm_head, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    if compiled:
        policy.compile(backend="aot_eager")
    for seed in (0, 1):
        loss, *_ = policy(*tokens_and_arguments(seed=2 * seed + rank))
        loss.backward()
    return loss.detach(), [p.grad.full_tensor() for p in policy.parameters()]


@pytest.mark.xdist_group("world")
def test_inside_fsdp2(worlds):
    runs = [worlds(2).run(sharded_policy_rank, compiled) for compiled in (False, True)]
    for (loss, gradients), (expected, of_eager) in zip(*runs, strict=True):
        assert torch.equal(loss, expected)
        for a, b in zip(gradients, of_eager, strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_cuda_graphs(backend, device):
    """``reduce-overhead`` replays a CUDA graph: the loss reads new values from static memory."""
    loss_of = loss_by(backend=backend)
    compiled = torch.compile(loss_of, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        (batch,) = batches([7], device=device, seed=seed)
        compare(loss_of, compiled, *batch)


WEIGHT = torch.linspace(-1, 1, 13 * 6).view(13, 6).sin()


def batch_of(layout, B):
    """A batch with 4 tokens per sequence."""
    torch.manual_seed(B)
    shape = (4 * B,) if layout == "packed" else (B, 4)
    return dict(
        hidden=torch.randn(*shape, 6),
        labels=torch.randint(0, 13, shape),
        log_probs=-torch.rand(shape),
        old=-torch.rand(shape),
        tokens=(torch.randn(shape if layout == "[B, S]" else B), torch.ones(shape)),
        offsets=dict(cu_seqlens=torch.arange(B + 1) * 4 if layout == "packed" else None),
    )


def by_logits(x):
    logits = x["hidden"] @ WEIGHT.T
    return bapo_loss(logits, x["labels"], x["old"], *x["tokens"], **x["offsets"]).loss


def by_hidden(x):
    arguments = x["hidden"], WEIGHT, x["labels"], x["old"], *x["tokens"]
    return bapo_linear_loss(*arguments, bias=WEIGHT[:, 0], **x["offsets"]).loss


def by_log_probs(x):
    options = dict(config=BAPOConfig(entropy_coef=0.1), entropy=x["old"], ref_log_probs=x["old"])
    arguments = x["log_probs"], x["old"], *x["tokens"]
    return bapo_loss_from_log_probs(*arguments, **options, **x["offsets"]).loss


def by_histogram(x):
    histogram = ContributionHistogram()
    histogram.update(x["log_probs"], x["old"], *x["tokens"], **x["offsets"])
    return histogram.solve().upper


FUNCTIONS = {
    "bapo_loss": by_logits,
    "bapo_linear_loss": by_hidden,
    "bapo_loss_from_log_probs": by_log_probs,
    "find_clip_bounds": lambda x: find_clip_bounds(x["log_probs"], x["old"], *x["tokens"]).upper,
    "ContributionHistogram": by_histogram,
    "log_probs": lambda x: log_probs(x["hidden"], x["labels"] % 6, temperature=0.7)[0],
    "linear_log_probs": lambda x: linear_log_probs(x["hidden"], WEIGHT, x["labels"])[0],
}
BATCHES = [
    (name, layout, dynamic)
    for name in FUNCTIONS
    for layout in ("[B]", "[B, S]", "packed")
    for dynamic in (True, None)
    if (name, layout) != ("find_clip_bounds", "packed")  # it takes no offsets
    if dynamic or name == "bapo_loss_from_log_probs"  # None: dynamic from the second size on
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout", "dynamic"), BATCHES)
def test_batch_sizes_do_not_recompile(name, layout, dynamic):
    """One graph, compiled at most twice: checks use sizes only in their messages."""
    function = FUNCTIONS[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="eager")
    for B in (3, 5, 7):
        batch = batch_of(layout, B)
        assert torch.equal(compiled(batch), function(batch))
    assert graphs() <= 2


def by_number(of_number):
    x = batch_of("[B]", 3)
    arguments = x["hidden"] @ WEIGHT.T, x["labels"], x["old"], *x["tokens"]
    return lambda number: bapo_loss(*arguments, **of_number(number)).loss


NUMBERS = {
    "batch_num_tokens": by_number(lambda n: dict(batch_num_tokens=n)),
    "dp_size": by_number(lambda n: dict(batch_num_tokens=n, dp_size=n)),
    "bounds": by_number(lambda n: dict(bounds=(0.8, n))),
    "config": by_number(lambda n: dict(config=BAPOConfig(ratio_upper_max=n, clip_ratio_c=n))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_a_call_may_be_dynamic(name):
    """Checks use the numbers only in their messages, whether the compiler knows them or not."""
    compiled = torch.compile(NUMBERS[name], fullgraph=True, dynamic=True, backend="eager")
    for number in (2, 3) if name == "dp_size" else (1.5, 2.5):
        assert torch.equal(compiled(number), NUMBERS[name](number))
