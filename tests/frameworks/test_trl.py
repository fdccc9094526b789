"""Real TRL training against an independent implementation in plain torch."""

import copy
import os
import re
import runpy
import subprocess
import sys
import warnings
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import EPS, assert_within_budget, needs_native

pytest.importorskip("trl")

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from bapo_kernels import BAPOConfig, ClipBoundSearch, linear_log_probs, reference
from bapo_kernels.core.checks import warn_once
from bapo_kernels.integrations.trl import BAPOTrainer, BAPOTrainerConfig
from bapo_kernels.integrations.trl_config import bapo_config
from bapo_kernels.integrations.trl_head import add_head

pytestmark = needs_native

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


def model(dtype=torch.float32):
    torch.manual_seed(0)
    made = Qwen3ForCausalLM(Qwen3Config(vocab_size=V, **SIZES))
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

    rollouts = None

    def start(self, rollouts=None):
        self.given = rollouts
        self.rollouts, self.losses, self.decided, self.logged = [], [], [], []
        return self

    def _generate_and_score_completions(self, inputs):
        if self.given is not None:
            made = copy.deepcopy(self.given[len(self.rollouts)])
        else:
            made = super()._generate_and_score_completions(inputs)
            # Rollouts of an older policy, so that the search has work.
            if made.get("old_per_token_logps") is not None:
                g = torch.Generator().manual_seed(len(self.rollouts))
                noise = torch.randn(made["old_per_token_logps"].shape, generator=g)
                made["old_per_token_logps"] = made["old_per_token_logps"] + 0.4 * noise
            tool = torch.zeros_like(made["completion_mask"])  # the second token is a tool's
            tool[:, 1] = 1
            made["tool_mask"] = 1 - tool
        self.rollouts.append(copy.deepcopy(made))
        torch.manual_seed(len(self.rollouts))  # for the shuffle that comes next
        return made

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


class Ours(Recorder, BAPOTrainer):
    def _log_metrics(self, out, *args):
        self.decided.append([b.item() for b in out.bounds])
        super()._log_metrics(out, *args)


LOGGED = ("clip_low", "clip_high", "pos_share", "pos_share_start", "pos_share_max", "saturated")


class Plain(Recorder, GRPOTrainer):
    """The loss from materialised logits in ordinary tensor operations, and the paper's loop."""

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

    def contributions(self, logp, inputs):
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        A = inputs["advantages"][:, None].expand(logp.shape)
        old = inputs.get("old_per_token_logps")
        old = logp.detach() if old is None else old
        rollout = inputs.get("sampling_per_token_logps", old)
        if self.importance_sampling_level == "sequence":
            mean = ((logp - old) * mask).sum(1) / mask.sum(1)
            logp = old + mean[:, None]  # every token with the ratio of its sequence
        return [x[mask] for x in (logp.detach(), old, A, rollout)]

    def decide(self, parts):
        """The bounds over all processes, in rank order, and their metrics."""
        if self.accelerator.num_processes > 1:
            of_ranks = [None] * self.accelerator.num_processes
            torch.distributed.all_gather_object(of_ranks, parts)
            parts = [part for of_rank in of_ranks for part in of_rank]
        logp, old, A, rollout = (torch.cat(x) for x in zip(*parts, strict=True))
        out = reference.bapo_loss_from_log_probs(
            logp, old, A, config=self.search_config, rollout_log_probs=rollout
        )
        self.bounds = [b.item() for b in out.bounds]
        self.metrics = {name: out.metrics[f"bapo_{name}"].item() for name in LOGGED}

    def _compute_loss(self, model, inputs):
        accumulation = self.current_gradient_accumulation_steps
        first = len(self.losses) % accumulation == 0
        if self.scope == "step" and first:
            with torch.no_grad():
                step = [
                    self._buffered_inputs[(self._step + i) % self.args.steps_per_generation]
                    for i in range(accumulation)
                ]
                self.decide([self.contributions(self.log_probs(model, x)[0], x) for x in step])
        logp, entropy = self.log_probs(model, inputs)
        if self.scope == "call":
            self.decide([self.contributions(logp, inputs)])
        self.decided.append(self.bounds)
        self.logged.append(self.metrics)
        low, high = self.bounds
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        A = inputs["advantages"][:, None]
        old = inputs.get("old_per_token_logps")
        old = logp.detach() if old is None else old
        r = (logp - old).exp()
        if self.importance_sampling_level == "sequence":
            r = (((logp - old) * mask).sum(1) / mask.sum(1)).exp()[:, None]
        policy = -torch.min(r * A, r.clamp(low, high) * A)
        if self.loss_type == "cispo":
            policy = -(r.clamp(low, high).detach() * A * logp)
        if self.search_config.clip_ratio_c is not None:
            cap = -A * self.search_config.clip_ratio_c
            policy = torch.where(A < 0, torch.min(policy, cap), policy)
        if self.beta:
            d = inputs["ref_per_token_logps"] - logp
            kl = d.exp() - d - 1
            policy = policy + self.beta * (kl * r if self.args.use_bias_correction_kl else kl)
        B = mask.shape[0]
        total = (policy * mask).sum()
        if self.loss_type == "grpo":
            loss = ((policy * mask).sum(1) / mask.sum(1)).mean() / accumulation
        elif self.loss_type == "bnpo":
            loss = total / mask.sum() / accumulation
        elif self.loss_type == "dr_grpo":
            loss = total / (B * self.max_completion_length) / accumulation
        else:
            share = accumulation / self.args.steps_per_generation
            tokens = inputs["num_items_in_batch"] / self.accelerator.num_processes
            loss = total / (tokens * share)
        if self.args.entropy_coef:
            mean = (entropy * mask).sum() / mask.sum()
            loss = loss - self.args.entropy_coef * mean / accumulation
        if self.scope == "lagged":
            self.seen.append(self.contributions(logp, inputs))
            if not first:
                self.decide(self.seen)
                self.seen = []
        return loss


def allowed(masks):
    """bool ``[B, T, V]``."""
    rows = torch.ones(len(masks), len(masks[0]), V, dtype=torch.bool)
    for of_sequence, mask in zip(rows, masks, strict=True):
        for n, row in enumerate(of_sequence):
            ids = mask.token_ids[mask.offsets[n] : mask.offsets[n + 1]].long()
            if len(ids):
                row.fill_(False)[ids] = True
    return rows


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
        for name, of_prompt in zip(made, (ids, completion, logprobs, sets), strict=True):
            made[name].append(of_prompt)
    return made


CASES = {
    "dapo, lagged": dict(bapo_scope="lagged"),
    "grpo, recipe, step": dict(loss_type="grpo", bapo_preset="recipe", bapo_scope="step"),
    "bnpo, KL, call": dict(
        loss_type="bnpo",
        beta=0.05,
        use_bias_correction_kl=False,
        learning_rate=0.003,  # with more the KL reaches the 10 at which the kernels clamp it
        bapo_scope="call",
    ),
    "dr_grpo, dual clip, TRL's head": dict(
        loss_type="dr_grpo", delta=1.5, temperature=0.8, bapo_head="trl"
    ),
    "KL with ratio, entropy, long generation": dict(
        beta=0.05, entropy_coef=0.02, bapo_scope="step", steps_per_generation=4
    ),
    "cispo, step": dict(loss_type="cispo", bapo_scope="step"),
    "grpo, sequence level, KL with ratio, lagged": dict(
        loss_type="grpo", importance_sampling_level="sequence", beta=0.05, bapo_scope="lagged"
    ),
    "sampling masks, KL, call": dict(
        rollout_func=from_the_likely_tokens,
        beta=0.05,
        use_bias_correction_kl=False,
        temperature=0.8,
        learning_rate=0.003,
        bapo_scope="call",
    ),
    "sampling masks, log_probs, step": dict(
        rollout_func=from_the_likely_tokens, entropy_coef=0.02, bapo_scope="step"
    ),
}


def trainer_of(kind, folder, rollouts=None, dtype=torch.float32, rollout_func=None, **options):
    policy = model()
    policy.config._name_or_path = str(folder / "model")  # where the KL's reference comes from
    policy.save_pretrained(folder / "model")
    return kind(
        model=policy.to(dtype),
        reward_funcs=reward,
        args=arguments(folder, **options),
        train_dataset=PROMPTS,
        processing_class=tokenizer(),
        rollout_func=rollout_func,
    ).start(rollouts)


def trained(kind, folder, rollouts=None, dtype=torch.float32, **options):
    start = {k: v.detach().double().clone() for k, v in model(dtype).named_parameters()}
    trainer = trainer_of(kind, folder, rollouts, dtype, **options)
    if kind is Plain:
        preset = options.get("bapo_preset", "paper")
        extra = {"clip_ratio_c": options["delta"]} if "delta" in options else {}
        trainer.search_config = getattr(BAPOConfig, preset)(target=TARGET[preset], **extra)
        trainer.scope = options.get("bapo_scope", "lagged")
        trainer.bounds, trainer.seen = [0.6, 1.2], []
        trainer.metrics = {"clip_low": 0.6, "clip_high": 1.2}  # before the first decision
    if trainer.beta:
        trainer.ref_model.to(dtype)
    trainer.train()
    end = dict(trainer.model.named_parameters())
    return trainer, {k: end[k].detach().double() - start[k] for k in start}


TARGET = {"paper": 0.62, "recipe": 1.5}


@pytest.mark.parametrize("name", CASES)
def test_training(tmp_path, name):
    """Stale rollouts, two iterations, two micro-batches per step: losses, bounds and updates."""
    check_training(tmp_path, name)


def test_two_processes(tmp_path):
    """The same under torchrun: DDP, and decisions over both processes."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    tests = Path(__file__).parents[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tests.parent}:{tests}"}
    run = subprocess.run(
        [sys.executable, *command, str(tmp_path), "dapo, lagged"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.count("equal") == 2


def check_training(tmp_path, name):
    options = CASES[name]
    target = TARGET[options.get("bapo_preset", "paper")]
    ours, got = trained(Ours, tmp_path, bapo_options={"target": target}, **options)
    plain, same = trained(Plain, tmp_path, ours.rollouts, **options)
    true, truth = trained(Plain, tmp_path, in_double(ours.rollouts), torch.float64, **options)
    assert len(ours.losses) == 8
    for a, b in zip(ours.decided, true.decided, strict=True):
        assert a == pytest.approx(b, abs=1e-6)
    assert len({tuple(b) for b in ours.decided}) > 1, "the search must have work"
    losses = (torch.tensor(t.losses, dtype=torch.float64) for t in (ours, plain, true))
    losses = [x.float() if i < 2 else x for i, x in enumerate(losses)]
    assert_within_budget("losses", *losses, operand=10.0)
    for key, update in got.items():
        largest = truth[key].abs().max().item()
        assert largest > 0, key
        # An update is the difference of two float32 weights; each ratio has the rounding of a
        # log-prob (8 = log V).
        weight = dict(ours.model.named_parameters())[key].abs().max().item()
        inherited = EPS[torch.float32] * (8 * weight + 8 * largest)
        assert_within_budget(key, update.float(), same[key], truth[key], inherited=inherited)
    entries = [entry for entry in ours.state.log_history if "loss" in entry]
    for entry, *decisions in zip(entries, true.logged[::2], true.logged[1::2], strict=True):
        assert entry.pop("bapo/label_outside_mask", None) == (0 if "masks" in name else None)
        assert {f"bapo/{key}" for key in decisions[0]} == {k for k in entry if "bapo/" in k}
        for key in decisions[0]:  # the mean of two micro-batches
            mean = sum(decision[key] for decision in decisions) / 2
            assert entry[f"bapo/{key}"] == pytest.approx(mean, abs=1e-5), key
    logged = {key for entry in entries for key in entry}
    ratios = {"clip_ratio/low_mean", "clip_ratio/region_mean"}
    if options.get("loss_type") == "cispo":
        ratios = {"cispo_clip_ratio"}
    assert ratios | {"entropy", "loss"} <= logged
    assert ("kl" in logged) == bool(options.get("beta"))


def with_masks(folder, rollout_func=from_the_likely_tokens, **options):
    """A trainer whose rollouts have sampling masks."""
    return trainer_of(Ours, folder, rollout_func=rollout_func, **(dict(max_steps=1) | options))


def test_rollouts_of_the_guide(tmp_path):
    """The block of docs/trl.md about sampling masks, with a stand-in for vLLM."""
    guide = (Path(__file__).parents[2] / "docs/trl.md").read_text()
    section = guide.partition("## Sampling masks")[2]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1)
    policy = model()
    source = SimpleNamespace(model=policy, temperature=1.0, max_completion_length=4)

    def generate(prompts, params):
        rows = zip(*from_the_likely_tokens(prompts, source).values(), strict=True)
        for prompt_ids, ids, logprobs, sets in rows:
            output = SimpleNamespace(
                token_ids=ids,
                logprobs=[
                    {i: SimpleNamespace(logprob=x)} for i, x in zip(ids, logprobs, strict=True)
                ],
                sampling_mask=SimpleNamespace(token_ids=sets),
            )
            yield SimpleNamespace(prompt_token_ids=prompt_ids, outputs=[output])

    llm = SimpleNamespace(generate=lambda *given: list(generate(*given)))
    names = dict(llm=llm, params=None)
    function, _, rest = block.partition("trainer = ")
    exec(function, names)
    made = with_masks(tmp_path, names["rollout"], max_completion_length=4)
    made.train()
    assert len(made.rollouts[0]["sampling_mask"]) == 8
    assert "rollout_func=rollout" in rest


@pytest.mark.parametrize("given", [True, False])
def test_scores_of_rollouts_with_sampling_masks(tmp_path, given):
    """Before the first update old, reference and sampler agree; without the sets they do not."""

    def rollout(prompts, trainer):
        made = from_the_likely_tokens(prompts, trainer)
        return made if given else {k: v for k, v in made.items() if k != "sampling_mask"}

    trainer = with_masks(tmp_path, rollout, beta=0.05)
    torch.manual_seed(1)
    prompts = [{"prompt": prompt} for prompt in ["a b c"] * 4 + ["m"] * 4]
    scored = BAPOTrainer._generate_and_score_completions(trainer, prompts)
    mask = scored["completion_mask"] != 0
    assert not mask.all(), "one completion must be shorter"
    sampled = scored["sampling_per_token_logps"][mask]
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        ratio = (scored[name][mask] - sampled).exp()
        if given:
            torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)
        else:
            assert ratio.max() < 0.5
    assert ("sampling_mask" in scored) == given


def test_sampling_masks_that_do_not_fit_are_refused(tmp_path):
    """A set for each token of each completion, and a head that takes them."""

    def fails(change, message, **options):
        def rollout(prompts, trainer):
            made = from_the_likely_tokens(prompts, trainer)
            change(made["sampling_mask"])
            return made

        with pytest.raises(ValueError, match=message):
            with_masks(tmp_path, rollout, **options).train()

    fails(lambda sets: sets.pop(), "sampling_mask must have a list of sets for each of the 8 comp")
    fails(lambda sets: sets[2].append([7]), r"sampling_mask\[2\] must have a set for each of the")
    fails(lambda sets: None, "sampling_mask must not be given with TRL's head", bapo_head="trl")
    trainer = with_masks(tmp_path)
    trainer.tools = [len]
    with pytest.raises(ValueError, match="sampling_mask must not be given where TRL calls tools"):
        trainer.rollout_func(["a"], trainer)


def in_double(rollouts):
    return [
        {
            k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in rollout.items()
        }
        for rollout in rollouts
    ]


def test_guide_runs(tmp_path):
    """The first block of docs/trl.md, run as it stands."""
    guide = (Path(__file__).parents[2] / "docs/trl.md").read_text()
    block = re.search(r"```python\n(.*?)```", guide, re.DOTALL).group(1)
    policy = model()
    policy.save_pretrained(tmp_path / "policy")
    tokenizer().save_pretrained(tmp_path / "policy")
    names = dict(model=str(tmp_path / "policy"), reward=reward, dataset=PROMPTS, folder=tmp_path)
    small = "max_completion_length=4, max_steps=1, use_cpu=True, bf16=False"
    code = block.replace("output_dir=folder", f"output_dir=folder, {small}")
    assert code != block
    exec(code, names)
    assert names["trainer"].state.global_step == 1


BAD_OPTIONS = [
    (dict(loss_type="vespo"), "loss_type must be one of .*smooth, without bounds to search for"),
    (dict(importance_sampling_level="batch"), "importance_sampling_level must be one of .*'sequen"),
    (
        dict(loss_type="sapo", bapo_scope="lagged"),
        "bapo_scope must be 'call' for loss_type='sapo' .*got 'lagged'",
    ),
    (dict(loss_type="cispo", delta=2.0), "delta must be None for loss_type='cispo' with BAPO"),
    (
        dict(loss_type="sapo", bapo_options={"target": 0.5}),
        r"bapo_options must be None for loss_type='sapo' \(it has no search\) with BAPO",
    ),
    (
        dict(loss_type="cispo", bapo_options={"contribution": "gradient"}),
        "contribution must be 'surrogate' with surrogate='cispo'",
    ),
    (dict(delta=0.9), "delta must be None or > 1 with BAPO, got 0.9"),
    (dict(bapo_head="liger"), r"bapo_head must be one of \(None, 'fused', 'log_probs', 'trl'\)"),
    (dict(bapo_scope="batch"), r"bapo_scope must be one of .*'call'\) with BAPO, got 'batch'"),
    (dict(bapo_scope="step", steps_per_generation=3), "steps_per_generation must be a multiple"),
    (dict(bapo_preset="authors"), "bapo_preset must be 'paper' or 'recipe', got 'authors'"),
    (dict(bapo_options="target"), "bapo_options must be a dict or None, got 'target'"),
    (dict(bapo_options={"target": 2.0}), "target must .*in"),
    (dict(bapo_options={"epsilon": 0.2}), "bapo_options must name options of BAPOConfig"),
]
NOT_FUSED = dict(
    entropy_coef=0.1,
    use_adaptive_entropy=True,
    top_entropy_quantile=0.5,
    off_policy_mask_threshold=0.5,
)
BAD_OPTIONS += [
    ({"bapo_head": "fused", name: value}, rf"be one of \(None, 'log_probs', 'trl'\) with {name}")
    for name, value in NOT_FUSED.items()
]
# Options of BAPOConfig that the user does not set, and who does.
OWNED = dict(
    loss_agg_mode="TRL's loss_type",
    loss_scale_factor="TRL's loss_type",
    kl_loss_coef="TRL's beta",
    kl_loss_type="TRL's beta",
    entropy_coef="TRL's entropy_coef",
    temperature="TRL's temperature",
    clip_ratio_c="TRL's delta",
    surrogate="TRL's loss_type",
    sapo_tau_pos="TRL's sapo_temperature_pos",
    sapo_tau_neg="TRL's sapo_temperature_neg",
    ratio_level="TRL's importance_sampling_level",
    logit_scale="the model's config",
    final_logit_softcapping="the model's config",
)
BAD_OPTIONS += [
    (dict(bapo_options={name: 3.0}), rf"bapo_options\['{name}'\] must be left to {owner}.*got 3.0")
    for name, owner in OWNED.items()
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_options_without_a_meaning_are_refused(options, message):
    """No model is needed to refuse them."""
    if "steps_per_generation" in options:
        options = options | dict(num_generations=2)
    with pytest.raises(ValueError, match=message):
        arguments("out", **options)


def test_changed_options_are_refused_before_a_model_is_loaded():
    args = arguments("out")
    args.loss_type = "vespo"
    with pytest.raises(ValueError, match="loss_type must be one of"):
        BAPOTrainer(model="/no/such/model", reward_funcs=reward, args=args)


def test_every_option_is_the_users_or_has_an_owner():
    search = dict(
        ratio_lower_start=0.7, ratio_lower_max=0.8, ratio_lower_step=0.1, ratio_upper_start=1.3,
        ratio_upper_max=1.4, ratio_upper_step=0.2, target=0.9, target_kind="ratio",
        raise_first="lower", token_weight="uniform", contribution="gradient",
    )  # fmt: skip
    assert {*search, *OWNED} == {field.name for field in fields(BAPOConfig)}
    options = dict(delta=4.0, temperature=0.7, beta=0.1, use_bias_correction_kl=True)
    args = arguments("out", bapo_options=search, **options)
    config = bapo_config(args)
    assert {name: getattr(config, name) for name in search} == search
    assert (config.clip_ratio_c, config.temperature, config.kl_loss_coef) == (4.0, 0.7, 0.0)
    recipe = bapo_config(arguments("out", bapo_preset="recipe"))
    assert recipe == BAPOConfig.recipe(kl_loss_type="k3")
    recipe = bapo_config(arguments("out", bapo_preset="recipe", loss_type="cispo"))
    assert recipe == BAPOConfig.recipe(surrogate="cispo", kl_loss_type="k3")
    temperatures = dict(sapo_temperature_pos=0.9, sapo_temperature_neg=1.2)
    options = dict(loss_type="sapo", importance_sampling_level="sequence")
    config = bapo_config(arguments("out", **options, **temperatures))
    assert (config.surrogate, config.sapo_tau_pos, config.sapo_tau_neg) == ("sapo", 0.9, 1.2)
    assert (config.ratio_level, config.loss_agg_mode) == ("sequence", "seq-mean-token-mean")


STEPS = dict(per_device_train_batch_size=32, gradient_accumulation_steps=2, num_generations=2)
LATER = STEPS | dict(num_iterations=4)
ADVICE = [
    (LATER, None),
    (LATER | dict(epsilon=0.3), "epsilon=0.3 is not used.*bapo_options"),
    (LATER | dict(epsilon_high=0.28), "epsilon_high=0.28 is not used.*never epsilons"),
    (STEPS | dict(num_iterations=1), "BAPO cannot act: every ratio is 1"),
    (STEPS | dict(num_iterations=1, steps_per_generation=1), "BAPO cannot act"),
    # two iterations, but in one optimizer step
    (STEPS | dict(num_iterations=2, steps_per_generation=1), "BAPO cannot act"),
    (STEPS | dict(num_iterations=1, steps_per_generation=3), None),
    (STEPS | dict(num_iterations=1, steps_per_generation=4), "with two optimizer steps"),
    (STEPS | dict(num_iterations=1, steps_per_generation=6), None),
    (STEPS | dict(num_iterations=2), "bapo_scope='lagged' with two optimizer steps"),
    (STEPS | dict(num_iterations=2, bapo_scope="step"), None),
    (LATER | dict(bapo_scope="call", per_device_train_batch_size=16), "decides from .* 16 seq"),
    (LATER | dict(bapo_scope="call"), None),
    (LATER | dict(bapo_scope="step", per_device_train_batch_size=16), None),
    (LATER | dict(loss_type="cispo", epsilon_high=5.0), "epsilon_high=5.0 is not used"),
    # without a search nothing of it is missed
    (dict(num_iterations=1, loss_type="sapo", epsilon=0.3), None),
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


def test_search_stops_at_an_end_of_the_grids_where_every_ratio_is_1():
    """Why two optimizer steps per generation are too few for the scope lagged."""
    g = torch.Generator().manual_seed(0)
    ends = set()
    for _ in range(50):
        logp, A = -torch.rand(40, generator=g), torch.randn(40, generator=g)
        bounds = reference.find_clip_bounds(logp, None, A, config=BAPOConfig())
        ends.add(tuple(b.item() for b in bounds))
    assert ends == {tuple(torch.tensor(x).tolist()) for x in ((0.6, 1.2), (0.9, 3.0))}


def test_args_of_trl_are_refused():
    args = GRPOConfig("out", use_cpu=True, bf16=False)
    message = "args must be None or a BAPOTrainerConfig, got GRPOConfig"
    with pytest.raises(ValueError, match=message):
        BAPOTrainer(model=model(), reward_funcs=reward, args=args)


def test_resumed_training(tmp_path):
    """With scope lagged, a resumed training has the bounds it had."""
    options = dict(bapo_scope="lagged", bapo_options={"target": TARGET["paper"]})
    first, _ = trained(Ours, tmp_path, **options, save_strategy="steps", save_steps=2)
    second = trainer_of(Ours, tmp_path, **options)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert first.decided[4] != first.decided[0]
    assert second.decided[0] == first.decided[4]
    logs = [trainer.state.log_history for trainer in (first, second)]
    third = [next(entry for entry in log if entry["step"] == 3) for log in logs]
    for name in LOGGED:  # what the decision was based on
        assert third[0][f"bapo/{name}"] == third[1][f"bapo/{name}"]


def test_evaluation(tmp_path):
    """Evaluation decides nothing, and leaves the decision of the training unchanged."""
    trainer, _ = trained(Ours, tmp_path, bapo_scope="lagged")
    before, table = trainer.search.bounds, trainer.search.histogram.table.clone()
    trainer.decided.clear()
    dataset = Dataset.from_dict({"prompt": ["a b c", "d e"] * 4})
    result = trainer.evaluate(dataset)
    assert torch.isfinite(torch.tensor(result["eval_loss"]))
    assert trainer.decided
    assert all(b == [x.item() for x in before] for b in trainer.decided)
    assert trainer.search.bounds == before
    assert torch.equal(trainer.search.histogram.table, table)
    trainer.search = ClipBoundSearch(trainer.bapo_config, "step")
    trainer.decided.clear()
    trainer.evaluate(dataset)  # before a training has decided
    assert all(b == pytest.approx([0.6, 1.2]) for b in trainer.decided)


def test_example(capsys):
    path = Path(__file__).parents[2] / "examples/trl_bapo.py"
    example = runpy.run_path(str(path), run_name="example")
    example["main"](scope="step", preset="recipe", steps=2)
    assert "BAPO in TRL, scope step, preset recipe" in capsys.readouterr().out


if __name__ == "__main__":  # a process of test_two_processes
    place = Path(sys.argv[1]) / os.environ["RANK"]
    place.mkdir()
    check_training(place, sys.argv[2])
    print("equal")


class TestHeads:
    """The head of a model that an adapter or TRL has changed."""

    tokens, completion = torch.arange(12).view(2, 6), 3

    def log_probs(self, model):
        labels = self.tokens[:, -self.completion :]

        def head(hidden, weight, bias):
            assert hidden.dtype == weight.dtype
            return linear_log_probs(hidden, weight, labels, bias=bias)[0]

        return model(input_ids=self.tokens, bapo_head=head, bapo_tokens=self.completion)

    def expected(self, model):
        logits = model(input_ids=self.tokens).logits[:, -self.completion - 1 : -1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        labels = self.tokens[:, -self.completion :, None]
        return torch.log_softmax(logits, -1).gather(-1, labels).squeeze(-1)

    def arguments(self, head=None, float32=False):
        return SimpleNamespace(bapo_head=head, cast_lm_head_to_fp32=float32)

    def adapted(self, layer, **options):
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules=[layer], init_lora_weights=False, **options)
        return peft.get_peft_model(model(), config)

    @pytest.mark.parametrize("layer", ["q_proj", "lm_head"])
    def test_lora(self, layer):
        adapted = self.adapted(layer)
        exact = copy.deepcopy(adapted).double()
        expected = self.expected(exact)
        add_head(adapted, self.arguments())
        got = self.log_probs(adapted)
        torch.testing.assert_close(got, expected.float())
        got.sum().backward()
        expected.sum().backward()
        names = [name for name, _ in adapted.named_parameters() if "lora_" in name]
        assert len(names) == 2
        for name in names:
            mine, right = (m.get_parameter(name).grad.double() for m in (adapted, exact))
            assert right.any()
            torch.testing.assert_close(mine, right, rtol=0, atol=5e-6 * float(right.abs().max()))

    def test_another_adapter_of_the_head_is_left_to_trl(self):
        adapted = self.adapted("lm_head", lora_dropout=0.1)
        with pytest.warns(UserWarning, match=r"bapo_head is 'trl', .*adapter.*a dropout of 0\.1"):
            assert add_head(adapted, self.arguments()) is None
        with pytest.raises(ValueError, match="adapter"):
            add_head(adapted, self.arguments("fused"))

    def test_a_head_in_float32(self):
        made = model(torch.bfloat16)
        made.lm_head = made.lm_head.float()

        def product(hidden):  # as TRL sets it
            return torch.nn.functional.linear(hidden.float(), made.lm_head.weight)

        made.lm_head.forward = product
        expected = self.expected(made)
        add_head(made, self.arguments(float32=True))
        torch.testing.assert_close(self.log_probs(made), expected)
        assert made.lm_head.forward is product
