"""Blocks of the pages with stand-ins for engines, and the examples of the repository."""

import math
import re
import runpy
from argparse import Namespace
from pathlib import Path

import pytest
import recipes
import torch
from accuracy import assert_same
from helpers import needs_native
from parity import assert_gradient, in_both

from bapo_kernels import SamplingMask, bapo_linear_loss, reference
from bapo_kernels.tools.budget import error_and_budget, in_some_orders, largest

pytestmark = needs_native
ROOT = Path(__file__).parents[2]


def blocks_of(page, heading=""):
    """Its Python, from a heading on."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"```python\n(.*?)```", text[text.index(heading) :], re.DOTALL)


def vllm(model, return_sampling_mask, logprobs_mode):
    """``LLM`` of vLLM 0.28 and later, as its documentation of ``return_sampling_mask`` shows it."""
    assert return_sampling_mask
    assert logprobs_mode == "processed_logprobs"

    def request(prompt):
        ids, mask = GENERATED[prompt], Namespace(token_ids=SETS[prompt])
        logprobs = [{i: Namespace(logprob=-float(t)), 99: None} for t, i in enumerate(ids)]
        output = Namespace(token_ids=ids, logprobs=logprobs, sampling_mask=mask)
        return Namespace(outputs=[output], prompt_token_ids=[len(prompt)])

    def generate(prompts, params):
        assert params.top_k > 0, "vLLM returns no mask without"
        return [request(prompt) for prompt in prompts]

    return Namespace(generate=generate)


def sglang(prompt, return_sampling_mask):
    assert return_sampling_mask
    logprobs = [-float(t) for t in range(len(GENERATED[prompt]))]
    names = ("output_token_sampling_mask", "output_token_sampling_logprobs")
    return {"meta_info": dict(zip(names, (SETS[prompt], logprobs), strict=True))}


GENERATED = {"a": [4, 5, 6], "b c": [7]}
SETS = {"a": [[4], [9, 5], [6, 1, 2]], "b c": [[7, 8]]}
LOG_PROBS = [[0.0, -1.0, -2.0], [0.0]]


def test_sampling_masks():
    """All blocks of docs/sampling_masks.md."""
    B, S, V, H = 4, 5, 20, 8
    hidden, weight = torch.randn(B, S, H, requires_grad=True), torch.randn(V, H)
    labels, old, A = torch.randint(V, (B, S)), torch.full((B, S), -2.0), torch.rand(B, S)
    first, vllm_code, sglang_code, function, slices = blocks_of("sampling_masks.md")
    names = dict(LLM=vllm, SamplingParams=Namespace, model="m", generate=sglang)
    names |= dict(SamplingMask=SamplingMask, bapo_linear_loss=bapo_linear_loss)
    names |= dict(prompts=list(GENERATED), B=B, S=S, weight=weight)
    tokens = dict(hidden=hidden[0, :4], labels=torch.tensor([3, 0, 5, 9]), old=old[0, :4])
    exec(first, made := names | tokens | dict(advantages=A[0, :4]))
    assert made["out"].metrics["label_outside_mask"] == 0
    assert made["out"].loss.isfinite()
    for source in (vllm_code, sglang_code):
        exec(source, names)
        assert names["sets"] == list(SETS.values())
        assert names["old_log_probs"] == LOG_PROBS

    # prompts of 2 and 3 tokens, padded by 1 and 0 on the left, and the labels shifted
    exec(function, names)
    mask = names["mask_of_batch"](names["sets"], [2, 2], S)
    expected = SamplingMask.from_lists([[], [], *SETS["a"], [], [], *SETS["b c"], [], []])
    assert_same(mask.offsets, expected.offsets)
    assert_same(mask.token_ids, expected.token_ids)

    sets = [[*{j, (j + 3) % V, *range(j % 3)}] for j in labels.flatten().tolist()]
    mask = SamplingMask.from_lists(sets)
    exec(slices, names | dict(hidden=hidden, labels=labels, old=old, advantages=A, mask=mask))

    def whole(leaf):
        out = reference.bapo_linear_loss(leaf, weight.to(leaf), labels, old, A, sampling_mask=mask)
        return out.loss, {"size": largest(out.log_probs)}

    same, truth = in_both(whole, hidden)
    gradients = hidden.grad, [x.gradient for x in same], truth.gradient
    assert_gradient("gradient", *gradients, truth.log["size"])


def test_rollouts_for_trl():
    """What :func:`test_trl.from_the_likely_tokens` returns, too."""
    (block, *_) = blocks_of("trl.md", "## Sampling masks")
    function, _, rest = block.partition("trainer = ")
    assert "rollout_func=rollout" in rest
    llm = vllm("m", return_sampling_mask=True, logprobs_mode="processed_logprobs")
    exec(function, names := dict(llm=llm, params=Namespace(top_k=5)))
    assert names["rollout"](list(GENERATED), None) == dict(
        prompt_ids=[[1], [3]],
        completion_ids=list(GENERATED.values()),
        logprobs=LOG_PROBS,
        sampling_mask=list(SETS.values()),
    )


def test_formats_of_teachers():
    """vLLM's entries with a further token and a NaN, and SGLang's, become ``[..., K]``."""
    tops = [None, {4: -3.0, 9: -0.5, 2: -1.0}, {1: -0.25, 8: math.nan}, None]
    vllm = [t and {id: Namespace(logprob=x) for id, x in t.items()} for t in tops]
    sglang = [None, [(-0.5, 9, None), (-1.0, 2, None)], [(-0.25, 1, None)], None]
    given = dict(request=Namespace(prompt_logprobs=vllm), k=2)
    made = recipes.run(given | dict(meta_info=dict(input_top_logprobs=sglang)), recipes.TEACHERS)
    for ids, teacher in zip(made["ids"], made["teacher"], strict=True):
        assert ids.tolist() == [[9, 2], [1, -100], [-100, -100]]
        assert teacher.tolist() == [[-0.5, -1.0], [-0.25, -math.inf], [-math.inf] * 2]


SIZES = dict(tokens=12, vocabulary=60, hidden=16, k=4)
EXAMPLES = {
    "verl_bapo": ("verl", dict(preset="recipe", staleness=0.3), "gradient norm.*bapo_clip_low"),
    "sampling_mask": ("transformers", dict(seeds=1, rollouts=2), "mean ratio.*smallest"),
    "distillation": ("typer", SIZES, r"one pass: \d.* s, two passes: \d.* s"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name, capsys):
    package, options, expected = EXAMPLES[name]
    for needed in (package, "typer", "rich"):
        pytest.importorskip(needed)
    example = runpy.run_path(str(ROOT / f"examples/{name}.py"), run_name="example")
    example["main"](**options)
    printed = capsys.readouterr().out
    assert re.search(expected, printed, re.DOTALL)
    if name == "sampling_mask":
        check_ratios(example, printed)
    if name == "distillation":
        one_pass = example["WAYS"]["one pass"]
        example["WAYS"]["one pass"] = lambda b: 1.0001 * one_pass(b)
        with pytest.raises(SystemExit, match="the gradients of hidden differ"):
            example["main"](**options)


def check_ratios(example, printed):
    """Before the first update every ratio is 1 with the sets; without, it is the mass kept."""
    model, tokens = example["build_model"](0), torch.arange(16).expand(8, 16) * 50
    logits = in_some_orders(lambda: model(tokens).logits)
    same, truth = [x.log_softmax(-1) for x in logits], model.double()(tokens).logits.log_softmax(-1)
    # A ratio is that of two log-probs, and is printed with six decimals.
    error = 2 * error_and_budget(same[0], same, truth)[1] + 5e-7
    for name, low, high in (("mean ratio", 0.8, 0.95), ("smallest", 0.7999, 0.801)):
        (line,) = (line for line in printed.splitlines() if name in line)
        with_sets, without = (float(x) for x in re.findall(r"\d\.\d+", line))
        assert abs(with_sets - 1) <= error
        assert low < without < high
