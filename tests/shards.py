"""One batch, whole and split over data x tensor parallel ranks."""

from dataclasses import replace

import torch
from helpers import make_case, per_token, transform_of, unmasked_tokens

from bapo_kernels import BAPOConfig, reference

B, S, V, H = 6, 5, 67, 16
# Columns per tensor-parallel rank, sequences per data-parallel rank: uneven, one of them empty.
COLUMNS = {1: [V], 2: [40, 27], 4: [20, 0, 30, 17]}
SEQUENCES = {1: [B], 2: [5, 1], 4: [2, 0, 3, 1]}

CASES = {
    "paper": dict(config=BAPOConfig.paper(target=0.6)),
    "recipe": dict(config=BAPOConfig.recipe()),
    # From hidden states it ends at 0.6 and 1.25, not at the maximum as the others do.
    "a search that stops early": dict(
        config=BAPOConfig.paper(target=0.36, token_weight="uniform"),
    ),
    "given bounds": dict(bounds=(0.75, 1.3)),
    "a rank without tokens": dict(config=BAPOConfig.paper(target=0.6), masked_sequences=[5]),
    "no tokens at all": dict(masked_sequences=range(B)),
    "KL, entropy, soft cap": dict(
        config=BAPOConfig.paper(
            target=0.6,
            kl_loss_coef=0.1,
            entropy_coef=0.05,
            final_logit_softcapping=8.0,
            temperature=0.7,
        ),
        ref_log_probs=per_token((B, S), 3),
    ),
    "temperatures": dict(
        config=BAPOConfig.paper(target=0.6, entropy_coef=0.05, final_logit_softcapping=8.0),
        temperature=per_token((B, S), 9, 0.5, 2.0),
    ),
    "sequence means": dict(
        config=BAPOConfig.paper(target=0.6, loss_agg_mode="seq-mean-token-mean"),
        rollout_is_weights=per_token((B, S), 4, 0.5, 2.0),
    ),
    "ratios of sequences": dict(config=BAPOConfig.paper(target=0.6, ratio_level="sequence")),
    "cispo": dict(config=BAPOConfig.paper(target=0.6, surrogate="cispo")),
    "sapo": dict(config=BAPOConfig(surrogate="sapo")),
    "mask": dict(config=BAPOConfig.paper(target=0.6, surrogate="mask")),
    "live statistics": dict(config=BAPOConfig.paper(target=0.6), statistics="live"),
    "forbidden tokens": dict(config=BAPOConfig.paper(target=0.6), forbidden=True),
    "NaN logit": dict(bad=torch.nan),
    "label outside the vocabulary": dict(label=V),
    "row of -inf": dict(row=-torch.inf),
}


def whole_case(name="paper", dtype=torch.float32):
    options = dict(CASES[name])
    masked = options.pop("masked_sequences", [])
    forbidden, bad = options.pop("forbidden", False), options.pop("bad", None)
    label, row = options.pop("label", None), options.pop("row", None)
    config = options.pop("config", BAPOConfig.paper())
    case = make_case(
        (B, S), V, dtype, staleness=0.4, seed=2, config=config, poison=False, **options
    )
    for sequence in masked:
        case.response_mask[sequence] = False
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
    counts = dict(batch_num_tokens=max(1, int(unmasked.sum())))
    if config.loss_agg_mode.startswith("seq"):
        counts = dict(global_batch_size=int(unmasked.any(1).sum()))
    return case.with_options(**counts)


def part(sizes, index):
    return slice(sum(sizes[:index]), sum(sizes[: index + 1]))


def of_rank(case, data, tensor, d, t, mesh):
    rows, columns = part(SEQUENCES[data], d), part(COLUMNS[tensor], t)
    options = {
        k: v[rows] if isinstance(v, torch.Tensor) and v.ndim else v for k, v in case.options.items()
    }
    options.update(dp_size=data, process_group=mesh.get_group("data"))
    options.update(vocab_group=mesh.get_group("tensor"))
    arguments = tuple(x[rows] for x in case.arguments())
    return rows, columns, arguments, options


def head(dtype=torch.float32):
    g = torch.Generator().manual_seed(5)
    hidden = torch.randn(B, S, H, generator=g).to(dtype)
    weight = (0.7 * torch.randn(V, H, generator=g)).to(dtype)
    return hidden, weight, torch.randn(V, generator=g).to(dtype)


def linear_case(name="paper", dtype=torch.float32):
    """The tokens of a case, with old log-probs near those of the head."""
    case = whole_case(name)
    hidden, weight, bias = (x.double() for x in head(dtype))
    transform = transform_of(case.options["config"])
    logp, _ = reference.linear_log_probs(hidden, weight, case.labels, bias=bias, **transform)
    noise = 0.4 * torch.randn(B, S, generator=torch.Generator().manual_seed(6))
    return replace(case, old_log_probs=(logp + noise).float())
