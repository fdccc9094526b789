"""The examples of the docstrings, of the README and of the user guide run."""

import doctest
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from causal_lm import CausalLM

import bapo_kernels
from bapo_kernels import aggregation, backends, config, reference
from bapo_kernels.backends import native

# Examples import nothing: they see torch and the public names.
NAMES = {"torch": torch, **{name: getattr(bapo_kernels, name) for name in bapo_kernels.__all__}}
NEEDS_NATIVE = "instruction_set"
ROOT = Path(__file__).parent.parent
README, GUIDE = ROOT / "README.md", ROOT / "docs/guide.md"
POLICIES = ROOT / "docs/policies.md"


def public(module):
    """Functions and classes that a module defines, by their names."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__.startswith(module.__name__)
    }


def documented():
    """Everything that must have an example."""
    found = {}
    for name, value in NAMES.items():
        if inspect.ismodule(value) and value is not torch:
            found |= {f"{name}.{key}": member for key, member in public(value).items()}
        elif value is not torch:
            found[name] = value
    found["bound_grid"] = config.bound_grid
    found["token_weights"] = aggregation.token_weights
    return found


def examples(value):
    """A :class:`doctest.DocTest` of a docstring and of each of its methods'."""
    module = inspect.getmodule(value)
    tests = doctest.DocTestFinder().find(value, globs={**vars(module), **NAMES})
    return [test for test in tests if test.examples]


def test_what_must_have_an_example():
    names = set(documented())
    assert {"bapo_loss", "BAPOLoss", "reference.bapo_loss", "debug.check_inputs"} <= names
    assert {"available_backends", "ClipBoundSearch", "debug.instruction_set"} <= names
    assert public(reference).keys() >= {"log_probs", "find_clip_bounds", "Contributions"}


@pytest.mark.parametrize("reference_alone", [False, True], ids=["all backends", "reference alone"])
@pytest.mark.parametrize("name", documented())
def test_docstring(name, reference_alone, monkeypatch):
    if reference_alone:
        monkeypatch.setattr(native, "WHY_NO_CPU", "hidden by the test")
        monkeypatch.setattr(native, "WHY_NO_CUDA", "hidden by the test")
        monkeypatch.setattr(backends.triton, "WHY_NOT", "hidden by the test")
    if name.endswith(NEEDS_NATIVE) and native.WHY_NO_CPU is not None:
        pytest.skip("needs the native library")
    tests = examples(documented()[name])
    assert tests, f"{name} has no example"
    for test in tests:
        report = []
        failed, ran = doctest.DocTestRunner().run(test, out=report.append)
        assert ran > 0
        assert failed == 0, "".join(report)


def sections(page):
    """From the headings of the sections that have Python to the sources of their blocks."""
    found = {}
    for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE):
        sources = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        if sources:
            found[section.partition("\n")[0]] = sources
    return found


def surroundings():
    """The names that the pages take as given: a batch of 2 x 3 tokens, groups of one rank."""
    model, tokens = CausalLM(), torch.randint(31, (2, 4))
    logits = model.lm_head(model.model(tokens).last_hidden_state[:, :-1])
    labels, old = tokens[:, 1:], torch.full((2, 3), -3.4)
    advantages, mask = torch.tensor([1.0, -1.0]), torch.ones(2, 3)
    per_token = advantages[:, None].expand(2, 3)

    def share(ratio, A, low, high):
        contributions = A.abs() * torch.where(A > 0, ratio.clamp(max=high), ratio.clamp(min=low))
        return contributions[A > 0].sum() / contributions.sum()

    batch = SimpleNamespace(labels=labels, old_log_probs=old, advantages=advantages, mask=mask)
    return NAMES | dict(
        model=model,
        tokens=tokens,
        hidden=model.model(tokens).last_hidden_state[:, :-1],
        logits=logits,
        logits_of_my_columns=logits,
        my_rows_of_the_head=model.lm_head.weight,
        labels=labels,
        old=old,
        old_log_probs=old,
        advantages=per_token,
        mask=mask,
        temperature=1.0,
        low=0.6,
        high=1.2,
        share=share,
        batch=batch,
        logits_of=lambda batch: logits.detach().requires_grad_(),
        micro_batches=[batch, batch],
        tokens_of_the_step=12,
        ranks=1,
        data_parallel_group=None,
        tensor_group=None,
    )


@pytest.mark.parametrize(
    ("page", "sources"),
    [
        pytest.param(page, sources, id=f"{page.name}, {heading}")
        for page in (README, GUIDE, POLICIES)
        for heading, sources in sections(page).items()
    ],
)
def test_pages(page, sources):
    """Every block of Python runs, after those before it in its section; its losses are finite."""
    names = surroundings()
    for source in sources:
        exec(compile(source, str(page), "exec"), names)
        losses = [names[name] for name in ("loss", "out") if name in names]
        values = [value.loss if hasattr(value, "loss") else value for value in losses]
        assert all(value.isfinite() for value in values)


def test_readme_before_and_after_agree():
    """The first two blocks compute one loss in two ways; here the paper's weights are equal."""
    (before, after), *_ = sections(README).values()
    names = surroundings()
    exec(before, names)
    exec(after, names)
    torch.testing.assert_close(names["out"].loss, names["loss"])
