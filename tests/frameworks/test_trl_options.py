"""Every option of TRL's ``GRPOConfig`` at fixed bounds, against TRL's own ``GRPOTrainer``."""

import json
import re

import pytest
import torch
from helpers import EPS, fixed_bounds, needs_native

pytest.importorskip("trl")

from test_trl import PROMPTS, SIZES, STANDARD, WORDS, reward, tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer, TrlParser

from bapo_kernels import reference
from bapo_kernels.core.checks import warn_once
from bapo_kernels.integrations.trl import BAPOTrainer, BAPOTrainerConfig
from bapo_kernels.integrations.trl_config import bapo_config

pytestmark = [needs_native, pytest.mark.filterwarnings("ignore")]


def model(experts=False):
    torch.manual_seed(0)
    options = dict(vocab_size=len(WORDS), **SIZES)
    if experts:
        few = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**options, **few, router_aux_loss_coef=0.1))
    made = Qwen3ForCausalLM(Qwen3Config(**options))
    with torch.no_grad():  # a head that prefers some words to others
        made.lm_head.weight.mul_(20)
    return made


def length(completion_ids, **_):
    return [float(len(ids)) for ids in completion_ids]


class Stale:
    """Old log-probs and importance weights as of an older policy; records losses and bounds."""

    weights = False

    def _generate_and_score_completions(self, inputs):
        torch.manual_seed(self.state.global_step)
        made = super()._generate_and_score_completions(inputs)
        shape = made["completion_ids"].shape
        if "old_per_token_logps" in made:
            made["old_per_token_logps"] += 0.4 * torch.randn(shape)
        if self.weights:
            made["sampling_per_token_logps"] = -3 * torch.rand(shape)
            made["importance_sampling_ratio"] = 0.5 + torch.rand(shape)
        made["tool_mask"] = (torch.arange(shape[1]) != 1).long().expand(shape)
        return made

    def _compute_loss(self, model, inputs):
        self.use_vllm = self.weights
        loss = super()._compute_loss(model, inputs)
        self.use_vllm = False
        self.losses.append(loss.item())
        return loss

    def _log_metrics(self, out, *others):
        self.decided.append([bound.item() for bound in out.bounds])
        super()._log_metrics(out, *others)


class TRLs(Stale, GRPOTrainer):
    pass


class Ours(Stale, BAPOTrainer):
    pass


def trainer(kind, folder, weights=False, experts=False, rewards=(reward,), **options):
    policy = model(experts)
    policy.config._name_or_path = str(folder / "model")  # where the KL's reference comes from
    if options.get("beta"):
        policy.save_pretrained(folder / "model")
    config = BAPOTrainerConfig if issubclass(kind, BAPOTrainer) else GRPOConfig
    made = kind(
        model=policy,
        reward_funcs=list(rewards),
        args=config(output_dir=str(folder), **(STANDARD | dict(learning_rate=0.05) | options)),
        train_dataset=PROMPTS,
        eval_dataset=PROMPTS.select(range(2)),
        processing_class=tokenizer(),
    )
    made.weights, made.losses, made.decided = weights, [], []
    return made


OPTIONS = {
    **{name: dict(loss_type=name) for name in ("grpo", "bnpo", "dr_grpo", "cispo", "sapo")},
    "luspo": dict(loss_type="luspo", learning_rate=0.01),  # it is a sum over tokens
    "dapo, with evaluations": dict(eval_strategy="steps", eval_steps=2),
    "sequence level": dict(loss_type="grpo", importance_sampling_level="sequence"),
    "luspo, sequence level": dict(loss_type="luspo", importance_sampling_level="sequence"),
    "delta": dict(delta=1.5),
    # With a higher rate the KL reaches the 10 at which it is clamped here.
    "KL": dict(beta=0.1, use_bias_correction_kl=False, learning_rate=0.003),
    "KL with ratio, reference updated": dict(
        beta=0.1,
        use_bias_correction_kl=True,
        sync_ref_model=True,
        ref_model_sync_steps=2,
        ref_model_mixup_alpha=0.5,
    ),
    "entropy": dict(entropy_coef=0.1),
    "adaptive entropy": dict(
        use_adaptive_entropy=True, entropy_target=1.7, entropy_coef_delta=0.1, entropy_coef=0.1
    ),
    "tokens of high entropy": dict(top_entropy_quantile=0.4, entropy_coef=0.1, beta=0.1),
    "off-policy mask": dict(off_policy_mask_threshold=0.05),
    "off-policy mask, importance weights": dict(
        off_policy_mask_threshold=0.4, weights=True, loss_type="cispo", top_entropy_quantile=0.7
    ),
    "importance weights": dict(weights=True, loss_type="bnpo"),
    "router losses": dict(experts=True, router_aux_loss_coef=0.5),
    "truncated completions": dict(mask_truncated_completions=True, loss_type="grpo"),
    "rewards": dict(rewards=(reward, length), reward_weights=[1.0, 0.3], scale_rewards="batch"),
    "rewards apart": dict(
        rewards=(reward, length),
        multi_objective_aggregation="normalize_then_sum",
        scale_rewards="none",
    ),
    "sampling": dict(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.1),
    "uneven window": dict(gradient_accumulation_steps=2, steps_per_generation=3, num_generations=4),
    "float32 head": dict(cast_lm_head_to_fp32=True, disable_dropout=True),
}
TIMES = re.compile("time|runtime|per_second|flos")


@pytest.mark.parametrize("name", OPTIONS)
def test_fixed_bounds_are_trls_own_loss(tmp_path, name):
    """Loss by loss, metric by metric, and the weights that are trained."""
    options = OPTIONS[name]
    bounds = {"bapo_options": fixed_bounds(0.8, 1.28)}
    epsilons = dict(epsilon=0.2, epsilon_high=0.28)
    if options.get("loss_type") == "cispo":
        bounds, epsilons = {"bapo_options": fixed_bounds(0.0, 1.28)}, dict(epsilon_high=1.28)
    elif options.get("loss_type") == "sapo":
        bounds, epsilons = {}, {}
    ours = trainer(Ours, tmp_path, **options, **bounds)
    right = trainer(TRLs, tmp_path, **options, **epsilons)
    for made in (ours, right):
        made.train()
    assert len(ours.losses) >= 8
    assert ours.losses == pytest.approx(right.losses, rel=1e-5, abs=1e-6)
    expected = dict(right.model.named_parameters())
    start = dict(model("experts" in options).named_parameters())
    for key, weight in ours.model.named_parameters():
        update = (expected[key] - start[key]).abs().max().item()
        tolerance = EPS[torch.float32] * (8 * weight.abs().max().item() + 100 * update)
        torch.testing.assert_close(weight, expected[key], rtol=0, atol=tolerance)
    assert len(ours.state.log_history) == len(right.state.log_history)
    for got, logged in zip(ours.state.log_history, right.state.log_history, strict=True):
        assert {key for key in got if "bapo/" not in key} == logged.keys()
        json.dumps(got, allow_nan=False)
        for key in logged.keys() - {key for key in logged if TIMES.search(key)}:
            assert got[key] == pytest.approx(logged[key], rel=1e-4, abs=1e-5), key


class Watched(Ours):
    def _counted(self, log_probs, entropies, inputs):
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        old, A = inputs["old_per_token_logps"], inputs["advantages"][:, None].expand(mask.shape)
        high = self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
        threshold = self.off_policy_mask_threshold
        near = self.get_off_policy_mask(A, log_probs.detach(), old, mask, threshold)
        tokens = log_probs.detach(), old, A
        kept = high & (near != 0)
        self.tokens.append([[x[chosen] for x in tokens] for chosen in (kept, mask != 0)])
        return super()._counted(log_probs, entropies, inputs)


@pytest.mark.parametrize("scope", ["call", "step", "lagged"])
def test_tokens_without_a_policy_term_are_not_searched_over(tmp_path, scope):
    """Neither those of low entropy nor those of sequences that are masked as off-policy."""
    masks = dict(top_entropy_quantile=0.5, off_policy_mask_threshold=0.05)
    made = trainer(Watched, tmp_path, bapo_scope=scope, bapo_options={"target": 0.62}, **masks)
    made.tokens = []
    made.train()
    size = {"call": 1, "step": 4, "lagged": 2}[scope]  # "step" scores its two micro-batches first
    decisions = []
    for i in range(0, len(made.tokens), size):
        of_step = made.tokens[i : i + min(size, 2)]
        for which in (0, 1):
            tokens = [torch.cat(x) for x in zip(*(parts[which] for parts in of_step), strict=True)]
            bounds = reference.find_clip_bounds(*tokens, config=bapo_config(made.args))
            decisions.append([bound.item() for bound in bounds])
    kept, all_tokens = decisions[::2], decisions[1::2]
    assert kept != all_tokens
    assert len({tuple(bounds) for bounds in kept}) > 1
    got = made.decided if scope == "call" else made.decided[::2]
    if scope == "lagged":
        kept = [torch.tensor([0.6, 1.2]).tolist(), *kept[:-1]]
    for mine, expected in zip(got, kept, strict=True):
        assert mine == pytest.approx(expected, abs=1e-6)


BEFORE = {
    "GRPO": (TRLs, {}, r"No such file or directory \(.*bapo_search.pt\)"),
    "fixed bounds": (
        Ours,
        dict(bapo_options=fixed_bounds(0.8, 1.28)),
        r"config.ratio_lower_start must be 0.6 in the state too, got 0.8 \(.*bapo_search.pt\)",
    ),
    "another scope": (
        Ours,
        dict(bapo_options={"target": 0.62}, bapo_scope="step"),
        r"scope must be 'lagged' in the state too, got 'step' \(.*bapo_search.pt\)",
    ),
}


@pytest.mark.parametrize("name", BEFORE)
def test_search_that_starts_at_a_checkpoint(tmp_path, name):
    kind, options, message = BEFORE[name]
    trainer(kind, tmp_path, save_strategy="steps", save_steps=2, max_steps=2, **options).train()
    again = trainer(Ours, tmp_path, bapo_options={"target": 0.7}, bapo_scope="lagged")
    warn_once.cache_clear()
    start = r"the search starts anew, from the bounds \(0.6, 1.2\): "
    with pytest.warns(UserWarning, match=start + message):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.decided[0] == pytest.approx([0.6, 1.2])
    assert len({tuple(bounds) for bounds in again.decided}) > 1


def test_options_on_a_command_line(tmp_path):
    line = f"--output_dir {tmp_path} --use_cpu true --bf16 false --bapo_scope step --bapo_options"
    arguments = [*line.split(), '{"target": 0.5}']
    (args,) = TrlParser((BAPOTrainerConfig,)).parse_args_and_config(arguments)
    assert (args.bapo_options, args.bapo_scope) == ({"target": 0.5}, "step")


def test_without_args(tmp_path, monkeypatch):
    """A default config and its name as TRL makes them, and the model card."""
    made = GRPOConfig.__post_init__

    def on_cpu(self):
        self.use_cpu = True
        made(self)

    monkeypatch.setattr(GRPOConfig, "__post_init__", on_cpu)
    monkeypatch.chdir(tmp_path)
    policy = model()
    policy.config._name_or_path = "somebody/tiny"
    data = dict(train_dataset=PROMPTS, processing_class=tokenizer())
    trainers = [kind(policy, reward, **data) for kind in (BAPOTrainer, GRPOTrainer)]
    names = [made.args.output_dir for made in trainers]
    assert names == ["tiny-BAPO", "tiny-GRPO"]
    trainers[0].create_model_card()
    card = (tmp_path / "tiny-BAPO/README.md").read_text()
    for part in (
        "- bapo",
        "- grpo",
        "papers/2510.18927",
        "@article{xi2025bapo",
        "@article{shao2024",
    ):
        assert part in card


def test_liger_is_refused_where_it_replaces_the_loss(monkeypatch):
    """Before TRL 1.14; since then it replaces layers."""
    options = dict(output_dir="out", use_cpu=True, bf16=False, use_liger_kernel=True)
    monkeypatch.delattr(GRPOTrainer, "compute_liger_loss", raising=False)
    BAPOTrainerConfig(**options)
    monkeypatch.setattr(GRPOTrainer, "compute_liger_loss", None, raising=False)
    with pytest.raises(ValueError, match="use_liger_kernel must be False before TRL 1.14"):
        BAPOTrainerConfig(**options)
