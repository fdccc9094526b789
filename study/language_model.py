"""SmolLM2 under an arm: the training of examples/smollm2.py, with questions that are held out."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

import torch
from smollm2 import CHAT, FLOAT32, Batch, Policy, Task, autocast, largest, rollout, update
from torch import Tensor

from bapo_kernels import BAPOOutput, linear_log_probs

from .arms import Arm, Scenario
from .metrics import metrics_of

LR = 1.5e-4  # where at a staleness of 32 the arm without clipping is sometimes dead at the end
EVALUATE_EVERY = 8
HELD_OUT, HELD_OUT_AT_THE_END = 64, 256
Progress = Callable[[range], Iterable[int]]


class Stopped(Policy):
    """An environment that ends a completion when it has said the right number."""

    def grade(self, completions: Tensor, answers: list[int]) -> Tensor:
        """``[P, group]`` rewards; what follows the right number is cut off."""
        rewards = torch.zeros(completions.shape[:2])
        for i, answer in enumerate(answers):
            for j, ids in enumerate(completions[i]):
                words = self.tokenizer.convert_ids_to_tokens(ids[ids >= 0].tolist())
                said = re.search(rf"(?<!\d){answer}\D", "".join(words))
                if said:
                    rewards[i, j] = 1.0
                    ends = torch.tensor([len(word) for word in words]).cumsum(-1)
                    ids[int(torch.searchsorted(ends, said.end())) + 1 :] = -100
        return rewards


def total(r: random.Random) -> tuple[str, str, int]:
    """The sum of two numbers, a digit at a time."""
    a, b = r.randint(10, 99), r.randint(10, 99)
    return f"What is {a} + {b}?", f"{a} + {b} =", a + b


TASKS: dict[str, tuple[type[Policy], Task]] = {
    "largest": (Policy, largest),
    "sum": (Stopped, total),
}


def part_of(task: Task, held_out: bool) -> Task:
    """A fifth of the questions of a task, chosen by a hash of their text, or the others."""

    def chosen(r: random.Random) -> tuple[str, str, int]:
        while (random.Random((question := task(r))[0]).random() < 0.2) != held_out:
            pass
        return question

    return chosen


def roll_out(
    policy: Policy, name: str, seed: int, done: int, count: int, progress: Progress = iter
) -> list[Batch]:
    """Batches for updates ``done`` to ``done + count``, all drawn from the policy as it is now."""
    task = part_of(TASKS[name][1], held_out=False)
    r, generator = random.Random(f"{seed} {done}"), torch.Generator()
    generator.manual_seed(r.getrandbits(32))
    return [rollout(policy, task, r, generator) for _ in progress(range(count))]


def untrained(name: str, lr: float = LR) -> Policy:
    """The model as it was downloaded."""
    return TASKS[name][0](lr)


@lru_cache(maxsize=1)
def first_rollout(name: str, seed: int, count: int, progress: Progress = iter) -> list[Batch]:
    """That of the untrained model, the same for all arms."""
    return roll_out(untrained(name), name, seed, 0, count, progress)


def train(
    policy: Policy,
    arm: Arm,
    scenario: Scenario,
    seed: int,
    updates: int,
    measure_rule: bool = False,
    progress: Progress = iter,
) -> Iterator[dict[str, float]]:
    """One row of numbers per update of an untrained policy.

    Args:
        measure_rule: also the change of the entropy in each update, measured and predicted by the
            Entropy-Clip Rule of the paper.
    """
    S = scenario.staleness
    batches = first_rollout(scenario.task, seed, min(S, updates), progress)
    for index in range(updates):
        if index and index % S == 0:
            count = min(S, updates - index)
            batches = roll_out(policy, scenario.task, seed, index, count, progress)
        batch = batches[index % S]
        out, norm = update(policy, batch, arm.config)
        row = metrics_of(out, arm) | {"training_reward": batch.rewards.mean().item()}
        row["grad_norm"] = norm
        if measure_rule:
            row["rule"] = predicted_change(out, batch)
            row["entropy_change"] = entropy(policy, batch) - row["entropy"]
        if index == updates - 1:
            row["held_out_end"] = accuracy(policy, scenario.task, HELD_OUT_AT_THE_END)
            row["held_out"] = row["held_out_end"]
        elif index % EVALUATE_EVERY == EVALUATE_EVERY - 1:
            row["held_out"] = accuracy(policy, scenario.task, HELD_OUT)
        yield row


def held_out(name: str, count: int) -> list[tuple[str, str, int]]:
    """Questions that no policy was trained on, the same every time."""
    r, task = random.Random(9), part_of(TASKS[name][1], held_out=True)
    return [task(r) for _ in range(count)]


def accuracy(policy: Policy, name: str, count: int) -> float:
    """Share of held-out questions that the most likely completion answers."""
    questions = held_out(name, count)
    return policy.grade(complete(policy, questions), [q[-1] for q in questions]).mean().item()


def complete(policy: Policy, questions: list[tuple[str, str, int]]) -> Tensor:
    """``[P, 1, N]``, the most likely completions."""
    return policy.sample([CHAT.format(*q[:2]) for q in questions])[2]


def words(policy: Policy, questions: list[tuple[str, str, int]]) -> list[str]:
    """The most likely completions as text."""
    return [policy.tokenizer.decode(ids[ids >= 0]) for ids in complete(policy, questions)[:, 0]]


def predicted_change(out: BAPOOutput, batch: Batch) -> float:
    """By the Entropy-Clip Rule, up to a factor: the mean over prefixes of ``-Cov[log pi, A*X]``.

    X is 1 where the token is not clipped; the paper's constant C does not change a covariance. The
    covariance is over the tokens after a prefix, of which one was drawn, from an older policy: with
    ``E[log pi] = -entropy`` it is estimated by ``r*A*X*(log pi + entropy)``.
    """
    logp, A = out.log_probs.detach(), batch.advantages
    ratio, (lower, upper) = (logp - batch.old_log_probs).exp(), out.bounds
    unclipped = torch.where(A > 0, ratio <= upper, ratio >= lower)
    covariance = ratio * torch.where(unclipped, A, 0.0) * (logp + out.entropy)
    return -covariance[batch.labels >= 0].mean().item()


@torch.no_grad()
@autocast()
def entropy(policy: Policy, batch: Batch) -> float:
    """Mean over the tokens, in nats."""
    _, values = linear_log_probs(batch.hidden(policy), policy.head, batch.labels, **FLOAT32)
    return values[batch.labels >= 0].mean().item()
