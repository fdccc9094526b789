"""Real TRL training against TRL's own loss, at fixed bounds and at those of the paper's loop."""

import contextlib
import copy
import functools
import json
import math
import os
import re
import warnings
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from accuracy import assert_same
from helpers import allowed_by, assert_within_budget, exhaustive_unless, fixed_bounds, needs_native
from parity import assert_trained
from world import world

pytest.importorskip("trl")

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer, TrlParser

from bapo_kernels import BAPOConfig, ClipBoundSearch, linear_log_probs, reference
from bapo_kernels.checks import warn_once
from bapo_kernels.core.head import sampled
from bapo_kernels.integrations.trl import BAPOTrainer, BAPOTrainerConfig
from bapo_kernels.integrations.trl_config import _OWNERS, bapo_config
from bapo_kernels.integrations.trl_head import add_head
from bapo_kernels.reference.sampled import row_seeds
from bapo_kernels.tools.budget import in_some_orders, largest
from bapo_kernels.tools.sum_order import SumOrder

pytestmark = needs_native

DOCS = Path(__file__).parents[2] / "docs"
V = 2_000
WORDS = ["<pad>", "<eos>", *"abcdefghijklmnop"]


def tokenizer():
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


SIZES = dict(
    hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, tie_word_embeddings=False, pad_token_id=0, eos_token_id=1,
)  # fmt: skip


def model(dtype=torch.float32, words=V, experts=False):
    torch.manual_seed(0)
    if experts:
        few = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
        options = SIZES | few | dict(vocab_size=words, router_aux_loss_coef=0.1)
        if dtype == torch.float64:
            options |= dict(experts_implementation="eager")  # alone can
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**options)).to(dtype)
    made = Qwen3ForCausalLM(Qwen3Config(vocab_size=words, **SIZES))
    with torch.no_grad():  # a head that prefers the known words, and some of these to others
        made.lm_head.weight.mul_(20)
        made.lm_head.weight[len(WORDS) :].mul_(0.1)
    return made.to(dtype)


def reward(completion_ids, **_):
    """The share of even tokens."""
    return [sum(1.0 for t in ids if t % 2 == 0) / len(ids) for ids in completion_ids]


STANDARD = dict(
    per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=4,
    num_iterations=2, max_completion_length=5, max_steps=4, learning_rate=0.3,
    lr_scheduler_type="constant", max_grad_norm=0.0, optim="sgd", use_cpu=True, bf16=False,
    report_to="none", disable_tqdm=True, logging_steps=1, save_strategy="no", seed=1,
)  # fmt: skip
PROMPTS = Dataset.from_dict({"prompt": ["a b c", "d e", "f g h i", "j"] * 4})


def arguments(folder, **options):
    return BAPOTrainerConfig(output_dir=str(folder), **(STANDARD | options))


class Recorder:
    """Records rollouts and what every micro-batch gave; may take the rollouts of another run."""

    def start(self, rollouts=None, weights=False):
        self.given, self.weights = rollouts, weights
        self.rollouts, self.losses, self.decided, self.operands = [], [], [], []
        return self

    def _generate_and_score_completions(self, inputs):
        if self.given is not None:
            made = copy.deepcopy(self.given[len(self.rollouts)])
        else:
            made = super()._generate_and_score_completions(inputs)
            g = torch.Generator().manual_seed(len(self.rollouts))
            shape = made["completion_ids"].shape
            # Rollouts of an older policy, so that the search has work.
            if made.get("old_per_token_logps") is not None:
                made["old_per_token_logps"] += 0.4 * torch.randn(shape, generator=g)
            if self.weights:
                made["sampling_per_token_logps"] = -3 * torch.rand(shape, generator=g)
                made["importance_sampling_ratio"] = 0.5 + torch.rand(shape, generator=g)
            made["tool_mask"] = torch.ones_like(made["completion_mask"])
            made["tool_mask"][:, 1] = 0  # the second token is a tool's
        self.rollouts.append(copy.deepcopy(made))
        torch.manual_seed(len(self.rollouts))  # for the shuffle that comes next
        return made

    def compute_loss(self, *args, **kwargs):
        self.use_vllm = self.weights
        loss = super().compute_loss(*args, **kwargs)
        self.use_vllm = False
        self.losses.append(loss.item())
        return loss


class Ours(Recorder, BAPOTrainer):
    def _log_metrics(self, out, *args):
        self.decided.append([b.item() for b in out.bounds])
        super()._log_metrics(out, *args)


class TRLs(Recorder, GRPOTrainer):
    pass


LOGGED = (
    *("clip_low", "clip_high", "pos_share", "pos_share_start", "pos_share_max"),
    *("saturated", "acted"),
)


class Searching(TRLs):
    """TRL's own loss of materialised logits, at the bounds that the paper's loop finds."""

    def start(self, rollouts, weights, config):
        self.search_config, self.scope, self.seen = config, self.args.bapo_scope, []
        self.bounds = [0.6, 1.2]
        self.metrics = {"clip_low": 0.6, "clip_high": 1.2, "acted": 0.0}  # before a decision
        return super().start(rollouts, weights)

    def log_probs(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        T = inputs["completion_ids"].shape[1]
        logits = model(input_ids=ids, attention_mask=attention).logits[:, -T - 1 : -1]
        if "sampling_mask" in inputs:
            logits = logits.masked_fill(~allowed(inputs["sampling_mask"]), -torch.inf)
        log_p = torch.log_softmax(logits / self.temperature, -1)
        logp = log_p.gather(-1, inputs["completion_ids"][..., None]).squeeze(-1)
        return logp, -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)

    def _get_per_token_logps_and_entropies(self, *_, **__):
        return *self.found, None

    def contributions(self, found, inputs):
        """Of the unmasked tokens; those without a policy term have no advantage."""
        (logp, entropies), mask = found, (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        A, old = inputs["advantages"][:, None].expand(mask.shape), inputs["old_per_token_logps"]
        if self.top_entropy_quantile < 1.0:
            A = A * self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
        if (threshold := self.off_policy_mask_threshold) is not None:
            A = A * self.get_off_policy_mask(A, logp.detach(), old, mask, threshold)
        rollout = inputs.get("sampling_per_token_logps", old)
        if self.importance_sampling_level == "sequence":
            mean = ((logp - old) * mask).sum(1) / mask.sum(1)
            logp = old + mean[:, None]  # every token with the ratio of its sequence
        return [x[mask] for x in (logp.detach(), old, A, rollout)]

    def decide(self, parts):
        """The bounds over all processes, in rank order, and their metrics."""
        if self.accelerator.num_processes > 1:
            gathered = [None] * self.accelerator.num_processes
            torch.distributed.all_gather_object(gathered, parts)
            parts = [part for mine in gathered for part in mine]
        logp, old, A, rollout = (torch.cat(x) for x in zip(*parts, strict=True))
        out = reference.bapo_loss_from_log_probs(
            logp, old, A, config=self.search_config, rollout_log_probs=rollout
        )
        self.bounds = [b.item() for b in out.bounds]
        self.metrics = {name: out.metrics[f"bapo_{name}"].item() for name in LOGGED}

    def _compute_loss(self, model, inputs):
        accumulation = self.current_gradient_accumulation_steps
        begins = len(self.losses) % accumulation == 0
        if self.scope == "step" and begins:
            with torch.no_grad():
                first = self._step % self.args.steps_per_generation
                step = self._buffered_inputs[first : first + accumulation]
                self.decide([self.contributions(self.log_probs(model, x), x) for x in step])
        self.found = self.log_probs(model, inputs)
        part = self.contributions(self.found, inputs)
        if self.scope == "call":
            self.decide([part])
        self.decided.append(self.bounds)
        for name, value in self.metrics.items():
            self._metrics["train"][f"bapo/{name}"].append(value)
        low, high = self.bounds
        cispo = self.loss_type == "cispo"  # whose epsilon_high is the bound itself
        self.epsilon_low, self.epsilon_high = 1 - low, high if cispo else high - 1
        loss = super()._compute_loss(model, inputs)
        (gradient,) = torch.autograd.grad(loss, self.found[0], retain_graph=True)
        self.operands.append((gradient * self.found[0]).nan_to_num().abs().sum().item())
        if self.scope == "lagged":
            self.seen.append(part)
            if not begins:
                self.decide(self.seen)
                self.seen = []
        return loss


def allowed(masks):
    """bool ``[B, T, V]``."""
    sets = [mask.token_ids.long().split(mask.offsets.diff().tolist()) for mask in masks]
    return torch.stack([allowed_by([x.tolist() for x in rows], V) for rows in sets])


@torch.no_grad()
def from_the_likely_tokens(prompts, trainer):
    """A ``rollout_func`` with min-p sampling, which records the sets that it draws from."""
    made = dict(prompt_ids=[], completion_ids=[], logprobs=[], sampling_mask=[])
    for prompt in prompts:
        ids = tokenizer()(prompt)["input_ids"]
        completion, logprobs, sets = [], [], []
        while len(completion) < trainer.max_completion_length and 1 not in completion:
            logits = trainer.model(input_ids=torch.tensor([ids + completion])).logits[0, -1]
            p, order = (logits / trainer.temperature).softmax(-1).sort(descending=True)
            p = p[p > 0.3 * p[0]]
            drawn = torch.multinomial(p, 1).item()
            completion.append(order[drawn].item())
            logprobs.append((p[drawn] / p.sum()).log().item())
            sets.append(order[: len(p)].tolist())
        for name, values in zip(made, (ids, completion, logprobs, sets), strict=True):
            made[name].append(values)
    return made


SETS = dict(rollout_func=from_the_likely_tokens)
# With a higher rate the KL reaches the 10 at which the kernels clamp it.
PLAIN_KL = dict(beta=0.05, use_bias_correction_kl=False, learning_rate=0.003)
CAPPED = dict(ratio_upper_max=1.5)  # TRL caps the ratios of positive advantages too
WITHOUT_LOWER = dict(ratio_lower_start=0.0, ratio_lower_max=0.0)  # as TRL's CISPO
MASKED = dict(top_entropy_quantile=0.5, off_policy_mask_threshold=0.05)
SCOPES = ("call", "step", "lagged")
SEARCHES = {
    "dapo, lagged": dict(bapo_scope="lagged"),
    "grpo, recipe, step": dict(loss_type="grpo", bapo_preset="recipe", bapo_scope="step"),
    "bnpo, KL, call": dict(loss_type="bnpo", bapo_scope="call", **PLAIN_KL),
    "dr_grpo, dual clip, TRL's head": dict(
        loss_type="dr_grpo", delta=1.5, search=CAPPED, temperature=0.8, bapo_head="trl"
    ),
    "KL with ratio, entropy, long generation": dict(
        beta=0.05, entropy_coef=0.02, bapo_scope="step", steps_per_generation=4
    ),
    "cispo, step": dict(loss_type="cispo", search=WITHOUT_LOWER, bapo_scope="step"),
    "grpo, sequence level, KL with ratio, lagged": dict(
        loss_type="grpo", importance_sampling_level="sequence", beta=0.05, bapo_scope="lagged"
    ),
    **{f"masked as TRL does, {scope}": dict(bapo_scope=scope, **MASKED) for scope in SCOPES},
    "sets, KL, call": dict(temperature=0.8, bapo_scope="call", **SETS, **PLAIN_KL),
    "sets, log_probs, step": dict(entropy_coef=0.02, bapo_scope="step", **SETS),
}
# At fixed bounds, with a small vocabulary. Others: in test_policy_parity.py.
FIXED = {
    "dapo, on-policy": dict(num_iterations=1),  # without old log-probs
    "dapo, with evaluations": dict(eval_strategy="steps", eval_steps=2),
    "KL with ratio, reference updated": dict(
        beta=0.1, use_bias_correction_kl=True, sync_ref_model=True, ref_model_sync_steps=2,
        ref_model_mixup_alpha=0.5,
    ),
    "adaptive entropy": dict(
        use_adaptive_entropy=True, entropy_target=1.7, entropy_coef_delta=0.1, entropy_coef=0.1
    ),
    "tokens of high entropy": dict(top_entropy_quantile=0.4, entropy_coef=0.1, beta=0.1),
    "off-policy mask, importance weights": dict(
        off_policy_mask_threshold=0.4, weights=True, loss_type="cispo", top_entropy_quantile=0.7
    ),
    "router losses": dict(experts=True, router_aux_loss_coef=0.5),
    "truncated completions": dict(mask_truncated_completions=True, loss_type="grpo"),
    "sampling": dict(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.1),
    "uneven window": dict(gradient_accumulation_steps=2, steps_per_generation=3, num_generations=4),
    "float32 head": dict(cast_lm_head_to_fp32=True, disable_dropout=True),
}  # fmt: skip
KEPT = (  # of both, in `make test-all`
    *("grpo, recipe, step", "KL with ratio, entropy, long generation", "sets, KL, call"),
    *("adaptive entropy", "router losses", "off-policy mask, importance weights"),
)
TARGET = {"paper": 0.62, "recipe": 1.5}
FEW = dict(words=len(WORDS), learning_rate=0.05, same_draws=True)


def trainer_of(
    kind, folder, rollouts=None, dtype=torch.float32, search=None, weights=False, words=V,
    experts=False, rollout_func=None, **options,
):  # fmt: skip
    """With ``search`` it has these options besides the target of its preset."""
    policy, preset = model(dtype, words, experts), options.get("bapo_preset", "paper")
    policy.config._name_or_path = str(folder / "model")  # where the KL's reference comes from
    policy.save_pretrained(folder / "model")
    search = None if search is None else dict(target=TARGET[preset]) | search
    if search is not None and kind is Ours:
        options["bapo_options"] = search
    data = dict(train_dataset=PROMPTS, eval_dataset=PROMPTS.select(range(2)))
    others = dict(processing_class=tokenizer(), rollout_func=rollout_func)
    made = kind(policy, reward, arguments(folder, **options), **data, **others)
    if made.beta:
        made.ref_model.to(dtype)
    if kind is not Searching:
        return made.start(rollouts, weights)
    search |= {"clip_ratio_c": options["delta"]} if "delta" in options else {}
    return made.start(rollouts, weights, getattr(BAPOConfig, preset)(**search))


def trained(*args, same_draws=False, **options):
    trainer = trainer_of(*args, **options)
    if same_draws:  # of trainers that generate themselves
        torch.manual_seed(0)
    trainer.train()
    return trainer


def weights_of(model):
    return {key: weight.detach() for key, weight in model.named_parameters()}


def in_double(rollouts):
    def of(value):
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.double() if floating else value

    return [{name: of(value) for name, value in rollout.items()} for rollout in rollouts]


def training_rank(rank, folder, name):
    """:func:`test_searched_bounds` as under torchrun."""
    number = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= number | dict(WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")
    place = Path(folder) / number["RANK"]
    place.mkdir()
    test_searched_bounds(place, name)


def test_two_processes(tmp_path):
    """DDP, and decisions over both processes."""
    with world(2, tmp_path, timeout=300) as two:
        two.run(training_rank, str(tmp_path), "dapo, lagged")


@pytest.mark.parametrize("name", exhaustive_unless(KEPT.__contains__, SEARCHES))
def test_searched_bounds(tmp_path, name):
    """Stale rollouts, two iterations, two micro-batches per step."""
    options = dict(search={}) | SEARCHES[name]
    ours = trained(Ours, tmp_path, **options)
    plain = [trained(Searching, tmp_path, ours.rollouts, **options)]
    with SumOrder(1):  # no third, because a training takes seconds
        plain.append(trained(Searching, tmp_path, ours.rollouts, **options))
    exact = options | dict(rollouts=in_double(ours.rollouts), dtype=torch.float64)
    true = trained(Searching, tmp_path, **exact)
    assert_same(torch.tensor(ours.decided), torch.tensor(true.decided))
    assert len({tuple(b) for b in ours.decided}) > 1, "the search must have work"
    for entry in ours.state.log_history:
        outside = entry.pop("bapo/label_outside_mask", None)
        assert outside == (0 if "sets" in name and "loss" in entry else None)
    start, trained_weights = weights_of(model()), weights_of(true.model)
    assert all((trained_weights[key] != before).any() for key, before in start.items())
    check_training(ours, plain, true, start, max(true.operands))


@pytest.mark.parametrize("name", exhaustive_unless(KEPT.__contains__, FIXED))
def test_fixed_bounds(tmp_path, name):
    """TRL's trainer as it is, which also generates."""
    options, cispo = FEW | FIXED[name], FIXED[name].get("loss_type") == "cispo"
    bounds = fixed_bounds(0.0 if cispo else 0.8, 1.28)
    ours = trained(Ours, tmp_path, bapo_options=bounds, **options)
    options |= dict(epsilon_high=1.28) if cispo else dict(epsilon=0.2, epsilon_high=0.28)
    trls = [trained(TRLs, tmp_path, **options)]
    given = trls[0].rollouts
    for seed in (1, 2):
        with SumOrder(seed):
            trls.append(trained(TRLs, tmp_path, given, **options))
    exact = dict(cast_lm_head_to_fp32=False, rollouts=in_double(given), dtype=torch.float64)
    true = trained(TRLs, tmp_path, **(options | exact))
    start = weights_of(model(words=len(WORDS), experts="experts" in options))
    A = max(largest(x["advantages"]) for x in true.rollouts)
    size = size_of(true)
    for entry in ours.state.log_history:
        json.dumps(entry, allow_nan=False)
        for name in [name for name in entry if "bapo/" in name]:
            del entry[name]
    check_training(ours, trls, true, start, size * A)  # means of ratios times A


def size_of(trainer):
    """The largest log-prob, whose rounding is in every ratio."""
    old = [x.get("old_per_token_logps") for x in trainer.rollouts]
    return max(math.log(len(WORDS)) if x is None else largest(x) for x in old)


TIMES = re.compile("time|runtime|per_second|flos")


def check_training(ours, theirs, true, start, inherited):
    """Loss by loss, metric by metric, and the weights that are trained."""
    runs = ours, *theirs, true
    size = size_of(true)
    assert len(ours.losses) >= 8
    losses, *same, truth = (torch.tensor(x.losses).double() for x in runs)
    assert_within_budget("losses", losses.float(), same, truth, inherited)
    got, *same, truth = (weights_of(made.model) for made in runs)
    assert_trained(got, same, truth, start, STANDARD["max_steps"], size)
    logs = [made.state.log_history for made in runs]
    numbers = [defaultdict(list) for _ in logs]
    for got, right, *others in zip(*logs, strict=True):
        further = got.keys() - right.keys()  # of a generation, if their rollouts are given
        assert right.keys() <= got.keys()
        assert not further or (theirs[0].given and not any("bapo/" in key for key in further))
        for key in {key for key in right if not TIMES.search(key)}:
            if key not in others[-1]:  # of the generation
                assert got[key] == right[key], key
                continue
            for lists, entry in zip(numbers, (got, right, *others), strict=True):
                lists[key].append(float(entry[key]))
    for key in numbers[0]:
        got, *same, truth = (torch.tensor(lists[key], dtype=torch.float64) for lists in numbers)
        # The steps before have their roundings, too.
        steps = 1 if "bapo/" in key else STANDARD["max_steps"]
        operand = steps * size * (1.0 if "bapo/" in key else max(1.0, largest(truth)))
        assert_within_budget(key, got.float(), same, truth, operand)


def test_scores_of_rollouts_with_sampling_masks(tmp_path):
    """Before the first update old policy, reference and sampler agree."""
    trainer = trainer_of(Ours, tmp_path, beta=0.05, **SETS)
    torch.manual_seed(1)
    prompts = [{"prompt": prompt} for prompt in ["a b c"] * 4 + ["m"] * 4]
    scored = BAPOTrainer._generate_and_score_completions(trainer, prompts)
    mask = scored["completion_mask"] != 0
    assert not mask.all(), "one completion must be shorter"

    def plain(policy):
        return Searching.log_probs(trainer, policy, scored)[0][mask]

    same, truth = in_some_orders(lambda: plain(trainer.model)), plain(trainer.model.double())
    for name in ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"):
        assert_within_budget(name, scored[name][mask], same, truth)


SETS_THAT_DO_NOT_FIT = [
    (lambda sets: sets.pop(), {}, " must have a list of sets for each of the 8 completions"),
    (lambda sets: sets[2].append([7]), {}, r"\[2\] must have a set for each of the"),
    (len, dict(bapo_head="trl"), " must not be given with TRL's head"),
    (len, dict(tools=[len]), " must not be given where TRL calls tools"),
]


@pytest.mark.parametrize(("change", "options", "message"), SETS_THAT_DO_NOT_FIT)
def test_sampling_masks_that_do_not_fit_are_refused(tmp_path, change, options, message):
    """A set for each token of each completion, and a head that takes them."""

    def rollout(prompts, trainer):
        made = from_the_likely_tokens(prompts, trainer)
        change(made["sampling_mask"])
        return made

    head = options.get("bapo_head")
    trainer = trainer_of(Ours, tmp_path, rollout_func=rollout, bapo_head=head)
    trainer.tools = options.get("tools")
    with pytest.raises(ValueError, match=f"sampling_mask{message}"):
        trainer.train() if head else trainer.rollout_func(["a"] * 8, trainer)


@pytest.mark.parametrize("head", ["fused", "log_probs", "trl"])
def test_gradient_samples(tmp_path, monkeypatch, head):
    """They reach the head, and TRL's own refuses them."""
    asked_for = []

    def made(*given):
        asked_for.append(given)
        return row_seeds(*given)

    monkeypatch.setattr(sampled, "row_seeds", made)
    options = dict(bapo_head=head, bapo_gradient_samples=16, max_steps=1)
    if head == "trl":
        with pytest.raises(ValueError, match="bapo_gradient_samples must not be given with TRL's"):
            trainer_of(Ours, tmp_path, **options)
    else:
        trainer_of(Ours, tmp_path, **options).train()
        assert asked_for


def test_guide_runs(tmp_path):
    """The first block of docs/trl.md, run as it stands."""
    block = re.search(r"```python\n(.*?)```", (DOCS / "trl.md").read_text(), re.DOTALL).group(1)
    model().save_pretrained(tmp_path / "policy")
    tokenizer().save_pretrained(tmp_path / "policy")
    names = dict(model=str(tmp_path / "policy"), reward=reward, dataset=PROMPTS, folder=tmp_path)
    small = "max_completion_length=4, max_steps=1, use_cpu=True, bf16=False"
    code = block.replace("output_dir=folder", f"output_dir=folder, {small}")
    assert code != block
    exec(code, names)
    assert names["trainer"].state.global_step == 1


GRADIENT = {"contribution": "gradient"}
MASK = {"surrogate": "mask"}  # which TRL has no name for
BAD_OPTIONS = [
    (dict(loss_type="vespo"), "loss_type must be one of .*smooth, without bounds to search for"),
    (dict(importance_sampling_level="batch"), "importance_sampling_level must be one of .*'sequen"),
    (dict(loss_type="sapo", bapo_scope="step"), "scope must be 'call' for loss_type='sap.*'step'"),
    (dict(loss_type="cispo", delta=2.0), "delta must be None for loss_type='cispo' with BAPO"),
    (dict(loss_type="sapo", bapo_options={"target": 0.5}), "bapo_options must be None for loss_t"),
    (dict(loss_type="cispo", bapo_options=GRADIENT), "contribution must be 'surrogate' with"),
    (dict(delta=2.0, bapo_options=MASK), "delta must be None for surrogate='mask' with BAPO"),
    (dict(loss_type="cispo", bapo_options=MASK), "'surrogate'.* be left to TRL's loss_type"),
    (dict(delta=0.9), "delta must be None or > 1 with BAPO, got 0.9"),
    (dict(bapo_head="liger"), r"bapo_head must be one of \(None, 'fused', 'log_probs', 'trl'\)"),
    (dict(bapo_scope="batch"), r"bapo_scope must be one of .*'call'\) with BAPO, got 'batch'"),
    (dict(bapo_scope="step", steps_per_generation=3), "steps_per_generation must be a multiple"),
    (dict(bapo_options="target"), "bapo_options must be a dict or None, got 'target'"),
    (dict(bapo_options={"epsilon": 0.2}), "bapo_options must name options of BAPOConfig"),
]
NEED_LOG_PROBS = "entropy_coef use_adaptive_entropy top_entropy_quantile off_policy_mask_threshold"
BAD_OPTIONS += [
    ({"bapo_head": "fused", name: 0.5}, rf"be one of \(None, 'log_probs', 'trl'\) with {name}")
    for name in NEED_LOG_PROBS.split()
]
BAD_OPTIONS += [
    (dict(bapo_options={name: 3.0}), rf"bapo_options\['{name}'\] must be left to {owner}, got 3.0")
    for name, owner in _OWNERS.items()
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_options_without_a_meaning_are_refused(options, message):
    """No model is needed to refuse them."""
    if "steps_per_generation" in options:
        options = options | dict(num_generations=2)
    with pytest.raises(ValueError, match=message):
        arguments("out", **options)


def test_args_are_refused_before_a_model_is_loaded():
    changed, trls = arguments("out"), GRPOConfig("out", use_cpu=True, bf16=False)
    changed.loss_type = "vespo"
    kinds = "args must be None or a BAPOTrainerConfig, got GRPOConfig"
    for args, message in ((changed, "loss_type must be one of"), (trls, kinds)):
        with pytest.raises(ValueError, match=message):
            BAPOTrainer(model="/no/such/model", reward_funcs=reward, args=args)


def test_liger_is_refused_where_it_replaces_the_loss(monkeypatch):
    """Before TRL 1.14; since then it replaces layers."""
    monkeypatch.delattr(GRPOTrainer, "compute_liger_loss", raising=False)
    arguments("out", use_liger_kernel=True)
    monkeypatch.setattr(GRPOTrainer, "compute_liger_loss", None, raising=False)
    with pytest.raises(ValueError, match="use_liger_kernel must be False before TRL 1.14"):
        arguments("out", use_liger_kernel=True)


def test_options_of_the_search_are_the_users():
    search = dict(ratio_upper_max=1.4, target=0.9, raise_first="lower", contribution="gradient")
    config = bapo_config(arguments("out", bapo_options=search))
    assert {name: getattr(config, name) for name in search} == search
    kinds = dict(clip={}, cispo=dict(loss_type="cispo"), mask=dict(bapo_options=MASK))
    for surrogate, options in kinds.items():
        recipe = bapo_config(arguments("out", bapo_preset="recipe", **options))
        assert recipe == BAPOConfig.recipe(surrogate=surrogate, kl_loss_type="k3")


def test_images_are_arguments_of_trls_head():
    names = BAPOTrainer._images(None, {}).keys()
    assert "pixel_values" in names
    assert not names & {"model", "batch_size", "compute_entropy", "compute_aux_loss"}


STEPS = dict(per_device_train_batch_size=32, gradient_accumulation_steps=2, num_generations=2)
LATER = STEPS | dict(num_iterations=4)
ADVICE = [
    (LATER, None),
    (LATER | dict(epsilon_high=0.28), "epsilon_high=0.28 is not used.*never epsilons"),
    (STEPS | dict(num_iterations=1), "BAPO cannot act: every ratio is 1"),
    (STEPS | dict(num_iterations=2, steps_per_generation=1), "BAPO cannot act"),  # one step
    (STEPS | dict(num_iterations=1, steps_per_generation=3), None),
    (STEPS | dict(num_iterations=1, steps_per_generation=4), "with two optimizer steps"),
    (STEPS | dict(num_iterations=2), "bapo_scope='lagged' with two optimizer steps"),
    (STEPS | dict(num_iterations=2, bapo_scope="step"), None),
    (LATER | dict(bapo_scope="call", per_device_train_batch_size=16), "decides from .* 16 seq"),
    (LATER | dict(bapo_scope="call"), None),
    (LATER | dict(bapo_scope="step", per_device_train_batch_size=16), None),
    (dict(num_iterations=1, loss_type="sapo", epsilon=0.3), None),  # nothing is missed
]


@pytest.mark.parametrize(("options", "message"), ADVICE)
def test_settings_that_are_probably_mistakes_warn(options, message):
    """One warning, once, where the config is made; ``None``: no warning."""
    warn_once.cache_clear()
    for expected in (message, None):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            arguments("out", **options)
        ours = [w for w in caught if re.search("BAPO|bapo", str(w.message))]
        assert len(ours) == (expected is not None), [str(w.message) for w in ours]
        for warning in ours:
            assert re.search(expected, str(warning.message))
            assert (warning.category, warning.filename) == (UserWarning, __file__)


SAVED = [
    (Ours, dict(bapo_scope="lagged"), None),
    (TRLs, {}, "No such file or directory"),
    (Ours, dict(bapo_scope="step"), "scope must be 'lagged' in the state too, got 'step'"),
]


@pytest.mark.parametrize(("kind", "options", "why"), SAVED)
def test_resumed_training(tmp_path, kind, options, why):
    """It has the bounds it had, or starts anew. For a search of another config: test_search.py."""
    warn_once.cache_clear()
    search = None if kind is TRLs else {}
    saved = dict(save_strategy="steps", save_steps=2)
    first = trained(kind, tmp_path, search=search, **saved, **options)
    again = trainer_of(Ours, tmp_path, search={}, bapo_scope="lagged")
    message = rf"the search starts anew, from the bounds \(0.6, 1.2\): {why} \(.*bapo_search.pt\)"
    with pytest.warns(UserWarning, match=message) if why else contextlib.nullcontext():
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    if why:
        assert_same(torch.tensor(again.decided[0]), torch.tensor([0.6, 1.2]))
        assert len({tuple(bounds) for bounds in again.decided}) > 1
        return
    assert again.decided[0] == first.decided[4] != first.decided[0]
    logs = (trainer.state.log_history for trainer in (first, again))
    third, same = (next(entry for entry in log if entry["step"] == 3) for log in logs)
    for name in LOGGED:  # what the decision was based on
        assert third[f"bapo/{name}"] == same[f"bapo/{name}"]


def test_evaluation(tmp_path, capsys):
    """Evaluation decides nothing, and leaves the decision of the training unchanged."""
    trainer = trained(Ours, tmp_path, search={}, bapo_scope="lagged")
    grids = "c_low 0.6 to 0.9 in 15 steps, c_high 1.2 to 3 in 37 steps"
    line = f"BAPO: scope lagged, target share 0.62, {grids}, head fused\n"
    assert line in capsys.readouterr().out
    before, table = trainer.search.bounds, trainer.search.histogram.table.clone()
    trainer.decided.clear()
    assert math.isfinite(trainer.evaluate()["eval_loss"])
    assert {tuple(bounds) for bounds in trainer.decided} == {tuple(b.item() for b in before)}
    assert trainer.search.bounds == before
    assert_same(trainer.search.histogram.table, table)
    trainer.search = ClipBoundSearch(trainer.bapo_config, "step")
    trainer.decided.clear()
    trainer.evaluate()  # before a training has decided
    assert all(torch.equal(torch.tensor(b), torch.tensor([0.6, 1.2])) for b in trainer.decided)


def test_options_on_a_command_line(tmp_path):
    line = f"--output_dir {tmp_path} --use_cpu true --bf16 false --bapo_scope step --bapo_options"
    given = [*line.split(), '{"target": 0.5}']
    (args,) = TrlParser((BAPOTrainerConfig,)).parse_args_and_config(given)
    assert (args.bapo_options, args.bapo_scope) == ({"target": 0.5}, "step")


def test_without_args(tmp_path, monkeypatch):
    """A default config and its name as TRL makes them, and the model card."""
    made = GRPOConfig.__post_init__
    monkeypatch.setattr(
        GRPOConfig, "__post_init__", lambda self: made(setattr(self, "use_cpu", True) or self)
    )
    monkeypatch.chdir(tmp_path)
    policy = model(words=len(WORDS))
    policy.config._name_or_path = "somebody/tiny"
    data = dict(train_dataset=PROMPTS, processing_class=tokenizer())
    ours, trls = (kind(policy, reward, **data) for kind in (BAPOTrainer, GRPOTrainer))
    assert (ours.args.output_dir, trls.args.output_dir) == ("tiny-BAPO", "tiny-GRPO")
    ours.create_model_card()
    card = (tmp_path / "tiny-BAPO/README.md").read_text()
    parts = "- bapo", "- grpo", "papers/2510.18927", "@article{xi2025bapo", "@article{shao2024"
    assert all(part in card for part in parts)


# Heads that an adapter or TRL has changed; for the gradients of LoRA see test_lm_head.py.

TOKENS = torch.arange(12).view(2, 6)
LABELS = TOKENS[:, -3:]


def log_probs_of_head(model):
    def head(hidden, weight, bias):
        assert hidden.dtype == weight.dtype
        return linear_log_probs(hidden, weight, LABELS, bias=bias)[0]

    return model(input_ids=TOKENS, bapo_head=head, bapo_tokens=3)


def log_probs_of_logits(model):
    log_p = model(input_ids=TOKENS).logits[:, -4:-1].log_softmax(-1)
    return log_p.gather(-1, LABELS[..., None]).squeeze(-1)


def with_lora(**options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False, **options)
    return peft.get_peft_model(model(), config)


def test_lora_is_summed_at_each_use():
    adapted = with_lora()
    exact = copy.deepcopy(adapted).double()
    add_head(adapted, arguments("out"))
    for _ in range(2):
        same = in_some_orders(lambda: log_probs_of_logits(adapted))
        got, truth = log_probs_of_head(adapted), log_probs_of_logits(exact)
        assert_within_budget("log_probs", got, same, truth)
        with torch.no_grad():
            for made in (adapted, exact):
                next(p for p in made.parameters() if p.requires_grad).mul_(2)


def test_another_adapter_of_the_head_is_left_to_trl():
    adapted = with_lora(lora_dropout=0.1)
    with pytest.warns(UserWarning, match=r"bapo_head is 'trl', .*adapter.*a dropout of 0\.1"):
        assert add_head(adapted, arguments("out")) is None
    with pytest.raises(ValueError, match="adapter"):
        add_head(adapted, arguments("out", bapo_head="fused"))


def test_a_head_in_float32():
    made = model(torch.bfloat16)
    made.lm_head = made.lm_head.float()

    def product(hidden, dtype=torch.float32):  # as TRL sets it
        return torch.nn.functional.linear(hidden.to(dtype), made.lm_head.weight.to(dtype))

    made.lm_head.forward = functools.partial(product, dtype=torch.float64)
    truth = log_probs_of_logits(made)
    made.lm_head.forward = product
    same = in_some_orders(lambda: log_probs_of_logits(made))
    add_head(made, arguments("out", cast_lm_head_to_fp32=True))
    assert_within_budget("log_probs", log_probs_of_head(made), same, truth)
    assert made.lm_head.forward is product
