"""Every error gives name, rule and value got, before anything is launched."""

import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch

from bapo_kernels import (
    BAPOConfig,
    ClipBounds,
    ClipBoundSearch,
    ContributionHistogram,
    available_backends,
    bapo_linear_loss,
    bapo_loss,
    bapo_loss_from_log_probs,
    find_clip_bounds,
    linear_log_probs,
    log_probs,
    reference,
)
from bapo_kernels.core import checks
from bapo_kernels.debug import check_inputs

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
    "logits float8": (
        arguments(logits=torch.zeros(B, S, V, dtype=torch.float8_e4m3fn)),
        "logits must be float64, float32, bfloat16 or float16, got torch.float8_e4m3fn",
    ),
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
        r"advantages must have the shape of labels \(2, 5\) or one entry per sequence \(2,\), "
        r"got \(5,\)",
    ),
    "advantages int": (
        arguments(advantages=torch.zeros(B, S, dtype=torch.long)),
        "advantages must be floating point",
    ),
    "packed advantages": (
        packed(advantages=torch.zeros(3), cu_seqlens=CU),
        r"advantages must have the shape of labels \(5,\) or one entry per sequence \(1,\), "
        r"got \(3,\)",
    ),
    "packed advantages without offsets": (
        packed(advantages=torch.zeros(1)),
        r"advantages must have the shape of labels \(5,\) or one entry per sequence with "
        r"cu_seqlens, got \(1,\)",
    ),
    "advantages with a dimension of 1": (
        arguments(advantages=torch.zeros(B, S, 1)),
        r"advantages must have the shape of labels \(2, 5\) or one entry per sequence \(2,\), "
        r"got \(2, 5, 1\)",
    ),
    "advantages as a column": (
        arguments(advantages=torch.zeros(B, 1)),
        r"advantages must have the shape of labels .*, got \(2, 1\)",
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
        r"bounds.lower must be in \[0, 1\], a bound of the ratio, not an epsilon, got 1.3",
    ),
    "bounds that are epsilons": (
        arguments(bounds=(0.2, 0.28)),
        "bounds.upper must be >= 1, a bound of the ratio, not an epsilon, got 0.28",
    ),
    "bounds nan": (arguments(bounds=(float("nan"), 1.2)), r"bounds.lower must be in \[0, 1\], "),
    "bounds size": (
        arguments(bounds=(torch.ones(4), torch.ones(()))),
        r"bounds.lower must have one element, or have the shape of labels \(2, 5\) or one entry "
        r"per sequence \(2,\), got \(4,\)",
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
    "tokens for sequences": (
        arguments(config=SEQ, batch_num_tokens=7),
        "batch_num_tokens must be None with loss_agg_mode='seq-mean-token-mean', which divides by "
        "global_batch_size, got 7",
    ),
    "sequences for tokens": (
        arguments(global_batch_size=torch.tensor(7)),
        "global_batch_size must be None with loss_agg_mode='token-mean', which divides by "
        "batch_num_tokens, got 7",
    ),
    "a count for a sum": (
        arguments(config=BAPOConfig(loss_agg_mode="token-sum"), batch_num_tokens=7),
        "batch_num_tokens must be None with loss_agg_mode='token-sum', which divides by neither",
    ),
    "batch_num_tokens": (
        arguments(batch_num_tokens=0),
        "batch_num_tokens must be finite and > 0, got 0",
    ),
    "batch_num_tokens inf": (
        arguments(batch_num_tokens=float("inf")),
        "batch_num_tokens must be finite and > 0, got inf",
    ),
    "batch_num_tokens bool": (
        arguments(batch_num_tokens=True),
        r"batch_num_tokens must be a number, got True \(bool\)",
    ),
    "batch_num_tokens of bools": (
        arguments(batch_num_tokens=torch.tensor(True)),
        "batch_num_tokens must be a real number, got torch.bool",
    ),
    "batch_num_tokens device": (
        arguments(batch_num_tokens=torch.ones((), device="meta")),
        "batch_num_tokens must be on the device of labels",
    ),
    "dp_size float": (
        arguments(dp_size=2.0, batch_num_tokens=3),
        r"dp_size must be an integer >= 1, got 2.0 \(float\)",
    ),
    "dp_size bool": (
        arguments(dp_size=True),
        r"dp_size must be an integer >= 1, got True \(bool\)",
    ),
    "dp_size tensor": (
        arguments(dp_size=torch.tensor(2), batch_num_tokens=3),
        "dp_size must be an integer >= 1, got Tensor",
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
        r"labels must have packed shape \(N,\) with cu_seqlens, got \(2, 5\)",
    ),
    "cu_seqlens shape": (
        packed(cu_seqlens=torch.tensor([0])),
        r"cu_seqlens must have shape \(B \+ 1,\) with B >= 1, got \(1,\)",
    ),
    "cu_seqlens dtype": (
        packed(cu_seqlens=CU.float()),
        "cu_seqlens must be int32 or int64, got torch.float32",
    ),
    "cu_seqlens from 1": (
        packed(cu_seqlens=torch.tensor([1, 5])),
        r"cu_seqlens must rise from 0 to at most 5, got \[1, 5\]",
    ),
    "lengths for cu_seqlens": (
        packed(cu_seqlens=torch.tensor([3, 2], dtype=torch.int32)),
        r"cu_seqlens must rise from 0 to at most 5, got \[3, 2\]",
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
def test_errors_of_bapo_loss(name):
    given, message = CASES[name]
    if given.get("backend") == "cpu" and available_backends()["cpu"] is not None:
        pytest.skip("the native library is absent")
    with pytest.raises(ValueError, match=message):
        bapo_loss(**given)


TEMPERATURES = {
    "number": (
        arguments(temperature=0.7),
        r"temperature must be a tensor \(a number is config.temperature\), got 0.7 \(float\)",
    ),
    "integers": (
        arguments(temperature=torch.ones(B, S, dtype=torch.long)),
        "temperature must be floating point, got torch.int64",
    ),
    "shape": (
        arguments(temperature=torch.ones(S)),
        r"temperature must be 0-dim, or have the shape of labels \(2, 5\) or one entry per "
        r"sequence \(2,\), got \(5,\)",
    ),
    "one element": (arguments(temperature=torch.ones(1, 1)), r"temperature must .*got \(1, 1\)"),
    "packed": (
        packed(temperature=torch.ones(B), cu_seqlens=CU),
        r"temperature must .* or one entry per sequence \(.*, got \(2,\)",
    ),
    "per sequence without offsets": (
        packed(temperature=torch.ones(B)),
        r"temperature must .* or one entry per sequence with cu_seqlens, got \(2,\)",
    ),
    "device": (
        arguments(temperature=torch.ones((), device="meta")),
        r"temperature must be on the device of labels \(cpu\), got meta",
    ),
}


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("name", TEMPERATURES)
def test_errors_of_temperature(name, backend):
    given, message = TEMPERATURES[name]
    with pytest.raises(ValueError, match=message):
        bapo_loss(**given, backend=backend)
    if name == "number" or "cu_seqlens" in given:
        return
    with pytest.raises(ValueError, match=message):
        log_probs(
            given["logits"], given["labels"], temperature=given["temperature"], backend=backend
        )


def test_errors_of_log_probs():
    with pytest.raises(ValueError, match="temperature must be finite and > 0, got 0"):
        log_probs(torch.randn(2, 3), torch.zeros(2, dtype=torch.long), temperature=0.0)
    with pytest.raises(ValueError, match="labels must have the leading shape"):
        log_probs(torch.randn(2, 3), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="vocab_group must be None"):
        log_probs(torch.randn(2, 3), torch.zeros(2, dtype=torch.long), vocab_group=1)


@pytest.mark.parametrize("backend", [{}, {"backend": "reference"}])
def test_tensors_without_values(backend):
    x = torch.empty(B, S, V, device="meta")
    A, labels = x[..., 0], torch.empty(B, S, dtype=torch.long, device="meta")
    for name, function, *given in (
        ("logits", bapo_loss, x, labels, None, A),
        ("logits", log_probs, x, labels),
        ("logits", check_inputs, x, labels, None, A),
        ("hidden_states", bapo_linear_loss, x, x[0], labels, None, A),
        ("hidden_states", linear_log_probs, x, x[0], labels),
        ("log_probs", bapo_loss_from_log_probs, A, None, A),
    ):
        with pytest.raises(ValueError, match=f"{name} must have values, got a tensor on the meta"):
            function(*given, **backend)
    with pytest.raises(ValueError, match="log_probs must have values, got a tensor on the meta"):
        find_clip_bounds(A, None, A)


@pytest.mark.filterwarnings("ignore:.*MaskedTensor:UserWarning")
@pytest.mark.parametrize("name", ["logits", "advantages"])
def test_masked_tensors(name):
    given = arguments()
    given[name] = torch.masked.masked_tensor(given[name], given[name] > 0)
    rule = r"must be an ordinary tensor \(.to_tensor\(value\)\), got a MaskedTensor"
    with pytest.raises(ValueError, match=f"{name} {rule}"):
        bapo_loss(**given)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_hidden_states_without_columns(backend):
    labels, *batch = list(arguments().values())[1:]
    hidden, weight = torch.ones(B, S, 0), torch.ones(V, 0)
    for function, *given in ((bapo_linear_loss, labels, *batch), (linear_log_probs, labels)):
        rule = r"hidden_states must have shape \(..., H\) with H >= 1, got \(2, 5, 0\)"
        with pytest.raises(ValueError, match=rule):
            function(hidden, weight, *given, backend=backend)


def test_errors_of_loss_from_log_probs():
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
    "bounds bool": (
        arguments(bounds=(False, True)),
        r"bounds.lower must be a number, got False \(bool\)",
    ),
    "bounds array": (
        arguments(bounds=(np.array([0.8]), 1.2)),
        r"bounds.lower must be a number \(.item\(\) of a tensor or array\), got ndarray",
    ),
    "bounds of bools": (
        arguments(bounds=(torch.tensor(True), torch.tensor(True))),
        "bounds.lower must be a real number, got torch.bool",
    ),
    "statistics bool": (arguments(statistics=True), "statistics must be 'all' or 'live', got True"),
    "mask per sequence": (
        arguments(response_mask=torch.ones(B)),
        r"response_mask must have the shape of labels \(2, 5\), got \(2,\)",
    ),
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
    """No TypeError from inside torch, and nothing is accepted silently."""
    given, message = WRONG_TYPES[name]
    with pytest.raises((TypeError, ValueError), match=message):
        bapo_loss(**given)


def test_unknown_options_are_refused():
    for name in ("clip_ratio", "loss_agg_mode", "logit_scale"):  # members of the config
        with pytest.raises(TypeError, match=name):
            bapo_loss(**arguments(**{name: 1.0}))


def test_nothing_is_written_before_the_checks():
    """A refused in-place call leaves the logits unchanged."""
    given = arguments(statistics="some", inplace=True)
    before = given["logits"].clone()
    version = given["logits"]._version
    for change in ({}, {"statistics": "all", "bounds": (2.0, 1.0)}):
        with pytest.raises(ValueError, match="must"):
            bapo_loss(**(given | change))
    assert torch.equal(given["logits"], before)
    assert given["logits"]._version == version


@pytest.mark.parametrize("loss_of", [bapo_loss, reference.bapo_loss])
@pytest.mark.parametrize("kind", [float, np.float32])
def test_bounds_that_are_numbers(kind, loss_of):
    """Epsilons, NaN and crossed bounds are refused; tensors are not read (``test_debug.py``)."""
    given = arguments()
    expected = loss_of(**given, bounds=(torch.tensor(0.75), torch.tensor([1.5]))).loss
    assert loss_of(**given, bounds=ClipBounds(kind(0.75), kind(1.5))).loss == expected
    bad = {"lower": [(1.3, 1.5), (-0.1, 1.5), (np.nan, 1.5)], "upper": [(0.2, 0.28), (0.8, np.nan)]}
    for side, pairs in bad.items():
        for pair in pairs:
            with pytest.raises(ValueError, match=f"bounds.{side} must be .*not an epsilon, got"):
                loss_of(**given, bounds=tuple(kind(bound) for bound in pair))


def test_upper_bound_may_be_infinite():
    given = arguments()
    assert bapo_loss(**given, bounds=(0.0, float("inf"))).metrics["pg_clipfrac"] == 0


@pytest.mark.parametrize("of", [np.float32, np.int64, np.float64, Fraction, int])
def test_numbers_of_any_type(of):
    """NumPy's numbers give the result of Python's, wherever a number is expected."""
    hidden, weight = torch.randn(B, S, 4), torch.randn(V, 4)
    labels, old, A = (arguments()[name] for name in ("labels", "old_log_probs", "advantages"))
    results = []
    for kind in (float, of):
        config = BAPOConfig(temperature=kind(2), loss_agg_mode="seq-mean-token-mean")
        options = dict(global_batch_size=kind(4), dp_size=2, config=config)
        if issubclass(kind, (np.integer, int)):
            options["dp_size"] = kind(2)
        out = bapo_linear_loss(hidden, weight, labels, old, A, bounds=(0.5, kind(2)), **options)
        results.append((out.loss, log_probs(hidden, labels * 0, temperature=kind(2))[0]))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_errors_of_chunk_tokens():
    call = torch.randn(B, S, 4), torch.randn(V, 4), *list(arguments().values())[1:]
    for wrong, got in ((2.0, r"2.0 \(float\)"), (0, "0"), (True, r"True \(bool\)")):
        with pytest.raises(
            ValueError, match=f"chunk_tokens must be None or an integer >= 1, got {got}"
        ):
            bapo_linear_loss(*call, chunk_tokens=wrong)


@pytest.mark.parametrize("value", [0.0, -3.0, float("nan")])
@pytest.mark.parametrize("loss_of", [bapo_loss, reference.bapo_loss])
def test_counts_on_a_device(loss_of, value):
    """They are not read: an invalid count makes the loss NaN, never 0 or of the wrong sign."""
    given = arguments(old_log_probs=None)
    count = torch.tensor(value)
    assert loss_of(**given, batch_num_tokens=count).loss.isnan()
    assert loss_of(**given, config=SEQ, global_batch_size=count).loss.isnan()


REFERENCE = {
    "old_log_probs": dict(old_log_probs=torch.zeros(S)),
    "response_mask": dict(response_mask=torch.ones(S)),
    "rollout_log_probs": dict(rollout_log_probs=torch.zeros(1)),
    "rollout_is_weights": dict(rollout_is_weights=torch.ones(S)),
    "ref_log_probs": dict(ref_log_probs=torch.zeros(1, S)),
    "advantages": dict(advantages=torch.ones(1)),
    "config": dict(config={}),
}


@pytest.mark.parametrize("name", REFERENCE)
def test_errors_of_the_reference(name):
    """What torch would broadcast over the tokens is refused."""
    given = dict(log_probs=torch.zeros(B, S), old_log_probs=None, advantages=torch.ones(B, S))
    with pytest.raises(ValueError, match=f"{name} must "):
        reference.bapo_loss_from_log_probs(**(given | REFERENCE[name]))


@pytest.mark.parametrize("ranks", [None, "1", "2"])
def test_missing_process_group_with_several_ranks_warns(ranks, monkeypatch):
    """``dist.group.WORLD`` is None before init_process_group: one warning says so."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("WORLD_SIZE", ranks)
    world, lp = torch.distributed.group.WORLD, torch.zeros(2)
    assert world is None
    torch._dynamo.reset()

    def loss_of(lp):
        return bapo_loss_from_log_probs(lp, None, lp, process_group=world)

    calls = (
        lambda: loss_of(lp),
        lambda: torch.compile(loss_of, fullgraph=True, backend="eager")(lp),
        lambda: ClipBoundSearch(process_group=world),
        lambda: find_clip_bounds(lp, None, lp),
    )
    for call in calls:
        checks.warn_once.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
            call()
        messages = [w for w in caught if "process_group is None" in str(w.message)]
        assert len(messages) == (ranks == "2")
        assert all("WORLD_SIZE is 2" in str(w.message) for w in messages)
        if call is not calls[1]:
            assert all(w.filename == __file__ for w in messages)
