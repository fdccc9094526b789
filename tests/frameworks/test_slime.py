"""slime's options through its adapter: against the reference in float64, and against slime itself.

slime is not on PyPI: where it can be imported (624b824, 0.3.1), its own loss is run too. Otherwise
its functions, and Megatron's, have stand-ins from their formulas.
"""

import sys
from argparse import Namespace
from collections import defaultdict
from functools import partial
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from helpers import EPS, assert_within_budget, fixed_bounds, needs_native
from parity import Found, assert_parity, found, in_both, recorded
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from bapo_kernels import BAPOConfig, reference
from bapo_kernels.integrations import slime
from bapo_kernels.integrations.slime import bapo_loss_function
from bapo_kernels.tools.budget import in_some_orders, largest

pytestmark = [needs_native, pytest.mark.xdist_group("world")]

V, TEMPERATURE = 33, 0.8
PADDING = 5  # rows at the end: slime has multiples of 128
DENOMINATORS = [3.0, 2.0, 9.0]  # of the rollouts, not of the samples
RESPONSE_LISTS = ("loss_masks", "log_probs", "rollout_log_probs", "ref_log_probs", "advantages")
DEFAULTS = dict(
    advantage_estimator="grpo", allgather_cp=False, calculate_per_token_loss=False,
    custom_pg_loss_reducer_function_path=None, custom_tis_function_path=None, entropy_coef=0.0,
    eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=None, get_mismatch_metrics=False,
    log_probs_chunk_size=-1, on_policy=False, rollout_temperature=TEMPERATURE,
    rollout_top_p=1.0, use_kl_loss=False, use_opsm=False, use_rollout_logprobs=False,
    use_tis=False, use_unbiased_kl=False,
)  # fmt: skip
FIXED = fixed_bounds(0.8, 1.28)
KL = dict(use_kl_loss=True, kl_loss_coef=0.3)
TIS = dict(use_tis=True, tis_clip=1.5, tis_clip_low=0.4)
OPSM = dict(use_opsm=True, opsm_delta=0.25)
GSPO = dict(advantage_estimator="gspo")
REJECTION = TIS | dict(custom_tis_function_path="test_slime.rejecting")
OPTIONS = {
    "plain": {},
    "entropy": dict(entropy_coef=0.1),
    **{kind: KL | dict(kl_loss_type=kind) for kind in ("k1", "k2", "k3", "low_var_kl")},
    "unbiased KL": KL | dict(kl_loss_type="low_var_kl", use_unbiased_kl=True),
    "TIS": TIS,
    "TIS, on-policy": TIS | dict(on_policy=True),
    "OPSM": OPSM,
    "GSPO": GSPO,
    "CISPO": dict(advantage_estimator="cispo"),
    "rollout log-probs": dict(use_rollout_logprobs=True),
    "all": KL | TIS | OPSM | GSPO | dict(kl_loss_type="k3", entropy_coef=0.1),
    "rejection": REJECTION,
    "rejection, GSPO": REJECTION | GSPO,
    "reducer": dict(custom_pg_loss_reducer_function_path="test_slime.sums", entropy_coef=0.1),
    "sums": TIS | dict(calculate_per_token_loss=True, entropy_coef=0.1),
}


def arguments(**options):
    """As slime's parser has them, with targets that need a search."""
    search = {"target": 0.4 if "gspo" in options.values() else 0.5}
    return Namespace(**(DEFAULTS | dict(bapo_options=search) | options))


def batch_of(args, masked=(), prompts=(3, 1, 2)):
    """Three samples packed, with responses of 4, 2 and 5 tokens; logits; their rows and labels.

    Some rollouts are masked as a whole, as by slime's ``remove_sample``.
    """
    g = torch.Generator().manual_seed(4)
    responses = [4, 2, 5]
    totals = [sum(lengths) for lengths in zip(prompts, responses, strict=True)]
    tokens = [torch.randint(0, V, (n,), generator=g) for n in totals]
    logits = 3 * torch.randn(1, sum(totals), V, generator=g)
    logits = torch.cat([logits, torch.full((1, PADDING, V), 7.0)], 1)
    ends = torch.tensor(totals).cumsum(0).tolist()
    rows = [torch.arange(e - r - 1, e - 1) for e, r in zip(ends, responses, strict=True)]
    labels = [t[-r:] for t, r in zip(tokens, responses, strict=True)]
    logp, _ = log_probs(logits.double(), rows, labels)
    masks = [torch.ones(r) for r in responses]
    masks[2][1] = 0

    def near(scale):  # ratios above and below 1
        moved = zip(logp, (-0.5, 0.0, 0.2), strict=True)
        return [(x + d + scale * torch.randn(len(x), generator=g)).float() for x, d in moved]

    batch = dict(
        unconcat_tokens=tokens, total_lengths=totals, response_lengths=responses, loss_masks=masks,
        log_probs=near(0.4), rollout_log_probs=near(0.6), ref_log_probs=near(0.3),
        advantages=[torch.full_like(x, A) for x, A in zip(masks, (1.0, -0.9, -0.6), strict=True)],
        rollout_mask_sums=[torch.tensor(n) for n in DENOMINATORS],
    )  # fmt: skip
    for sample in masked:
        batch["loss_masks"][sample].zero_()
        batch["rollout_mask_sums"][sample].zero_()
    if args.on_policy:
        batch["log_probs"] = None
    return batch, logits, rows, labels


def log_probs(logits, rows, labels):
    """Log-probs and entropies of each response."""
    made = [
        reference.log_probs(logits[0, at], label, temperature=TEMPERATURE)
        for at, label in zip(rows, labels, strict=True)
    ]
    return zip(*made, strict=True)


# Stand-ins.


def stand_in(monkeypatch, name, **functions):
    """Imports find a module with these functions, and its parents."""
    parents = name.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        parent = ".".join(parents[:depth])
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    module = ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def megatron(monkeypatch, size=1, rank=0, group=None, tensor_group=None):
    """``megatron.core.mpu`` with context parallelism or tensor parallelism."""
    mpu = Namespace(
        get_context_parallel_world_size=lambda: size,
        get_context_parallel_rank=lambda: rank,
        get_context_parallel_group=lambda: group,
        get_tensor_model_parallel_world_size=lambda: 2 if tensor_group else 1,
        get_tensor_model_parallel_group=lambda: tensor_group,
    )
    stand_in(monkeypatch, "megatron.core", mpu=mpu)


def slimes(monkeypatch, own=None):
    """The functions of slime that the adapter calls, on a rank that has ``own`` tokens."""
    parts = {
        "utils.ppo_utils": dict(compute_approx_kl=approx_kl, compute_opsm_mask=opsm),
        "utils.misc": dict(load_function=lambda path: globals()[path.split(".")[1]]),
        "backends.megatron_utils.loss": dict(vanilla_tis_function=truncated),
        "backends.megatron_utils.cp_utils": dict(get_sum_of_sample_mean=reduction_of(own)),
    }
    for name, functions in parts.items():
        stand_in(monkeypatch, f"slime.{name}", **functions)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    megatron(monkeypatch)
    slimes(monkeypatch)


def reduction_of(own=None):
    """``get_sum_of_sample_mean`` of a rank that has these tokens of every response."""

    def made(total_lengths, response_lengths, loss_masks, denominators, per_token):
        at = [slice(None)] * len(loss_masks) if own is None else own
        masks = [mask[i] for mask, i in zip(loss_masks, at, strict=True)]
        scales = [1.0 if per_token else torch.as_tensor(n).clamp(min=1) for n in denominators]

        def reduction(x):
            parts = zip(x.split([len(mask) for mask in masks]), masks, scales, strict=True)
            return sum((x_i * mask).sum() / n for x_i, mask, n in parts)

        return reduction

    return made


def reduction_of_batch(args, batch, own=None):
    masks, denominators = batch["loss_masks"], batch["rollout_mask_sums"]
    return reduction_of(own)(None, None, masks, denominators, args.calculate_per_token_loss)


def approx_kl(log_probs, log_probs_base, kl_loss_type, importance_ratio=None):
    d = log_probs - log_probs_base
    kl = {"k1": d, "k2": d**2 / 2}.get(kl_loss_type, torch.exp(-d) - 1 + d)
    kl = kl if importance_ratio is None else importance_ratio * kl
    return kl.clamp(-10, 10) if kl_loss_type == "low_var_kl" else kl


def mean(values, mask):
    return (values * mask).sum() / mask.sum().clamp(min=1)


def opsm(args, full_log_probs, full_old_log_probs, advantages, loss_masks):
    samples = zip(full_log_probs, full_old_log_probs, advantages, loss_masks, strict=True)
    drops = [
        ((mean(old - logp, mask) > args.opsm_delta) & (A < 0)).float()
        for logp, old, A, mask in samples
    ]
    shares = zip(drops, loss_masks, strict=True)
    return 1 - torch.cat(drops), sum(drop.sum() / mask.sum().clamp(min=1) for drop, mask in shares)


def truncated(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **_):
    ratio = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp()
    factors = ratio.clamp(args.tis_clip_low, args.tis_clip)
    return pg_loss * factors, loss_masks, {"tis": ratio, "tis_clipfrac": (factors != ratio).float()}


def rejecting(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **_):
    """A correction with rejection: the first token of every response."""
    tokens = pg_loss, train_log_probs, rollout_log_probs, loss_masks
    pg_loss, masks, metrics = truncated(args, *tokens)
    kept = [torch.cat([0.0 * mask[:1], mask[1:]]) for mask in masks]
    return pg_loss, kept, metrics


def sums(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    """A reducer of the policy term alone."""
    mask = torch.cat(loss_masks)
    return lambda x: (x * mask).sum() / 7


# The loss.


def run(args, batch, logits, own=None, function=bapo_loss_function):
    reduction = reduction_of_batch(args, batch, own)
    return found(lambda leaf: function(args, batch, leaf, reduction), logits)


def check(got, args, batch, logits, *case):
    same, truth = in_both(lambda leaf: expected(args, batch, leaf, *case), logits)
    assert_parity(got, same, truth, largest(torch.cat(batch["rollout_log_probs"])))


def expected(args, batch, logits, rows, labels):
    """The loss and what is logged: slime's terms around the policy's of the reference."""
    lengths, masks = batch["response_lengths"], batch["loss_masks"]
    logp, entropy = map(torch.cat, log_probs(logits, rows, labels))
    train = logp.detach() if args.on_policy else torch.cat(batch["log_probs"]).to(logits)
    rollout = torch.cat(batch["rollout_log_probs"]).to(logits)
    old = rollout if args.use_rollout_logprobs else train
    A = torch.cat(batch["advantages"]).to(logits)
    factors, kept, log, metrics = torch.ones_like(A), masks, {}, {}
    if args.use_opsm:
        samples = [x.split(lengths) for x in (logp, old, A)]
        factors, log["opsm_clipfrac"] = opsm(args, *samples, masks)
        assert 0 < factors.sum() < len(A), "the case must need the masking"
    if args.use_tis:
        correction = rejecting if args.custom_tis_function_path else truncated
        samples = [x.split(lengths) for x in (train, rollout)]
        factors, kept, metrics = correction(args, factors, *samples, masks)
    reduce, given = (reduction_of_batch(args, batch | dict(loss_masks=m)) for m in (kept, masks))
    ones = torch.ones_like(A, requires_grad=True)
    reducer = sums(None, None, kept, None) if args.custom_pg_loss_reducer_function_path else reduce
    (weights,) = torch.autograd.grad(reducer(ones), ones)

    named = dict(gspo=dict(ratio_level="sequence"), cispo=dict(surrogate="cispo"))
    named = named.get(args.advantage_estimator, {}) | dict(loss_agg_mode="token-sum")
    config = BAPOConfig(**(named | args.bapo_options))
    tokens = logp, old, A * torch.cat(kept), rollout, weights * factors
    padded = [pad_sequence(x.split(lengths), batch_first=True) for x in tokens]
    *tokens, rollouts, weights = padded
    further = dict(rollout_log_probs=rollouts, rollout_is_weights=weights, config=config)
    mask = pad_sequence(masks, batch_first=True)
    out = reference.bapo_loss_from_log_probs(*tokens, mask, **further)
    log_ratio = logp - old
    if config.ratio_level == "sequence":
        ratios = zip(log_ratio.split(lengths), masks, strict=True)
        log_ratio = torch.cat([mean(x, mask).expand_as(x) for x, mask in ratios])
    if config.has_bounds:
        low, high = (b.to(logits) for b in out.bounds)
        searches = low > 0.6 or high > 1.2
        assert searches or args.custom_tis_function_path, "the case must need a search"
        # slime divides bounds, too, by its count of rollouts or tokens.
        scale = given(torch.ones(11)) + sum(not mask.any() for mask in masks)
        log |= dict(bapo_clip_low=low * scale, bapo_clip_high=high * scale)
    log |= dict(pg_loss=out.loss, entropy_loss=reduce(entropy), ppo_kl=-reduce(log_ratio))
    loss = out.loss - args.entropy_coef * reduce(entropy)
    if args.use_kl_loss:
        ratio = (logp - old).exp() if args.use_unbiased_kl else None
        ref = torch.cat(batch["ref_log_probs"])
        log["kl_loss"] = reduce(approx_kl(logp, ref, args.kl_loss_type, ratio))
        loss = loss + args.kl_loss_coef * log["kl_loss"]
    if args.use_tis:
        metrics["ois"] = log_ratio.exp()
        log |= {name: given(values) for name, values in metrics.items()}
    compared = logp if args.use_rollout_logprobs else old
    log["train_rollout_logprob_abs_diff"] = reduce((compared - rollout).abs())
    return loss, log


SAPO = {  # which slime has no names for
    "SAPO": dict(bapo_options=dict(surrogate="sapo")),
    "SAPO of sequences": dict(bapo_options=dict(surrogate="sapo", ratio_level="sequence")),
}


@pytest.mark.parametrize("name", OPTIONS | SAPO)
def test_options(name):
    args = arguments(**(OPTIONS | SAPO)[name])
    batch, *case = batch_of(args)
    got = run(args, batch, case[0])
    check(got, args, batch, *case)
    assert ("bapo_clip_high" in got.log) == (name in OPTIONS)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_as_slime_has_them(options, monkeypatch):
    """With the bounds of slime's own clip, its own functions give the same loss and gradient."""
    monkeypatch.undo()
    megatron(monkeypatch)
    theirs = pytest.importorskip("slime.backends.megatron_utils.loss").policy_loss_function
    args = arguments(bapo_options=FIXED, **options)
    batch, logits, *_ = batch_of(args)
    got = run(args, batch, logits)
    # slime takes logits of float32 alone: the noise of its own sums is the yardstick.
    same = in_some_orders(partial(run, args, batch, logits, None, theirs))
    assert set(same[0].log) <= set(got.log)
    for name in {"pg_clipfrac", "entropy_loss"} & same[0].log.keys():
        del same[0].log[name]
    assert_parity(got, same, same[0], largest(torch.cat(batch["rollout_log_probs"])))


def rank_of_context(rank, size, options, case):
    """What a rank finds, and the rows of its logits among all."""
    args = arguments(**options)
    batch, logits, *_ = batch_of(args, **case)
    totals, responses = batch["total_lengths"], batch["response_lengths"]
    starts = [0, *torch.tensor(totals).cumsum(0).tolist()]
    rows, own = [], []
    for start, total, response in zip(starts, totals, responses, strict=False):
        chunks = torch.arange(2 * size * -(-total // (2 * size))).view(2 * size, -1)
        at = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
        rows.append(torch.where(at < total, start + at, -1))
        places = at - (total - response - 1)
        own.append(places[(places >= 0) & (places < response)])
    rows = torch.cat([*rows, torch.full((PADDING,), -1)])
    if args.allgather_cp:
        padded = torch.arange(-(-logits.shape[1] // size) * size).view(size, -1)[rank]
        rows = torch.where(padded < sum(totals), padded, -1)
    for name in RESPONSE_LISTS[1:]:
        if batch[name]:
            batch[name] = [x[at] for x, at in zip(batch[name], own, strict=True)]
    part = torch.where(rows[:, None] < 0, 7.0, logits[0, rows])[None]
    with pytest.MonkeyPatch.context() as monkeypatch:
        megatron(monkeypatch, size, rank, dist.group.WORLD)
        slimes(monkeypatch, own)
        return run(args, batch, part, own), rows


CONTEXT = {
    **{k: (OPTIONS[k], {}) for k in ("plain", "TIS", "TIS, on-policy", "GSPO", "all", "rejection")},
    # All responses are in the last chunks of their samples, which the first zigzag rank has.
    "idle rank": (OPTIONS["all"] | dict(use_opsm=False), dict(prompts=(30, 14, 40))),
    "masked rollout": ({}, dict(masked=[2])),  # which the ranks count once
}


@pytest.mark.parametrize("allgather_cp", [False, True], ids=["zigzag", "all-gather"])
@pytest.mark.parametrize("name", CONTEXT)
def test_context_parallelism(name, allgather_cp, worlds):
    """The ranks' losses and metrics add up to those of the whole batch, and so the gradients."""
    options, case = CONTEXT[name]
    options = options | dict(allgather_cp=allgather_cp)
    ranks = worlds(2).run(rank_of_context, 2, options, case)
    args = arguments(**options)
    batch, *others = batch_of(args, **case)
    gradient = torch.zeros_like(others[0])
    for part, rows in ranks:
        gradient[0].index_add_(0, rows[rows >= 0], part.gradient[0, rows >= 0])
        assert not part.gradient[0, rows < 0].any()
    logged = {key: sum(part.log[key] for part, _ in ranks) for key in ranks[0][0].log}
    got = Found(sum(part.loss for part, _ in ranks), logged, gradient)
    check(got, args, batch, *others)
    if name == "idle rank" and not allgather_cp:
        assert not ranks[1][0].gradient.any()


def rank_of_vocabulary(rank, options):
    """What a rank finds from its columns of the logits."""
    args = arguments(**options)
    batch, logits, *_ = batch_of(args)
    with pytest.MonkeyPatch.context() as monkeypatch:
        megatron(monkeypatch, tensor_group=dist.group.WORLD)
        slimes(monkeypatch)
        return run(args, batch, logits.tensor_split(2, -1)[rank])


@pytest.mark.parametrize("name", ["plain", "all"])
def test_tensor_parallelism(name, worlds):
    """Every rank has the loss of the whole vocabulary, and the gradient of its columns."""
    ranks, args = worlds(2).run(rank_of_vocabulary, OPTIONS[name]), arguments(**OPTIONS[name])
    gradient = torch.cat([found.gradient for found in ranks], -1)
    for part in ranks:
        check(part._replace(gradient=gradient), args, *batch_of(args))


def test_masked_tokens_are_not_logged():
    """Nothing is read of them, and ``0*inf`` is not 0."""
    args, logs = arguments(**TIS), []
    for masked in (-1.0, -1000.0):
        batch, logits, *_ = batch_of(args)
        batch["log_probs"][2][1] = masked
        logs.append(run(args, batch, logits).log)
    assert logs[0] == logs[1]


MASKED = ["plain", "TIS", "all", "rejection", "reducer", "sums"]


@pytest.mark.parametrize("name", MASKED)
def test_masked_rollouts(name):
    """slime's divisor counts them, so what is logged must count them, too.

    Without an unmasked token everything else is 0.
    """
    args = arguments(bapo_options=FIXED, **OPTIONS[name])
    for masked in range(1, 4):
        batch, logits, *_ = batch_of(args, range(masked))
        batch["rollout_mask_sums"] = counts = [mask.sum() for mask in batch["loss_masks"]]
        _, log, gradient = run(args, batch, logits)
        divisor = sum(n.clamp(min=1) for n in counts) if args.calculate_per_token_loss else 3
        bounds = torch.stack([log["bapo_clip_low"], log["bapo_clip_high"]])
        true = recorded([0.8, 1.28])
        inherited = 2 * 1.28 * EPS[torch.float32]  # and of the quotient
        assert_within_budget("bounds", bounds / divisor, true, true, inherited=inherited)
    assert not gradient.any()
    assert all(value.isfinite() for value in log.values())
    assert log["pg_loss"] == log["entropy_loss"] == log["loss"] == 0


@pytest.mark.parametrize("name", [name for name in MASKED if name != "sums"])
def test_empty_response(name):
    """A sample that is a prompt alone changes nothing, unless slime counts tokens, at least one."""
    args = arguments(**OPTIONS[name])
    batch, logits, *_ = batch_of(args)
    without = run(args, batch, logits)
    further = {key: torch.empty(0) for key in RESPONSE_LISTS if batch[key]} | dict(
        unconcat_tokens=torch.tensor([3, 1]), total_lengths=2, response_lengths=0,
        rollout_mask_sums=torch.tensor(2.0),
    )  # fmt: skip
    batch |= {key: [*batch[key], value] for key, value in further.items()}
    torch.testing.assert_close(run(args, batch, logits), without, rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIONS)
def test_host_never_waits_for_the_device(name, monkeypatch):
    """With stand-ins for the losses of this package.

    Tensors of the device ``meta`` have no values, so what needs one on the host raises, as do
    boolean indices: on a GPU each would make the host wait.
    """

    def made(*shape):
        return torch.ones(*shape, device="meta", requires_grad=True)

    def loss(values, *_, **options):
        T, metrics = values.shape[0], defaultdict(lambda: made(()).detach())
        return SimpleNamespace(loss=made(()), log_probs=made(T), entropy=made(T), metrics=metrics)

    args = arguments(**OPTIONS[name])
    batch, logits, *_ = batch_of(args)
    for key, values in batch.items():
        if values:
            batch[key] = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in values]
    for function in ("bapo_loss", "bapo_loss_from_log_probs"):
        monkeypatch.setattr(slime, function, loss)
    monkeypatch.setattr(slime, "log_probs", lambda logits, *_, **__: made(2, len(logits)))
    bapo_loss_function(args, batch, made(*logits.shape), reduction_of_batch(args, batch))


@pytest.mark.parametrize("name", MASKED)
def test_recomputed_loss_function(name, monkeypatch):
    """``--recompute-loss-function`` computes nothing twice in forward."""
    args = arguments(**OPTIONS[name])
    batch, logits, *_ = batch_of(args)
    loss, _, gradient = run(args, batch, logits)
    functions = {name: Mock(wraps=getattr(slime, name)) for name in ("bapo_loss", "log_probs")}
    for function, counted in functions.items():
        monkeypatch.setattr(slime, function, counted)
    leaf, reduction = logits.clone().requires_grad_(), reduction_of_batch(args, batch)
    again, _ = checkpoint(bapo_loss_function, args, batch, leaf, reduction, use_reentrant=False)
    assert sum(counted.call_count for counted in functions.values()) == 1
    again.backward()
    assert sum(counted.call_count for counted in functions.values()) <= 2
    torch.testing.assert_close(again.detach(), loss, rtol=0, atol=0)
    torch.testing.assert_close(leaf.grad, gradient, rtol=0, atol=0)


def test_rollouts_cut_by_top_p_are_refused():
    args = arguments(rollout_top_p=0.9)
    batch, logits, *_ = batch_of(args)
    with pytest.raises(ValueError, match="rollout_top_p must be 1 with BAPO, got 0.9"):
        bapo_loss_function(args, batch, logits, torch.sum)
