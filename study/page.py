"""``docs/internals/study.md`` from the records of the study."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd
from scipy import stats

from benchmarks.tables import markdown

from .arms import ARMS, NO_CLIP, SCOPES
from .compare import BASELINE, CONFIDENCE, LATE, Difference, compared, paired
from .policy import build_policy
from .runs import RULE_SCENARIO, WINDOW

NAME = "internals/study.md"
SEARCHING = [arm for arm in ARMS if arm.startswith("BAPO")]


def page(runs: pd.DataFrame) -> str:
    """The text of the page."""
    return "\n".join(sections(runs)).rstrip() + "\n"


def sections(runs: pd.DataFrame) -> Iterator[str]:
    """The page from top to bottom."""
    last = runs.iloc[-1]
    yield INTRODUCTION.format(
        seeds=runs.seed.nunique(),
        updates=runs.updates.max(),
        runs=len(runs),
        parameters=sum(p.numel() for p in build_policy().parameters()),
        machine=f"{last.machine}, one thread per run, torch {last.torch}; {commits(runs)}",
    )
    yield END_POINT.format(on_policy=on_policy(runs))
    yield by_arm(runs, lambda s, a: spread(values(runs, s, a, "held_out")))
    yield f"Differences from {BASELINE}, with 95 % intervals; bold where the interval excludes 0:\n"
    yield by_arm(runs, lambda s, a: "" if a == BASELINE else words(paired(runs, s, a)))
    yield counted(runs)
    yield AFTER_END_POINT
    yield EXPLORATORY
    for title, column in LATER.items():
        yield f"### {title}\n"
        yield by_arm(runs, lambda s, a, c=column: spread(values(runs, s, a, c)))
        yield LESSONS[column]
    yield CONTRAST
    yield contrasts(runs)
    yield AFTER_CONTRAST
    yield SEARCH
    yield of_search(runs)
    yield AFTER_SEARCH
    yield SCOPE
    yield of_scopes(runs)
    yield AFTER_SCOPE
    yield RULE
    yield of_rule(runs)
    yield AFTER_RULE


def commits(runs: pd.DataFrame) -> str:
    """The commits at which the runs were made."""
    counts = runs.groupby("commit").date.agg(["size", "max"])
    return "; ".join(f"{n} runs at commit {c}, {d[:10]}" for c, (n, d) in counts.T.items())


def values(runs: pd.DataFrame, scenario: str, arm: str, column: str) -> pd.Series:
    """A column of the runs of an arm, one entry per seed."""
    return runs.loc[(runs.scenario == scenario) & (runs.arm == arm), column]


def spread(column: pd.Series) -> str:
    """Mean and standard deviation."""
    digits = 2 if column.mean() >= 1 else 3
    return f"{column.mean():.{digits}f} ± {column.std():.{digits}f}"


def words(difference: Difference) -> str:
    """A difference and its interval."""
    text = f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"
    return f"**{text}**" if difference.separated else text


def by_arm(runs: pd.DataFrame, cell: Callable[[str, str], str]) -> str:
    """A table: arms down, scenarios across."""
    cells = {s: {arm: cell(s, arm) for arm in ARMS} for s in compared(runs)}
    return markdown(pd.DataFrame(cells)) + "\n"


def on_policy(runs: pd.DataFrame) -> str:
    """The arms of the on-policy scenario, which must be the same to the bit."""
    rewards = runs[runs.scenario == "staleness 1"].pivot(
        index="seed", columns="arm", values="held_out"
    )
    same = (rewards.nunique(axis=1) == 1).all()
    words = "are the same to the bit" if same else "differ, which they must not"
    names = " and ".join(rewards.columns)
    return f"On-policy, {names} {words}: {spread(rewards[BASELINE])}."


def counted(runs: pd.DataFrame) -> str:
    """How many intervals exclude zero, and how many would by chance."""
    arms = [arm for arm in ARMS if arm not in (BASELINE, NO_CLIP)]
    pairs = [(scenario, arm) for scenario in compared(runs) for arm in arms]
    found = [paired(runs, *pair) for pair in pairs]
    above, below = sum(d.low > 0 for d in found), sum(d.high < 0 for d in found)
    chance = (1 - CONFIDENCE) * len(pairs)
    return (
        f"Of these {len(pairs)} intervals without those of '{NO_CLIP}', {above} lie above 0 and"
        f" {below} below. If no arm differed, about {chance:.0f} would exclude 0 by chance; those"
        " of a scenario share the runs of one baseline, so that such errors come together.\n"
    )


def contrasts(runs: pd.DataFrame) -> str:
    """Paired differences of the entropy between arms that differ in one thing."""
    cells = {
        scenario: {
            f"{arm} minus {against}": words(
                paired(runs, scenario, arm, "late_entropy", against=against)
            )
            for arm, against in CONTRASTS
        }
        for scenario in compared(runs)
    }
    return markdown(pd.DataFrame(cells)) + "\n"


def of_search(runs: pd.DataFrame) -> str:
    """What the searches did, as means over the seeds and the updates."""
    rows = {}
    for scenario in compared(runs):
        for arm in SEARCHING:
            of_arm = runs[(runs.scenario == scenario) & (runs.arm == arm)]
            rows[scenario, arm] = {
                "share at the starting bounds": f"{of_arm.mean_bapo_pos_share_start.mean():.3f}",
                "at the final bounds": f"{of_arm.mean_bapo_pos_share.mean():.3f}",
                "highest possible": f"{of_arm.mean_bapo_pos_share_max.mean():.3f}",
                "bounds raised": f"{of_arm.moved.mean():.0%}",
                "saturated": f"{of_arm.saturated.mean():.0%}",
                "c_high inside its range": f"{of_arm.interior.mean():.0%}",
                "mean c_low": f"{of_arm.mean_bapo_clip_low.mean():.2f}",
                "mean c_high": f"{of_arm.mean_bapo_clip_high.mean():.2f}",
            }
    table = pd.DataFrame(rows).T
    table.index = pd.Index([f"{scenario}: {arm}" for scenario, arm in table.index])
    return markdown(table) + "\n"


def of_scopes(runs: pd.DataFrame) -> str:
    """Scopes over four micro-batches, and one call over the whole update."""
    rows = {}
    for scenario in dict.fromkeys(runs[runs.arm.isin(SCOPES)].scenario):
        for arm in SCOPES:
            of_arm = runs[(runs.scenario == scenario) & (runs.arm == arm)]
            rows[f"{scenario}: {arm.removeprefix('BAPO, ')}"] = {
                "held-out reward": spread(of_arm.held_out),
                "minus BAPO in one call": words(paired(runs, scenario, arm, against="BAPO")),
                "entropy": spread(of_arm.late_entropy),
                "bounds raised": f"{of_arm.moved.mean():.0%}",
                "c_high inside its range": f"{of_arm.interior.mean():.0%}",
                "mean c_low": f"{of_arm.mean_bapo_clip_low.mean():.2f}",
                "mean c_high": f"{of_arm.mean_bapo_clip_high.mean():.2f}",
            }
    return markdown(pd.DataFrame(rows).T) + "\n"


def of_rule(runs: pd.DataFrame) -> str:
    """Agreement of predicted and measured changes of the entropy, over all updates of an arm."""
    rows = {}
    measured = runs[runs.scenario == RULE_SCENARIO].dropna(subset="rule")
    for arm in ARMS:
        of_seeds = [np.array(rule) for rule in measured[measured.arm == arm].rule]
        predicted, change = np.concatenate(of_seeds).T
        by_seed = [stats.pearsonr(*rule.T).statistic for rule in of_seeds]
        fit = stats.linregress(predicted, change)
        rows[arm] = {
            "updates": f"{len(change):,}",
            "correlation": f"{stats.pearsonr(predicted, change).statistic:.2f}",
            "least and greatest of a seed": f"{min(by_seed):.2f}, {max(by_seed):.2f}",
            "rank correlation": f"{stats.spearmanr(predicted, change).statistic:.2f}",
            "same sign": f"{np.mean(np.sign(predicted) == np.sign(change)):.0%}",
            "eta (slope)": f"{fit.slope:.2f}",
            "mean predicted": f"{predicted.mean():+.4f}",
            "mean measured": f"{change.mean():+.4f}",
        }
    return markdown(pd.DataFrame(rows).T) + "\n"


LATER = {
    f"Entropy over the last {LATE * WINDOW} updates, nats per token": "late_entropy",
    "Largest gradient norm": "largest_grad_norm",
    "Greedy held-out reward": "held_out_greedy",
}
INTRODUCTION = """# A study of staleness, replay and partial rollout

Written, with its figures, by `python -m study report` from
[records](../../study/results/study.jsonl): {runs} runs of {updates} updates, {seeds} seeds. `make
study` makes such records in an hour on two cores. {machine}. What BAPO does in general is on
[another page](../what_bapo_does.md), how to read its metrics on [Choosing](../choosing.md).

This is a toy: a decoder of {parameters:,} parameters, {updates} updates, one task. It shows how
the search behaves when tokens of negative advantage dominate, and how far differences in reward
can be told from noise. It does not show what happens in a large model.

## Setup

- **Task.** A walk on a board of 10 x 10 from a start to a goal, which the prompt names. The
  policy does not see where it is; the environment ends the walk at the goal (reward 1) or after
  24 moves (reward 0). Wrong walks are long and right ones short. A fifth of the pairs of start
  and goal is held out.
- **Policy.** A Qwen3 decoder of two layers of width 64, after 300 steps of supervised training on
  noisy walks; it then reaches one goal in six or seven. For each seed all arms start from the same
  weights.
- **Update.** 16 prompts with 8 walks each, GRPO advantages, mean over tokens, AdamW with a
  learning rate of 2e-3, gradient norm clipped to 1.
- **Scenarios.** Staleness S: one rollout is split into S updates. Sample replay: half of the
  groups of an update are new, the others come each from a random one of the last 16 rollouts, with
  the log-probs of that time. Partial rollout: a walk is drawn in three parts of 8 moves, each
  under the policy of a later rollout (S = 4), so that a sequence has old log-probs of three
  policies. All walks of a batch end together: one that arrives early waits, so right walks are
  the oldest. At the start, the first two rollouts have no update between them.
- **Arms.** Fixed bounds; the paper's preset ("BAPO"), the same with `contribution="gradient"`,
  the authors' code ("recipe"); 0.9/3.0 are the bounds at which BAPO's search saturates, without a
  search. On-policy (S = 1) only two arms were run, because there all arms are the same: every
  ratio is 1, and no bound clips anything.
- **Noise.** Training is chaotic: two arms with the same mathematics, which differ in the last
  bits, end at different rewards (see [scopes](#scopes-of-the-search)). So runs of one seed are
  hardly paired after some updates. Intervals cover seeds only: the held-out walks are the same in
  all runs.
"""
END_POINT = """## The end point, fixed beforehand

The held-out reward after the last update: the share of 1,024 sampled walks that reach their goal.
{on_policy} That is as low as without clipping at a staleness of 2, so it is no upper bound for the
others: at this learning rate clipping is what keeps training stable, and on-policy nothing is
clipped. Mean and standard deviation over the seeds:
"""
AFTER_END_POINT = """![Paired differences of the held-out reward](../figures/study_differences.png)

Only the arm without clipping is clearly different: it collapses in every scenario. BAPO cannot be
told from fixed 0.8/1.2 in any of them, and neither can the recipe. No arm is best throughout: fixed
0.6/1.2 is worse at a staleness of 2 and better at 32.
"""
EXPLORATORY = """## What else was seen

Everything from here on is exploratory: it was looked at after the runs, and is not corrected for
the number of comparisons.

![Training at a staleness of 8](../figures/study_training.png)
"""
LESSONS = {
    "late_entropy": "",
    "largest_grad_norm": """The arms that clip are alike. Without clipping the norm is larger from a
staleness of 4 on, with spikes that differ from seed to seed.
""",
    "held_out_greedy": """Arms that keep more entropy gain more from greedy decoding: at a staleness
of 8, fixed 0.9/3.0 is below fixed 0.8/1.2 where walks are sampled, and above it where they are
greedy.
""",
}
CONTRASTS = [
    ("fixed 0.8/1.2", "fixed 0.6/1.2"),
    ("fixed 0.9/3.0", "fixed 0.6/3.0"),
    ("fixed 0.6/3.0", "fixed 0.6/1.2"),
    ("BAPO", "fixed 0.9/3.0"),
    ("BAPO", "fixed 0.8/1.2"),
]
CONTRAST = f"""### What moves the entropy

Paired differences of the entropy over the last {LATE * WINDOW} updates: a higher lower bound, a
higher upper bound, and BAPO against fixed bounds.
"""
AFTER_CONTRAST = """A higher lower bound keeps more entropy, in every scenario and at both upper
bounds: it takes the gradient from negative tokens sooner. A higher upper bound does not do so
throughout. BAPO ends a little below fixed 0.9/3.0, where its search is most of the time; against
fixed 0.8/1.2 it keeps more entropy at a staleness of 2 to 8, and less at 32.
"""
SEARCH = """## What the searches did

Means over seeds and updates; the target is a share of 0.4, for the recipe a ratio of 1, which is
a share of 0.5.
"""
AFTER_SEARCH = """With the paper's weights the search is a switch: c_high ends inside its range in
at most 5 % of the updates, and the highest share that any bounds give is at most 0.003 above the
share at the start. With `contribution="gradient"` the search has more to move and ends inside in 5
to 41 %. The recipe's target is out of reach here: in every update it is fixed 0.8/2.0 with dual
clip.
"""
SCOPE = """## Scopes of the search

The update in four micro-batches: a search per micro-batch (`call`), one search over all four
(`step`, the paper's), or the bounds of the previous update (`lagged`). Scope `step` decides as
BAPO in one call, so that their difference is noise alone. Bounds are means over decisions.
"""
AFTER_SCOPE = """No scope can be told from another by its reward. A search per micro-batch raises
the bounds less often than one over the whole update: a quarter of the tokens has a share that
varies more, and so is above the target more often.
"""
RULE = f"""## The Entropy-Clip Rule

The paper predicts the change of the entropy in an update as `-eta*Cov[log pi, A*X + C]`, a
covariance over the tokens after a prefix, with X = 1 where the token is not clipped. Here it is
measured in every update at {RULE_SCENARIO}. Predicted, up to eta: the mean over the prefixes of
the update of `-r*A*X*(log pi + entropy)`, which is the covariance as one drawn token estimates it.
Measured: the entropy over the same prefixes after the step minus that before. The rule is derived
for logits that move freely along the natural gradient. Here they share weights, and Adam's
momentum and the clipped norm make eta differ from update to update; so the slope is not the
paper's eta, and the correlation cannot be near 1.
"""
AFTER_RULE = """![Predicted and measured changes of the entropy](../figures/study_rule.png)

The rule points the right way: for every arm the correlation is about 0.4, and with clipping two
thirds of the signs agree. Between arms, too, a larger predicted loss of entropy mostly goes with a
larger measured one; the exception is fixed 0.6/3.0, with half the predicted and all of the measured
loss of fixed 0.6/1.2.
"""
