"""check_inputs names the first offending index; the environment report gives reasons."""

import inspect
from contextlib import nullcontext

import pytest
import torch
from helpers import make_case

import bapo_kernels
from bapo_kernels import BAPOConfig, bapo_loss, log_probs, reference
from bapo_kernels.backends import native
from bapo_kernels.debug import check_inputs, environment
from bapo_kernels.sampling_mask import SamplingMask


def case():
    return make_case((3, 4), V=9, masked=0.0, idle=0.0, poison=False)


def refuses(message):
    return pytest.raises(ValueError, match=message) if message else nullcontext()


def check(*given, refused=None, **options):
    """``refused``: with this message."""
    with refuses(refused):
        check_inputs(*given, **options)


def test_good_inputs_pass():
    good = case()
    good.logits[0, 0, 3] = -torch.inf
    good.response_mask[1, 1] = False
    good.logits[1, 1] = torch.nan
    good.labels[1, 1] = 77
    check(good.logits, *good.arguments(), statistics="live", **good.options)


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
    given = {name: getattr(x, name) for name in ("logits", "labels", *PER_TOKEN[:1], "advantages")}
    given.setdefault(name, torch.zeros(3, 4))[index] = value
    check(**given, response_mask=x.response_mask, refused=message)


def test_offsets_that_end_early():
    """Tokens in no sequence are named, unless they are masked anyway."""
    x = torch.zeros(9)
    given = torch.zeros(9, 3), x.long(), None, torch.ones(9)
    mask, labels = torch.ones(9), x.long()
    mask[7:], labels[7:] = 0, -100
    options = dict(cu_seqlens=torch.tensor([0, 3, 7]))
    at_end = "cu_seqlens must end at 9, got 7: tokens 7 to 8 are in no sequence"
    check(*given, **options, refused=at_end)
    check(*given, mask, **options)
    check(given[0], labels, *given[2:], **options)


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
    given = dict(logits=logits, labels=labels, old_log_probs=old, advantages=A)
    rounded, mask = old.clone(), torch.ones_like(old)
    rounded[1, 2] = 1e-6
    for good in (old, rounded, *[torch.full_like(old, -0.0)] * (name != "old_log_probs")):
        check(**given | {name: good})
    mask[0, 0], rounded[0, 0] = 0, 0.5
    check(**given | {name: rounded}, response_mask=mask)
    refused = name + r" must be log-probs <= 0, got 0.{}\d+ at \({}\)"
    check(**given | {name: old.exp()}, refused=refused.format("", "0, 0"))
    rounded[0, 0], rounded[3, 1] = -1.0, 0.02
    check(**given | {name: rounded}, refused=refused.format("0", "3, 1"))


def test_probabilities_given_as_logits():
    logits, labels, old, A = policy()
    for right in (logits, torch.log_softmax(logits, -1), logits.bfloat16(), logits.clamp(min=0)):
        check(right, labels, old, A)
    for wrong in (logits.softmax(-1), logits.bfloat16().softmax(-1)):
        check(wrong, labels, None, A, refused="logits must be logits, got probabilities")
    check(torch.eye(4), torch.arange(4), None, torch.ones(4))
    check(torch.ones(9, 1), torch.zeros(9, dtype=torch.long), None, torch.ones(9))
    check(logits[0, 0], labels[0, 0], old[0, 0], A[0])  # a single row


def test_logarithms_given_as_weights():
    *given, old, A = policy()
    check(*given, old, A, rollout_is_weights=old.exp())
    negative = r"rollout_is_weights must be >= 0, got -.* at \(0, 0\)"
    check(*given, old, A, rollout_is_weights=old, refused=negative)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("value", [0.5, -1.0, -torch.inf, torch.nan, 2])
def test_values_that_are_not_a_mask(value, dtype):
    given, mask = policy(), torch.ones(4, 12, dtype=dtype)
    if dtype.is_floating_point or value in (-1.0, 2):
        mask[2, 3] = value
        check(*given, mask, refused=r"response_mask must be 0 \(masked\) or 1, got .*2, 3")
    for good in (mask == 1, (mask == 1).to(dtype)):
        check(*given, good)
    check(*given, torch.zeros_like(mask), refused="response_mask must leave a token unmasked, got")


def test_inverted_mask():
    """A prompt has no labels: a mask that keeps only the prompt must be inverted."""
    logits, labels, old, A = policy()
    labels[:, :5] = -100
    mask = labels != -100
    check(logits, labels, old, A, mask)
    nothing = "labels must leave a token unmasked, got none"
    check(logits, torch.full_like(labels, -100), old, A, refused=nothing)
    inverted = "response_mask must be 1 at some label other than -100"
    check(logits, labels, old, A, ~mask, refused=inverted)


@pytest.mark.parametrize("zeros", [False, True])
def test_inverted_mask_of_a_whole_sequence(zeros):
    """The old log-probs are of answers; elsewhere they are 0, or those of another policy."""
    logits, labels, old, A = policy()
    answers = (torch.arange(12) >= 5).expand(4, 12)
    old = old * answers if zeros else torch.where(answers, old, old - 2 - torch.rand(4, 12))
    summary = check_inputs(logits, labels, old, A, answers)
    assert summary[:2] == (48, 28)
    assert summary.difference < 1e-6
    assert str(summary).startswith("28 of 48 tokens unmasked, mean |log_prob - old| ")
    inverted = "response_mask must be 1 .*an inverted mask"
    check(logits, labels, old, A, ~answers, refused=inverted)
    check(logits[:1, :9], labels[:1, :9], old[:1, :9], A[:1], ~answers[:1, :9])  # few tokens


@pytest.mark.parametrize("drift", [0.1, 0.5, 2.0])
def test_masked_tokens_of_a_drifting_policy(drift):
    """Those of tools are certain, and their old log-probs fit or are padding."""
    for seed in range(10):
        g = torch.Generator().manual_seed(seed)
        logits, labels, _, A = policy((4, 24), 200)
        mask = torch.rand(4, 24, generator=g) < 0.6
        logits[~mask] = logits[~mask].scatter(-1, labels[~mask][:, None], 15.0)
        now = log_probs(logits, labels)[0]
        moved = (now + drift * torch.randn(4, 24, generator=g)).clamp(max=0)
        for of_tools in (torch.zeros(4, 24), now, moved):
            check(logits, labels, torch.where(mask, moved, of_tools), A, mask)


@pytest.mark.parametrize("stale", [0.0, 0.1])
@pytest.mark.parametrize(
    ("layout", "V"), [("padded", 1000), ("packed", 11), ("one row", 11), ("one row", 1000)]
)
def test_shifted_labels(V, layout, stale):
    """Labels not shifted, or shifted twice; old log-probs shifted along with them, or not."""
    logits, tokens, *_ = policy((6, 14), V)
    logits[0, 0, tokens[0, 0]] = -torch.inf
    rows, labels = logits[:, :-2], tokens[:, 1:-1]
    old = log_probs(rows, labels)[0]
    old = (old - stale * torch.rand_like(old)).clamp(max=0)

    def in_layout(rows, labels, old, refused=None):
        options = {}
        if layout == "packed":
            options["cu_seqlens"] = torch.arange(7) * labels.shape[1]
            rows, labels, old = rows.flatten(0, 1), labels.flatten(), old.flatten()
        if layout == "one row":
            rows, labels, old = (x[0] for x in (rows, labels, old))
        check(rows, labels, old, torch.ones_like(old), **options, refused=refused)

    in_layout(rows, labels, old)
    aligned = "labels must be aligned with the rows of logits .*labels one position"
    for wrong, where in ((tokens[:, :-2], "later"), (tokens[:, 2:], "earlier")):
        in_layout(rows, wrong, old, f"{aligned} {where}. Corrected, mean .*instead of")
    moved = old.roll(1, 1)
    moved[:, 0] = -50.0  # belongs to no row
    in_layout(rows[:, 1:], tokens[:, 1:-2], moved[:, 1:], f"{aligned} later")
    after, before = (f"old_log_probs must be .*position {which}" for which in ("after", "before"))
    in_layout(rows[:, 1:], labels[:, 1:], moved[:, 1:], after)
    in_layout(rows[:, :-1], labels[:, :-1], old[:, 1:], before)
    if not stale:
        first_step = "nats; in a correct first step ppo_kl and pg_clipfrac are about 0"
        in_layout(rows, tokens[:, :-2], old, first_step)


def test_wrong_temperature():
    for T in (0.6, 0.9, 1.1, 1.4):
        given = policy(V=500, temperature=T)
        check(*given, config=BAPOConfig(temperature=T))
        check(*given, refused=f"config.temperature must .*, got 1.0, they fit {T}")


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_wrong_transform(scale):
    """A soft cap that the config lacks, and transforms that the model has applied already."""
    logits, labels, _, A = policy((4, 32), 500)
    z = scale * logits
    softcap, scaled = (BAPOConfig(**{n: 30.0}) for n in ("final_logit_softcapping", "logit_scale"))
    capped = 30 * torch.tanh(z / 30)
    old = log_probs(capped, labels)[0]
    check(z, labels, old, A, config=softcap)
    check(capped, labels, old, A)
    if scale > 1:  # below, a soft cap is linear
        lacks = "config.final_logit_softcapping must .*, got None, they fit 30"
        check(z, labels, old, A, refused=lacks)
        twice = "config must have no scale and soft cap for logits that the model returns, got {}"
        check(capped, labels, old, A, config=softcap, refused=twice.format("1.0 and 30.0"))
    once = log_probs(z / 30, labels)[0]
    check(z / 900, labels, once, A, config=scaled)
    scaled = "config must have no scale .*, got 30.0 and None, applied once more"
    check(z / 30, labels, once, A, config=BAPOConfig(logit_scale=30.0), refused=scaled)


def test_rows_of_other_sequences():
    logits, labels, old, A = policy((6, 12))
    rows = "labels must be aligned with the rows of logits .*, got those of the sequence at -2 "
    check(logits.roll(2, 0), labels, old, A, refused=rows)
    values = "old_log_probs must be those of labels, got those of the sequence at [+]1 in the batch"
    check(logits, labels, old.roll(1, 0), A, refused=values)
    spread = "old_log_probs must be those of single tokens, got the same value at all tokens"
    for each in (old.sum(1, keepdim=True), old.mean(1, keepdim=True) - 1):
        check(logits, labels, each.expand(6, 12), A, refused=spread)


def test_temperatures():
    """Per token, per sequence, 0-dim: bad ones of unmasked tokens, and those of another policy."""
    T = torch.linspace(0.5, 2.0, 4)[:, None].expand(4, 12).clone()
    given = logits, labels, _, A = policy((4, 12), 500, temperature=T)
    check(*given, temperature=T)
    check(*given, temperature=T[:, 0])
    others = policy((4, 12), 500, temperature=0.7)[2]
    fitting = "^temperature must be that of old_log_probs, got the tensor .*, they fit 0.7"
    check(logits, labels, others, A, temperature=T, refused=fitting)
    mask = torch.ones(4, 12, dtype=torch.bool)
    mask[1, 3] = False
    for bad in (0.0, -1.0, torch.inf, torch.nan):
        T[1, 3] = bad
        check(*given, mask, temperature=T)
        check(*given, temperature=T, refused=f"temperature must be finite and > 0, got {bad} at")
    zero = r"temperature must .*, got 0.0 at \(0, 0\)"
    check(*given, temperature=torch.tensor(0.0), refused=zero)
    check(*given, temperature=T[0], refused=r"temperature must .*, got \(12,\)")


@pytest.mark.parametrize("shape", [(1, 2), (1, 7), (2, 5), (4, 12)])
def test_stale_data_is_accepted(shape):
    """However stale and in whatever way; and few tokens are no evidence of a mistake."""
    for seed, V in enumerate([3, 3, 50, 50, 400, 400]):
        logits, labels, old, A = policy(shape, V)
        torch.manual_seed(seed)
        for off in (torch.randn(shape), -torch.rand(shape), -torch.rand(shape[0], 1)):
            for scale in (0.5, 5.0):
                check(logits, labels, (old + scale * off).clamp(max=-1e-3), A)
        for n in range(2):  # forbidden since the rollout
            logits[0, n, labels[0, n]] = -torch.inf
            check(logits, labels, old, A)
    zeros = "response_mask must .*1 at .* old_log_probs 0 alone: an inverted mask, or zeros"
    check(logits, labels, torch.zeros(shape), A, refused=zeros if labels.numel() > 8 else "")


@pytest.mark.parametrize(
    ("row", "ids", "message"),
    [
        (5, [9], r"sampling_mask.token_ids must be in \[0, 9\), got 9 at \(1, 1\)$"),
        (5, [3, -1, 2**40], r"sampling_mask.token_ids .* got -1 at \(1, 1\) and 1 more$"),
        (5, [3, 0, 3, 3], r"token_ids must be distinct in a set, got 3 at \(1, 1\) and 1 more$"),
        (3, [3, 5], r"labels must be in the sets of sampling_mask, got 1 at \(0, 3\)$"),
        (1, [9, 9], None),  # masked
        (2, [], None),
        (2, [0, 1], None),
    ],
)
def test_sets(row, ids, message):
    x = case()
    x.labels[:] = 1
    x.response_mask[0, 1] = False
    sets = [[n, 1, 0] if n > 1 else [0, 1] for n in range(8)] + [[]] * 4
    sets[row] = ids
    check(x.logits, *x.arguments(), sampling_mask=SamplingMask.from_lists(sets), refused=message)


def test_sets_that_belong_to_other_tokens():
    """Offsets that fall: as on a GPU, where they are not read before."""
    x = case()
    x.labels[:] = torch.arange(4)
    mask = SamplingMask.from_lists([[3]] * 12)
    falling = torch.arange(4, dtype=torch.int32), torch.tensor([0, 3, 2] + [4] * 10)
    many = r"labels must be in the sets of sampling_mask, got 0 at \(0, 0\) and 8 more"
    for sets, refused in (
        (mask, many),
        (mask[1:], r"sampling_mask must have 12 rows, .*\(3, 4\).* got 11"),
        (SamplingMask._of(*falling), r"offsets must rise from 0 to 4, got 2 at \(2,\)"),
    ):
        check(x.logits, *x.arguments(), sampling_mask=sets, refused=refused)


def test_logits_outside_of_the_sets_may_hold_anything():
    """And those inside decide: a set of -inf alone, old log-probs that know no set."""
    logits, labels, _, A = policy(V=50)
    order = torch.rand(4, 12, 50).scatter(-1, labels[..., None], -1.0).argsort(-1)
    mask = SamplingMask.from_padded(order[..., :5])
    logits = logits.scatter(-1, order[..., 5:], torch.nan)
    old = reference.log_probs(logits, labels, sampling_mask=mask, temperature=0.7)[0]
    given = logits, labels, old, A
    warmer = dict(config=BAPOConfig(temperature=0.7), sampling_mask=mask)
    check(*given, **warmer)
    colder = r"config.temperature must .*, got 1.0, they fit 0.7"
    check(*given, sampling_mask=mask, refused=colder)
    check(*given, refused=r"logits must be finite or -inf, got nan at \(0, 0")
    logits[2, 3, order[2, 3, :5]] = -torch.inf
    check(*given, **warmer, refused=r"logits must allow a token in every row.* at \(2, 3\)")


def test_values_of_options():
    """``test_errors.py`` has what a loss checks too."""
    epsilons = torch.tensor(0.2), torch.tensor(0.28)
    for message, options in (
        ("bounds.upper must be >= 1, .*not an epsilon, got 0.28", dict(bounds=epsilons)),
        ("batch_num_tokens must be finite and > 0, got 0", dict(batch_num_tokens=torch.tensor(0))),
        ("batch_num_tokens must .*, got nan", dict(batch_num_tokens=torch.tensor(torch.nan))),
    ):
        check(*policy(), **options, refused=message)


def test_environment_report():
    report = environment()
    assert report["bapo_kernels"] == bapo_kernels.__version__
    for name, reason in bapo_kernels.available_backends().items():
        assert report[f"backend {name}"] == ("available" if not reason else f"absent: {reason}")


def test_missing_library_is_explained(tmp_path, monkeypatch):
    """What runs without it: repository/test_supply.py."""
    monkeypatch.setattr(native, "LIBRARY", tmp_path / native.LIBRARY.name)
    monkeypatch.setattr(native, "_PACKAGE", tmp_path)
    assert "setup.py has not built it" in native._load()
    monkeypatch.setattr(native, "WHY_NO_CPU", "no C++ compiler found")
    c = case()
    assert bapo_kernels.find_clip_bounds(c.old_log_probs, None, c.advantages).upper > 1
    with refuses("backend 'cpu' cannot run: no C\\+\\+ compiler found"):
        bapo_loss(c.logits, *c.arguments(), backend="cpu")


def test_unmasked_prompt():
    """Trainers pad the old log-probs of a prompt with 0."""
    logits, labels = 3 * torch.randn(4, 12, 50), torch.randint(0, 50, (4, 12))
    mask, ones = (torch.arange(12) >= 5).expand(4, 12).float(), torch.ones(4, 12)
    given = logits, labels, log_probs(logits, labels)[0] * mask, ones[:, 0]
    check(*given, mask)
    check(*given, ones, refused=r"response_mask must be 0 .*a prompt.*log-prob of -")
