"""The flat inputs that the kernels take per token, against the same in plain PyTorch."""

import itertools
import math

import pytest
import torch
from prepared import MODES, arguments_of, check_prepared, packed_arguments, padded_arguments

from bapo_kernels import BAPOConfig
from bapo_kernels.core.arguments.single import as_numbers
from bapo_kernels.core.operators import FIELDS

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("live", [False, True])
def test_padded(backend, device, mode, live):
    for shape in ((5, 33), (40, 70), (3, 2, 5), (3, 0), (0, 3)):
        check_prepared(padded_arguments(shape, mode, live), backend, device)
    if not mode.startswith("seq"):
        for shape in ((), (1,), (7,), (0,)):
            check_prepared(padded_arguments(shape, mode, live), backend, device)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "offsets",
    [(0, 5), (0, 3, 3, 64, 300), (0, 300), (0, 0, 1, 2, 2, 250), tuple(range(301)), (0, 0)],
    ids=str,
)
def test_packed(backend, device, offsets, mode):
    for per_sequence in (False, True):
        check_prepared(packed_arguments(300, offsets, mode, per_sequence), backend, device)


@pytest.mark.parametrize("mode", MODES)
def test_many_sequences(backend, device, mode):
    """More than one program counts at once, or one whose threads have up to four."""
    check_prepared(packed_arguments(4_500, range(0, 4_500, 2), mode, True), backend, device)
    for K in (600, 1_100, 1_700):  # tokens behind the last
        check_prepared(packed_arguments(1_800, range(K + 1), mode, True), backend, device)


@pytest.mark.parametrize("offsets", [(0, 5, 3), (1, 300), (0, 301), (-1, 7), (0, -5), (0, 400, 9)])
def test_offsets_that_break_their_rule_make_everything_nan(backend, device, offsets):
    for mode in MODES:
        got = check_prepared(packed_arguments(300, offsets, mode, True), backend, device)
        assert got.weights[got.unmasked].isnan().all()
        assert got.field("advantages").isnan().all()
        assert got.unmasked.any()


@pytest.mark.parametrize("dtype", FLOATS)
def test_any_type_of_number(backend, device, dtype):
    g = torch.Generator().manual_seed(0)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 2e-8, -6e-5])
    values = torch.cat([torch.randn(91, generator=g), special]).to(dtype)
    fields = {"advantages": values, "old_log_probs": values.flip(0)}
    for labels, mask in itertools.product((*INTEGERS, dtype), (torch.bool, *INTEGERS, *FLOATS)):
        tokens = torch.randint(0, 100, (100,), generator=g).to(labels)
        if labels in (torch.int16, torch.int32, torch.int64, torch.int8):
            tokens[::7] = -100
        given = torch.cat([special[:7], torch.randint(0, 2, (93,), generator=g)]).to(mask)
        check_prepared(arguments_of(tokens, fields, given), backend, device)


def test_strides(backend, device):
    """Columns of a wider matrix, its transpose, and one advantage per sequence."""
    g = torch.Generator().manual_seed(0)
    wide = torch.randint(-1, 50, (6, 41), generator=g)
    old = torch.randn(41, 6, generator=g).T[:, :40]
    fields = {"advantages": torch.randn(6, 1, generator=g).expand(6, 40), "old_log_probs": old}
    config = BAPOConfig(loss_agg_mode="seq-mean-token-mean")
    arguments = arguments_of(wide[:, 1:], fields, (wide > 9)[:, 1:], config)
    check_prepared(arguments, backend, device)


@pytest.mark.parametrize("N", [30, 2_047])  # of the tokens of a program few, or all but one
def test_every_field(backend, device, N):
    """Some are per sequence. Most tokens are behind the last sequence."""
    arguments = packed_arguments(N, (0, 3, 3, N // 5, N // 4), "token-mean", True)
    per_token = {name: torch.randn(N, dtype=torch.float64) for name in FIELDS}
    check_prepared(arguments._replace(fields=per_token | arguments.fields), backend, device)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.float32, torch.bfloat16])
def test_divisors(backend, device, mode, dtype):
    arguments = padded_arguments((4, 9), mode, False)
    signed, infinite = [-1] * dtype.is_signed, [math.inf] * dtype.is_floating_point
    for divisor in (3, 0, *signed, *infinite):
        tensor = as_numbers(torch.tensor(divisor, dtype=dtype))
        on_device = arguments._replace(divisor=tensor, dp_size=2)
        got = check_prepared(on_device, backend, device)
        assert got.weights[got.unmasked].isnan().all() == (divisor != 3 and mode != "token-sum")
    check_prepared(arguments._replace(divisor=7.5, dp_size=3), backend, device)
    if mode == "seq-mean-token-sum-norm":
        by_length = BAPOConfig(loss_agg_mode=mode)
        check_prepared(arguments._replace(config=by_length), backend, device)


@pytest.mark.parametrize("valid", [True, False])
def test_bounds_on_the_device(backend, device, valid):
    arguments = padded_arguments((4, 9), "token-mean", False)
    good = (0.6, 1.2), (0.0, 1.0), (1.0, torch.inf), (1.1, 1.2)
    bad = (1.2, 0.8), (-0.1, 1.2), (torch.nan, 1.2), (0.8, torch.nan)
    for bounds in good if valid else bad:
        got = check_prepared(arguments._replace(bounds=torch.tensor(bounds)), backend, device)
        assert got.weights[got.unmasked].isfinite().all() == valid
        assert not valid or (got.weights != 0).any()


@pytest.mark.parametrize("mode", MODES)
def test_many_tokens(backend, device, mode, interpreted):
    """More than one launch counts, in more programs than one."""
    rows = 3 if interpreted else 40
    check_prepared(padded_arguments((rows, 8_200), mode, True), backend, device)
    offsets = (0, 1, 4, 5, 5, 37, 8_000, 8_001, 8_033, 16_300)
    check_prepared(packed_arguments(16_384, offsets, mode, True), backend, device)


def test_more_sequences_than_a_program_takes_at_once(backend, device):
    arguments = packed_arguments(3_000, range(3_001), "seq-mean-token-mean", False)
    check_prepared(arguments, backend, device)
