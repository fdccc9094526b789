"""slime's options through its adapter: against formulas in float64, and against slime itself.

slime is not on PyPI: where it can be imported (624b824, 0.3.1), its own loss is run too.
"""

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import slime_case
import torch
import torch.distributed as dist
from helpers import EPS, assert_within_budget, fixed_bounds, needs_native
from parity import Found, assert_parity, found, in_both, recorded
from slime_case import TEMPERATURE
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from bapo_kernels import BAPOConfig, reference
from bapo_kernels.integrations import slime
from bapo_kernels.integrations.slime import bapo_loss_function
from bapo_kernels.tools.budget import in_some_orders, largest

pytestmark = [needs_native, pytest.mark.xdist_group("world")]

FIXED = fixed_bounds(0.8, 1.28)
OF_RESPONSES = ("loss_masks", "log_probs", "rollout_log_probs", "ref_log_probs", "advantages")
KL = dict(use_kl_loss=True, kl_loss_coef=0.3)
TIS = dict(use_tis=True, tis_clip=1.5, tis_clip_low=0.4)
OPSM = dict(use_opsm=True, opsm_delta=0.25)
GSPO = dict(advantage_estimator="gspo")
REJECTION = TIS | dict(custom_tis_function_path="slime_case.rejecting")
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
    "reducer": dict(custom_pg_loss_reducer_function_path="slime_case.sums", entropy_coef=0.1),
    "sums": TIS | dict(calculate_per_token_loss=True, entropy_coef=0.1),
}


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    slime_case.megatron(monkeypatch)
    slime_case.slime(monkeypatch, reduction_of())


def arguments(options, bapo_options=None):
    """With targets that need a search."""
    if bapo_options is None:
        bapo_options = {"target": 0.4 if "gspo" in options.values() else 0.5}
    return slime_case.arguments(**(dict(bapo_options=bapo_options) | options))


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


def run(args, batch, logits, own=None, function=bapo_loss_function):
    reduction = reduction_of_batch(args, batch, own)
    return found(lambda leaf: function(args, batch, leaf, reduction), logits)


def check(got, args, batch, logits, *case):
    same, truth = in_both(lambda leaf: expected(args, batch, leaf, *case), logits)
    assert_parity(got, same, truth, largest(torch.cat(batch["rollout_log_probs"])))


def batch_of(args, masked=(), **options):
    """Some rollouts are masked as a whole, as by slime's ``remove_sample``."""
    batch, off_policy, logits, rows, labels = slime_case.case(**options)
    batch |= off_policy
    for sample in masked:
        batch["loss_masks"][sample].zero_()
        batch["rollout_mask_sums"][sample].zero_()
    if args.on_policy:
        batch["log_probs"] = None
    return batch, logits, rows, labels


def expected(args, batch, logits, rows, labels):
    """The loss and what is logged, term by term."""
    made = [
        reference.log_probs(logits[0, at], label, temperature=TEMPERATURE)
        for at, label in zip(rows, labels, strict=True)
    ]
    lengths, masks = batch["response_lengths"], batch["loss_masks"]
    logp, entropy = (torch.cat(x) for x in zip(*made, strict=True))
    train = logp.detach() if args.on_policy else torch.cat(batch["log_probs"]).to(logits)
    rollout = torch.cat(batch["rollout_log_probs"]).to(logits)
    old = rollout if args.use_rollout_logprobs else train
    A = torch.cat(batch["advantages"]).to(logits)
    factors, kept, log, metrics = torch.ones_like(A), masks, {}, {}
    if args.use_opsm:
        of_samples = [x.split(lengths) for x in (logp, old, A)]
        factors, log["opsm_clipfrac"] = slime_case.opsm(args, *of_samples, masks)
        assert 0 < factors.sum() < len(A), "the case must need the masking"
    if args.use_tis:
        rejects = args.custom_tis_function_path
        correction = slime_case.rejecting if rejects else slime_case.truncated
        of_samples = [x.split(lengths) for x in (train, rollout)]
        factors, kept, metrics = correction(args, factors, *of_samples, masks)
    gspo, cispo = (args.advantage_estimator == name for name in ("gspo", "cispo"))
    config = BAPOConfig(**(dict(ratio_level="sequence" if gspo else "token") | args.bapo_options))
    log_ratio = logp - old
    if config.ratio_level == "sequence":
        ratios = zip(log_ratio.split(lengths), masks, strict=True)
        log_ratio = torch.cat([slime_case.mean(x, mask).expand_as(x) for x, mask in ratios])
    r = log_ratio.exp()
    if config.has_bounds:
        tokens = [x.split(lengths) for x in (logp.detach(), old, A * torch.cat(kept), rollout)]
        *tokens, padded, mask = [pad_sequence(x, batch_first=True) for x in (*tokens, masks)]
        search = dict(config=config, rollout_log_probs=padded)
        low, high = (b.to(logits) for b in reference.find_clip_bounds(*tokens, mask, **search))
        searches = low > 0.6 or high > 1.2
        assert searches or args.custom_tis_function_path, "the case must need a search"
        # slime divides bounds, too, by its count of rollouts or tokens.
        scale = reduction_of_batch(args, batch)(torch.ones(11))
        scale = scale + sum(not mask.any() for mask in batch["loss_masks"])
        log |= dict(bapo_clip_low=low * scale, bapo_clip_high=high * scale)
        clamped = r.clamp(low, high) * A
        policy = -clamped.detach() * logp if cispo else -torch.min(r * A, clamped)
    else:  # of SAPO
        tau = torch.where(A > 0, config.sapo_tau_pos, config.sapo_tau_neg)
        policy = -4 / tau * torch.sigmoid(tau * (r - 1)) * A
    reduce = reduction_of_batch(args, batch | dict(loss_masks=kept))
    if args.custom_pg_loss_reducer_function_path:
        loss = (policy * factors * torch.cat(kept)).sum() / 7
    else:
        loss = reduce(policy * factors)
    log |= dict(pg_loss=loss, entropy_loss=reduce(entropy), ppo_kl=-reduce(log_ratio))
    loss = loss - args.entropy_coef * reduce(entropy)
    if args.use_kl_loss:
        ratio = (logp - old).exp() if args.use_unbiased_kl else None
        ref = torch.cat(batch["ref_log_probs"])
        kl = reduce(slime_case.approx_kl(logp, ref, args.kl_loss_type, ratio))
        loss, log["kl_loss"] = loss + args.kl_loss_coef * kl, kl
    if args.use_tis:
        given = reduction_of_batch(args, batch)
        log |= {name: given(values) for name, values in (metrics | dict(ois=r)).items()}
    compared = logp if args.use_rollout_logprobs else old
    log["train_rollout_logprob_abs_diff"] = reduce((compared - rollout).abs())
    return loss, log


OF_BAPO = {  # which slime has no names for
    "SAPO": dict(bapo_options=dict(surrogate="sapo")),
    "SAPO of sequences": dict(bapo_options=dict(surrogate="sapo", ratio_level="sequence")),
}


@pytest.mark.parametrize("name", OPTIONS | OF_BAPO)
def test_options(name):
    args = arguments((OPTIONS | OF_BAPO)[name])
    batch, *case = batch_of(args)
    got = run(args, batch, case[0])
    check(got, args, batch, *case)
    assert ("bapo_clip_high" in got.log) == (name in OPTIONS)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_as_slime_has_them(options, monkeypatch):
    """With the bounds of slime's own clip, its own functions give the same loss and gradient."""
    monkeypatch.undo()
    slime_case.megatron(monkeypatch)
    slimes = pytest.importorskip("slime.backends.megatron_utils.loss")
    args = arguments(options, FIXED)
    batch, logits, *_ = batch_of(args)
    got = run(args, batch, logits)
    # slime takes logits of float32 alone: the noise of its own sums is the yardstick.
    theirs = in_some_orders(partial(run, args, batch, logits, None, slimes.policy_loss_function))
    assert set(theirs[0].log) <= set(got.log)
    for name in {"pg_clipfrac", "entropy_loss"} & theirs[0].log.keys():
        del theirs[0].log[name]
    assert_parity(got, theirs, theirs[0], largest(torch.cat(batch["rollout_log_probs"])))


def rank_of_context(rank, size, options, case):
    """What a rank finds, and the rows of its logits among all."""
    args = arguments(options)
    batch, logits, *_ = batch_of(args, **case)
    totals, responses = batch["total_lengths"], batch["response_lengths"]
    starts = [0, *torch.tensor(totals).cumsum(0).tolist()]
    rows, own = [], []
    for start, total, response in zip(starts, totals, responses, strict=False):
        chunks = torch.arange(2 * size * -(-total // (2 * size))).view(2 * size, -1)
        at = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
        rows.append(torch.where(at < total, start + at, -1))
        of_response = at - (total - response - 1)
        own.append(of_response[(of_response >= 0) & (of_response < response)])
    rows = torch.cat([*rows, torch.full((slime_case.PADDING,), -1)])
    if args.allgather_cp:
        padded = torch.arange(-(-logits.shape[1] // size) * size).view(size, -1)[rank]
        rows = torch.where(padded < sum(totals), padded, -1)
    for name in ("log_probs", "rollout_log_probs", "ref_log_probs", "advantages"):
        if batch[name]:
            batch[name] = [x[at] for x, at in zip(batch[name], own, strict=True)]
    of_rank = torch.where(rows[:, None] < 0, 7.0, logits[0, rows])[None]
    with pytest.MonkeyPatch.context() as monkeypatch:
        slime_case.megatron(monkeypatch, size, rank, dist.group.WORLD)
        slime_case.slime(monkeypatch, reduction_of(own))
        return run(args, batch, of_rank, own), rows


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
    args = arguments(options)
    batch, *others = batch_of(args, **case)
    gradient = torch.zeros_like(others[0])
    for of_rank, rows in ranks:
        gradient[0].index_add_(0, rows[rows >= 0], of_rank.gradient[0, rows >= 0])
        assert not of_rank.gradient[0, rows < 0].any()
    logged = {key: sum(of_rank.log[key] for of_rank, _ in ranks) for key in ranks[0][0].log}
    got = Found(sum(of_rank.loss for of_rank, _ in ranks), logged, gradient)
    check(got, args, batch, *others)
    if name == "idle rank" and not allgather_cp:
        assert not ranks[1][0].gradient.any()


def rank_of_vocabulary(rank, options):
    """What a rank finds from its columns of the logits."""
    args = arguments(options)
    batch, logits, *_ = batch_of(args)
    with pytest.MonkeyPatch.context() as monkeypatch:
        slime_case.megatron(monkeypatch, tensor_group=dist.group.WORLD)
        slime_case.slime(monkeypatch, reduction_of())
        return run(args, batch, logits.tensor_split(2, -1)[rank])


@pytest.mark.parametrize("name", ["plain", "all"])
def test_tensor_parallelism(name, worlds):
    """Every rank has the loss of the whole vocabulary, and the gradient of its columns."""
    ranks = worlds(2).run(rank_of_vocabulary, OPTIONS[name])
    args = arguments(OPTIONS[name])
    gradient = torch.cat([found.gradient for found in ranks], -1)
    for of_rank in ranks:
        check(of_rank._replace(gradient=gradient), args, *batch_of(args))


def test_masked_tokens_are_not_logged():
    """Nothing is read of them, and ``0*inf`` is not 0."""
    args, logs = arguments(TIS), []
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
    args = arguments(OPTIONS[name], FIXED)
    for masked in range(1, 4):
        batch, logits, *_ = batch_of(args, range(masked))
        batch["rollout_mask_sums"] = counts = [mask.sum() for mask in batch["loss_masks"]]
        _, log, gradient = run(args, batch, logits)
        divisor = sum(n.clamp(min=1) for n in counts) if args.calculate_per_token_loss else 3
        bounds = torch.stack([log["bapo_clip_low"], log["bapo_clip_high"]])
        true = recorded([0.8, 1.28])
        of_product = 2 * 1.28 * EPS[torch.float32]  # and of the quotient
        assert_within_budget("bounds", bounds / divisor, true, true, inherited=of_product)
    assert not gradient.any()
    assert all(value.isfinite() for value in log.values())
    assert log["pg_loss"] == log["entropy_loss"] == log["loss"] == 0


@pytest.mark.parametrize("name", [name for name in MASKED if name != "sums"])
def test_empty_response(name):
    """A sample that is a prompt alone changes nothing, unless slime counts tokens, at least one."""
    args = arguments(OPTIONS[name])
    batch, logits, *_ = batch_of(args)
    without = run(args, batch, logits)
    per_token = {key: [*batch[key], torch.empty(0)] for key in OF_RESPONSES if batch[key]}
    batch |= per_token | dict(
        unconcat_tokens=[*batch["unconcat_tokens"], torch.tensor([3, 1])],
        total_lengths=[*batch["total_lengths"], 2],
        response_lengths=[*batch["response_lengths"], 0],
        rollout_mask_sums=[*batch["rollout_mask_sums"], torch.tensor(2.0)],
    )
    torch.testing.assert_close(run(args, batch, logits), without, rtol=0, atol=0)


class Copies(TorchDispatchMode):
    """Counts those to another device."""

    copies = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default:
            self.copies += out.device != args[0].device
        return out


def copies_on_device(options, samples, monkeypatch):
    """By the adapter, with stand-ins for the losses of this package.

    Tensors of the device ``meta`` have no values, so what needs one on the host raises, as do
    boolean indices: on a GPU each would make the host wait.
    """

    def made(*shape):
        return torch.ones(*shape, device="meta", requires_grad=True)

    def loss(values, *_, **options):
        T, metrics = values.shape[0], defaultdict(lambda: made(()).detach())
        return SimpleNamespace(loss=made(()), log_probs=made(T), entropy=made(T), metrics=metrics)

    args = arguments(options)
    batch, logits, *_ = batch_of(args)
    for name, values in batch.items():
        if values:
            on_device = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in values]
            batch[name] = on_device * samples
    for name in ("bapo_loss", "bapo_loss_from_log_probs"):
        monkeypatch.setattr(slime, name, loss)
    monkeypatch.setattr(slime, "log_probs", lambda logits, *_, **__: made(2, len(logits)))
    logits = made(1, samples * logits.shape[1], slime_case.V)
    reduction = reduction_of_batch(args, batch)
    with Copies() as made_copies:
        bapo_loss_function(args, batch, logits, reduction)
    return made_copies.copies


@pytest.mark.parametrize("name", OPTIONS)
def test_host_never_waits_for_the_device(name, monkeypatch):
    """Hundreds of samples share a micro-batch: waits for each of them would starve a GPU."""
    few, many = (copies_on_device(OPTIONS[name], n, monkeypatch) for n in (1, 9))
    assert few == many == (2 if "GSPO" in name or name == "all" else 1)


@pytest.mark.parametrize("name", MASKED)
def test_recomputed_loss_function(name, monkeypatch):
    """``--recompute-loss-function`` computes nothing twice in forward."""
    args = arguments(OPTIONS[name])
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
    args = arguments(dict(rollout_top_p=0.9))
    batch, logits, *_ = batch_of(args)
    with pytest.raises(ValueError, match="rollout_top_p must be 1 with BAPO, got 0.9"):
        bapo_loss_function(args, batch, logits, torch.sum)
