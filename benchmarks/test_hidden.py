"""Loss and gradients from hidden states, beside the bare matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from .cases import HEAD, REAL, SAMPLES, TARGETS, Case, half
from .methods import cross_entropies, liger, pytorch, trl, verl
from .methods.method import Method
from .methods.ours import from_log_probs, ours
from .methods.yardsticks import IN_CHUNKS, ONE, THREE, TWO
from .test_logits import CPU, GPU, losses_from

IN_PARTS = [  # hold the logits of a part of the tokens
    *trl.HIDDEN,
    *liger.HIDDEN,
    *verl.HIDDEN,
    *cross_entropies.HIDDEN,
    *pytorch.HIDDEN,
]
BASELINES = [*IN_PARTS, *cross_entropies.WITH_ALL_LOGITS, *pytorch.CROSS_ENTROPY]


def cases(device: str) -> Iterator[tuple[Case, list[Method]]]:
    cpu, mine = device == "cpu", [THREE, *ours(device, "")]
    model, N = (CPU[0], 128) if cpu else (GPU[0], 8_192)
    yield from losses_from("hidden", device, N, mine, BASELINES)
    loss = partial(Case.of, "hidden", "loss", model, dtype=half("hidden", device))
    many = replace(loss(8_192), H=128, model="any") if cpu else loss(131_072)
    yield replace(many, sweep="many tokens"), [*mine, *IN_PARTS]
    yield loss(N, sweep=TARGETS), [*mine, *ours(device, "one chunk")]
    yield from _forms_of_the_head(device, model, 512 if cpu else N)
    if cpu:  # has the kernels
        yield from _gradients_from_samples(device, model)


def _gradients_from_samples(device: str, model: str) -> Iterator[tuple[Case, list[Method]]]:
    """On rows of a language model, beside the exact gradients."""
    one, apart = ours(device, "", "gradient_samples = 2048"), ", log-probs, then loss"
    sampled = from_log_probs(device, f"{apart}, gradient_samples = 2048", 2_048)
    mine = [ONE, *one, *from_log_probs(device, apart), *sampled]
    case = Case.of("hidden", "loss", model, 512, sweep=SAMPLES, profile=REAL)
    for dtype in dict.fromkeys((half("hidden", device), "float32")):
        for N in (512, 2_048):
            yield replace(case, N=N, dtype=dtype), mine
        yield replace(case, dtype=dtype, frozen=True), mine


def _forms_of_the_head(device: str, model: str, N: int) -> Iterator[tuple[Case, list[Method]]]:
    """Trained and frozen, and with rows of zero advantage."""
    apart = from_log_probs(device, ", log-probs, then loss")
    for dtype in dict.fromkeys((half("hidden", device), "float32")):
        narrow = dtype == "bfloat16"
        forms = "", "chunk_tokens = N/4", *(["float32 logits"] if narrow else [])
        mine, wide = [*ours(device, *forms), *apart], [trl.WIDE] if narrow else []
        case = Case.of("hidden", "loss", model, N, dtype=dtype, sweep=HEAD)
        for products, frozen in ((3, False), (2, True)):
            yardsticks = [TWO if frozen else THREE, IN_CHUNKS[products]]
            yield replace(case, frozen=frozen), [*yardsticks, *mine, *wide, *BASELINES]
        if dtype == half("hidden", device):
            live = ours(device, "live", "live, chunk_tokens = N/4")
            yield replace(case, layout="zero advantage"), [THREE, IN_CHUNKS[3], *mine, *live]


def test_hidden(measure):
    measure()
