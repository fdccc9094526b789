"""Random arguments that a caller may pass, against the reference in float64.

``pytest tests/test_fuzz.py --hypothesis-profile=deep`` draws thirty times as many examples,
different ones every time.
"""

import io
import shutil
import subprocess
import tarfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import helpers
import pytest
import torch
from helpers import check_result, per_token, transform_of, unmasked_tokens
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from bapo_kernels import (
    BAPOConfig,
    ClipBounds,
    ClipBoundSearch,
    ContributionHistogram,
    bapo_loss,
    log_probs,
    reference,
)
from bapo_kernels.config import IGNORE_INDEX, LossAggMode
from bapo_kernels.tools.budget import Case, Result, make_case

pytestmark = pytest.mark.slow

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EDGES = [1, 2, 3, 15, 16, 17, 31, 127, 257]  # one token, vectors and their neighbours, primes
BLOCKS = [4095, 4096, 4097, 8191, 9001]
SEEDS = st.integers(0, 2**20)
PER_TOKEN = {  # arguments with an entry per token, and the range of their values
    "ref_log_probs": (-6.0, 0.0),
    "rollout_is_weights": (0.0, 2.0),
    "rollout_log_probs": (-6.0, 0.0),
    "temperature": (0.4, 2.5),
}
PRESETS = [
    BAPOConfig.paper,
    BAPOConfig.recipe,
    partial(BAPOConfig.fixed, 0.8, 1.2),
    partial(BAPOConfig.fixed, 1.0, 1.0),
]
SEARCH = dict(
    target_kind=st.sampled_from(["share", "ratio"]),
    target=st.floats(0.0, 1.0),
    raise_first=st.sampled_from(["upper", "lower"]),
    token_weight=st.sampled_from(["rollout_prob", "uniform"]),
    contribution=st.sampled_from(["surrogate", "gradient"]),
)
LOSS = dict(
    clip_ratio_c=st.sampled_from([None, 1.5, 3.0]),
    kl_loss_coef=st.sampled_from([0.0, 0.1]),
    kl_loss_type=st.sampled_from(["k1", "k2", "k3", "low_var_kl"]),
    entropy_coef=st.sampled_from([0.0, 0.01, -0.02]),
    loss_agg_mode=st.sampled_from(get_args(LossAggMode)),
    loss_scale_factor=st.sampled_from([None, 11.0]),
    temperature=st.sampled_from([1.0, 0.6, 1.3, 0.05, 50.0]),
    logit_scale=st.sampled_from([1.0, 0.5]),
    final_logit_softcapping=st.sampled_from([None, 10.0, 1.0]),
)

# Changes to all logits of a row but the label's.
EXTREME_ROWS = {
    "80": lambda z: z.fill_(80.0),
    "-80": lambda z: z.fill_(-80.0),
    "+-80": lambda z: z.sign_().mul_(80.0),
    "offset": lambda z: z.add_(1e4),
    "spread": lambda z: z.mul_(40.0),
    "subnormal": lambda z: z.mul_(1e-40),
    "first stands out": lambda z: z[:1].fill_(900.0),
    "last stands out": lambda z: z[-1:].fill_(900.0),
    "half forbidden": lambda z: z[::2].fill_(-torch.inf),
    "label alone": lambda z: z.fill_(-torch.inf),
}
EXTREME_ADVANTAGES = [0.0, -0.0, 1e-40, -1e-40, 1e-20, -1e-20, 1e6, -1e6, 1e28, -1e28]
EXTREME_LOG_RATIOS = [19.0, -19.0, 25.0, -25.0, 1e4, -100.0]  # the clamp is at 20

LAYOUTS = {"plain": lambda x: x} | helpers.LAYOUTS


def transform(case):
    """What a call does to logits; a temperature per token replaces that of the config."""
    of_call = {name: case.options[name] for name in ("temperature",) if name in case.options}
    return transform_of(case.options["config"]) | of_call


def build_config(preset, **options):
    return preset(**options)


@st.composite
def cases(draw, few=False):
    """A case of any shape, options and values; ``few``: few short rows, for the interpreter."""
    seed, packed = draw(SEEDS), draw(st.booleans())
    size = st.integers(0, 2 if few else 6)
    lengths = draw(st.lists(size, min_size=1, max_size=2 if few else 4))
    shape = (sum(lengths),) if packed else (len(lengths), lengths[0])
    V = draw(st.sampled_from(EDGES if few else EDGES * 3 + BLOCKS))
    config = draw(st.builds(build_config, st.sampled_from(PRESETS), **SEARCH, **LOSS))
    if packed:  # no padded length can take its place
        config = replace(config, loss_scale_factor=11.0)
    given_per_token = draw(st.sets(st.sampled_from(sorted(PER_TOKEN))))
    given_per_token |= {"ref_log_probs"} if config.kl_loss_coef else set()
    masked = draw(st.sampled_from([0.0, 0.25, 1.0]))
    case = make_case(
        shape,
        V,
        draw(st.sampled_from(DTYPES)),
        masked=masked,
        idle=draw(st.sampled_from([0.0, 0.3, 1.0])),
        spread=draw(st.sampled_from([0.0, 0.1, 3.0])),
        config=config,
        seed=seed,
        **{name: per_token(shape, seed, *PER_TOKEN[name]) for name in given_per_token},
    )
    tokens = st.integers(0, case.labels.numel() - 1) if case.labels.numel() else st.nothing()
    exceptions = partial(st.dictionaries, tokens, max_size=3 if case.labels.numel() else 0)
    set_logits(case, draw(exceptions(st.sampled_from(sorted(EXTREME_ROWS)))))
    set_old_log_probs(
        case,
        draw(st.sampled_from([None, 0.1, 1.0])),
        draw(exceptions(st.sampled_from(EXTREME_LOG_RATIOS))),
    )
    if draw(st.booleans()):
        case.advantages = torch.randn(len(lengths), generator=torch.Generator().manual_seed(seed))
    else:
        for i, advantage in draw(exceptions(st.sampled_from(EXTREME_ADVANTAGES))).items():
            case.advantages.view(-1)[i] = advantage
    mask_dtypes = [torch.bool, torch.uint8, torch.int64, torch.float32]
    case.response_mask = case.response_mask.to(draw(st.sampled_from(mask_dtypes)))
    if masked == 0.0 and draw(st.booleans()):
        case.response_mask = None
    offsets = torch.tensor([0, *lengths], dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    case.labels = case.labels.to(offsets.dtype)
    if packed:
        case = case.with_options(cu_seqlens=offsets.cumsum(0, dtype=offsets.dtype))
    return case.with_options(**draw(call_options(config)))


def set_logits(case, rows):
    for i, name in rows.items():
        z, label = case.logits.view(-1, case.logits.shape[-1])[i], case.labels.view(-1)[i]
        kept = z[label].clone() if label != IGNORE_INDEX else None
        EXTREME_ROWS[name](z)
        if kept is not None:
            z[label] = kept


def set_old_log_probs(case, staleness, log_ratios):
    """Log-ratios with this standard deviation, except at some tokens; ``None``: on-policy."""
    logp, _ = reference.log_probs(case.logits.double(), case.labels, **transform(case))
    noise = torch.randn(logp.shape, generator=torch.Generator().manual_seed(1))
    log_ratio = (staleness or 0.0) * noise
    for i, value in log_ratios.items():
        log_ratio.view(-1)[i] = value
    case.old_log_probs = None if staleness is None else (logp - log_ratio).float()


@st.composite
def call_options(draw, config):
    options = dict(
        statistics=draw(st.sampled_from(["all", "live"])),
        bounds=draw(st.sampled_from([None, None, (0.8, 1.2), (1.0, 1.0), (0.0, 1e9)])),
    )
    if options["bounds"] is not None and draw(st.booleans()):
        options["bounds"] = ClipBounds(*map(torch.tensor, options["bounds"]))
    if draw(st.booleans()):
        counts = dict(batch_num_tokens=torch.tensor(37.0), global_batch_size=7)
        options |= counts | dict(dp_size=draw(st.sampled_from([1, 4])))
    return options


def fuzzed(interpreted=False):
    """The profile in use; in Triton's interpreter, where a row takes milliseconds, fewer examples
    and no shrinking."""
    profile, checks = settings.default, list(HealthCheck)
    if not interpreted:
        return settings(profile, suppress_health_check=checks)
    phases = [Phase.explicit, Phase.reuse, Phase.generate]
    count = max(1, profile.max_examples // 10)
    return settings(profile, suppress_health_check=checks, max_examples=count, phases=phases)


def run(case, backend, layout="plain", inplace=False):
    leaf = case.logits.clone().requires_grad_()
    logits = LAYOUTS[layout](leaf * 1.0)
    arguments = dict(backend=backend, inplace=inplace, **case.options)
    output = bapo_loss(logits, *case.arguments(), **arguments)
    return Result(output, torch.autograd.grad(output.loss, leaf))


def assert_same_bits(one, other):
    for a, b in zip(tensors(one), tensors(other), strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def tensors(result):
    loss, log_probs, entropy, bounds, metrics = result.output
    return [loss.detach(), log_probs, entropy, *bounds, *metrics.values(), *result.gradients]


def test_loss_of_any_case(backend, device, interpreted):
    """Within the budget, with the same bits in any layout, in place and in a second run."""

    @fuzzed(interpreted)
    @given(
        case=cases(few=interpreted),
        layout=st.sampled_from(sorted(LAYOUTS)),
        inplace=st.booleans(),
    )
    def check(case, layout, inplace):
        got = run(case, backend)
        check_result(case, got, few_tokens=True)
        assert_same_bits(got, run(case, backend, layout, inplace))
        assert not got.gradient[~unmasked_tokens(case)].any()

    check()


def rows(case, index):
    """Some tokens of a case, packed."""

    def take(values):
        return None if values is None else values.reshape(-1)[index]

    options = {k: take(v) if k in PER_TOKEN else v for k, v in case.options.items()}
    logits = case.logits.reshape(-1, case.logits.shape[-1])[index]
    return Case(logits, *map(take, case.arguments()), options)


def test_any_row_alone_has_the_bits_of_the_batch(backend, device, interpreted):
    """With given bounds and no mean over tokens, nothing couples the rows."""

    @fuzzed(interpreted)
    @given(case=cases(few=interpreted), at=st.integers(0, 100))
    def check(case, at):
        N = case.labels.numel()
        if N == 0:
            return
        if case.advantages.shape != case.labels.shape:
            case.advantages = torch.linspace(-2.0, 2.0, N)
        config = replace(case.options["config"], loss_agg_mode="token-sum")
        case = case.with_options(config=config, bounds=(0.8, 1.2), cu_seqlens=None)
        together = run(rows(case, slice(None)), backend)
        alone = run(rows(case, [at % N]), backend)
        assert torch.equal(alone.gradient[0].isnan(), together.gradient[at % N].isnan())
        assert torch.equal(alone.gradient[0].nan_to_num(), together.gradient[at % N].nan_to_num())
        for name in ("log_probs", "entropy"):
            one, other = (getattr(r.output, name).nan_to_num(-1.0) for r in (alone, together))
            assert one[0] == other[at % N]

    check()


def test_log_probs_of_any_case(backend, device, interpreted):
    """``log_probs`` gives the bits of the loss."""

    @fuzzed(interpreted)
    @given(case=cases(few=interpreted), layout=st.sampled_from(sorted(LAYOUTS)))
    def check(case, layout):
        got = log_probs(
            LAYOUTS[layout](case.logits),
            case.labels.masked_fill(~unmasked_tokens(case), IGNORE_INDEX),
            backend=backend,
            **transform(case),
        )
        output = run(case.with_options(statistics="all"), backend).output
        assert torch.equal(got[0], output.log_probs)
        assert torch.equal(got[1], output.entropy)

    check()


def floats(bounds):
    """In float32, as the kernels take them."""
    return None if bounds is None else torch.tensor([float(b) for b in bounds]).tolist()


class Searches(RuleBasedStateMachine):
    """A ``ClipBoundSearch``, a list of the tokens it was given, and the paper's loop over them."""

    @initialize(
        config=st.builds(build_config, st.sampled_from(PRESETS), **SEARCH),
        device=st.sampled_from([None, "cpu"]),
    )
    def start(self, config, device):
        self.config = config
        self.search = ClipBoundSearch(config, self.scope, device=device)
        self.batches = []
        self.bounds = None  # each call searches for itself, or nothing is decided yet
        if self.scope == "lagged":
            self.bounds = floats((config.ratio_lower_start, config.ratio_upper_start))
        self.save()

    def tokens(self):
        """All tokens, with masks and optional arguments filled in."""
        parts = zip(*self.batches, strict=True) if self.batches else [[torch.empty(0)]] * 5
        *tokens, rollout = (torch.cat([t.reshape(-1) for t in part]) for part in parts)
        return tokens, rollout

    def expected_bounds(self):
        tokens, rollout = self.tokens()
        bounds = reference.find_clip_bounds(*tokens, config=self.config, rollout_log_probs=rollout)
        return floats(bounds)

    def add(self, logp, old, advantages, mask=None, rollout=None):
        self.search.update(logp, old, advantages, mask, rollout_log_probs=rollout)
        if self.scope == "call":
            return
        old = logp if old is None else old
        mask = torch.ones_like(logp) if mask is None else mask
        advantages = advantages if advantages.ndim == 2 else advantages[:, None]
        advantages = advantages.expand(logp.shape)
        rollout = old if rollout is None else rollout
        self.batches.append((logp, old, advantages, mask, rollout))

    @rule(
        shape=st.tuples(st.integers(1, 4), st.integers(0, 5)),
        seed=SEEDS,
        given=st.sets(st.sampled_from(["old", "mask", "rollout", "per sequence"])),
    )
    def update(self, shape, seed, given):
        g = torch.Generator().manual_seed(seed)
        logp, rollout = -5 * torch.rand(2, *shape, generator=g)
        noise, advantages = torch.randn(2, *shape, generator=g)
        sequence = torch.randn(shape[0], generator=g)
        self.add(
            logp,
            logp - noise if "old" in given else None,
            sequence if "per sequence" in given else advantages,
            torch.rand(shape, generator=g) < 0.5 if "mask" in given else None,
            rollout if "rollout" in given else None,
        )

    @precondition(lambda self: self.scope != "step" or self.bounds is not None)
    @rule(seed=SEEDS)
    def call(self, seed):
        case = make_case((2, 5), 33, staleness=0.5, seed=seed, poison=False)
        case = case.with_options(**self.search.options)
        output = bapo_loss(case.logits, *case.arguments(), **case.options)
        truth = reference.bapo_loss(case.logits.double(), *case.arguments(), **case.options)
        assert floats(output.bounds) == (self.bounds or floats(truth.bounds))
        if self.scope == "lagged":
            self.add(output.log_probs, case.old_log_probs, case.advantages, unmasked_tokens(case))

    @rule(order=st.randoms(use_true_random=False))
    def step(self, order):
        if self.scope != "call":
            self.bounds = self.expected_bounds()
            order.shuffle(self.batches)
            again = ContributionHistogram(self.config)
            for logp, old, advantages, mask, rollout in self.batches:
                again.update(logp, old, advantages, mask, rollout_log_probs=rollout)
            assert floats(again.solve()) == self.bounds
        self.search.step()
        self.batches = []

    @rule()
    def save(self):
        file = io.BytesIO()
        torch.save(self.search.state_dict(), file)
        self.saved = file.getvalue(), list(self.batches), self.bounds

    @rule(fresh=st.booleans())
    def load(self, fresh):
        state, batches, self.bounds = self.saved
        if fresh:
            self.search = ClipBoundSearch(self.config, self.scope)
        self.search.load_state_dict(torch.load(io.BytesIO(state)))
        self.batches = list(batches)

    @invariant()
    def bounds_are_those_of_the_loop(self):
        if self.scope == "step" and self.bounds is None:
            with pytest.raises(RuntimeError, match="no bounds yet"):
                _ = self.search.bounds
        else:
            assert floats(self.search.bounds) == self.bounds

    @invariant()
    def sums_are_those_of_the_loop(self):
        tokens, rollout = self.tokens()
        probe = reference.Contributions(self.config, *tokens, rollout)
        sums = [probe.negative(point) for point in self.config.lower_grid]
        sums += [probe.positive(point) for point in self.config.upper_grid]
        histogram = self.search.histogram
        table = None if histogram is None else histogram.table
        table = torch.zeros(len(sums), dtype=torch.float64) if table is None else table
        torch.testing.assert_close(table, torch.stack(sums), rtol=1e-12, atol=0)


@pytest.mark.parametrize("scope", ["call", "step", "lagged"])
def test_search_over_any_calls(scope):
    profile = fuzzed()
    few = settings(profile, max_examples=profile.max_examples // 5, stateful_step_count=15)
    machine = type(f"Searches_{scope}", (Searches,), dict(scope=scope))
    run_state_machine_as_test(machine, settings=few)


def test_state_from_before_the_first_update():
    search = ClipBoundSearch(scope="step")
    state = search.state_dict()
    search.update(torch.zeros(4), None, torch.ones(4))
    search.load_state_dict(state)
    assert search.histogram.table is None or not search.histogram.table.any()


def test_sequences_without_tokens():
    config = BAPOConfig(loss_agg_mode="seq-mean-token-sum-norm")
    logits, tokens = torch.empty(3, 0, 5), torch.empty(3, 0)
    assert reference.bapo_loss(logits, tokens.long(), tokens, tokens, config=config).loss == 0


ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(shutil.which("clang++") is None, reason="clang++ is absent")
def test_fuzz_target_compiles():
    command = ["clang++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-Icsrc"]
    subprocess.run([*command, "fuzz/cpu_kernels.cpp"], cwd=ROOT, check=True)


def test_the_corpus_is_one_archive_of_small_inputs():
    with tarfile.open(ROOT / "fuzz" / "corpus.tar.gz") as archive:
        inputs = [member for member in archive if not member.isdir()]
    assert len(inputs) > 200
    assert all(member.isfile() and member.name.startswith("corpus/") for member in inputs)
    assert max(member.size for member in inputs) <= 256, "what fuzz/Makefile gives libFuzzer"
