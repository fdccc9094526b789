"""Random arguments that a caller may pass, against the reference in float64.

``pytest tests/test_fuzz.py --hypothesis-profile=deep`` draws thirty times as many examples,
different ones every time.
"""

import io
from dataclasses import replace
from functools import partial
from typing import get_args

import helpers
import pytest
import torch
from accuracy import assert_rounded, assert_same
from helpers import check_result, per_token, transform_of, unmasked_tokens
from hypothesis import HealthCheck, Phase, given, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.utils._pytree import tree_map_only

import bapo_kernels
from bapo_kernels import BAPOConfig, ClipBoundSearch, bapo_loss, log_probs, reference
from bapo_kernels.config import IGNORE_INDEX, LossAggMode
from bapo_kernels.tools.budget import Case, Result, make_case

pytestmark = [pytest.mark.slow, pytest.mark.hypothesis]  # `make exhaustive`: more examples

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
def cases(draw, device, few=False):
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
    case = case.with_options(**draw(call_options(config)))
    parts = case.logits, *case.arguments(), case.options
    return Case(*tree_map_only(torch.Tensor, lambda values: values.to(device), parts))


def set_logits(case, rows):
    for i, name in rows.items():
        z, label = case.logits.view(-1, case.logits.shape[-1])[i], case.labels.view(-1)[i]
        before = z.clone()
        EXTREME_ROWS[name](z)
        z.copy_(z.where(torch.arange(len(z)) != label, before))


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
        options["bounds"] = bapo_kernels.ClipBounds(*map(torch.tensor, options["bounds"]))
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


assert_same_bits = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


def tensors(result):
    loss, log_probs, entropy, bounds, metrics = result.output
    return [loss.detach(), log_probs, entropy, *bounds, *metrics.values(), *result.gradients]


def test_any_case(backend, device, interpreted):
    """The loss is within the budget, with the same bits in any layout, in place and in a second
    run, of ``log_probs``, and of a row alone."""

    @fuzzed(interpreted)
    @given(
        case=cases(device, few=interpreted),
        layout=st.sampled_from(sorted(LAYOUTS)),
        inplace=st.booleans(),
        at=st.integers(0, 100),
    )
    def check(case, layout, inplace, at):
        got = run(case, backend)
        check_result(case, got)
        assert_same_bits(tensors(got), tensors(run(case, backend, layout, inplace)))
        assert not got.gradient[~unmasked_tokens(case)].any()
        check_log_probs(case, backend, layout)
        if case.labels.numel():
            check_row_alone(case, backend, at % case.labels.numel())

    check()


def check_log_probs(case, backend, layout):
    labels = case.labels.masked_fill(~unmasked_tokens(case), IGNORE_INDEX)
    got = log_probs(LAYOUTS[layout](case.logits), labels, backend=backend, **transform(case))
    output = run(case.with_options(statistics="all"), backend).output
    assert_same(got, (output.log_probs, output.entropy), "log-probs, entropy")


def check_row_alone(case, backend, at):
    """With given bounds and no mean over tokens, nothing couples the rows."""
    if case.advantages.shape != case.labels.shape:
        case.advantages = torch.linspace(-2.0, 2.0, case.labels.numel(), device=case.logits.device)
    config = replace(case.options["config"], loss_agg_mode="token-sum")
    case = case.with_options(config=config, bounds=(0.8, 1.2), cu_seqlens=None)
    batch, alone = (run(rows(case, of), backend) for of in (slice(None), [at]))
    of_batch = [values[[at]] for values in (*batch.output[1:3], batch.gradient)]
    assert_same_bits([*alone.output[1:3], alone.gradient], of_batch)


def rows(case, index):
    """Some tokens of a case, packed."""

    def take(values):
        return None if values is None else values.reshape(-1)[index]

    options = {k: take(v) if k in PER_TOKEN else v for k, v in case.options.items()}
    logits = case.logits.reshape(-1, case.logits.shape[-1])[index]
    return Case(logits, *map(take, case.arguments()), options)


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

    def add(self, logp, advantages, old=None, mask=None, rollout=None):
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
        mask = torch.rand(shape, generator=g) < 0.5
        optional = dict(old=logp - noise, mask=mask, rollout=rollout)
        optional = {name: optional[name] for name in given & optional.keys()}
        self.add(logp, sequence if "per sequence" in given else advantages, **optional)

    def has_bounds(self):
        return self.scope != "step" or (self.bounds is not None and not self.batches)

    @precondition(has_bounds)
    @rule(seed=SEEDS)
    def call(self, seed):
        case = make_case((2, 5), 33, staleness=0.5, seed=seed, poison=False)
        case = case.with_options(**self.search.options)
        output = bapo_loss(case.logits, *case.arguments(), **case.options)
        truth = reference.bapo_loss(case.logits.double(), *case.arguments(), **case.options)
        assert floats(output.bounds) == (self.bounds or floats(truth.bounds))
        if self.scope == "lagged":
            self.add(output.log_probs, case.advantages, case.old_log_probs, unmasked_tokens(case))

    @rule(order=st.randoms(use_true_random=False))
    def step(self, order):
        if self.scope != "call":
            tokens, rollout = self.tokens()
            options = dict(config=self.config, rollout_log_probs=rollout)
            self.bounds = floats(reference.find_clip_bounds(*tokens, **options))
            order.shuffle(self.batches)
            again = bapo_kernels.ContributionHistogram(self.config)
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
        if self.has_bounds():
            assert floats(self.search.bounds) == self.bounds
        else:
            with pytest.raises(RuntimeError, match="no bounds for these tokens yet"):
                _ = self.search.bounds

    @invariant()
    def sums_are_those_of_the_loop(self):
        tokens, rollout = self.tokens()
        probe = reference.Contributions(self.config, *tokens, rollout)
        sums = [probe.negative(point) for point in self.config.lower_grid]
        sums += [probe.positive(point) for point in self.config.upper_grid]
        histogram = self.search.histogram
        table = None if histogram is None else histogram.table
        table = torch.zeros(len(sums), dtype=torch.float64) if table is None else table
        # exp, three products and a sum in any order, of terms of one sign
        assert_rounded(table, torch.stack(sums), 2 * (4 + tokens[0].numel()))


@pytest.mark.parametrize("scope", ["call", "step", "lagged"])
def test_search_over_any_calls(scope):
    profile = fuzzed()
    few = settings(profile, max_examples=profile.max_examples // 5, stateful_step_count=15)
    machine = type(f"Searches_{scope}", (Searches,), dict(scope=scope))
    stateful.run_state_machine_as_test(machine, settings=few)


def test_sequences_without_tokens():
    config = BAPOConfig(loss_agg_mode="seq-mean-token-sum-norm")
    logits, tokens = torch.empty(3, 0, 5), torch.empty(3, 0)
    assert reference.bapo_loss(logits, tokens.long(), tokens, tokens, config=config).loss == 0
