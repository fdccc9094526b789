"""torch.compile in one graph with dynamic shapes, and what the ops tell the compiler."""

from itertools import product

import pytest
import torch
from accuracy import assert_as_reference
from helpers import KERNELS, exhaustive_unless, make_case
from torch._functorch.aot_autograd import aot_function
from torch._inductor.utils import run_and_get_code
from torch.testing import assert_close
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import bapo_kernels
from bapo_kernels import (
    BAPOConfig,
    BAPOLinearLoss,
    BAPOLoss,
    ClipBoundSearch,
    ContributionHistogram,
    SamplingMask,
    bapo_linear_loss,
    bapo_loss,
    bapo_loss_from_log_probs,
    find_clip_bounds,
    linear_log_probs,
    linear_top_k,
    log_probs,
    mean_metrics,
)
from bapo_kernels.config import Options
from bapo_kernels.core.operators import FIELDS, HEAD_SCHEMAS, NAMESPACES, SCHEMAS
from bapo_kernels.distillation import jsd, kl, masked, renormalised, with_tail
from bapo_kernels.output import REPORT

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not KERNELS, reason="no kernels")]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def loss_by(names=(), **fixed):
    """The loss of a batch, whose arguments beyond the mask have these names, and a metric."""

    def loss_of(logits, labels, old, advantages, mask, *more):
        options = dict(zip(names, more, strict=True)) | fixed
        out = bapo_loss(logits, labels, old, advantages, mask, **options)
        return out.loss, out.metrics["pg_clipfrac"]

    return loss_of


def batches(sizes, V=257, **options):
    """Logits, and what a loss takes beside them, of sequences of these lengths."""
    for S in sizes:
        case = make_case((3, S), V, poison=False, **options)
        yield case.logits, *case.arguments()


def compare(function, compiled, x, *arguments, close=False):
    """What is returned and the gradient are the same; or close, where a compiler adds up too."""

    def results(call):
        leaf = x.detach().clone().requires_grad_()
        value, *aside = call(leaf, *arguments)
        if value.requires_grad:
            value.sum().backward()
        return [value.detach(), *aside, leaf.grad]

    if close:
        return assert_as_reference(results(compiled), lambda _: results(function))
    assert_close(results(compiled), results(function), rtol=0, atol=0)


def check(function, given, compiler="inductor", dynamic=True, most=1, close=False):
    """So many graphs have the values and the gradient of the function, of every batch."""
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=compiler)
    for batch in given:
        compare(function, compiled, *batch, close=close)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= most


# Without a loss_scale_factor the padded length takes its place.
SUM_NORM = torch.float16, "seq-mean-token-sum-norm"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "mode"),
    exhaustive_unless(lambda *case: case != SUM_NORM, [(torch.float32, "token-mean"), SUM_NORM]),
)
def test_loss_with_dynamic_shapes(backend, device, interpreted, dtype, mode):
    given = batches((7, 9, 12), dtype=dtype, device=device)
    loss_of = loss_by(backend=backend, config=BAPOConfig(loss_agg_mode=mode))
    # What Inductor generates around the operators does not depend on their backend.
    check(loss_of, given, "aot_eager" if interpreted or dtype == torch.float32 else "inductor")


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

    with torch._dynamo.config.patch(error_on_recompile=True):
        check(loss_by(["bounds", "batch_num_tokens"], backend=backend), given(), "aot_eager")


@pytest.mark.slow
def test_a_lagged_search_compiles_once():
    """The first bounds, which no decision has made, are tensors as the later ones."""
    (batch,), search = batches([3], 65), ClipBoundSearch(scope="lagged")
    logits, labels, old, A, mask = batch
    compiled = torch.compile(bapo_loss, fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            out = compiled(logits.detach(), labels, old, A, mask, **search.options)
            search.update(out.log_probs, old, A, mask)
            search.step()


@pytest.mark.slow
@pytest.mark.parametrize("level", ["logits", "hidden states", "log-probs"])
def test_log_probs_of_a_compiled_loss_have_a_gradient(level):
    """Eager calls raise where they cannot compute it (``test_misuse.py``)."""
    case = make_case((3, 8), 65, poison=False)
    weight, (labels, *batch) = torch.randn(16, 65), case.arguments()

    def loss(hidden):
        logits = hidden @ weight
        logp, _ = log_probs(logits, labels)
        if level == "logits":
            out = bapo_loss(logits, labels, *batch)
        elif level == "log-probs":
            out = bapo_loss_from_log_probs(logp, *batch)
        else:
            out = bapo_linear_loss(hidden, weight.T.contiguous(), labels, *batch)
        eager = torch.where(case.response_mask, logp, 0.0)
        term = out.log_probs if torch.compiler.is_compiling() else eager
        return out.loss.detach() + 0.1 * term.sum(), term.detach()

    check(loss, [(torch.randn(3, 8, 16),)], "aot_eager", dynamic=None, close=True)


N, V = 6, 40
TERMS = dict(clip_ratio_c=3.0, kl_loss_coef=0.1, entropy_coef=0.01)
OPTIONS = BAPOConfig(logit_scale=1.1, final_logit_softcapping=30.0, **TERMS).options
GIVEN = [name for name in FIELDS if name not in ("rollout_log_probs", "lower", "upper")]
PRESENT = sum(1 << FIELDS.index(name) for name in GIVEN)


def double(*shape):
    return torch.rand(*shape, dtype=torch.float64)


def arguments_of(operator, device="cpu", **changes):
    """What an operator takes, by the names of its arguments."""
    torch.manual_seed(0)
    flags, ids = torch.ones(N, dtype=torch.uint8), torch.arange(0, 36, 3, dtype=torch.int32)
    tokens, K = torch.rand(len(FIELDS), N) + 0.5, len(ids)
    known = dict(logits=torch.randn(2, 3, V), labels=torch.randint(0, V, (N,)), offsets=None)
    known |= dict(counted=flags.bool(), unmasked=flags.bool(), weights=double(N))
    known |= dict(tokens=tokens, present=PRESENT, options=OPTIONS, bounds=torch.tensor([0.8, 1.2]))
    known |= dict(log_probs=-double(N), entropy=double(N), stats=double(N, 2) + 1)
    known |= dict(dlog_probs=double(N), dentropy=double(N), dlog_ratios=double(N))
    known |= dict(undecided=flags, only=flags, dlogits=torch.empty(2, 3, V))
    known |= dict(log_ratios=double(N), rank=1, table=double(2, 54), masses=double(6))
    known |= dict(ticket=torch.zeros(1, dtype=torch.int32), report=torch.empty(len(REPORT)))
    known |= dict(outputs=torch.empty(2, N), length=3, cu_seqlens=None)
    # Of prepare.
    known |= dict(labels_or_log_probs=torch.randint(0, V, (2, 3)))
    known |= dict(response_mask=torch.ones(2, 3).bool(), live=True)
    known |= dict(fields=[torch.rand(2, 3) if k < 2 else None for k in range(len(FIELDS))])
    known |= dict(scale=1.0, divisor=None, device_divisor=None)
    # Of sampling sets and of the head.
    known |= dict(token_ids=ids, vocab=V, shard=torch.tensor([0, V]), add=True)
    known |= dict(values=torch.randn(K), dvalues=torch.randn(K), positions=torch.zeros(N).long())
    known |= dict(hidden=torch.randn(N, 8), weight=torch.randn(V, 8), bias=torch.randn(V))
    known |= dict(dhidden=torch.zeros(N, 8), dweight=torch.zeros(V, 8), dbias=torch.zeros(V))
    known |= dict(order=torch.arange(K), rows=torch.arange(K).int() // 2)
    known |= dict(segments=torch.arange(V + 1).clamp(max=K))
    known |= dict(x=torch.randn(2, 3, V), factor=torch.tensor(2.0))
    # Of samples.
    known |= dict(beside=double(N), seeds=ids[:N], gradient_samples=2, counts=ids[:N].clone())
    known |= dict(ids=torch.zeros(N, 2).int(), drawn=None)
    if operator == "sample_rows":
        known |= dict(values=torch.zeros(N, 2), drawn=double(N, 4))
    names = [argument.split()[-1] for argument in SCHEMAS[operator].split(", ")]
    if not operator.startswith("row_") or operator.endswith("_"):
        known["offsets"] = torch.arange(0, 14, 2)[: N + 1]
    if operator in ("row_pass_", "row_gradient_", "head_sets_pass"):
        known |= dict(logits=known["values"], labels=known["labels"] % 2)
    if "row_pass" in operator or operator == "head_sets_pass":
        known["bounds"] = None
    if operator == "add_sequence_means_":
        known |= dict(length=0, cu_seqlens=torch.tensor([0, 4, 6]))
    given = [(known | changes)[name] for name in names]
    return tree_map_only(torch.Tensor, lambda a: a.to(device), given)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(HEAD_SCHEMAS))
@pytest.mark.parametrize(
    ("frozen", "masked", "labels", "samples"),  # every pair of the first three
    [
        *[(False, False, (N,), None), (True, True, (N,), None), (False, True, (N, 3), None)],
        *[(True, False, (N, 3), None), (False, True, (N,), 2), (True, False, (N, 3), 2)],
    ],
)
def test_opcheck_of_the_head(name, frozen, masked, labels, samples):
    head = torch.randn(2, 3, 8), torch.randn(V, 8), None if frozen else torch.randn(V)
    # The values of rows that are not counted may be anything.
    tokens = torch.randint(0, V, labels), (torch.arange(N) % 3 != 0) | masked
    options = torch.rand(len(FIELDS), N) + 0.5, PRESENT, OPTIONS, torch.float32, torch.float32
    offsets = torch.tensor([0, 4, 4, 8, 12, 12, 12])
    mask = (torch.arange(12, dtype=torch.int32), offsets) if masked else (None, None)
    arguments = (*head, *tokens, *options, 4, samples, "cpu", None, None, *mask)
    frozen = frozen and samples is None
    if name == "head_forward":
        arguments = (frozen, *arguments)
    elif name == "head_top_k":
        arguments = (3, *head, tokens[0].view(N, -1)[:, 0].contiguous(), *arguments[4:])
    else:
        *found, unscaled, values, sample = torch.ops.bapo_kernels.head_forward(frozen, *arguments)
        unscaled = unscaled if frozen and len(labels) == 2 else None
        needs = [True, not frozen, not frozen and head[2] is not None]
        given = -double(*labels), double(N), found, values, sample, unscaled, needs
        arguments = (*given, *arguments)
    op = getattr(torch.ops.bapo_kernels, name).default
    torch.library.opcheck(op, arguments)
    assert torch.Tag.cudagraph_unsafe in op.tags, "it reads row counts on the host"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_opcheck(backend, device, name):
    operator = getattr(getattr(torch.ops, NAMESPACES[backend]), name).default
    torch.library.opcheck(operator, tuple(arguments_of(name, device)))


def test_ops_refuse_what_would_corrupt_memory(backend, device):
    other_version = list(OPTIONS[:5])
    for operator, name, *wrong in (
        ("row_pass", "labels", torch.zeros(N - 1).long(), torch.zeros(N)),  # too few, no integers
        ("row_pass", "tokens", torch.ones(len(FIELDS), N + 1), torch.ones(len(FIELDS) - 1, N)),
        ("row_pass", "present", 0),  # no advantages
        ("row_pass", "present", PRESENT | 1 << FIELDS.index("lower")),  # one of both bounds
        ("row_pass", "bounds", torch.ones(2, N)),  # of tokens in the place of those of all
        ("row_pass", "dlogits", torch.empty(2, 3, V - 1)),
        ("row_statistics", "stats", double(N)),  # too few
        ("row_statistics", "labels", torch.zeros(N, 0).long(), torch.zeros(N, 2).long()),  # none, 2
        ("row_gradient", "dlog_probs", double(N, 2)),  # of one label
        ("row_statistics", "tokens", None),  # no temperatures
        ("row_gradient", "stats", double(N)),  # too few
        ("row_pass_", "offsets", torch.arange(N + 1).int(), torch.arange(N)),  # int32, too few
        ("row_gradient_", "logits", torch.empty(12).double()),  # values of another dtype
        ("prepare", "response_mask", torch.zeros(2, 2)),
        ("prepare", "fields", [torch.zeros(2, 3)]),  # too few
        ("prepare", "fields", [None] * len(FIELDS)),  # no advantages to tell what is live
        ("prepare", "counted", torch.zeros(N, dtype=torch.int32)),  # of another dtype
        ("prepare", "tokens", torch.zeros(1, N), None),  # room for one field, for none
        ("prepare", "cu_seqlens", torch.tensor([0, 6])),  # of padded tokens
        ("contributions", "table", double(2, 53)),  # of another grid
        ("contributions", "rank", 2),  # beyond the table
        ("search", "masses", double(5)),  # too few
        ("token_loss", "report", torch.empty(14)),  # of another version
        ("token_loss", "outputs", torch.empty(1, N)),  # no room for the entropies
        ("token_loss", "bounds", None),
        ("sequence_log_ratios", "length", 4),  # no number of sequences
        ("sequence_log_ratios", "log_ratios", double(N - 1)),  # room for too few
        ("add_sequence_means_", "cu_seqlens", torch.tensor([0])),  # no sequence
        ("add_sequence_means_", "cu_seqlens", torch.tensor([0.0, 6.0])),  # no integers
        ("find_labels", "offsets", torch.arange(N)),  # too few
        ("gather_sets", "token_ids", torch.arange(12)),  # of another dtype
        ("gather_sets", "values", torch.empty(11)),  # too few
        ("multiply_sets", "weight", torch.randn(V, 7)),  # of another width
        ("head_sets_pass", "dhidden", torch.zeros(N, 8).bfloat16()),  # of fewer bits
        ("sets_dhidden", "dhidden", torch.zeros(N - 1, 8)),  # room for too few rows
        ("sets_dweight", "segments", torch.arange(V)),  # too few
        ("row_gradient", "drawn", double(N, 4)),  # of rows that are no sets
        ("row_gradient_", "drawn", double(N, 3)),  # too few
        ("sample_rows", "ids", torch.zeros(N, 3).int(), torch.zeros(N, 0).int()),  # not as values
        ("sample_rows", "seeds", torch.zeros(N).long()),  # of another dtype
        ("sample_rows", "gradient_samples", 0),
        *((name, "options", other_version) for name in SCHEMAS if "[] options" in SCHEMAS[name]),
    ):
        rule = (
            f"options must be {len(Options._fields)} numbers, got 5"
            if name == "options"
            else "must"
        )
        for value in wrong:
            arguments = arguments_of(operator, device, **{name: value})
            with pytest.raises(RuntimeError, match=rule):
                getattr(getattr(torch.ops, NAMESPACES[backend]), operator)(*arguments)


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
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("level", ["logits", "hidden states"])
def test_collectives_are_part_of_the_graph(tmp_path, level, shards):
    """They do not split it."""
    group = dict(rank=0, world_size=1, init_method=f"file://{tmp_path / 'store'}")
    torch.distributed.init_process_group("gloo", **group)
    try:
        case = make_case((4, 8), 65, staleness=0.4, poison=False)
        head = torch.randn(4, 8, 16).bfloat16(), torch.randn(65, 16).bfloat16().requires_grad_()
        x, *weight = (case.logits,) if level == "logits" else head
        function = bapo_linear_loss if weight else bapo_loss
        names = ("process_group", "vocab_group") if shards else ("process_group",)
        groups = dict.fromkeys(names, torch.distributed.group.WORLD)

        def loss(x):
            out = function(x, *weight, *case.arguments(), **groups)
            shard = groups.get("vocab_group")
            best = linear_top_k(x, *weight, 3, vocab_group=shard) if weight else ()
            return out.loss, out.metrics["bapo_pos_share"], *best

        check(loss, [(x,)], "aot_eager", dynamic=None)
    finally:
        torch.distributed.destroy_process_group()


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
HEAD = torch.nn.Parameter(WEIGHT.clone())
MODULE = BAPOLoss(BAPOConfig.recipe(), statistics="live")
LINEAR = BAPOLinearLoss(BAPOConfig.recipe())
ALL_TERMS = BAPOConfig(loss_agg_mode="seq-mean-token-mean", **TERMS)


def batch_of(layout, B):
    """Hidden states and a batch of sequences of 4 tokens, in whose layout its advantages are."""
    torch.manual_seed(B)
    shape = (4 * B,) if layout == "packed" else (B, 4)
    labels, advantages = torch.randint(0, 13, shape), torch.randn(shape if "S" in layout else B)
    offsets = torch.arange(B + 1) * 4 if layout == "packed" else None
    old = -torch.rand(shape)
    return torch.randn(*shape, 6), labels, old, advantages, torch.ones(shape), offsets


def by_logits(x, y, old, A, mask, offsets, **options):
    return bapo_loss(x @ WEIGHT.T, y, old, A, mask, cu_seqlens=offsets, **options)[:1]


def by_hidden(x, y, old, A, mask, offsets, **options):
    options |= dict(bias=WEIGHT[:, 0], cu_seqlens=offsets)
    return bapo_linear_loss(x, HEAD, y, old, A, mask, **options)[:1]


def by_log_probs(x, y, old, A, mask, offsets):
    options = dict(config=BAPOConfig(entropy_coef=0.1), entropy=x[..., 1], ref_log_probs=old)
    return bapo_loss_from_log_probs(x[..., 0], old, A, mask, cu_seqlens=offsets, **options)[:1]


def by_histogram(x, y, old, A, mask, offsets):
    histogram = ContributionHistogram().update(x[..., 0], old, A, mask, cu_seqlens=offsets)
    return (histogram.solve().upper,)


def by_temperatures(x, y, old, A, mask, offsets):
    """Of tokens, of sequences, or one."""
    batch, T = (x, y, old, A, mask, offsets), A.abs() + 0.5
    T = T if offsets is None else T.mean()
    loss = by_logits(*batch, temperature=T)[0] + by_hidden(*batch, temperature=T, chunk_tokens=5)[0]
    logp, entropy = log_probs(x @ WEIGHT.T, y, temperature=T)
    return loss + (logp * entropy).mean(), logp.detach()


def in_a_checkpoint(x, y, *batch):
    def value(x):
        return by_logits(x, y, *batch)[0] + log_probs(x, y % 6)[0].sum()

    return (checkpoint(value, x, use_reentrant=False),)


def by_k_labels(x, y, old, A, mask, offsets):
    ids = torch.stack([y, (y + 1) % 6], -1)
    (by_head, _), (logp, entropy) = linear_log_probs(x, HEAD, ids), log_probs(x, ids % 6)
    return with_entropy((by_head + logp).sum(-1), entropy)


def by_sets(x, y, *batch):
    ids, counts = torch.stack([y, (y + 1) % 13], -1), torch.full_like(y, 2)
    mask, logits = SamplingMask.from_counts(ids.flatten(), counts), x @ WEIGHT.T
    logp, entropy = log_probs(logits, y, sampling_mask=mask)
    best, _ = linear_top_k(x, HEAD, 2, sampling_mask=mask)
    return by_logits(x, y, *batch, sampling_mask=mask)[0] + logp.mean(), entropy.detach(), best


def by_top_k(x, *_):
    """In float32, and in chunks of bfloat16."""
    return *linear_top_k(x, HEAD, 3), *linear_top_k(
        x.bfloat16(), HEAD.bfloat16(), 2, chunk_tokens=9
    )


def by_distillation(x, y, *_):
    """In float64: float32 does not show where a compiler rounds differently."""
    ids = torch.stack([y % 6, torch.where(y > 2, (y + 1) % 6, -100)], -1)
    teacher = torch.full(ids.shape, -1.0, dtype=torch.float16, device=x.device)
    s, t = (masked(z, ids).double() for z in (log_probs(x, ids)[0], teacher))
    tails = jsd(with_tail(s), with_tail(t), 0.3)
    return ((tails + kl(renormalised(s), renormalised(t))).float(),)


def with_entropy(logp, entropy):
    return logp + 0.1 * entropy, entropy.detach()


def averaged(logp, old, A, mask, offsets):
    outs = [
        bapo_loss_from_log_probs(logp, old, A, mask, cu_seqlens=offsets, bounds=bounds)
        for bounds in ((0.8, 1.2), (0.7, 1.4))
    ]
    return mean_metrics(outs)


FUNCTIONS = {
    "bapo_loss": by_logits,
    "all terms": lambda *batch: by_logits(*batch, ref_log_probs=batch[2], config=ALL_TERMS),
    "own bounds": lambda *batch: by_logits(*batch, bounds=(batch[3].sigmoid(), 1.2 - batch[2])),
    "temperatures": by_temperatures,
    "a checkpoint": in_a_checkpoint,
    "BAPOLoss": lambda x, *batch: MODULE(x @ WEIGHT.T, *batch[:-1], cu_seqlens=batch[-1])[:1],
    "BAPOLinearLoss": lambda x, *batch: LINEAR(x, HEAD, *batch[:-1], cu_seqlens=batch[-1])[:1],
    "bapo_linear_loss": by_hidden,
    "bapo_loss_from_log_probs": by_log_probs,
    "mean_metrics": lambda x, y, *batch: [*averaged(x[..., 0], *batch).values()],
    "find_clip_bounds": lambda x, y, *batch: (find_clip_bounds(x[..., 0], *batch[:-1]).upper,),
    "ContributionHistogram": by_histogram,
    "log_probs": lambda x, y, *_: with_entropy(*log_probs(x, y % 6, temperature=0.7)),
    "no gradient, no entropy": torch.no_grad()(
        lambda x, y, *_: log_probs(x, y % 6, return_entropy=False)[:1]
    ),
    "linear_top_k": by_top_k,
    "linear_log_probs": lambda x, y, *_: with_entropy(*linear_log_probs(x, HEAD, y)),
    "K labels": by_k_labels,
    "sampling mask": by_sets,
    "distillation": by_distillation,
    "sizes that become dynamic": by_log_probs,  # from the second on
}
ADDED_UP = (
    *("temperatures", "a checkpoint", "bapo_linear_loss", "BAPOLinearLoss", "linear_log_probs"),
    *("K labels", "sampling mask"),
)
COMPILERS = {"[B]": "eager", "[B, S]": "inductor", "packed": "aot_eager"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    exhaustive_unless(
        lambda name, layout: (
            layout == ("packed" if [*FUNCTIONS].index(name) % 2 else "[B]")
            or (name, layout)
            == ("distillation", "[B, S]")  # Inductor once read log-probs too early
        ),
        product(FUNCTIONS, COMPILERS),
    ),
)
def test_functions_of_any_batch_size(name, layout):
    """One graph, compiled at most twice: checks use sizes only in their messages."""
    if (name, layout) == ("find_clip_bounds", "packed"):
        pytest.skip("it takes no offsets")
    given = [batch_of(layout, B) for B in (3, 5, 7)]
    dynamic = None if name == "sizes that become dynamic" else True
    check(FUNCTIONS[name], given, COMPILERS[layout], dynamic, most=2, close=name in ADDED_UP)


def test_every_public_function_is_compiled():
    """What takes tensors; searches across calls are in a test of their own."""
    data = {"BAPOConfig", "BAPOOutput", "ClipBounds", "ClipBoundSearch", "LMHead", "SamplingMask"}
    others = {"available_backends", "debug", "empty_cache", "reference", "warm_up"}
    assert set(bapo_kernels.__all__) - data - others <= set(FUNCTIONS)


NUMBERS = {
    "batch_num_tokens": lambda n: dict(batch_num_tokens=n),
    "dp_size": lambda n: dict(batch_num_tokens=n, dp_size=n),
    "bounds": lambda n: dict(bounds=(0.8, n)),
    "config": lambda n: dict(config=BAPOConfig(ratio_upper_max=n, clip_ratio_c=n)),
    "temperature": lambda n: dict(temperature=n),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_a_call_may_be_dynamic(name):
    """Checks use the numbers only in their messages, whether the compiler knows them or not."""
    numbers = (2, 3) if name == "dp_size" else (1.5, 2.5)
    given = [(*batch_of("[B]", 3), number) for number in numbers]
    check(lambda *x: by_logits(*x[:-1], **NUMBERS[name](x[-1])), given, "eager", most=2)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "name", ["all terms", "temperatures", "linear_log_probs", "K labels", "linear_top_k"]
)
def test_export(name, strict):
    """Of a module that has the head as a parameter, for any number of sequences."""

    class Module(torch.nn.Module):
        def forward(self, *batch):
            return FUNCTIONS[name](*batch)

    module = Module()
    module.head = HEAD
    first, second = (batch_of("[B, S]", B) for B in (3, 5))
    sizes = ((*[{0: torch.export.Dim("B", min=2, max=64)}] * 5, None),)
    program = torch.export.export(module, first, dynamic_shapes=sizes, strict=strict)
    exported = program.module(check_guards=False)  # torch cannot check those of globals
    for batch in (first, second):
        assert_close(exported(*batch), module(*batch), rtol=0, atol=0)


def test_functional_tensors():
    """AOTAutograd alone calls the package with a kind of its own."""
    logits, labels, *_ = next(batches([7]))
    traced = aot_function(lambda *x: log_probs(*x)[0], lambda graph, _: graph)
    assert_close(traced(logits, labels), log_probs(logits, labels)[0], rtol=0, atol=0)


@pytest.mark.parametrize("call", [bapo_loss, log_probs])
def test_second_derivatives_are_refused(call):
    """By logits `[B, S, V]` that are an input; a view that is saved would be detached."""
    case = make_case((2, 3), 33, poison=False)
    given = case.arguments() if call is bapo_loss else case.arguments()[:1]
    compiled = torch.compile(lambda x: call(x, *given)[0].sum(), backend="aot_eager")
    leaf = case.logits.requires_grad_()
    (first,) = torch.autograd.grad(compiled(leaf * 2), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(first.sum(), leaf)
