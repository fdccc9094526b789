"""Metrics that say whether the search acts and on which sign, and those of many calls."""

import pytest
import torch
import torch.distributed as dist
from accuracy import assert_rounded

from bapo_kernels import (
    BAPOConfig,
    ClipBoundSearch,
    bapo_loss_from_log_probs,
    mean_metrics,
    reference,
)


def test_by_hand(backend, device):
    r = torch.tensor([1.5, 1.0, 0.5, 0.9, 1.0, 9.0], device=device)
    A = torch.tensor([1.0, 2.0, -1.0, -1.0, 0.0, 3.0], device=device)
    mask = torch.tensor([1, 1, 1, 1, 1, 0], device=device)

    def metrics(**options):
        batch = r.log(), torch.zeros_like(r), A, mask
        got, same = (
            {name: value.item() for name, value in out.metrics.items()}
            for out in (
                bapo_loss_from_log_probs(*batch, backend=backend, **options),
                reference.bapo_loss_from_log_probs(*batch, **options),
            )
        )
        assert got == pytest.approx(same, rel=1e-6, abs=1e-6)
        return got

    for statistics in ("all", "live"):
        got = metrics(bounds=(0.6, 1.2), statistics=statistics)
        assert got["pg_clipfrac_pos"] == got["pg_clipfrac_neg"] == 0.5
        assert (got["tokens"], got["tokens_pos"], got["tokens_neg"]) == (5, 2, 2)
        assert got["bapo_acted"] == 0, "these are the starting bounds"
    cispo = metrics(bounds=(0.95, 1.2), config=BAPOConfig(surrogate="cispo"))
    assert (cispo["pg_clipfrac_pos"], cispo["pg_clipfrac_neg"]) == (0.5, 1.0)
    A = A.abs()
    assert metrics()["pg_clipfrac_neg"] == metrics()["bapo_acted"] == 0
    acted = [metrics(config=BAPOConfig(target=1.0))]
    lower, upper = torch.full_like(r, 0.6), torch.full_like(r, 1.2)
    assert metrics(bounds=(lower, upper))["bapo_acted"] == 0
    assert metrics(bounds=(lower, 1.2 + 2 * (1 - mask)))["bapo_acted"] == 0, "it is masked"
    acted += [metrics(bounds=(0.6, torch.cat([upper[1:], upper[:1] + 0.1]).roll(1)))]
    acted += [metrics(bounds=(0.5, 1.2)), metrics(bounds=(0.6, 1.3))]
    assert [got["bapo_acted"] for got in acted] == [0, 1, 1, 1], "without negative mass it stops"
    assert metrics(config=BAPOConfig(surrogate="sapo"))["bapo_acted"] == 0


def calls(count, *, statistics="all", **options):
    """Micro-batches of unequal size, one of padding alone, and all of them in one call."""
    g = torch.Generator().manual_seed(0)
    logp, old, A = (0.3 * torch.randn(2 * count, 6, generator=g) for _ in range(3))
    A *= torch.rand(A.shape, generator=g) < 0.8
    mask = torch.rand(A.shape, generator=g) < 0.6
    mask[:2] = False
    options |= dict(ref_log_probs=old, statistics=statistics, entropy=old.abs())

    def call(rows):
        of_rows = {k: v[rows] if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        return bapo_loss_from_log_probs(logp[rows], old[rows], A[rows], mask[rows], **of_rows)

    parts = [call(slice(2 * k, 2 * k + 2)) for k in range(count)]
    return parts, call(slice(None)), int(mask.sum())


def same(got, whole, names):
    for name in names:
        assert_rounded(got[name], (whole.metrics | {"loss": whole.loss.detach()})[name].double(), 8)


MEANS = ("pg_clipfrac", "pg_clipfrac_pos", "pg_clipfrac_neg", "pg_clipfrac_lower", "ppo_kl")
LOSSES = ("loss", "pg_loss", "kl_loss")
COUNTS = ("tokens", "tokens_pos", "tokens_neg")
GIVEN = ("entropy", "bapo_clip_low", "bapo_clip_high", "bapo_acted")


@pytest.mark.parametrize("statistics", ["all", "live"])
@pytest.mark.parametrize("given", [False, True])
def test_means_are_those_of_one_call(statistics, given):
    config = BAPOConfig(clip_ratio_c=1.3)
    options = dict(config=config, bounds=(0.8, 1.25), statistics=statistics)
    parts, whole, tokens = calls(4, **options)
    if given:
        parts, _, _ = calls(4, batch_num_tokens=tokens, dp_size=3, **options)
    got = mean_metrics(parts, dp_size=3 if given else 1)
    assert got.keys() == whole.metrics.keys() | {"loss"}
    same(got, whole, MEANS + LOSSES + COUNTS + GIVEN)
    assert got["pg_clipfrac_pos"] != got["pg_clipfrac_neg"]
    without = mean_metrics([out.metrics for out in parts], dp_size=3 if given else 1)
    assert without == {name: value for name, value in got.items() if name != "loss"}
    padding = mean_metrics(parts[:1] * 2)
    assert (padding["loss"], padding["bapo_clip_high"]) == (0, 1.25)
    sapo, _, _ = calls(2, config=BAPOConfig(surrogate="sapo"), statistics=statistics)
    assert mean_metrics(sapo)["bapo_clip_high"] == torch.inf


def rank_metrics(rank):
    group, (_, _, tokens) = dist.group.WORLD, calls(3)
    options = dict(batch_num_tokens=tokens, dp_size=2)
    mine = slice(0, 1) if rank == 0 else slice(1, 3)  # of rank 0 padding alone
    given, alone = (calls(3, bounds=(0.8, 1.25), **more)[0][mine] for more in (options, {}))
    return mean_metrics(given, group, dp_size=2), mean_metrics(alone, group)


@pytest.mark.xdist_group("world")
def test_means_over_ranks(worlds):
    whole = calls(3, bounds=(0.8, 1.25))[1]
    for ranks in zip(*worlds(2).run(rank_metrics), strict=True):
        assert ranks[0] == ranks[1]
        same(ranks[0], whole, MEANS + LOSSES + COUNTS + GIVEN)


def test_scope_of_a_step_says_what_its_decision_did():
    search = ClipBoundSearch(BAPOConfig(target=0.9), "step")
    logp, A = torch.tensor([0.2, -0.2]), torch.tensor([1.0, -1.0])
    search.update(logp, torch.zeros(2), A)
    search.step()
    outputs = [bapo_loss_from_log_probs(logp, torch.zeros(2), A, **search.options)] * 2
    assert search.metrics["bapo_acted"] == mean_metrics(outputs)["bapo_acted"] == 1


def test_outputs_that_do_not_belong_together():
    (one, other), _, tokens = calls(2)
    with pytest.raises(ValueError, match="outputs must have the output of a call, got none"):
        mean_metrics([])
    counted = calls(2, batch_num_tokens=tokens)[0][0]
    for bad in ([one, counted], [one, other.metrics]):
        with pytest.raises(ValueError, match="outputs must have the same metrics, got .'loss"):
            mean_metrics(bad)
    with pytest.raises(ValueError, match="outputs must be a list, got BAPOOutput"):
        mean_metrics(one)
    with pytest.raises(ValueError, match="outputs must have the metric 'tokens'"):
        mean_metrics([{"pg_loss": one.loss}])
    with pytest.raises(ValueError, match="dp_size must be an integer >= 1"):
        mean_metrics([one], dp_size=0)
