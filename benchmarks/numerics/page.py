"""``docs/numerics.md`` from the records of the study."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd

from ..records import RESULTS as FOLDER
from ..records import Record, load
from ..report import markdown
from .errors import DTYPES, LOG_RATIOS, N_HIDDEN, V_HIDDEN, H, N
from .figures import BUDGET, LARGE, WHO, frames

RESULTS = FOLDER / "numerics.jsonl"
PAGE = Path(__file__).parents[2] / "docs" / "numerics.md"


def table(frame: pd.DataFrame, index: str, column: str, value: str = "error") -> str:
    """Everybody's largest errors."""
    order = [list(dict.fromkeys(frame[name])) for name in (index, column)]
    columns = sorted(order[1], key=list(WHO).index) if column == "who" else order[1]
    of_cell = {
        pair: "NaN" if not cell.finite.all() else f"{cell[value].max():.1e}"
        for pair, cell in frame.groupby([index, column], sort=False)
    }
    cells = [[of_cell.get((i, c), "") for c in columns] for i in order[0]]
    heads = [f"{c:,}" if isinstance(c, int) else c for c in columns]
    return markdown(pd.DataFrame(cells, index=pd.Index(order[0], name=""), columns=heads)) + "\n"


def page(records: list[Record] | None = None) -> str:
    """The text of ``docs/numerics.md``."""
    records = load(RESULTS) if records is None else records
    errors, decisions = frames(records)
    return "\n".join([*of_errors(errors, records[-1]), *of_decisions(decisions)]).rstrip() + "\n"


def of_errors(errors: pd.DataFrame, last: Record) -> Iterator[str]:
    """Part one."""
    machine = f"{last['machine']}, torch {last['torch']}; commit {last['commit']}"
    yield INTRODUCTION.format(machine=machine, N=N, ratios=" or ".join(map(str, LOG_RATIOS)))
    at_logits = errors[errors.part == "logits"]
    large = at_logits[at_logits.V == LARGE]
    for quantity, (head, value) in HEADS.items():
        of_quantity = large[large.quantity == quantity]
        yield f"### {head}, V = {LARGE:,}\n"
        for dtype in DTYPES:
            yield f"{dtype} logits:\n"
            of_dtype = of_quantity[of_quantity["dtype"] == dtype]
            if value == "relative":
                of_dtype = of_dtype[of_dtype.who != BUDGET]
            yield table(of_dtype, "rows", "who", value)
        yield LESSONS[quantity]
    yield "### Over the vocabulary\n"
    yield "Log-probs and entropy, std 3, float32 logits:\n"
    standard = at_logits[(at_logits.rows == "std 3") & (at_logits["dtype"] == "float32")]
    for quantity in ("log_probs", "entropy"):
        yield table(standard[standard.quantity == quantity], "who", "V")
    yield LESSONS["V"]
    yield "### Against the budget\n"
    yield against_budgets(errors)
    yield "### From hidden states\n"
    hidden = errors[(errors.part == "hidden") & (errors.V == V_HIDDEN)]
    yield HIDDEN.format(N=N_HIDDEN, V=V_HIDDEN, H=H)
    for dtype in DTYPES:
        yield f"{dtype}:\n"
        of_dtype = hidden[(hidden["dtype"] == dtype) & (hidden.who != BUDGET)].copy()
        of_dtype = of_dtype[of_dtype.quantity.isin(NAMES)]
        gradient = of_dtype.quantity.str.contains("gradient")
        of_dtype["error"] = of_dtype.relative.where(gradient, of_dtype.error)
        of_dtype["quantity"] = of_dtype.quantity.map(NAMES)
        yield table(of_dtype, "who", "quantity")
    yield LESSONS["hidden"]


def against_budgets(errors: pd.DataFrame) -> str:
    """The largest error of ours as a share of its budget, by quantity and dtype."""
    keys = ["part", "dtype", "V", "rows", "quantity"]
    ours = errors[(errors.who == "bapo_kernels cpu") & (errors.quantity != "bounds")]
    both = ours.merge(errors[errors.who == BUDGET], on=keys, suffixes=("", "_budget"))
    both["share"] = both.error / both.error_budget
    both["of"] = both.part + ": " + both.quantity.str.replace("_", "-")
    wide = both.pivot_table(index="of", columns="dtype", values="share", aggfunc="max", sort=False)
    wide = wide.rename_axis("")
    return markdown(wide[list(DTYPES)].map(lambda share: f"{share:.2f}")) + "\n"


def of_decisions(decisions: Mapping[str, Record]) -> Iterator[str]:
    """Part two."""
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
            who: {
                "log-prob, mean error": f"{s['mean']:.1e}",
                "rms": f"{s['rms']:.1e}",
                "median shift": f"{s['shift']:.1e}",
                "predicted": flips_in_words(s["predicted"]),
                "over all targets": flips_in_words(s["all_targets"]),
                "observed": s["observed"],
            }
            for who, s in record["sources"].items()
        }
        yield markdown(pd.DataFrame(rows).T) + "\n"
    yield LESSONS["decisions"]


def flips_in_words(count: float) -> str:
    return f"{count:,.0f}" if count >= 10 else f"{count:.2g}"


HEADS = {
    "log_probs": ("Log-probs, largest error", "error"),
    "entropy": ("Entropy, largest error", "error"),
    "loss": ("Loss, error", "error"),
    "gradient": ("Gradient of the logits, error as a share of its norm", "relative"),
}
NAMES = {"log_probs": "log-prob", "loss": "loss", "gradient": "dh", "weight gradient": "dW"}
INTRODUCTION = """# Rounding

Written, figures too, by `python -m benchmarks.numerics --no-measure` from
[records](../benchmarks/results/numerics.jsonl); without the option it measures first
(`TRITON_INTERPRET=1` adds the Triton kernels). {machine}.

## Errors

Truth is the reference in float64 on the same inputs, already rounded to their dtype: what is
measured is what a function loses, not what the dtype lost before. {N} rows a case: normal logits of
four standard deviations, uniform ones, a constant row, one logit at 40 or the last at 60 among
standard normal ones, and half of the entries -inf. Every second label is drawn from the policy, the
others are any allowed token. Log-ratios are within 0.02 of {ratios}, away from every
admissible bound, so that an error of a log-prob changes a gradient by as much and does not switch
it off; decisions are the second part. Peers that know log-probs alone get the loss of the tokens in
float32 on top. `log_softmax` is in the dtype of the logits, `cross_entropy` of `logits.float()`.
The budget is that of [the tests](../bapo_kernels/tools/budget.py).

![Errors by kind of rows](figures/numerics_errors.svg)

![Errors over the vocabulary](figures/numerics_vocabulary.svg)
"""
HIDDEN = """{N} rows of H = {H}, V = {V:,}, logits of standard deviation 3. Gradients: error as a
share of the norm; log-prob and loss: largest error.
"""
DECISIONS = """## Decisions

{batches:,} batches of {tokens} tokens from bfloat16 logits (V = {V:,}, standard deviation 3,
labels drawn from the policy), staleness 0.1 to 2, normal advantages. The target is uniform over
what the search can reach; batches in which no bound raises the tested quantity are left out. The
margin is the least |tested quantity - target| at the points up to the stop.

"One pass and loop differ" compares `find_clip_bounds` with the literal loop in float64 on the same
float32 log-probs, bit for bit.

![Margins and flips](figures/numerics_decisions.svg)
"""
LESSONS = {
    "log_probs": """Ours stay near the rounding of the float32 result: 16 terms at a time are
added in plain float32, those sums with what their additions lose, and the log-prob is rounded once.
PyTorch adds the whole vocabulary in float32, and loses most where many terms matter (std 3). Where
a log-prob is large, every result has the same rounding of it. `log_softmax` of 16-bit logits, which
TRL and verl take there, rounds the log-prob to 11 or 8 bits, and a ratio inherits that as a factor.
In float16 the constant row is not finite: its sum of exp exceeds 65,504.
""",
    "entropy": """Where x is large and the entropy small (std 30), logsumexp(x) - sum p*x (verl)
loses what the two terms have in common; ours and -sum p*log p measure x from near the maximum. With
half of the entries -inf, 0*-inf is NaN with everybody else. The 16-bit entropies of `log_softmax`,
TRL and verl are off in the second digit, verl's at std 30 in the first.
""",
    "loss": """Between kernels log-probs are float64, so the loss of ours does not inherit their
rounding; that of the peers does, and in 16 bits the ratios are off by as much as the log-probs.
""",
    "gradient": """From 16-bit logits ours and `cross_entropy` are as good as the dtype, one
rounding of every entry. The others take p from rounded log-probs, and their ratio is off: by half
of the gradient at std 30 in bfloat16. From float32 logits ours is one rounding; the peers' ratio
carries the error of a float32 log-prob.
""",
    "V": """Ours hardly depend on the vocabulary. TRL and verl (a `logsumexp` a row) lose less than
`log_softmax` in log-probs; entropies are sums over the vocabulary in float32 with all of them.
""",
    "hidden": """In 16 bits everybody's error is about the same: the product rounds the logits to
the dtype before anybody sees them. In float32 the sums over the vocabulary tell: ours and TRL's are
taken in parts.
""",
    "decisions": """Predicted is the mean over all targets when each exact log-prob is moved at
random by up to half a unit in the last place of what the function returns; over all targets is
the same with the log-probs that it returned; observed is at the drawn targets.

- One pass and loop agree bit for bit: no margin is near the rounding of float64.
- Rounding exact log-probs to float32 flips a few in 10,000, to bfloat16 about a third.
- 16-bit `log_softmax`, and so TRL and verl, are where bfloat16 rounding is, and a little above.
- Ours flips as often as the rounding of its float32 result explains, and in `bapo_loss`, where
  log-probs reach the search in float64, less often. In preset `paper` the likely tokens weigh most;
  their log-probs, near 0, have a last place far smaller than the float32 sums they are made of, and
  that is where the others lose.
- Margins of preset `paper` can be tiny because the range is: where few tokens are clipped,
  raising a bound hardly changes the share. Its flips matter as little.
""",
}
