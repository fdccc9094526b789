"""Every refusal says name, rule and value got, before anything is launched."""

import pytest
import torch

from bapo_kernels import (
    BAPOConfig,
    ContributionHistogram,
    available_backends,
    bapo_loss,
    bapo_loss_from_log_probs,
    log_probs,
)

B, S, V = 2, 5, 11
SEQ = BAPOConfig(loss_agg_mode="seq-mean-token-mean")
NORM = BAPOConfig(loss_agg_mode="seq-mean-token-sum-norm")


def arguments(**changes):
    base = dict(
        logits=torch.randn(B, S, V),
        labels=torch.zeros(B, S, dtype=torch.long),
        old_log_probs=torch.zeros(B, S),
        advantages=torch.ones(B, S),
    )
    return base | changes


def packed(**changes):
    base = dict(
        logits=torch.randn(S, V),
        labels=torch.zeros(S, dtype=torch.long),
        old_log_probs=torch.zeros(S),
        advantages=torch.ones(S),
    )
    return base | changes


CU = torch.tensor([0, 5])
CASES = {
    "logits int": (
        arguments(logits=torch.ones(B, S, V, dtype=torch.long)),
        "logits must be floating point, got torch.int64",
    ),
    "logits list": (arguments(logits=[1.0]), "logits must be a tensor, got list"),
    "logits scalar": (
        arguments(logits=torch.tensor(1.0)),
        r"logits must have shape \(..., V\), got \(\)",
    ),
    "no vocabulary": (
        arguments(logits=torch.ones(B, S, 0)),
        r"logits must have V >= 1, got \(2, 5, 0\)",
    ),
    "labels float": (
        arguments(labels=torch.zeros(B, S)),
        "labels must be integers, got torch.float32",
    ),
    "labels bool": (
        arguments(labels=torch.zeros(B, S, dtype=torch.bool)),
        "labels must be integers, got torch.bool",
    ),
    "labels shape": (
        arguments(labels=torch.zeros(B, S - 1, dtype=torch.long)),
        r"labels must have the leading shape of logits \(2, 5\), got \(2, 4\)",
    ),
    "labels device": (
        arguments(labels=torch.zeros(B, S, dtype=torch.long, device="meta")),
        r"labels must be on the device of logits \(cpu\), got meta",
    ),
    "old shape": (
        arguments(old_log_probs=torch.zeros(B)),
        r"old_log_probs must have the shape of labels \(2, 5\), got \(2,\)",
    ),
    "old int": (
        arguments(old_log_probs=torch.zeros(B, S, dtype=torch.int32)),
        "old_log_probs must be floating point, got torch.int32",
    ),
    "old device": (
        arguments(old_log_probs=torch.zeros(B, S, device="meta")),
        "old_log_probs must be on the device of labels",
    ),
    "advantages shape": (
        arguments(advantages=torch.zeros(S)),
        r"advantages must have the shape of labels \(2, 5\) or one entry a sequence \(2,\), "
        r"got \(5,\)",
    ),
    "advantages int": (
        arguments(advantages=torch.zeros(B, S, dtype=torch.long)),
        "advantages must be floating point",
    ),
    "packed advantages": (
        packed(advantages=torch.zeros(3), cu_seqlens=CU),
        r"advantages must have shape \(5,\) or one entry a sequence \(1,\), got \(3,\)",
    ),
    "mask shape": (
        arguments(response_mask=torch.ones(B)),
        r"response_mask must have the shape of labels \(2, 5\), got \(2,\)",
    ),
    "mask list": (arguments(response_mask=[1]), "response_mask must be a tensor"),
    "rollout": (
        arguments(rollout_log_probs=torch.zeros(1)),
        "rollout_log_probs must have the shape of labels",
    ),
    "is weights": (
        arguments(rollout_is_weights=torch.zeros(1)),
        "rollout_is_weights must have the shape of labels",
    ),
    "ref shape": (
        arguments(ref_log_probs=torch.zeros(1)),
        "ref_log_probs must have the shape of labels",
    ),
    "ref missing": (
        arguments(config=BAPOConfig(kl_loss_coef=0.1)),
        "ref_log_probs must be given when config.kl_loss_coef is not 0, got None",
    ),
    "statistics": (
        arguments(statistics="some"),
        "statistics must be 'all' or 'live', got 'some'",
    ),
    "vocab_group": (
        arguments(vocab_group="x"),
        r"vocab_group must be None or a torch.distributed.ProcessGroup that this rank is in "
        r"\(mesh.get_group\(\)\), got str",
    ),
    "process_group": (arguments(process_group=0), "process_group must be None or a torch.distr"),
    "unknown backend": (
        arguments(backend="tpu"),
        r"backend must be None or one of \['cuda', 'triton', 'cpu', 'reference'\], got 'tpu'",
    ),
    "absent backend": (arguments(backend="cuda"), "backend 'cuda' cannot run: "),
    "backend dtype": (
        arguments(logits=torch.ones(B, S, V, dtype=torch.float64), backend="cpu"),
        "backend 'cpu' cannot run: logits must be float32, bfloat16 or float16, got torch.float64",
    ),
    "backend device": (
        arguments(
            logits=torch.ones(B, S, V, device="meta"),
            labels=torch.zeros(B, S, dtype=torch.long, device="meta"),
            backend="cpu",
        ),
        "backend 'cpu' cannot run: logits must be on a cpu device, got meta",
    ),
    "bounds not a pair": (arguments(bounds=(1.0,)), r"bounds must be a pair \(lower, upper\)"),
    "bounds order": (
        arguments(bounds=(1.3, 1.2)),
        r"bounds must have 0 <= lower <= upper, got \(1.3, 1.2\)",
    ),
    "bounds nan": (arguments(bounds=(float("nan"), 1.2)), "bounds.lower must be a number >= 0"),
    "bounds size": (
        arguments(bounds=(torch.ones(2), torch.ones(()))),
        r"bounds.lower must have one element, got \(2,\)",
    ),
    "bounds device": (
        arguments(bounds=(torch.ones(()), torch.ones((), device="meta"))),
        "bounds.upper must be on the device of the tokens",
    ),
    "dp_size": (arguments(dp_size=0), "dp_size must be an integer >= 1, got 0"),
    "dp_size tokens": (
        arguments(dp_size=2),
        "batch_num_tokens must be given when dp_size > 1 with loss_agg_mode='token-mean', got None",
    ),
    "dp_size sequences": (
        arguments(dp_size=2, config=SEQ, batch_num_tokens=3),
        "global_batch_size must be given when dp_size > 1 with loss_agg_mode='seq-mean-token-mean'",
    ),
    "batch_num_tokens": (
        arguments(batch_num_tokens=0),
        "batch_num_tokens must be > 0, got 0",
    ),
    "global_batch_size": (
        arguments(global_batch_size=torch.ones(2)),
        r"global_batch_size must have one element, got \(2,\)",
    ),
    "packed sequences": (
        packed(config=SEQ),
        r"cu_seqlens must be given for packed labels of shape \(5,\) with "
        "loss_agg_mode='seq-mean-token-mean', got None",
    ),
    "padded cu_seqlens": (
        arguments(cu_seqlens=CU),
        r"cu_seqlens must come with packed labels of shape \(N,\), got labels of shape \(2, 5\)",
    ),
    "cu_seqlens shape": (
        packed(cu_seqlens=torch.tensor([0])),
        r"cu_seqlens must have shape \(B \+ 1,\) with B >= 1, got \(1,\)",
    ),
    "cu_seqlens dtype": (
        packed(cu_seqlens=CU.float()),
        "cu_seqlens must be int32 or int64, got torch.float32",
    ),
    "cu_seqlens list": (packed(cu_seqlens=[0, 5]), "cu_seqlens must be a tensor"),
    "cu_seqlens device": (
        packed(cu_seqlens=CU.to("meta")),
        "cu_seqlens must be on the device of labels",
    ),
    "packed norm": (
        packed(config=NORM, cu_seqlens=CU),
        "config.loss_scale_factor must be given for packed input",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bapo_loss(name):
    given, message = CASES[name]
    if given.get("backend") == "cpu" and available_backends()["cpu"] is not None:
        pytest.skip("the native library is absent")
    with pytest.raises(ValueError, match=message):
        bapo_loss(**given)


def test_log_probs():
    with pytest.raises(ValueError, match="temperature must be finite and > 0, got 0"):
        log_probs(torch.randn(2, 3), torch.zeros(2, dtype=torch.long), temperature=0.0)
    with pytest.raises(ValueError, match="labels must have the leading shape"):
        log_probs(torch.randn(2, 3), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="vocab_group must be None"):
        log_probs(torch.randn(2, 3), torch.zeros(2, dtype=torch.long), vocab_group=1)


def test_loss_from_log_probs():
    lp = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="log_probs must be floating point, got torch.int64"):
        bapo_loss_from_log_probs(lp.long(), None, lp)
    with pytest.raises(ValueError, match=r"entropy must have the shape of log_probs .*got \(2,\)"):
        bapo_loss_from_log_probs(lp, None, lp, entropy=lp[:, 0])
    with pytest.raises(ValueError, match="entropy must be given when config.entropy_coef is not 0"):
        bapo_loss_from_log_probs(lp, None, lp, config=BAPOConfig(entropy_coef=0.1))
    with pytest.raises(ValueError, match="statistics must be"):
        bapo_loss_from_log_probs(lp, None, lp, statistics="none")
    with pytest.raises(ValueError, match="advantages must have the shape of log_probs"):
        ContributionHistogram().update(lp, None, torch.zeros(4))


WRONG_TYPES = {
    "config dict": (arguments(config={"target": 0.5}), "config must be"),
    "config empty dict": (arguments(config={}), "config must be"),
    "bounds str": (arguments(bounds=("a", 1.2)), "bounds.lower must be"),
    "bounds None": (arguments(bounds=(0.8, None)), "bounds.upper must be"),
    "bounds mixed": (arguments(bounds=(torch.tensor(0.8), -1.0)), "bounds.* must"),
    "batch_num_tokens str": (arguments(batch_num_tokens="3"), "batch_num_tokens must be"),
    "mask complex": (
        arguments(response_mask=torch.ones(B, S, dtype=torch.complex64)),
        "response_mask must be",
    ),
    "logits sparse": (arguments(logits=torch.ones(B, S, V).to_sparse()), "logits must"),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_wrong_types_are_named(name):
    """Not a TypeError from inside of torch, and never taken in silence."""
    given, message = WRONG_TYPES[name]
    with pytest.raises((TypeError, ValueError), match=message):
        bapo_loss(**given)


def test_unknown_options_are_refused():
    for name in ("clip_ratio", "loss_agg_mode", "temperature"):  # members of the config
        with pytest.raises(TypeError, match=name):
            bapo_loss(**arguments(**{name: 1.0}))


def test_nothing_is_written_before_the_checks():
    """A refused call in place leaves the logits alone."""
    given = arguments(statistics="some", inplace=True)
    before = given["logits"].clone()
    version = given["logits"]._version
    for change in ({}, {"statistics": "all", "bounds": (2.0, 1.0)}):
        with pytest.raises(ValueError, match="must"):
            bapo_loss(**(given | change))
    assert torch.equal(given["logits"], before)
    assert given["logits"]._version == version
