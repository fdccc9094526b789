"""How the Triton kernels cut rows into tiles and share rows between programs."""

import pytest
import torch
from accuracy import assert_rounded, assert_same
from helpers import DEVICES, INTERPRETED, KERNELS, PTX, check_against_reference, make_case
from operands import options_of

pytestmark = pytest.mark.skipif(
    "triton" not in KERNELS, reason="needs Triton's interpreter or a GPU"
)
DEVICE = DEVICES["triton"]
WITHOUT_FIELDS = (None, 0, options_of())  # of the tokens
# Each of the interpreter's three programs reads 64 flags, then a few more.
N = 3 * (64 + 2) - 1 if INTERPRETED else 4_500 if PTX else 40_000
SHAPES = [(N, 5)] if INTERPRETED else [(N, 5), (600 if PTX else N, 2_100)]  # of one warp, of two


def rows_and_labels(n, V, dtype=torch.float32):
    logits = torch.randn(1, n, V, device=DEVICE).mul_(4).to(dtype)
    return logits, torch.randint(V, (n,), device=DEVICE)


def double(*shape):
    return torch.full(shape, float("nan"), dtype=torch.float64, device=DEVICE)


def statistics(logits, labels):
    """Log-probs, entropies and sums, as the kernel writes them."""
    n = len(labels)
    results = double(*labels.shape), double(n), double(n, 2)
    counted = torch.ones(n, dtype=torch.bool, device=DEVICE)
    torch.ops.bapo_kernels_triton.row_statistics(
        logits, None, labels, counted, *WITHOUT_FIELDS, *results
    )
    return results


def gradient(logits, labels, found, dlog_probs, only):
    _, entropy, stats = found
    dlogits = torch.full_like(logits, float("nan"))
    torch.ops.bapo_kernels_triton.row_gradient(
        *(logits, None, labels, stats, entropy, dlog_probs, None, only, None),
        *WITHOUT_FIELDS,
        dlogits,
    )
    return dlogits


@pytest.mark.parametrize(("n", "V"), SHAPES)
def test_programs_that_stride_over_rows_find_every_wanted_one(n, V):
    logits, labels = rows_and_labels(n, V)
    dlog_probs = torch.randn(n, dtype=torch.float64, device=DEVICE)
    found = statistics(logits, labels)
    everything = gradient(logits, labels, found, dlog_probs, None)
    assert everything.isfinite().all()
    for wanted in ([], [0], [n - 1], [1, 2, 191, 192, n - 2]):
        only = torch.zeros(n, dtype=torch.uint8, device=DEVICE)
        only[wanted] = 1
        some = gradient(logits, labels, found, dlog_probs, only)
        assert some[:, only == 0].isnan().all()
        assert_same(some[:, only != 0], everything[:, only != 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaling_strides_over_rows(dtype):
    for factor in torch.tensor([1.0, 0.3], device=DEVICE):
        x, _ = rows_and_labels(11, 700, dtype)
        expected = (x.float() * factor).to(dtype)
        torch.ops.bapo_kernels_triton.scale_(x, factor)
        assert_same(x, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("V", [5, 129, 1_025, 16_399, 17_000])
def test_what_fills_the_last_tile_does_not_change_the_bits(V, dtype):
    """The end of a row is a masked tile: the same as forbidden tokens up to the end of the tile."""
    logits, labels = rows_and_labels(4, V, dtype)
    logits[0, 0, V // 2] = -float("inf")
    longer = min(2 ** V.bit_length() - 1, V + 400)  # of the same fixed point and width of tiles
    padded = torch.nn.functional.pad(logits, (0, longer - V), value=-float("inf"))
    alone, filled = statistics(logits, labels), statistics(padded, labels)
    assert_same(alone, filled)
    dlog_probs = torch.randn(4, dtype=torch.float64, device=DEVICE)
    expected = gradient(padded, labels, filled, dlog_probs, None)
    assert_same(gradient(logits, labels, alone, dlog_probs, None), expected[..., :V])
    assert not expected[..., V:].any()


@pytest.mark.parametrize(("dtype", "vector"), [(torch.float32, 4), (torch.bfloat16, 8)])
def test_rows_end_at_every_number_of_a_thread(dtype, vector):
    """Also where a tile is full but for a number or a vector, and where it is one of these."""
    tile = 512 * vector  # of 512 threads, of which each has numbers 512 apart if rows are unaligned
    ends = [8 * tile - 1, 8 * tile - 16, 4 * tile + 1, 4 * tile + 16]
    ends += [512 * i + 3 for i in range(4 * vector, 8 * vector)]
    for V in ends[:4] if INTERPRETED else ends:
        case = make_case((1, 4), V, dtype, DEVICE, staleness=0.0, masked=0.0, poison=False)
        case.advantages.fill_(1.0)
        case.response_mask[0, 1], case.old_log_probs[0, 2] = False, -99.0  # masked, clipped
        check_against_reference(case, "triton")
        half = 4 * tile + abs(V - 4 * tile) // 2  # without gradients there are 256 threads
        assert all(each.isfinite().all() for each in statistics(*rows_and_labels(2, half, dtype)))
        logits, labels = rows_and_labels(2, V, dtype)
        dlog_probs = torch.tensor([0.0, 3.0], dtype=torch.float64, device=DEVICE)
        got = gradient(logits, labels, statistics(logits, labels), dlog_probs, None)
        log_p = logits.double().log_softmax(-1)
        expected = -log_p.exp()
        expected[0, range(2), labels] += 1
        expected *= dlog_probs[:, None]
        # The exponent and its factor; exp, sum, quotient and coefficient.
        assert_rounded(got, expected, 4 - 2 * log_p)
        scaled = logits.double() * 0.5
        torch.ops.bapo_kernels_triton.scale_(logits, torch.tensor(0.5, device=DEVICE))
        assert_same(logits, scaled.to(dtype))


def test_several_labels_of_a_row():
    """Each has the bits of one alone, and so has its gradient if the others have none."""
    n, V, K = 5, 700, 130
    logits, _ = rows_and_labels(n, V)
    labels = torch.stack([torch.randperm(V, device=DEVICE)[:K] for _ in range(n)])
    labels[:, 129] = labels[:, 3]
    found = statistics(logits, labels)
    for k in (0, 3, 127, 128, 129):
        alone = statistics(logits, one := labels[:, k].contiguous())
        assert_same(found[0][:, k], alone[0])
        assert_same(found[1:], alone[1:])
    dlog_probs = torch.zeros(n, K, dtype=torch.float64, device=DEVICE)
    dlog_probs[:, 3], dlog_probs[:, 129] = 0.25, 0.5
    got = gradient(logits, labels, found, dlog_probs, None)
    others = torch.zeros_like(logits, dtype=torch.bool).scatter_(2, labels[None], True)
    others.scatter_(2, one[None, :, None], False)
    expected = gradient(logits, one, alone, dlog_probs.sum(1), None)
    assert_same(got[~others], expected[~others])
    log_p = logits.double().log_softmax(-1)[others]
    assert_rounded(got[others], -0.75 * log_p.exp(), 4 - 2 * log_p)

    only = torch.tensor([1, 1, 0, 1, 1], dtype=torch.uint8, device=DEVICE)
    some = gradient(logits, labels, found, dlog_probs, only)
    assert some[0, 2].isnan().all()
    assert_same(some[:, only != 0], got[:, only != 0])
    logits[0, 1], dlog_probs[1] = float("nan"), 0.0
    assert not gradient(logits, labels, statistics(logits, labels), dlog_probs, None)[0, 1].any()


def test_rows_of_nothing_but_forbidden_tokens_and_of_the_lowest_numbers():
    """The running maximum starts at the lowest finite number, which is a legal logit too."""
    lowest = torch.finfo(torch.float32).min
    logits = torch.full((1, 3, 7), -float("inf"), device=DEVICE)
    logits[0, 1], logits[0, 2, 3] = lowest, lowest
    log_probs, entropy, stats = statistics(logits, torch.full((3,), 3, device=DEVICE))
    assert stats[0].tolist() == [-float("inf"), 0.0]
    assert stats[1:].tolist() == [[lowest, 7.0], [lowest, 1.0]]
    expected = torch.log(torch.tensor([7.0, 1.0], dtype=torch.float64, device=DEVICE))
    assert_rounded(log_probs[1:].float(), -expected, 2)
    assert_rounded(entropy[1:].float(), expected, 2)
