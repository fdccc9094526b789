"""The examples of the docstrings, of the README and of every page of the documentation run."""

import ast
import doctest
import importlib
import inspect
import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from causal_lm import CausalLM
from helpers import assert_within_budget

import bapo_kernels
from bapo_kernels import BAPOConfig, config, log_probs, reference
from bapo_kernels.backends import native
from bapo_kernels.tools import plain
from bapo_kernels.tools.budget import in_some_orders, largest

# Examples import nothing: they see torch and the public names.
NAMES = {"torch": torch, **{name: getattr(bapo_kernels, name) for name in bapo_kernels.__all__}}
ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
START = ROOT / "docs/getting_started.md"
# Blocks that need more than these surroundings: page, a line of the block, and who runs it or why
# nobody can. Like all others they compile, and what they name of this package exists.
NOT_RUN = {
    ("trl.md", "trainer = BAPOTrainer("): "test_trl.py trains by it",
    ("trl.md", "args = BAPOTrainerConfig("): "test_policy_parity.py has TRL's loss by it",
    ("trl.md", "trl_loss._chunked_jsd_loss = "): "test_distillation_parity.py compares both",
    ("verl.md", "losses._chunked_topk_log_probs = "): "test_distillation_parity.py compares both",
    ("migrating.md", "args = GRPOConfig("): "TRL's own trainer",
    ("migrating.md", "args = BAPOTrainerConfig("): "test_policy_parity.py has DAPO by it",
    ("megatron.md", ""): "models of megatron-core, which test_megatron.py trains by the same head",
    ("sampling_masks.md", ""): "test_pages.py runs them all, with stand-ins for the engines",
}
# Blocks that import an absent one are skipped.
FRAMEWORKS = {"trl", "verl", "skyrl", "trinity", "megatron"}


def documented():
    """Everything that must have an example: what is public, and what public modules define."""
    found = {"bound_grid": config.bound_grid}
    for name, value in NAMES.items():
        if not inspect.ismodule(value):
            found[name] = value
        elif value is not torch:
            for key, member in vars(value).items():
                of_module = inspect.isclass(member) or inspect.isfunction(member)
                if of_module and key[0] != "_" and member.__module__.startswith(value.__name__):
                    found[f"{name}.{key}"] = member
    return found


@pytest.mark.parametrize("name", documented())
def test_docstring(name):
    if name.endswith("instruction_set") and native.WHY_NO_CPU is not None:
        pytest.skip("needs the native library")
    value = documented()[name]
    names = {**vars(inspect.getmodule(value)), **NAMES}
    tests = [test for test in doctest.DocTestFinder().find(value, globs=names) if test.examples]
    assert tests, f"{name} has no example"
    for test in tests:
        report = []
        failed, _ = doctest.DocTestRunner().run(test, out=report.append)
        assert failed == 0, "".join(report)


def blocks(page):
    """From the headings of the sections that have Python to the sources of their blocks."""
    found = {}
    for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE):
        sources = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        if sources:
            found[section.partition("\n")[0]] = sources
    return found


def of_all_pages():
    """Page, section and sources of its blocks; those of ``START`` are one section."""
    for page in PAGES:
        sections = blocks(page)
        if page == START:
            sections = {"all": list(itertools.chain(*sections.values()))}
        for heading, sources in sections.items():
            yield pytest.param(page, sources, id=f"{page.name}, {heading}")


def is_absent(error):
    """Whether an import has failed because a framework, or its version, is not here."""
    return (error.name or str(error)).split(".")[0].split()[0] in FRAMEWORKS


def not_run(page, source):
    """The entry of ``NOT_RUN`` for a block, if there is one."""
    return next((key for key in NOT_RUN if key[0] == page.name and key[1] in source), None)


def openrlhf_args():
    options = {"level": "seq", "mode": "mask", "gating": "binary_kl", "threshold": [0.0, 0.003]}
    options |= {"enable": True, "type": "tis"}
    correction = {f"is_correction_{name}": value for name, value in options.items()}
    actor = SimpleNamespace(dual_clip=2.5, loss_agg_mode="token-mean", policy_loss_type="gspo")
    algo = SimpleNamespace(advantage=SimpleNamespace(**correction))
    return SimpleNamespace(actor=actor, algo=algo)


def surroundings():
    """The names that the pages take as given: a batch of 2 x 3 tokens, groups of one rank."""
    model, tokens = CausalLM(), torch.randint(31, (2, 4))
    logits = model(tokens).logits[:, :-1].detach().requires_grad_()
    labels, old = tokens[:, 1:], torch.full((2, 3), -3.4)
    advantages, response_mask = torch.tensor([1.0, -1.0]), torch.ones(2, 3)

    batch = SimpleNamespace(labels=labels, old_log_probs=old, advantages=advantages)
    batch.response_mask = response_mask
    per_token = ("old", "old_log_probs", "ref_log_probs", "rollout_log_probs", "teacher_log_probs")
    names = dict.fromkeys(per_token, old) | {"head": bapo_kernels.LMHead.of(model)}
    names |= dict.fromkeys(["logits", "logits_of_my_columns"], logits)
    names |= dict.fromkeys(["weight", "my_rows_of_the_head"], model.lm_head.weight)
    names |= dict.fromkeys(["data_parallel_group", "tensor_group"])
    names |= dict(model=model, tokens=tokens, labels=labels, batch=batch)
    names |= dict(response_mask=response_mask, temperature=1.0, tokens_of_the_step=12, ranks=1)
    names["hidden"] = model.model(tokens).last_hidden_state[:, :-1]
    names["advantages"] = advantages[:, None].expand(2, 3)
    names["logits_of"] = lambda batch: logits.detach().requires_grad_()
    return NAMES | names | {"micro_batches": [batch, batch]}


# Names that some pages take as given in addition, mostly those of frameworks.
OF_PAGES = {
    "distributed.md": dict(DistributedDataParallel=lambda module: module),  # test_ranks.py has it
    "distillation.md": dict(
        ids=torch.tensor([[[3, 5], [8, -100], [-100, -100]]] * 2),
        teacher=torch.tensor([-0.5, -2.0]).expand(2, 3, 2),
        teacher_hidden=torch.randn(2, 3, 4),
        teacher_weight=torch.randn(31, 4),
        request=SimpleNamespace(prompt_logprobs=[None, {7: SimpleNamespace(logprob=-0.5)}]),
        meta_info=dict(input_top_logprobs=[None, [(-0.5, 7, None)]]),
        k=2,
    ),
    "frameworks.md": dict(
        self=SimpleNamespace(args=openrlhf_args()),  # OpenRLHF's trainer
        pipeline_config=SimpleNamespace(loss_agg_mode="token-mean"),
        log_probs=torch.full((2, 3), -3.3, requires_grad=True),
        response_mask=torch.ones(2, 3),
        tokens=6,
        samples=2,
        sample_weights=None,
    ),
    "migrating.md": dict(config=BAPOConfig()),
    "troubleshooting.md": dict(config=BAPOConfig()),
    "verl.md": dict(
        data_parallel_mesh=SimpleNamespace(get_group=lambda: None),
        output=SimpleNamespace(extra_fields={}),
        completion=SimpleNamespace(sampling_mask=SimpleNamespace(token_ids=[[3], []])),
    ),
}


@pytest.mark.parametrize(("page", "sources"), of_all_pages())
def test_pages(page, sources):
    """Every block of Python runs, after those before it in its section; its losses are finite.

    A reader who copies the blocks of the first page one after the other needs nothing else.
    """
    names = {} if page == START else surroundings() | OF_PAGES.get(page.name, {})
    for source in sources:
        check_names(source)
        if not_run(page, source):
            continue
        try:
            exec(compile(source, str(page), "exec"), names)
        except ImportError as error:
            if is_absent(error):
                pytest.skip(str(error))
            raise
        losses = [names[name] for name in ("loss", "out") if name in names]
        values = [getattr(value, "loss", value) for value in losses]
        assert all(value.isfinite().all() for value in values if isinstance(value, torch.Tensor))
    assert page != START or losses


def check_names(source):
    """Names and keywords that a block takes from this package exist, also where it cannot run."""
    names, tree = NAMES | {"torch": None}, ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("bapo_kernels"):
            names |= {a.asname or a.name: imported(node.module, a.name) for a in node.names}
    if "BAPOTrainerConfig" in source:
        names["BAPOTrainerConfig"] = imported("bapo_kernels.integrations.trl", "BAPOTrainerConfig")
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        owner, _, name = ast.unparse(call.func).rpartition(".")
        function = getattr(names.get(owner), name, None) if owner else names.get(name)
        if callable(function):
            parameters = inspect.signature(function).parameters
            takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            assert takes_any or given.keys() <= parameters.keys(), ast.unparse(call)
        if "bapo_options" in given:
            options = {key.value for key in given["bapo_options"].keys}
            assert options <= BAPOConfig.__dataclass_fields__.keys()


def imported(module, name):
    """``None`` where the framework is absent."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        if is_absent(error):
            return None
        raise


def test_every_block_is_found():
    """Also one that is indented, or whose fence has options, would otherwise run nowhere."""
    found = []
    for page in PAGES:
        sources = list(itertools.chain(*blocks(page).values()))
        fences = re.findall(r"^\s*(?:```|~~~)\s*\{?py", page.read_text(), re.MULTILINE)
        assert len(fences) == len(sources), page.name
        found += [not_run(page, source) for source in sources]
    assert set(NOT_RUN) == {*found} - {None}


@pytest.mark.parametrize("bounds", ["start", "upper", "both"])
def test_readme_before_and_after_agree(bounds):
    """The first two blocks find the same bounds and compute one loss and gradient."""
    (before, after, _), *_ = blocks(README).values()
    assert inspect.getsource(plain).split('"""\n', 1)[1].strip() in before
    g = torch.Generator().manual_seed(0)
    names, shape = {"temperature": 0.8}, (4, 16)
    values = torch.randn(*shape, 50, generator=g)
    names["labels"] = torch.randint(50, shape, generator=g)
    logp = log_probs(values, names["labels"], temperature=0.8)[0]
    names["old_log_probs"] = (logp + 0.5 * torch.randn(shape, generator=g)).clamp(max=-0.1)
    shift = dict(start=0.3, upper=0.265, both=0.2)[bounds]
    names["advantages"] = torch.randn(shape, generator=g) + shift
    names["response_mask"] = torch.rand(shape, generator=g) < 0.7

    def run(source):
        names["logits"] = values.clone().requires_grad_()
        exec(source, names)
        return names["logits"].grad

    def loss_and_gradient():
        dlogits = run(before)
        return names["loss"].detach(), dlogits

    same, dlogits = zip(*in_some_orders(loss_and_gradient), strict=True), run(after)
    low, high = (bound.item() for bound in names["out"].bounds)
    assert (low, high) == pytest.approx((names["low"], names["high"]))
    moved = dict(start=(0, 0), upper=(0, 1), both=(1, 1))[bounds]
    assert (names["low"] > 0.6, names["high"] > 1.2) == moved
    exact = values.double().requires_grad_()
    arguments = [names[n] for n in ("labels", "old_log_probs", "advantages", "response_mask")]
    truth = reference.bapo_loss(exact, *arguments, config=names["config"])
    truth.loss.backward()
    operand = largest(names["old_log_probs"]) * high  # a mean of ratios, of log-probs
    numbers = zip((names["out"].loss, dlogits), same, (truth.loss, exact.grad), strict=True)
    for name, (got, of_before, of_truth) in zip(("loss", "dlogits"), numbers, strict=True):
        assert_within_budget(name, got, of_before, of_truth, operand if name == "loss" else 0.0)
