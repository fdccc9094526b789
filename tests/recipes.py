"""The blocks of docs/distillation.md, and what plugs into frameworks, as a reader copies them."""

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[1] / "docs/distillation.md"
TEXT = PAGE.read_text() if PAGE.exists() else ""  # in the repository only
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
IMPORTS, FORWARD, REVERSE, SAMPLED, POLICY, WITH_RL, TEACHERS = BLOCKS or [""] * 7
# Losses of a token, and their gradients in S and outside: with a tail, without, renormalised.
TABLE = re.findall(r"^\| `(kl.*)` \| `(.*)` \| `(.*)` \|$", TEXT, re.MULTILINE)
LEAVES = "hidden", "weight"


def run(names, *sources):
    """What the blocks make of leaves of their own."""
    made = dict(names)
    for name in LEAVES:
        if name in names:
            made[name] = names[name].clone().requires_grad_()
    for source in (IMPORTS, *sources):
        exec(source, made)
    return made


def gradients(made, value):
    leaves = [made[name] for name in LEAVES]
    return list(torch.autograd.grad(value.sum(), leaves, retain_graph=True))


def plain(hidden, weight, ids, temperature=1.0, logit_scale=1.0, final_logit_softcapping=None):
    """Log-probs and entropy of PyTorch."""
    x, cap = hidden @ weight.T * logit_scale, final_logit_softcapping
    x = ((x if cap is None else cap * (x / cap).tanh()) / temperature).log_softmax(-1)
    return x.gather(-1, ids.clamp(min=0)), -(x.exp() * x).sum(-1)


def plug_in(monkeypatch, page, module, name):
    """Their function, and that of a page, which takes its place during a test."""
    theirs = getattr(module, name)
    monkeypatch.setattr(module, name, theirs)  # and back
    text = (PAGE.parent / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (source,) = (block for block in blocks if f".{name} = " in block)
    exec(source, {})
    assert getattr(module, name) is not theirs
    return theirs, getattr(module, name)
