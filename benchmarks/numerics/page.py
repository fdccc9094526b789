"""``docs/internals/numerics.md`` from the records of the study."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd

from ..records import RESULTS as FOLDER
from ..records import Record, load
from ..tables import markdown
from .errors import DTYPES, LOG_RATIOS, N_HIDDEN, V_HIDDEN, H, N
from .figures import BUDGET, CURVES, LARGE, frames
from .head import N as N_OF_HEADS

RESULTS = FOLDER / "numerics.jsonl"
PAGE = Path(__file__).parents[2] / "docs" / "internals" / "numerics.md"


def table(frame: pd.DataFrame, index: str, column: str, value: str = "error") -> str:
    """The largest errors, as a Markdown table."""
    order = [list(dict.fromkeys(frame[name])) for name in (index, column)]
    columns = sorted(order[1], key=list(CURVES).index) if column == "method" else order[1]
    of_cell = {
        pair: "NaN" if not cell.finite.all() else f"{cell[value].max():.1e}"
        for pair, cell in frame.groupby([index, column], sort=False)
    }
    cells = [[of_cell.get((i, c), "") for c in columns] for i in order[0]]
    heads = [f"{c:,}" if isinstance(c, int) else c for c in columns]
    return markdown(pd.DataFrame(cells, index=pd.Index(order[0], name=""), columns=heads)) + "\n"


def page(records: list[Record] | None = None) -> str:
    """The text of ``docs/internals/numerics.md``."""
    records = load(RESULTS) if records is None else records
    errors, decisions = frames(records)
    parts = {record["part"]: record for record in records}  # the last of each
    sections = [
        *of_errors(errors, parts["hidden"]),
        *of_heads(errors[errors.part == "head"], parts["head"]),
        *of_decisions(decisions),
    ]
    return "\n".join(sections).rstrip() + "\n"


def of_errors(errors: pd.DataFrame, last: Record) -> Iterator[str]:
    """The part on errors."""
    yield INTRODUCTION.format(machine=_machine(last), N=N, ratios=" or ".join(map(str, LOG_RATIOS)))
    at_logits = errors[errors.part == "logits"]
    large = at_logits[at_logits.V == LARGE]
    for quantity, (head, value) in HEADS.items():
        of_quantity = large[large.quantity == quantity]
        yield f"### {head}, V = {LARGE:,}\n"
        for dtype in DTYPES:
            yield f"{dtype} logits:\n"
            of_dtype = of_quantity[of_quantity["dtype"] == dtype]
            if value == "relative":
                of_dtype = of_dtype[of_dtype.method != BUDGET]
            yield table(of_dtype, "rows", "method", value)
        yield LESSONS[quantity]
    yield "### Over the vocabulary\n"
    yield "Log-probs and entropy, std 3, float32 logits:\n"
    standard = at_logits[(at_logits.rows == "std 3") & (at_logits["dtype"] == "float32")]
    for quantity in ("log_probs", "entropy"):
        yield table(standard[standard.quantity == quantity], "method", "V")
    yield LESSONS["V"]
    yield "### Errors relative to the budget\n"
    yield against_budgets(errors)
    yield "### From hidden states\n"
    hidden = errors[(errors.part == "hidden") & (errors.V == V_HIDDEN)]
    yield HIDDEN.format(N=N_HIDDEN, V=V_HIDDEN, H=H)
    for dtype in DTYPES:
        yield f"{dtype}:\n"
        of_dtype = hidden[(hidden["dtype"] == dtype) & (hidden.method != BUDGET)].copy()
        of_dtype = of_dtype[of_dtype.quantity.isin(NAMES)]
        gradient = of_dtype.quantity.str.contains("gradient")
        of_dtype["error"] = of_dtype.relative.where(gradient, of_dtype.error)
        of_dtype["quantity"] = of_dtype.quantity.map(NAMES)
        yield table(of_dtype, "method", "quantity")
    yield LESSONS["hidden"]


def of_heads(errors: pd.DataFrame, last: Record) -> Iterator[str]:
    """The part on log-probs of heads."""
    yield HEADS_OF_16_BITS.format(N=N_OF_HEADS, V=last["V"], machine=_machine(last))
    yield table(errors.astype({"H": int}), "method", "H")
    yield LESSONS["head"]


def _machine(record: Record) -> str:
    return f"{record['machine']}, torch {record['torch']}; commit {record['commit']}"


def against_budgets(errors: pd.DataFrame) -> str:
    """Our largest error relative to its budget, by quantity and dtype."""
    keys = ["part", "dtype", "V", "rows", "quantity"]
    ours = errors[(errors.method == "bapo_kernels cpu") & (errors.quantity != "bounds")]
    both = ours.merge(errors[errors.method == BUDGET], on=keys, suffixes=("", "_budget"))
    both["share"] = both.error / both.error_budget
    both["of"] = both.part + ": " + both.quantity.str.replace("_", "-")
    wide = both.pivot_table(index="of", columns="dtype", values="share", aggfunc="max", sort=False)
    wide = wide.rename_axis("")
    return markdown(wide[list(DTYPES)].map(lambda share: f"{share:.2f}")) + "\n"


def of_decisions(decisions: Mapping[str, Record]) -> Iterator[str]:
    """The part on decisions."""
    first = next(iter(decisions.values()))
    yield DECISIONS.format(
        batches=sum(r["batches"] for r in decisions.values()),
        tokens=", ".join(f"{n:,}" for n in first["tokens"]),
        V=first["V"],
    )
    counts = {
        preset: {
            "batches": f"{r['batches']:,}",
            "one pass and loop differ": len(r["differ"]),
            "exact ties": r["ties"],
            "least margin": f"{r['least_margin']:.1e}",
        }
        for preset, r in decisions.items()
    }
    yield markdown(pd.DataFrame(counts).T) + "\n"
    for preset, record in decisions.items():
        yield f"Preset `{preset}`, flips in {record['batches']:,} decisions:\n"
        rows = {
            method: {
                "log-prob, mean error": f"{s['mean']:.1e}",
                "rms": f"{s['rms']:.1e}",
                "median shift": f"{s['shift']:.1e}",
                "predicted": flips_in_words(s["predicted"]),
                "over all targets": flips_in_words(s["all_targets"]),
                "observed": s["observed"],
            }
            for method, s in record["sources"].items()
        }
        yield markdown(pd.DataFrame(rows).T) + "\n"
    yield LESSONS["decisions"]


def flips_in_words(count: float) -> str:
    return f"{count:,.0f}" if count >= 10 else f"{count:.2g}"


HEADS = {
    "log_probs": ("Log-probs, largest error", "error"),
    "entropy": ("Entropy, largest error", "error"),
    "loss": ("Loss, error", "error"),
    "gradient": ("Gradient of the logits, error relative to its norm", "relative"),
}
NAMES = {"log_probs": "log-prob", "loss": "loss", "gradient": "dh", "weight gradient": "dW"}
INTRODUCTION = """# Rounding

Written, together with its figures, by `python -m benchmarks.numerics --no-measure` from
[records](../../benchmarks/results/numerics.jsonl). Without the option the command measures first;
`TRITON_INTERPRET=1` adds the Triton kernels. {machine}.

## Errors

The truth is the reference in float64 on the same inputs, which are already rounded to their dtype.
So the error is what a function loses, not what the dtype has lost before. Each case has {N} rows:
normal logits of four standard deviations, uniform logits, a constant row, one logit at 40 or the
last logit at 60 among standard normal ones, and rows whose entries are -inf in half of the places.
Every second label is drawn from the policy, the others are any allowed token. Log-ratios are within
0.02 of {ratios}, away from every admissible bound, so that an error of a log-prob changes a
gradient by as much and does not clip it; decisions are the subject of the second part. Baselines
that provide log-probs only are completed with the token loss in float32. `log_softmax` is computed
in the dtype of the logits, `cross_entropy` on `logits.float()`. The error budget is that of
[the tests](../../bapo_kernels/tools/budget.py).

![Errors by kind of rows](../figures/numerics_errors.png)

![Errors over the vocabulary](../figures/numerics_vocabulary.png)
"""
HIDDEN = """{N} rows with H = {H}, V = {V:,} and logits of standard deviation 3. Errors of gradients
are relative to the norm; those of log-probs and loss are the largest error.
"""
HEADS_OF_16_BITS = """### Float32 logits of bfloat16 hidden states

Largest error of the log-probs of {N} rows, by the width H of the head; V = {V:,}, logits of
standard deviation 3. {machine}.
"""
DECISIONS = """## Decisions

{batches:,} batches of {tokens} tokens from bfloat16 logits (V = {V:,}, standard deviation 3,
labels drawn from the policy), with staleness 0.1 to 2 and normal advantages. The target is uniform
over the values that the search can reach; batches in which no bound raises the tested quantity are
left out. The margin is the least |tested quantity - target| at the points up to the stop.

"One pass and loop differ" compares `find_clip_bounds` with the loop of `reference` in float64, bit
for bit and on the same float32 log-probs.

![Margins and flips](../figures/numerics_decisions.png)
"""
LESSONS = {
    "log_probs": """Our errors stay near the rounding of the float32 result: 16 terms at a time are
added in plain float32, those sums are added with compensation, and the log-prob is rounded once.
PyTorch adds the whole vocabulary in float32 and loses most where many terms matter (std 3). Where a
log-prob is large, its own rounding is the same for all. `log_softmax` of 16-bit logits, which TRL
and verl use there, rounds the log-prob to 11 or 8 bits, and a ratio inherits that as a factor. In
float16 the constant row is not finite, because its sum of exponentials exceeds 65,504.
""",
    "entropy": """Where logits are large and the entropy is small (std 30), logsumexp(x) - sum p*x
(verl) loses what its two terms have in common; ours and -sum p*log p measure x from near the
maximum. With half of the entries at -inf, 0*-inf gives NaN in all baselines. The 16-bit entropies
of `log_softmax`, TRL and verl are wrong in the second digit, verl's at std 30 in the first.
""",
    "loss": """Between our kernels log-probs are float64, so our loss does not inherit their
rounding. The loss of the baselines does, and in 16 bits their ratios are as wrong as the log-probs.
""",
    "gradient": """From 16-bit logits ours and `cross_entropy` are as good as the dtype: one
rounding of every entry. The others take p from rounded log-probs, and their ratio is wrong: by half
of the gradient at std 30 in bfloat16. From float32 logits our error is one rounding; the ratio of
the baselines carries the error of a float32 log-prob.
""",
    "V": """Our errors hardly depend on the vocabulary. TRL and verl (one `logsumexp` per row) lose
less than `log_softmax` in log-probs; all baselines sum the entropy over the vocabulary in float32.
""",
    "hidden": """In 16 bits the errors of all methods are about the same, because the product
already rounds the logits to the dtype. In float32 the sums over the vocabulary make the difference:
ours and TRL's are taken in parts.
""",
    "head": """A bfloat16 product rounds every logit to 8 bits, and a softmax in float32 cannot
bring them back. With `logits_dtype=torch.float32` the products are summed and kept in float32, and
what is left is the error of a float32 log-prob. TRL's `cast_lm_head_to_fp32` multiplies a weight
and hidden states that were converted to float32. The head that prime-rl patches into vLLM
([pull request 2441](https://github.com/PrimeIntellect-ai/prime-rl/pull/2441)) multiplies them in
bfloat16, by `torch.mm` with `out_dtype=torch.float32`; on a CPU, which has no such product, they
are converted here. A product of two bfloat16 numbers is exact in float32, so all three sum the same
terms, in different orders. The remaining difference is the softmax: TRL's is one `logsumexp` per
row, and `log_softmax`, taken for prime-rl's, adds the whole vocabulary in float32.
""",
    "decisions": """"Predicted" is the mean over all targets when each exact log-prob is moved at
random by up to half a unit in the last place of what the function returns. "Over all targets" is
the same with the log-probs that it returned. "Observed" is at the drawn targets.

- One pass and loop agree bit for bit: no margin is near the rounding of float64.
- Rounding exact log-probs to float32 flips a few decisions in 10,000, to bfloat16 about a third.
- 16-bit `log_softmax`, and with it TRL and verl, flip as often as rounding to bfloat16, or slightly
  more often.
- Ours flips as often as the rounding of its float32 result explains, and less often in `bapo_loss`,
  where log-probs reach the search in float64. In preset `paper` the likely tokens weigh most. Their
  log-probs are near 0, with a last place far smaller than that of the float32 sums from which the
  baselines compute them, and that is where the baselines lose.
- Margins of preset `paper` can be tiny because its range is: where few tokens are clipped, raising
  a bound hardly changes the share. Its flips matter just as little.
""",
}
