"""Every error gives name, rule and value got, before anything is launched."""

import re
import warnings
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from accuracy import assert_same

from bapo_kernels import (
    BAPOConfig,
    ClipBounds,
    ClipBoundSearch,
    available_backends,
    bapo_linear_loss,
    bapo_loss,
    bapo_loss_from_log_probs,
    checks,
    find_clip_bounds,
    linear_log_probs,
    linear_top_k,
    log_probs,
    reference,
)
from bapo_kernels.debug import check_inputs
from bapo_kernels.distillation import jsd, kl, masked, padded, with_tail

B, S, V = 2, 5, 11
SEQ = BAPOConfig(loss_agg_mode="seq-mean-token-mean")
NORM = BAPOConfig(loss_agg_mode="seq-mean-token-sum-norm")
SUM = BAPOConfig(loss_agg_mode="token-sum")


def arguments(shape=(B, S), **changes):
    base = dict(
        logits=torch.randn(*shape, V),
        labels=torch.zeros(shape, dtype=torch.long),
        old_log_probs=torch.zeros(shape),
        advantages=torch.ones(shape),
    )
    return base | changes


def raises(message):
    return pytest.raises(ValueError, match=re.escape(message))


ONES, ROWS, ON_META = torch.ones(B, S), torch.ones(B, S, V), torch.ones(B, S, device="meta")
ONE, ONE_ON_META = torch.ones(()), torch.ones((), device="meta")
CU, LENGTHS, FALLING = torch.tensor([0, 5]), torch.tensor([3, 2]), torch.tensor([0, 3, 2, 4])
LABELS = torch.zeros(B, S, dtype=torch.long)
NESTED = torch.nested.nested_tensor([ROWS[0], ROWS[1, 1:]], layout=torch.jagged)
A_COUNT = "must be given when dp_size > 1 with loss_agg_mode="
SHAPE = "the shape of labels (2, 5)"
PER_SEQUENCE = f"{SHAPE} or one entry per sequence (2,)"
OF_PACKED = "the shape of labels (5,) or one entry per sequence"
A_GROUP = "be None or a torch.distributed.ProcessGroup that this rank is in (mesh.get_group())"

# By the argument, what it must be, and the value that it was. test_argument_kinds.py has others of
# every argument: types, dtypes, layouts, devices and shapes.
WRONG = {
    "logits": {
        "be floating point, got torch.int64": ROWS.long(),
        "be a dense tensor, got torch.jagged": NESTED,
        "have shape (..., V), got ()": ONE,
        "have V >= 1, got (2, 5, 0)": ROWS[..., :0],
    },
    "advantages": {f"have {PER_SEQUENCE}, got (5,)": ONES[0]},
    "temperature": {
        "be a number, got '0.7' (str)": "0.7",
        "be finite and > 0, got 0.0": 0,
        f"be 0-dim, or have {PER_SEQUENCE}, got (1, 1)": ONES[:1, :1],
        "be on the device of labels (cpu), got meta": ONE_ON_META,
    },
    "config": {"be a BAPOConfig or None, got dict": {"target": 0.5}, "be a BAPOConfig": {}},
    "statistics": {"be 'all' or 'live', got 'some'": "some", "be 'all' or 'live', got True": True},
    "vocab_group": {f"{A_GROUP}, got str": "x"},
    "process_group": {f"{A_GROUP}, got int": 0},
    "backend": {"be None or one of ['cuda', 'triton', 'cpu', 'reference'], got 'tpu'": "tpu"},
    "bounds": {"be a pair (lower, upper)": (1.0,)},
    "bounds.lower": {
        f"have one element, or have {PER_SEQUENCE}, got (4,)": (torch.ones(4), ONE),
        "be a number, got False (bool)": (False, True),
        "be a number (.item() of a tensor or array), got ndarray": (np.array([0.8]), 1.2),
        "be a real number, got torch.bool": (ONE.bool(), ONE.bool()),
        "be a number, got 'a' (str)": ("a", 1.2),
    },
    "bounds.upper": {
        "be >= 1, a bound of the ratio, not an epsilon, got -1.0": (torch.tensor(0.8), -1.0),
        "be on the device of the tokens": (ONE, ONE_ON_META),
        "be a number, got None (NoneType)": (0.8, None),
    },
    "dp_size": {"be an integer >= 1, got 0": 0, "be an integer >= 1, got True (bool)": True},
    "batch_num_tokens": {
        "be finite and > 0, got 0": 0,
        "be finite and > 0, got inf": float("inf"),
        "be a number, got True (bool)": True,
        "be a number, got '3' (str)": "3",
    },
    "global_batch_size": {
        "have one element, got (2,)": ONES[:, 0],
        "be None with loss_agg_mode='token-mean', which divides by batch_num_tokens, got 7": (
            torch.tensor(7)
        ),
    },
}
TOGETHER = {  # by the message, what is wrong together
    "ref_log_probs must be given when config.kl_loss_coef is not 0, got None": (
        dict(config=BAPOConfig(kl_loss_coef=0.1))
    ),
    "backend 'cuda' cannot run: ": dict(backend="cuda"),
    "backend 'cpu' cannot run: logits must be float32, bfloat16 or float16, got torch.float64": (
        dict(logits=ROWS.double(), backend="cpu")
    ),
    "backend 'cpu' cannot run: logits must be on a cpu device, got meta": (
        dict(logits=ROWS.to("meta"), labels=ON_META.long(), backend="cpu")
    ),
    "dp_size must be an integer >= 1, got 2.0 (float)": dict(dp_size=2.0, batch_num_tokens=3),
    "dp_size must be an integer >= 1, got Tensor": dict(dp_size=ONE, batch_num_tokens=3),
    f"batch_num_tokens {A_COUNT}'token-mean', got None": dict(dp_size=2),
    f"global_batch_size {A_COUNT}'seq-mean-token-mean'": (
        dict(dp_size=2, config=SEQ, batch_num_tokens=3)
    ),
    "batch_num_tokens must be None with loss_agg_mode='seq-mean-token-mean', which divides by "
    "global_batch_size, got 7": dict(config=SEQ, batch_num_tokens=7),
    "batch_num_tokens must be None with loss_agg_mode='token-sum', which divides by neither": (
        dict(config=SUM, batch_num_tokens=7)
    ),
    "labels must have packed shape (N,) with cu_seqlens, got (2, 5)": dict(cu_seqlens=CU),
}
PACKED = {
    f"advantages must have {OF_PACKED} (1,), got (3,)": dict(advantages=ONES[0, :3], cu_seqlens=CU),
    f"advantages must have {OF_PACKED} with cu_seqlens, got (1,)": dict(advantages=ONES[0, :1]),
    f"temperature must be 0-dim, or have {OF_PACKED} (1,), got (2,)": (
        dict(temperature=ONES[:, 0], cu_seqlens=CU)
    ),
    f"temperature must be 0-dim, or have {OF_PACKED} with cu_seqlens, got (2,)": (
        dict(temperature=ONES[:, 0])
    ),
    "cu_seqlens must be given for packed labels of shape (5,) with "
    "loss_agg_mode='seq-mean-token-mean', got None": dict(config=SEQ),
    "cu_seqlens must have shape (B + 1,) with B >= 1, got (1,)": dict(cu_seqlens=CU[:1]),
    "cu_seqlens must rise from 0 to at most 5, got [1, 5]": dict(cu_seqlens=torch.tensor([1, 5])),
    "cu_seqlens must rise from 0 to at most 5, got [3, 2]": dict(cu_seqlens=LENGTHS.int()),
    "cu_seqlens must rise from 0 to at most 5, got [0, 3, 2, 4]": dict(cu_seqlens=FALLING),
    "config.loss_scale_factor must be given for packed input": dict(config=NORM, cu_seqlens=CU),
}
CASES = [
    *(
        ((B, S), f"{name} must {rule}", {name.split(".")[0]: value})
        for name, values in WRONG.items()
        for rule, value in values.items()
    ),
    *(((B, S), *case) for case in TOGETHER.items()),
    *(((S,), *case) for case in PACKED.items()),
]


@pytest.mark.parametrize(("shape", "message", "changes"), CASES, ids=[case[1] for case in CASES])
def test_errors_of_bapo_loss(shape, message, changes):
    """No TypeError from inside torch, and nothing is accepted silently."""
    if changes.get("backend") == "cpu" and available_backends()["cpu"] is not None:
        pytest.skip("the native library is absent")
    given = arguments(shape, **changes)
    functions = [bapo_loss, partial(bapo_loss, backend="reference"), check_inputs]
    for function in functions:
        with raises(message):
            function(**given)


def of_hidden(**options):
    return bapo_linear_loss(ROWS, ROWS[0], LABELS, None, ONES, **options)


CHUNK = "chunk_tokens must be None or an integer >= 1"
of_log_probs = bapo_loss_from_log_probs
OTHER_CALLS = {
    "temperature must be finite and > 0, got 0": lambda: log_probs(ROWS, LABELS, temperature=0.0),
    "vocab_group must be None": lambda: log_probs(ROWS, LABELS, vocab_group=1),
    "entropy must be given when config.entropy_coef is not 0": lambda: of_log_probs(
        ONES, None, ONES, config=BAPOConfig(entropy_coef=0.1)
    ),
    "statistics must be": lambda: of_log_probs(ONES, None, ONES, statistics="none"),
    "scope must be call, step or lagged, got batch": lambda: ClipBoundSearch(scope="batch"),
    f"{CHUNK}, got 0": lambda: of_hidden(chunk_tokens=0),
    f"{CHUNK}, got 2.0 (float)": lambda: of_hidden(chunk_tokens=2.0),
    f"{CHUNK}, got True (bool)": lambda: of_hidden(chunk_tokens=True),
    "lm_head_weight must have the dtype": lambda: linear_log_probs(ROWS, ROWS[0].half(), LABELS),
    "logits_dtype must be None, or torch.float32 for hidden states of half precision "
    "(here torch.float32), got torch.bfloat16": lambda: of_hidden(logits_dtype=torch.bfloat16),
    "x must have the shape of ids (2, 1), got (2, 5)": lambda: masked(ONES, LABELS[:, :1]),
    "x must be floating point, got torch.int64": lambda: masked(LABELS, ONES),
    "b must have the shape of a (2, 6), got (2, 1)": lambda: kl(with_tail(ONES), ONES[:, :1]),
    "teacher must have the shape of student (2, 5), got (5,)": lambda: jsd(ONES, ONES[0], 0.5),
    "beta must be in (0, 1): at its ends take kl, got 1": lambda: jsd(ONES, ONES, 1),
    "rows must have pairs (id, log-prob), got ids [-0.5]": lambda: padded([[(-0.5, 3)]], 1),
}


@pytest.mark.parametrize("message", OTHER_CALLS)
def test_errors_of_other_functions(message):
    with raises(message):
        OTHER_CALLS[message]()


@pytest.mark.parametrize("backend", [{}, {"backend": "reference"}])
def test_tensors_without_values(backend):
    x, A, labels = ROWS.to("meta"), ON_META, ON_META.long()
    for name, function, *given in (
        ("logits", bapo_loss, x, labels, None, A),
        ("logits", log_probs, x, labels),
        ("logits", check_inputs, x, labels, None, A),
        ("hidden_states", bapo_linear_loss, x, x[0], labels, None, A),
        ("hidden_states", linear_log_probs, x, x[0], labels),
        ("log_probs", bapo_loss_from_log_probs, A, None, A),
    ):
        with raises(f"{name} must have values, got a tensor on the meta"):
            function(*given, **backend)
    with raises("log_probs must have values, got a tensor on the meta"):
        find_clip_bounds(A, None, A)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_hidden_states_without_columns(backend):
    labels, *batch = list(arguments().values())[1:]
    hidden, weight = torch.ones(B, S, 0), torch.ones(V, 0)
    for function, *given in ((bapo_linear_loss, labels, *batch), (linear_log_probs, labels)):
        with raises("hidden_states must have shape (..., H) with H >= 1, got (2, 5, 0)"):
            function(hidden, weight, *given, backend=backend)


def test_unknown_options_are_refused():
    for name in ("clip_ratio", "loss_agg_mode", "logit_scale"):  # members of the config
        for function in (bapo_loss, check_inputs):
            with pytest.raises(TypeError, match=name):
                function(**arguments(**{name: 1.0}))


def test_nothing_is_written_before_the_checks():
    """A refused in-place call leaves the logits unchanged."""
    given = arguments(statistics="some", inplace=True)
    before = given["logits"].clone()
    version = given["logits"]._version
    for change in ({}, {"statistics": "all", "bounds": (2.0, 1.0)}):
        with pytest.raises(ValueError, match="must"):
            bapo_loss(**(given | change))
    assert_same(given["logits"], before)
    assert given["logits"]._version == version


@pytest.mark.parametrize("loss_of", [bapo_loss, reference.bapo_loss])
@pytest.mark.parametrize("kind", [float, np.float32])
def test_bounds_that_are_numbers(kind, loss_of):
    """Epsilons, NaN and crossed bounds are refused; tensors are not read (``test_debug.py``)."""
    given = arguments()
    expected = loss_of(**given, bounds=(torch.tensor(0.75), torch.tensor([1.5]))).loss
    assert loss_of(**given, bounds=ClipBounds(kind(0.75), kind(1.5))).loss == expected
    epsilon = "a bound of the ratio, not an epsilon, got"
    for message, pair in {
        f"bounds.lower must be in [0, 1], {epsilon} 1.2": (1.2, 1.5),
        f"bounds.lower must be in [0, 1], {epsilon} -0.1": (-0.1, 1.5),
        f"bounds.lower must be in [0, 1], {epsilon} nan": (np.nan, 1.5),
        f"bounds.upper must be >= 1, {epsilon} 0.28": (0.2, 0.28),
        f"bounds.upper must be >= 1, {epsilon} nan": (0.8, np.nan),
    }.items():
        with raises(message):
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
        assert_same(a, b)


@pytest.mark.parametrize("value", [0.0, -3.0, float("nan"), float("inf")])
@pytest.mark.parametrize("loss_of", [bapo_loss, reference.bapo_loss])
def test_counts_on_a_device(loss_of, value):
    """They are not read: an invalid count makes the loss NaN, never 0 or of the wrong sign."""
    given = arguments(old_log_probs=None)
    count = torch.tensor(value)
    assert loss_of(**given, batch_num_tokens=count).loss.isnan()
    assert loss_of(**given, config=SEQ, global_batch_size=count).loss.isnan()


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


def test_float64_is_slow_and_says_so_once():
    labels, A = torch.arange(3), torch.ones(3)
    x, weight = torch.randn(3, 4).double(), torch.randn(5, 4).double()
    torch._dynamo.reset()
    functions = {
        bapo_loss: lambda **given: bapo_loss(x, labels, None, A, **given),
        log_probs: lambda **given: log_probs(x, labels, **given),
        "compiled": torch.compile(lambda **given: log_probs(x, labels, **given), backend="eager"),
        bapo_linear_loss: lambda **given: bapo_linear_loss(x, weight, labels, None, A, **given),
        linear_top_k: lambda **given: linear_top_k(x, weight, 2, **given),
        # It has no such argument.
        find_clip_bounds: lambda backend: backend or find_clip_bounds(x[:, 0], x[:, 1], A, A),
    }
    for call in functions.values():
        for backend in (None, "reference"):
            checks.warn_once.cache_clear()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call(backend=backend)
                call(backend=backend)
            messages = [w for w in caught if "float64 on the PyTorch reference" in str(w.message)]
            assert len(messages) == (backend is None)


@pytest.mark.parametrize("function", [bapo_loss, bapo_linear_loss, bapo_loss_from_log_probs])
def test_another_name_of_the_mask(function):
    with pytest.raises(TypeError, match="^mask must be called response_mask, got Tensor$"):
        function(ROWS, mask=ONES)
