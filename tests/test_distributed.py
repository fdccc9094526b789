"""Data x tensor parallel grids of real processes against one process, whole, in float64."""

from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from helpers import (
    EPS,
    KERNELS,
    assert_within_budget,
    loss_sensitivity,
    make_case,
    per_token,
    run_reference,
)
from world import grid, world

import bapo_kernels
from bapo_kernels import BAPOConfig, ContributionHistogram, bapo_loss, find_clip_bounds, reference

pytestmark = pytest.mark.xdist_group("world")

B, S, V, H = 6, 5, 67, 16
# Uneven, one part empty; sequences of the data-parallel ranks.
COLUMNS = {1: [V], 2: [40, 27], 4: [20, 0, 30, 17]}
SEQUENCES = {1: [B], 2: [5, 1], 4: [2, 0, 3, 1]}
GRIDS = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1)]
BACKENDS = [*KERNELS, "reference"]

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
        yield cache(lambda n: stack.enter_context(world(n, tmp_path_factory.mktemp("ranks"))))


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
        k: v[rows] if isinstance(v, torch.Tensor) and v.ndim else v
        for k, v in case.options.items()
    }
    options.update(dp_size=data, process_group=mesh.get_group("data"))
    options.update(vocab_group=mesh.get_group("tensor"))
    arguments = tuple(x[rows] for x in case.arguments())
    return rows, columns, arguments, options


def facts(out):
    return dict(
        loss=out.loss.detach(),
        bounds=torch.stack(tuple(out.bounds)),
        log_probs=out.log_probs,
        entropy=out.entropy,
        metrics=dict(out.metrics),
    )


def logits_rank(rank, name, dtype, backend, data, tensor, inplace):
    mesh = grid(data, tensor)
    d, t = divmod(rank, tensor)
    case = whole_case(name, dtype)
    rows, columns, arguments, options = of_rank(case, data, tensor, d, t, mesh)
    leaf = case.logits[rows, :, columns].clone().requires_grad_()
    logits = leaf.clone() if inplace else leaf
    out = bapo_loss(logits, *arguments, backend=backend, inplace=inplace, **options)
    out.loss.backward()
    assert leaf.grad.dtype == dtype
    return facts(out) | dict(gradient=leaf.grad)


def put_together(parts, data, tensor, key="gradient"):
    """Blocks of the ranks as one tensor; the gradient is the mean over data-parallel ranks."""
    rows = [
        torch.cat([parts[d * tensor + t][key] for t in range(tensor)], -1) for d in range(data)
    ]
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
@pytest.mark.parametrize(("data", "tensor"), GRIDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits(worlds, backend, data, tensor, name):
    check_logits_level(worlds, name, torch.float32, backend, data, tensor)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes(worlds, backend, dtype, inplace):
    check_logits_level(worlds, "paper", dtype, backend, 2, 2, inplace)


def check_logits_level(worlds, name, dtype, backend, data, tensor, inplace=False):
    parts = worlds(data * tensor).run(logits_rank, name, dtype, backend, data, tensor, inplace)
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
