"""RL of a real language model on a CPU: SmolLM2-135M-Instruct learns to name the largest number.

Its head has V = 49,152 and H = 576; the last eight of its 30 layers learn. A rollout serves
``--staleness`` updates, so the policy that learns is not the one that sampled::

    python examples/smollm2.py --updates 40
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import NamedTuple

import torch
import typer
from rich.progress import track
from smollm2_model import END, END_ID, autocast, in_two, load, side_by_side
from torch import Tensor, nn
from transformers import DynamicCache

from bapo_kernels import BAPOConfig, BAPOOutput, bapo_linear_loss, debug, linear_log_probs

PROMPTS, GROUP, NEW = 8, 8, 16  # prompts of an update, completions of each, tokens of a completion
CHAT = f"<|im_start|>user\n{{}}{END}\n<|im_start|>assistant\n{{}}"
Task = Callable[[random.Random], tuple[str, str, int]]
FLOAT32 = dict(logits_dtype=torch.float32)


def largest(r: random.Random) -> tuple[str, str, int]:
    """A question, the words that every answer begins with, and the number that is right."""
    a, b, c = r.sample(range(10, 100), 3)
    return f"Which number is the largest: {a}, {b} or {c}?", "The largest number is", max(a, b, c)


def reward(completion: str, answer: int) -> float:
    """1 if the completion has ended and its last number is right, else 0."""
    return float(completion.endswith(END) and re.findall(r"\d+", completion)[-1:] == [str(answer)])


class Policy:
    """SmolLM2, of which the last eight layers learn, in float32 under autocast."""

    def __init__(self, lr: float = 2e-4) -> None:
        self.model, self.tokenizer = load()
        self.frozen, self.learning, self.decoder = in_two(self.model, learning=8)
        self.weights, self.head = [*self.learning.layers.parameters()], self.model.lm_head.weight
        self.optimizer = torch.optim.AdamW(self.weights, lr, betas=(0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    @autocast()
    def sample(
        self, prompts: list[str], group: int = 1, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Prompts, their mask, and ``[P, group, N]`` completions; greedy without a generator."""
        options = dict(padding=True, add_special_tokens=False, return_tensors="pt")
        prompt = self.tokenizer(prompts, **options)
        ids, mask = prompt.input_ids, prompt.attention_mask
        alive, cache = torch.arange(len(ids) * group), DynamicCache(config=self.model.config)
        completions = torch.full((len(alive), NEW), -100)
        for t in range(NEW):
            context = dict(attention_mask=mask, past_key_values=cache, use_cache=True)
            hidden = self.decoder(ids, **context).last_hidden_state[:, -1]
            if t == 0:  # the group shares the prompt
                cache.batch_repeat_interleave(group)
                hidden, mask = (x.repeat_interleave(group, 0) for x in (hidden, mask))
            logits = nn.functional.linear(hidden, self.head).float()
            if generator is None:
                ids = logits.argmax(-1, keepdim=True)
            else:  # torch.multinomial takes longer
                mass = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
                u = torch.rand(len(mass), 1, generator=generator, dtype=torch.float64)
                ids = torch.searchsorted(mass, u * mass[:, -1:], right=True)
            completions[alive, t] = ids[:, 0]
            going = (ids[:, 0] != END_ID).nonzero()[:, 0]
            if not len(going):
                break
            cache.batch_select_indices(going)
            alive, ids, mask = alive[going], ids[going], mask[going]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], -1)
        completions = completions[:, : t + 1].unflatten(0, (-1, group))
        return prompt.input_ids, prompt.attention_mask, completions

    def grade(self, completions: Tensor, answers: list[int]) -> Tensor:
        """``[P, group]`` rewards."""
        texts = map(self.tokenizer.batch_decode, completions.where(completions >= 0, END_ID))
        pairs = zip(texts, answers, strict=True)
        return torch.tensor([[reward(text, answer) for text in group] for group, answer in pairs])


class Batch(NamedTuple):
    """An update's groups: P prompts with G completions of at most N tokens."""

    hidden: Callable[[Policy], Tensor]  # [P, G*N, H]
    labels: Tensor  # [P, G*N], -100 after the end of a completion
    old_log_probs: Tensor  # [P, G*N]
    advantages: Tensor  # [P, G*N]
    rewards: Tensor  # [P, G]


@torch.no_grad()
@autocast()
def rollout(policy: Policy, task: Task, r: random.Random, generator: torch.Generator) -> Batch:
    """Completions of new questions, with the log-probs of the policy that samples them."""
    questions = [task(r) for _ in range(PROMPTS)]
    prompts = (CHAT.format(*question[:2]) for question in questions)
    ids, mask, completions = policy.sample([*prompts], GROUP, generator)
    rewards = policy.grade(completions, [answer for *_, answer in questions])
    A = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-4)
    labels, advantages = completions.flatten(1), A.repeat_interleave(completions.shape[-1], -1)
    context, before = side_by_side(mask, completions)
    features = policy.frozen(torch.cat([ids, labels.clamp(min=0)], -1), **context)

    def hidden(policy: Policy) -> Tensor:
        states = policy.learning(inputs_embeds=features.last_hidden_state, **context)
        return states.last_hidden_state[:, before]

    old_log_probs, _ = linear_log_probs(hidden(policy), policy.head, labels, **FLOAT32)
    return Batch(hidden, labels, old_log_probs, advantages, rewards)


def update(policy: Policy, batch: Batch, config: BAPOConfig) -> tuple[BAPOOutput, float]:
    """One step of the optimizer; the loss, and the norm of its gradient before it is clipped."""
    of_policy, *tensors, _ = batch
    with autocast():
        hidden = of_policy(policy)
    if not policy.optimizer.state:  # before the first update
        logits = hidden.detach().float() @ policy.head.float().T
        print(debug.check_inputs(logits, *tensors, config=config))
    out = bapo_linear_loss(hidden, policy.head, *tensors, config=config, **FLOAT32)
    policy.optimizer.zero_grad()
    out.loss.backward()
    norm = nn.utils.clip_grad_norm_(policy.weights, 1.0)
    policy.optimizer.step()
    return out, norm.item()


def main(updates: int = 40, staleness: int = 8, preset: str = "paper", seed: int = 0) -> None:
    """Trains; prints the loss and its metrics after every update."""
    policy, r, generator = Policy(), random.Random(seed), torch.Generator().manual_seed(seed)
    for done in range(0, updates, staleness):
        count = track(range(min(staleness, updates - done)), "rollout")
        for batch in [rollout(policy, largest, r, generator) for _ in count]:
            out, norm = update(policy, batch, getattr(BAPOConfig, preset)())
            print(f"reward {batch.rewards.mean():.2f}, gradient {norm:.2f}, {out}")


if __name__ == "__main__":
    typer.run(main)
