"""One batch, whole and split over data x tensor parallel ranks."""

from dataclasses import replace
from functools import partial

import torch
from accuracy import assert_within_budget
from helpers import allowed_by, sets_of, transform_of, unmasked_tokens
from world import grid

from bapo_kernels import BAPOConfig, SamplingMask, reference
from bapo_kernels.tools.budget import Case, make_case, per_token

B, S, V, H = 6, 5, 67, 16
# Columns per tensor-parallel rank, sequences per data-parallel rank: uneven, one of them empty.
COLUMNS = {1: [V], 2: [40, 27], 4: [20, 0, 30, 17]}
SEQUENCES = {1: [B], 2: [5, 1], 4: [2, 0, 3, 1]}

paper = partial(BAPOConfig.paper, target=0.6)
CAPPED = dict(entropy_coef=0.05, final_logit_softcapping=8.0)
CASES = {
    "paper": dict(config=paper()),
    "recipe": dict(config=BAPOConfig.recipe()),
    # From hidden states it ends at 0.6 and 1.25, not at the maximum as the others do.
    "a search that stops early": dict(config=BAPOConfig.paper(target=0.36, token_weight="uniform")),
    "given bounds": dict(bounds=(0.75, 1.3)),
    "a rank without tokens": dict(config=paper(), masked_sequences=[5]),
    "no tokens at all": dict(masked_sequences=range(B)),
    "KL, entropy, soft cap": dict(
        config=paper(kl_loss_coef=0.1, temperature=0.7, **CAPPED),
        ref_log_probs=per_token((B, S), 3),
    ),
    "temperatures": dict(config=paper(**CAPPED), temperature=per_token((B, S), 9, 0.5, 2.0)),
    "sequence means": dict(
        config=paper(loss_agg_mode="seq-mean-token-mean"),
        rollout_is_weights=per_token((B, S), 4, 0.5, 2.0),
    ),
    "ratios of sequences": dict(config=paper(ratio_level="sequence")),
    "cispo": dict(config=paper(surrogate="cispo")),
    "sapo": dict(config=BAPOConfig(surrogate="sapo")),
    "mask": dict(config=paper(surrogate="mask")),
    "live statistics": dict(config=paper(), statistics="live"),
    "forbidden tokens": dict(config=paper(), forbidden=True),
    "sampling mask": dict(config=paper(entropy_coef=0.05), sets=True),
    "NaN logit": dict(bad=torch.nan),
    "label outside the vocabulary": dict(label=V),
    "row of -inf": dict(row=-torch.inf),
}


def whole_case(name="paper", dtype=torch.float32):
    options = dict(config=BAPOConfig.paper()) | CASES[name]
    names = "masked_sequences", "forbidden", "bad", "label", "row", "sets"
    masked, forbidden, bad, label, row, has_sets = (options.pop(key, None) for key in names)
    case = make_case((B, S), V, dtype, staleness=0.4, seed=2, poison=False, **options)
    case.response_mask[list(masked or [])] = False
    unmasked = unmasked_tokens(case)
    if forbidden:
        case.logits[0, :, 40:] = -torch.inf  # every column of a rank
        case.logits[1, :, ::3] = -torch.inf
    place = tuple(unmasked.nonzero()[0].tolist()) if unmasked.any() else None
    if bad is not None:
        case.logits[(*place, 3)] = bad
    if row is not None:
        case.logits[place] = row
    if label is not None:
        case.labels[place] = label
    if has_sets:  # what they lack is never read
        sets = sets_of(case.labels, V)
        case.logits.masked_fill_(~allowed_by(sets, V).view(B, S, V), torch.nan)
        case = case.with_options(sampling_mask=SamplingMask.from_lists(sets))
    counts = dict(batch_num_tokens=max(1, int(unmasked.sum())))
    if options["config"].loss_agg_mode.startswith("seq"):
        counts = dict(global_batch_size=int(unmasked.any(1).sum()))
    return case.with_options(**counts)


def part(sizes, index):
    return slice(sum(sizes[:index]), sum(sizes[: index + 1]))


def of_rank(case, rank, data, tensor, device="cpu"):
    """The rows and columns of a rank, and its part of a case, with the groups in its options."""
    mesh = grid(data, tensor, device)
    d, t = divmod(rank, tensor)
    rows, columns = part(SEQUENCES[data], d), part(COLUMNS[tensor], t)
    options = {
        k: v[rows] if isinstance(v, torch.Tensor) and v.ndim else v for k, v in case.options.items()
    }
    if mask := options.get("sampling_mask"):
        options["sampling_mask"] = mask[S * rows.start : S * rows.stop]
    options.update(dp_size=data, process_group=mesh.get_group("data"))
    options.update(vocab_group=mesh.get_group("tensor"))
    arguments = (x[rows] for x in case.arguments())
    return rows, columns, Case(case.logits[rows, :, columns], *arguments, options)


def head(dtype=torch.float32):
    g = torch.Generator().manual_seed(5)
    hidden = torch.randn(B, S, H, generator=g).to(dtype)
    weight = (0.7 * torch.randn(V, H, generator=g)).to(dtype)
    return hidden, weight, torch.randn(V, generator=g).to(dtype)


def linear_case(name="paper", dtype=torch.float32):
    """The tokens of a case, with old log-probs near those of the head."""
    case = whole_case(name)
    hidden, weight, bias = (x.double() for x in head(dtype))
    options = transform_of(case.options["config"])
    options["sampling_mask"] = case.options.get("sampling_mask")
    logp, _ = reference.linear_log_probs(hidden, weight, case.labels, bias=bias, **options)
    noise = 0.4 * torch.randn(B, S, generator=torch.Generator().manual_seed(6))
    return replace(case, old_log_probs=(logp + noise).nan_to_num(neginf=-3.0).float())


OF_LOG_PROBS = (
    *("temperature", "sampling_mask", "vocab_group", "backend", "bias", "chunk_tokens"),
    "gradient_samples",
)


def outputs_and_loss(module, function, leaves, arguments, **options):
    """Of a function of logits, or of hidden states, weight and bias; of log-probs a sum."""
    if len(leaves) > 1:
        options["bias"] = leaves[2]
    call = getattr(module, function)
    if function.endswith("loss"):
        out = call(*leaves[:2], *arguments, **options)
        return out._asdict() | dict(bounds=torch.stack(tuple(out.bounds))), out.loss
    labels, weights = arguments[0], per_token((B, S), 7)
    if options.get("several"):  # of every rank, repeated ones, and one outside of the vocabulary
        labels = torch.stack([labels, (labels + 9) % V, labels, V - 1 - labels % V], -1)
        labels[0, 0, 1] = V
        weights = per_token((B, S, 4), 7)
    given = transform_of(options["config"])
    given |= {name: options[name] for name in OF_LOG_PROBS if name in options}
    logp, entropy = call(*leaves[:2], labels, **given)
    loss = (logp.nan_to_num(0.0, neginf=0.0) * weights).sum()
    if leaves[-1].requires_grad:  # a frozen head gives entropies no gradient
        loss = loss + 0.3 * (entropy * per_token((B, S), 8)).sum()
    return dict(log_probs=logp, entropy=entropy), loss


def case_of(function, name, dtype):
    """A case, and the leaves of its whole batch and vocabulary."""
    if "linear" in function:
        return linear_case(name, dtype), head(dtype)
    case = whole_case(name, dtype)
    return case, (case.logits,)


def check_means(got, same, truth):
    """By name; ``same``: of one process, in some orders."""
    assert got.keys() == truth.keys()
    for name, expected in truth.items():
        assert_within_budget(name, got[name], [plain[name] for plain in same], expected)
