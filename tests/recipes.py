"""The blocks of docs/distillation.md, run as a reader copies them."""

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[1] / "docs/distillation.md"
TEXT = PAGE.read_text() if PAGE.exists() else ""  # in the repository only
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
DEFINED, FORWARD, REVERSE, JSD, SAMPLED, POLICY, WITH_RL, TEACHERS = BLOCKS or [""] * 8
# Losses of a token, and their gradients in S and outside: with a tail, without, renormalised.
TABLE = re.findall(r"^\| `(kl.*)` \| `(.*)` \| `(.*)` \|$", TEXT, re.MULTILINE)
WITH_TAIL, PLAIN, RENORMALISED = [row[0] for row in TABLE] or [""] * 3
LEAVES = "hidden", "weight"


def run(names, *sources):
    """What the definitions and the blocks make of leaves of their own."""
    made = dict(names)
    for name in LEAVES:
        if name in names:
            made[name] = names[name].clone().requires_grad_()
    for source in (DEFINED, *sources):
        exec(source, made)
    return made


def gradients(made, value):
    leaves = [made[name] for name in LEAVES]
    return list(torch.autograd.grad(value.sum(), leaves, retain_graph=True))
