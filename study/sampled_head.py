"""SmolLM2 with a head of its own that learns, whose gradients come from a part of the vocabulary.

By dense arithmetic: what is shown is the effect on a training, not a speed.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import typer
from rich.progress import track
from smollm2 import Batch, Policy, autocast
from torch import Tensor, nn

from bapo_kernels import BAPOOutput, bapo_loss_from_log_probs
from bapo_kernels.reference.sampled import row_seeds, sample
from benchmarks.records import Record, append, environment, load

from .arms import PAPER
from .language_model import (
    EVALUATE_EVERY,
    HELD_OUT,
    HELD_OUT_AT_THE_END,
    LR,
    accuracy,
    roll_out,
)
from .runs import rounded

RULES = {"exact": None, "C = 2048": 2048, "C = 256": 256, "C = 16": 16, "over 2^-12": 2.0**-12}
Rule = int | float | None
TASK, SEEDS, UPDATES, STALENESS = "largest", 6, 32, 8
BATCHES = 16  # whose gradients' variance is measured
MEASURED_AFTER = 0, 16  # updates
RESULTS = Path(__file__).parent / "results" / "sampled_head.jsonl"
_ROWS = 64  # at once


class PolicyWithHead(Policy):
    """Its head is no longer that of the embedding, and learns with the last layers, in float32."""

    def __init__(self, lr: float = LR) -> None:
        super().__init__(lr)
        self.head = nn.Parameter(self.head.float().clone())
        self.optimizer.add_param_group({"params": [self.head]})
        self.weights = [*self.weights, self.head]


def in_gradient(log_p: Tensor, entropy: Tensor, labels: Tensor, rule: Rule) -> Tensor:
    """``[N, V]``: p, or what stands for it in ``onehot - p``, and 0 where an id is left out.

    Args:
        rule: nothing: exact; an int: the size of a sample; a float: the least entry of the gradient
            that is kept, as cut-cross-entropy has it for each tile.
    """
    p = log_p.exp()
    if isinstance(rule, int):
        at_label = log_p.gather(1, labels[:, None])
        seeds = row_seeds(torch.cat([at_label, entropy[:, None]], 1).double(), labels)
        return sample(log_p, labels[:, None], seeds, rule).p
    if rule is not None:
        onehot = torch.zeros_like(p).scatter_(1, labels[:, None], 1.0)
        return torch.where((p - onehot).abs() > rule, p, onehot)  # onehot - onehot = 0
    return p


class HeadLogProbs(torch.autograd.Function):
    """Log-probs and entropies of hidden states ``[N, H]``, in float32 of autocast's operands."""

    kept: Tensor  # bool [V], ids in the last gradient
    entries: float  # of its rows on average

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rule: Rule
    ) -> tuple[Tensor, Tensor]:
        h, W = hidden.float(), weight.to(hidden.dtype).float()
        ctx.save_for_backward(h, W, labels)
        ctx.rule, ctx.dtype = rule, hidden.dtype
        parts = (rows(h, W, labels, at) for at in torch.arange(len(h)).split(_ROWS))
        columns = zip(*((p.gather(1, y[:, None])[:, 0], H) for p, H, y in parts), strict=True)
        log_probs, entropy = (torch.cat(column) for column in columns)
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, dlog_probs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        h, W, labels = ctx.saved_tensors
        dhidden, dweight = torch.zeros_like(h), torch.zeros_like(W)
        counts = torch.zeros(len(W), dtype=torch.long)
        live = dlog_probs.nonzero()[:, 0]
        for at in live.split(_ROWS):
            log_p, entropy, y = rows(h, W, labels, at)
            q = in_gradient(log_p, entropy, y, ctx.rule)
            q[torch.arange(len(y)), y] -= 1.0
            counts += (q != 0).sum(0)
            q *= -dlog_probs[at, None]
            dhidden[at] = q @ W
            dweight.addmm_(q.T, h[at])
        HeadLogProbs.kept = counts > 0
        HeadLogProbs.entries = counts.sum().item() / max(len(live), 1)
        return dhidden.to(ctx.dtype), dweight, None, None


def rows(h: Tensor, W: Tensor, labels: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax, entropy and labels of some rows."""
    log_p = torch.log_softmax(h[at] @ W.T, -1)
    return log_p, -(log_p.exp() * log_p).sum(-1), labels[at]


def loss_of(policy: Policy, batch: Batch, rule: Rule) -> BAPOOutput:
    """That of the paper's configuration; its gradient of the head follows the rule."""
    with autocast():
        hidden = batch.hidden(policy)
    counted = batch.labels >= 0
    found = HeadLogProbs.apply(hidden[counted], policy.head, batch.labels[counted], rule)
    log_probs, entropy = (torch.zeros(counted.shape).masked_scatter(counted, x) for x in found)
    given = batch.old_log_probs, batch.advantages, counted
    return bapo_loss_from_log_probs(log_probs, *given, entropy=entropy, config=PAPER)


def gradient(policy: Policy, batch: Batch, rule: Rule) -> tuple[BAPOOutput, list[Tensor]]:
    """The loss, and the gradients of all weights that learn."""
    policy.optimizer.zero_grad()
    out = loss_of(policy, batch, rule)
    out.loss.backward()
    return out, [weight.grad for weight in policy.weights if weight.grad is not None]


def update(policy: Policy, batch: Batch, rule: Rule) -> tuple[BAPOOutput, float]:
    """One step of the optimizer; the loss, and the norm of its gradient before it is clipped."""
    out, _ = gradient(policy, batch, rule)
    norm = nn.utils.clip_grad_norm_(policy.weights, 1.0)
    policy.optimizer.step()
    return out, norm.item()


def variances(policy: Policy, batches: list[Batch]) -> Record:
    """For each rule the mean square of its error over the exact gradient's variance of batches."""
    names = {"layers": slice(-1), "head": slice(-1, None), "all": slice(None)}
    total = [torch.zeros_like(weight) for weight in policy.weights]
    squares, errors = dict.fromkeys(names, 0.0), {}

    def square(tensors: list[Tensor], part: slice) -> float:
        return sum(tensor.square().sum().item() for tensor in tensors[part])

    for batch in batches:
        exact = [x.clone() for x in gradient(policy, batch, None)[1]]
        for sum_, x in zip(total, exact, strict=True):
            sum_ += x
        for name, part in names.items():
            squares[name] += square(exact, part)
        for rule, value in RULES.items():
            if value is None:
                continue
            both = zip(gradient(policy, batch, value)[1], exact, strict=True)
            error = [x - y for x, y in both]
            for name, part in names.items():
                errors[rule, name] = errors.get((rule, name), 0.0) + square(error, part)
    B, found = len(batches), {}
    for (rule, name), value in errors.items():
        between = (squares[name] - square(total, names[name]) / B) / (B - 1)
        found.setdefault(rule, {})[name] = rounded(value / B / between)
    return found


class Steps:
    """How far an update moves the rows of a head, and in how many updates each was kept."""

    def __init__(self, policy: PolicyWithHead) -> None:
        self.head, self.before = policy.head.detach(), policy.head.detach().clone()
        self.updates = self.length = torch.zeros(len(self.head))

    def add(self) -> None:
        """Those of the update that was just made."""
        self.length = self.length + (self.head - self.before).norm(dim=1)
        self.updates = self.updates + HeadLogProbs.kept
        self.before.copy_(self.head)

    def beside(self, exact: Steps) -> dict[str, list[float]]:
        """By updates with an id: ids, their mean step in units of 1e-6, and the exact arm's."""
        found = {}
        for low, high in ((0, 0), (1, 3), (4, 15), (16, 31), (32, 32)):
            of = (self.updates >= low) & (self.updates <= high)
            if of.any():
                means = (x.length[of].mean().item() / UPDATES * 1e6 for x in (self, exact))
                found[f"{low} to {high}"] = [of.sum().item(), *map(rounded, means)]
        return found


def train(rule: Rule, seed: int, first: list[Batch]) -> tuple[Record, Steps]:
    """A training from the untrained model on, and its record."""
    policy = PolicyWithHead()
    steps, batches, held_out, rows = Steps(policy), first, [], []
    for index in range(UPDATES):
        if index and index % STALENESS == 0:
            batches = roll_out(policy, TASK, seed, index, STALENESS)
        batch = batches[index % STALENESS]
        out, norm = update(policy, batch, rule)
        steps.add()
        row = out.metrics["entropy"].item(), batch.rewards.mean().item(), norm
        rows.append((*row, HeadLogProbs.entries))
        if index % EVALUATE_EVERY == EVALUATE_EVERY - 1:
            last = index == UPDATES - 1
            held_out.append(accuracy(policy, TASK, HELD_OUT_AT_THE_END if last else HELD_OUT))
    names = "entropy", "reward", "grad_norm", "entries"
    curves = zip(names, zip(*rows, strict=True), strict=True)
    record: Record = {name: [*map(rounded, values)] for name, values in curves}
    return record | {"held_out": held_out}, steps


def of_seed(seed: int) -> list[Record]:
    """All rules from the same first rollout."""
    torch.set_num_threads(1)
    first = roll_out(PolicyWithHead(), TASK, seed, 0, STALENESS)
    records, exact = [], None
    for name, rule in RULES.items():
        record, steps = train(rule, seed, first)
        exact = exact or steps
        records.append({"rule": name, "seed": seed} | record | {"steps": steps.beside(exact)})
    return records


def of_variance(updates: int) -> list[Record]:
    """After so many exact updates: of the gradients of new batches, all from one rollout."""
    torch.set_num_threads(1)
    policy = PolicyWithHead()
    for batch in roll_out(policy, TASK, 100, 0, updates):
        update(policy, batch, None)
    batches = roll_out(policy, TASK, 101, updates, BATCHES)
    return [{"updates": updates, "batches": BATCHES, "variances": variances(policy, batches)}]


def main(seeds: int = SEEDS, out: Path = RESULTS) -> None:
    """Appends the records that the file lacks; ``study report`` makes the tables."""
    known, facts = load(out), environment() | {"threads": 1}
    done = {(name, r[name]) for r in known for name in ("seed", "updates") if name in r}
    tasks = [(of_variance, "updates", n) for n in MEASURED_AFTER]
    tasks += [(of_seed, "seed", n) for n in range(seeds)]
    with ProcessPoolExecutor(2) as pool:
        pending = [pool.submit(f, n) for f, name, n in tasks if (name, n) not in done]
        for future in track(as_completed(pending), "runs", total=len(pending)):
            append(out, [facts | record for record in future.result()])


if __name__ == "__main__":
    typer.run(main)
