"""check_inputs names the first offending index; the environment report gives reasons."""

import inspect
import subprocess
import sys

import pytest
import torch
from helpers import make_case

import bapo_kernels
from bapo_kernels import BAPOConfig, bapo_loss, log_probs, reference
from bapo_kernels.debug import check_inputs, environment
from bapo_kernels.sampling_mask import SamplingMask


def case():
    return make_case((3, 4), V=9, masked=0.0, idle=0.0, poison=False)


def refuses(message):
    return pytest.raises(ValueError, match=message)


def test_good_inputs_pass():
    good = case()
    good.logits[0, 0, 3] = -torch.inf
    good.response_mask[1, 1] = False
    good.logits[1, 1] = torch.nan
    good.labels[1, 1] = 77
    check_inputs(good.logits, *good.arguments(), statistics="live", **good.options)


PER_TOKEN = ("old_log_probs", "rollout_log_probs", "rollout_is_weights", "ref_log_probs")
BAD = [
    ("labels", (2, 1), 9, r"labels must be in \[0, 9\) or -100, got 9 at \(2, 1\)"),
    ("logits", (1, 3, 7), torch.nan, r"logits must be finite or -inf, got nan at \(1, 3, 7\)"),
    ("logits", (1, 3, 7), torch.inf, r"logits must be finite or -inf, got inf at \(1, 3, 7\)"),
    ("logits", (1, 3), -torch.inf, r"logits must allow a token in every row.* at \(1, 3\)"),
    ("advantages", (0, 2), torch.nan, r"advantages must be finite, got nan at \(0, 2\)"),
    *((x, (2, 3), -torch.inf, rf"{x} must be finite, got -inf at \(2, 3\)") for x in PER_TOKEN),
]


@pytest.mark.parametrize(("name", "index", "value", "message"), BAD)
def test_bad_values(name, index, value, message):
    x = case()
    x.labels[:] = 1
    given = {"advantages": x.advantages, "old_log_probs": x.old_log_probs}
    given |= {"logits": x.logits, "labels": x.labels, "response_mask": x.response_mask}
    given.setdefault(name, torch.zeros(3, 4))[index] = value
    with refuses(message):
        check_inputs(**given)


def test_bad_offsets():
    x = torch.zeros(4)
    for offsets in ([0, 5], [1, 4], [0, 3, 2, 4]):
        with refuses("cu_seqlens must rise from 0 to at most 4"):
            check_inputs(torch.zeros(4, 3), x.long(), x, x, cu_seqlens=torch.tensor(offsets))


@pytest.mark.parametrize("masked_by", ["mask", "labels"])
def test_offsets_that_end_early(masked_by):
    """Tokens in no sequence are named, unless they are masked anyway."""
    x = torch.zeros(9)
    labels, mask, offsets = x.long(), torch.ones(9), torch.tensor([0, 3, 7])
    with refuses(r"cu_seqlens must end at 9, got 7: tokens 7 to 8 are in no sequence"):
        check_inputs(torch.zeros(9, 3), labels, None, x, mask, cu_seqlens=offsets)
    if masked_by == "mask":
        mask[7:] = 0
    else:
        labels[7:] = -100
    check_inputs(torch.zeros(9, 3), labels, None, x, mask, cu_seqlens=offsets)


def test_check_inputs_has_the_signature_of_the_loss():
    loss, check = (inspect.signature(function).parameters for function in (bapo_loss, check_inputs))
    assert [(p.name, p.kind, p.default) for p in loss.values()] == [
        (p.name, p.kind, p.default) for p in check.values()
    ]


def policy(shape=(4, 12), V=50, **options):
    """Logits, the labels they predict, and the old log-probs of a first step."""
    torch.manual_seed(0)
    logits, labels = torch.randn(*shape, V), torch.randint(0, V, shape)
    return logits, labels, log_probs(logits, labels, **options)[0], torch.ones(shape[0])


@pytest.mark.parametrize("name", ["old_log_probs", "rollout_log_probs", "ref_log_probs"])
@pytest.mark.parametrize("V", [2, 50, 2000])
def test_probabilities_given_as_log_probs(name, V):
    logits, labels, old, A = policy(V=V)
    given = dict(old_log_probs=old)
    check_inputs(logits, labels, advantages=A, **given | {name: old})
    rounded = old.clone()
    rounded[1, 2] = 1e-6
    check_inputs(logits, labels, advantages=A, **given | {name: rounded})
    check_inputs(logits, labels, advantages=A, **given | {name: torch.full_like(old, -0.0)})
    mask = torch.ones_like(old)
    mask[0, 0], rounded[0, 0] = 0, 0.5
    check_inputs(logits, labels, advantages=A, response_mask=mask, **given | {name: rounded})
    with refuses(rf"{name} must be log-probs <= 0, got 0.\d+ at \(0, 0\)"):
        check_inputs(logits, labels, advantages=A, **given | {name: old.exp()})
    rounded[0, 0] = -1.0
    rounded[3, 1] = 0.02
    with refuses(rf"{name} must be log-probs <= 0, got 0.0\d+ at \(3, 1\)"):
        check_inputs(logits, labels, advantages=A, **given | {name: rounded})


def test_probabilities_given_as_logits():
    logits, labels, old, A = policy()
    for right in (logits, torch.log_softmax(logits, -1), logits.bfloat16(), logits.clamp(min=0)):
        check_inputs(right, labels, old, A)
    for wrong in (logits.softmax(-1), logits.bfloat16().softmax(-1)):
        with refuses("logits must be logits, got probabilities"):
            check_inputs(wrong, labels, None, A)
    check_inputs(torch.eye(4), torch.arange(4), None, torch.ones(4))
    check_inputs(torch.ones(9, 1), torch.zeros(9, dtype=torch.long), None, torch.ones(9))
    check_inputs(logits[0, 0], labels[0, 0], old[0, 0], A[0])  # a single row


def test_logarithms_given_as_weights():
    logits, labels, old, A = policy()
    check_inputs(logits, labels, old, A, rollout_is_weights=old.exp())
    with refuses(r"rollout_is_weights must be >= 0, got -.* at \(0, 0\)"):
        check_inputs(logits, labels, old, A, rollout_is_weights=old)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("value", [0.5, -1.0, -torch.inf, torch.nan, 2])
def test_values_that_are_not_a_mask(value, dtype):
    logits, labels, old, A = policy()
    mask = torch.ones(old.shape, dtype=dtype)
    if dtype.is_floating_point or value in (-1.0, 2):
        mask[2, 3] = value
        with refuses(r"response_mask must be 0 \(masked\) or 1, got .*2, 3"):
            check_inputs(logits, labels, old, A, mask)
    for good in (mask == 1, (mask == 1).to(dtype), torch.zeros_like(mask)):
        check_inputs(logits, labels, old, A, good)


def test_inverted_mask():
    """A prompt has no labels: a mask that keeps only the prompt must be inverted."""
    logits, labels, old, A = policy()
    labels[:, :5] = -100
    mask = labels != -100
    check_inputs(logits, labels, old, A, mask)
    check_inputs(logits, torch.full_like(labels, -100), old, A, mask)
    with refuses("response_mask must be 1 at some label other than -100"):
        check_inputs(logits, labels, old, A, ~mask)


FIRST_STEP = "nats; in a correct first step ppo_kl and pg_clipfrac are about 0"


@pytest.mark.parametrize("stale", [0.0, 0.1])
@pytest.mark.parametrize("layout", ["padded", "packed", "one row"])
@pytest.mark.parametrize("V", [11, 1000])
def test_shifted_labels(V, layout, stale):
    """Labels not shifted, or shifted twice; old log-probs shifted along with them, or not."""
    logits, tokens, *_ = policy((6, 14), V)
    logits[0, 0, tokens[0, 0]] = -torch.inf
    rows, labels = logits[:, :-2], tokens[:, 1:-1]
    old = log_probs(rows, labels)[0]
    old = (old - stale * torch.rand_like(old)).clamp(max=0)
    options = {}

    def check(rows, labels, old):
        if layout == "packed":
            S = labels.shape[1]
            rows, labels, old = rows.flatten(0, 1), labels.flatten(), old.flatten()
            options["cu_seqlens"] = torch.arange(7) * S
        if layout == "one row":
            rows, labels, old = (x[0] for x in (rows, labels, old))
        check_inputs(rows, labels, old, torch.ones_like(old), **options)

    check(rows, labels, old)
    aligned = "labels must be aligned with the rows of logits .*labels one position"
    for wrong, where in ((tokens[:, :-2], "later"), (tokens[:, 2:], "earlier")):
        with refuses(f"{aligned} {where}. Corrected, mean .*instead of"):
            check(rows, wrong, old)
    moved = old.roll(1, 1)
    moved[:, 0] = -50.0  # belongs to no row
    with refuses(f"{aligned} later"):
        check(rows[:, 1:], tokens[:, 1:-2], moved[:, 1:])
    with refuses("old_log_probs must be .*position after"):
        check(rows[:, 1:], labels[:, 1:], moved[:, 1:])
    with refuses("old_log_probs must be .*position before"):
        check(rows[:, :-1], labels[:, :-1], old[:, 1:])
    if not stale:
        with refuses(FIRST_STEP):
            check(rows, tokens[:, :-2], old)


def test_wrong_temperature():
    for T in (0.6, 0.8, 1.4):
        arguments = policy(V=500, temperature=T)
        check_inputs(*arguments, config=BAPOConfig(temperature=T))
        with refuses(f"config.temperature must .*, got 1.0, they fit {T}"):
            check_inputs(*arguments)


def test_temperatures():
    """Per token, per sequence, 0-dim: bad ones of unmasked tokens, and those of another policy."""
    T = torch.linspace(0.5, 2.0, 4)[:, None].expand(4, 12).clone()
    logits, labels, old, A = policy((4, 12), 500, temperature=T)
    check_inputs(logits, labels, old, A, temperature=T)
    check_inputs(logits, labels, old, A, temperature=T[:, 0])
    of_another = policy((4, 12), 500, temperature=0.7)[2]
    rule = "^temperature must be that of old_log_probs, got the tensor given, they fit 0.7"
    with refuses(rule):
        check_inputs(logits, labels, of_another, A, temperature=T)
    mask = torch.ones(4, 12, dtype=torch.bool)
    mask[1, 3] = False
    for bad in (0.0, -1.0, torch.inf, torch.nan):
        T[1, 3] = bad
        check_inputs(logits, labels, old, A, mask, temperature=T)
        with refuses(rf"temperature must be finite and > 0, got {bad} at"):
            check_inputs(logits, labels, old, A, temperature=T)
    with refuses(r"temperature must .*, got 0.0 at \(0, 0\)"):
        check_inputs(logits, labels, old, A, temperature=torch.tensor(0.0))
    with refuses(r"temperature must .*, got \(12,\)"):
        check_inputs(logits, labels, old, A, temperature=T[0])


@pytest.mark.parametrize("shape", [(1, 2), (1, 7), (2, 5), (4, 12)])
def test_stale_data_is_accepted(shape):
    """However stale and in whatever way; and few tokens are no evidence of a mistake."""
    for seed, V in enumerate([3, 3, 50, 50, 400, 400]):
        logits, labels, old, A = policy(shape, V)
        torch.manual_seed(seed)
        for off in (torch.randn(shape), -torch.rand(shape), -torch.rand(shape[0], 1)):
            for scale in (0.5, 5.0):
                check_inputs(logits, labels, (old + scale * off).clamp(max=-1e-3), A)
        for n in range(2):  # forbidden since the rollout
            logits[0, n, labels[0, n]] = -torch.inf
            check_inputs(logits, labels, old, A)
    check_inputs(logits, labels, torch.zeros(shape), A)


@pytest.mark.parametrize(
    ("row", "ids", "message"),
    [
        (5, [9], r"sampling_mask.token_ids must be in \[0, 9\), got 9 at \(1, 1\)$"),
        (5, [3, -1, 2**40], r"sampling_mask.token_ids .* got -1 at \(1, 1\) and 1 more$"),
        (5, [3, 0, 3, 3], r"token_ids must be distinct in a set, got 3 at \(1, 1\) and 1 more$"),
        (3, [3, 5], r"labels must be in the sets of sampling_mask, got 1 at \(0, 3\)$"),
        (1, [9, 9], None),
        (2, [], None),
    ],
)
def test_sets(row, ids, message):
    """Those of masked tokens may hold anything."""
    x = case()
    x.labels[:] = 1
    x.response_mask[0, 1] = False
    sets = [[n, 1, 0] if n > 1 else [0, 1] for n in range(8)] + [[]] * 4
    check_inputs(x.logits, *x.arguments(), sampling_mask=SamplingMask.from_lists(sets))
    sets[row] = ids
    mask = SamplingMask.from_lists(sets)
    if message is None:
        return check_inputs(x.logits, *x.arguments(), sampling_mask=mask)
    with refuses(message):
        check_inputs(x.logits, *x.arguments(), sampling_mask=mask)


def test_labels_outside_of_many_sets():
    x = case()
    x.labels[:] = torch.arange(4)
    mask = SamplingMask.from_lists([[3]] * 12)
    rule = r"labels must be in the sets of sampling_mask, got 0 at \(0, 0\) and 8 more"
    with refuses(rule):
        check_inputs(x.logits, *x.arguments(), sampling_mask=mask)
    with refuses(r"sampling_mask must have 12 rows, .*\(3, 4\).* got 11"):
        check_inputs(x.logits, *x.arguments(), sampling_mask=mask[1:])


def test_logits_outside_of_the_sets_may_hold_anything():
    """And those inside decide: a set of -inf alone, old log-probs that know no set."""
    logits, labels, _, A = policy(V=50)
    order = torch.rand(4, 12, 50).scatter(-1, labels[..., None], -1.0).argsort(-1)
    mask = SamplingMask.from_padded(order[..., :5])
    logits = logits.scatter(-1, order[..., 5:], torch.nan)
    old = reference.log_probs(logits, labels, sampling_mask=mask, temperature=0.7)[0]
    warmer = dict(config=BAPOConfig(temperature=0.7), sampling_mask=mask)
    check_inputs(logits, labels, old, A, **warmer)
    with refuses(r"config.temperature must .*, got 1.0, they fit 0.7"):
        check_inputs(logits, labels, old, A, sampling_mask=mask)
    with refuses(r"logits must be finite or -inf, got nan at \(0, 0"):
        check_inputs(logits, labels, old, A)
    logits[2, 3, order[2, 3, :5]] = -torch.inf
    with refuses(r"logits must allow a token in every row.* at \(2, 3\)"):
        check_inputs(logits, labels, old, A, **warmer)


def test_offsets_of_sets_that_do_not_rise():
    """As on a GPU, where they are not read before."""
    x = case()
    mask = SamplingMask._of(torch.arange(4, dtype=torch.int32), torch.tensor([0, 3, 2] + [4] * 10))
    with refuses(r"offsets must rise from 0 to 4, got 2 at \(2,\)"):
        check_inputs(x.logits, *x.arguments(), sampling_mask=mask)


def test_options_are_checked_too():
    arguments = policy()
    epsilons = torch.tensor(0.2), torch.tensor(0.28)
    for message, options in (
        ("bounds.upper must be >= 1, .*not an epsilon, got 0.28", dict(bounds=epsilons)),
        ("batch_num_tokens must be finite and > 0, got 0", dict(batch_num_tokens=torch.tensor(0))),
        ("batch_num_tokens must be finite and > 0, got -1", dict(batch_num_tokens=-1)),
        ("config must be a BAPOConfig", dict(config={"temperature": 0.7})),
        ("ref_log_probs must be given", dict(config=BAPOConfig(kl_loss_coef=0.1))),
        ("backend must be None or one of", dict(backend="tpu")),
    ):
        with refuses(message):
            check_inputs(*arguments, **options)
    with refuses("batch_num_tokens must be finite and > 0, got nan"):
        check_inputs(*arguments, batch_num_tokens=torch.tensor(torch.nan))
    with pytest.raises(TypeError, match="old_logprobs"):
        check_inputs(*arguments, old_logprobs=arguments[2])


def test_uint8_labels():
    """-100 as uint8 is 156, a label like any other."""
    labels = torch.full((2,), 156, dtype=torch.uint8)
    with refuses(r"labels must be in \[0, 100\) or -100, got 156"):
        check_inputs(torch.zeros(2, 100), labels, None, torch.ones(2))


def test_environment_report():
    report = environment()
    assert report["bapo_kernels"] == bapo_kernels.__version__
    for name, reason in bapo_kernels.available_backends().items():
        expected = "available" if reason is None else f"absent: {reason}"
        assert report[f"backend {name}"] == expected


@pytest.mark.slow
def test_command_line():
    run = subprocess.run(
        [sys.executable, "-m", "bapo_kernels"], capture_output=True, text=True, check=True
    )
    assert "backend reference available" in run.stdout


def test_missing_library_is_explained(tmp_path, monkeypatch):
    """Without the native library everything still runs, and the reason is given."""
    from bapo_kernels.backends import native

    monkeypatch.setattr(native, "_PACKAGE", tmp_path)
    assert "setup.py has not built it" in native._load()
    (tmp_path / "_build.json").write_text('{"native": "no C++ compiler found"}')
    reason = native._load()
    assert reason == "the native library is absent: no C++ compiler found"
    monkeypatch.setattr(native, "WHY_NO_CPU", reason)
    assert bapo_kernels.available_backends()["cpu"] == reason
    c = case()
    assert bapo_kernels.bapo_loss(c.logits, *c.arguments()).loss.isfinite()
    assert bapo_kernels.find_clip_bounds(c.old_log_probs, None, c.advantages).upper > 1
    with refuses("backend 'cpu' cannot run: .*no C\\+\\+ compiler found"):
        bapo_kernels.bapo_loss(c.logits, *c.arguments(), backend="cpu")


def test_unmasked_prompt():
    """Trainers pad the old log-probs of a prompt with 0."""
    logits, labels = 3 * torch.randn(4, 12, 50), torch.randint(0, 50, (4, 12))
    old = log_probs(logits, labels)[0]
    mask = (torch.arange(12) >= 5).expand(4, 12).float()
    check_inputs(logits, labels, old * mask, torch.ones(4), mask)
    with refuses(r"response_mask must be 0 .*a prompt.*log-prob of -"):
        check_inputs(logits, labels, old * mask, torch.ones(4), torch.ones(4, 12))
