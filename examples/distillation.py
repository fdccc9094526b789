"""RL and distillation of a teacher's top K: one pass over the head, or one for each loss::

python examples/distillation.py
"""

from __future__ import annotations

import time

import torch
import typer
from torch import Tensor

from bapo_kernels import bapo_linear_loss, bapo_loss_from_log_probs, linear_log_probs
from bapo_kernels.distillation import kl, with_tail
from bapo_kernels.tools.budget import error_and_budget


def batch(tokens: int, vocabulary: int, hidden: int, k: int) -> dict[str, Tensor]:
    """A student's hidden states, head and rollout, and a teacher's top K."""
    g = torch.Generator().manual_seed(0)
    h, w = (torch.randn(n, hidden, generator=g) for n in (tokens, vocabulary))
    w *= 3 / hidden**0.5
    labels = torch.randint(vocabulary, (tokens,), generator=g)
    old = linear_log_probs(h, w, labels)[0] + 0.1 * torch.randn(tokens, generator=g)
    of_teacher = (h + 0.3 * torch.randn(h.shape, generator=g)) @ w.T
    teacher, ids = of_teacher.log_softmax(-1).topk(k)
    made = dict(hidden=h.requires_grad_(), weight=w.requires_grad_(), teacher=teacher, ids=ids)
    return made | dict(labels=labels, old=old, advantages=torch.randn(tokens, generator=g))


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Of the top K and of all other ids together (docs/distillation.md)."""
    return kl(with_tail(teacher), with_tail(student)).mean()


def one_pass(b: dict[str, Tensor]) -> Tensor:
    columns = torch.cat([b["labels"][:, None], b["ids"]], -1)  # the sampled token first
    student, _ = linear_log_probs(b["hidden"], b["weight"], columns)
    out = bapo_loss_from_log_probs(student[:, 0], b["old"], b["advantages"])
    return out.loss + 0.1 * forward_kl(student[:, 1:], b["teacher"])


def two_passes(b: dict[str, Tensor]) -> Tensor:
    head = b["hidden"], b["weight"]
    backend = "reference" if b["hidden"].dtype == torch.float64 else None
    out = bapo_linear_loss(*head, b["labels"], b["old"], b["advantages"], backend=backend)
    student, _ = linear_log_probs(*head, b["ids"], backend=backend)
    return out.loss + 0.1 * forward_kl(student, b["teacher"])


WAYS = {"one pass": one_pass, "two passes": two_passes}


def gradients(way: str, b: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(WAYS[way](b), (b["hidden"], b["weight"]))


def main(tokens: int = 128, vocabulary: int = 16_000, hidden: int = 512, k: int = 32) -> None:
    """Times both, unless one pass is farther from float64 than twice two passes and a rounding."""
    b = batch(min(tokens, 16), vocabulary, hidden, k)
    exact = {name: x.double() if x.is_floating_point() else x for name, x in b.items()}
    found = [*(gradients(way, b) for way in WAYS), gradients("two passes", exact)]
    for name, one, two, truth in zip(("hidden", "weight"), *found, strict=True):
        error, budget = error_and_budget(one, two, truth)
        print(f"gradient of {name}: off by {error:.1e}, at most {budget:.1e}")
        if not error <= budget:
            raise SystemExit(f"the gradients of {name} differ")

    b, fastest = batch(tokens, vocabulary, hidden, k), dict.fromkeys(WAYS, float("inf"))
    for way in [*WAYS] * 4:
        start = time.perf_counter()
        gradients(way, b)
        fastest[way] = min(fastest[way], time.perf_counter() - start)
    print(*(f"{way}: {seconds:.2f} s" for way, seconds in fastest.items()), sep=", ")


if __name__ == "__main__":
    typer.run(main)
