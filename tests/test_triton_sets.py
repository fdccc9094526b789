"""The Triton operators on sampling masks, against their formulas in float64."""

import pytest
import set_operators as cases
import torch
from accuracy import assert_same, assert_sums
from far_apart import FRONT, check_far_apart
from helpers import DEVICES, INTERPRETED, KERNELS, PTX
from operands import call
from set_operators import *  # noqa: F403 - its tests
from set_operators import Sets, check_dhidden, check_move, check_multiply, left, rand
from torch import nan
from torch.nn.functional import pad

pytestmark = pytest.mark.skipif(
    "triton" not in KERNELS, reason="needs Triton's interpreter or a GPU"
)
EVERY_PLACE = 34 if INTERPRETED else 130  # more than a warp, and than a program takes at once
OF_PRODUCTS = 10 if INTERPRETED else 34  # which take eight ids at once, in four programs of a row
# Of rows of the head: around a vector, and around the columns that a program takes at once.
LENGTHS = [128 * k + i for k in range(4) for i in range(1, 9)]
if INTERPRETED:
    LENGTHS = [1, 8, 511, 512, 513]


class OnDevice:
    """The operators, for CPU tensors: their memory is copied to the device, and back."""

    sizes = cases.Sizes(flags_of_no_row=cases.ADD_AND_BIAS[::2])  # such a value reaches the bias
    if INTERPRETED:  # where a row takes milliseconds
        sizes = sizes._replace(rows=cases.FEW_IDS, of_head=(0, 1, 2, 33, 5, 0, 70, 3))
        sizes = sizes._replace(long=(70, 130), whole=(2_001,), vocab=300, H=8)

    def __getattr__(self, name):
        def run(*arguments):
            tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
            there = {
                id(memory): (memory, memory.to(DEVICES["triton"]))
                for memory in map(memory_of, tensors)
            }

            def moved(x):
                if not isinstance(x, torch.Tensor):
                    return x
                memory = there[id(memory_of(x))][1]
                return memory.as_strided(x.shape, x.stride(), x.storage_offset())

            getattr(torch.ops.bapo_kernels_triton, name)(*map(moved, arguments))
            for here, other in there.values():
                here.copy_(other)

        return run


def memory_of(x):
    return x if x._base is None else x._base


@pytest.mark.skipif(not PTX, reason="the interpreter reads all memory, and a GPU has less")
def test_operands_beyond_32_bits():
    check_far_apart(OnDevice(), blocks_of_front=FRONT)


@pytest.fixture
def ops():
    return OnDevice()


def test_programs_that_stride_over_rows_find_every_wanted_one(ops):
    n = 200 if INTERPRETED else 1_100 if PTX else 70_000  # programs read 64 flags, then the others
    sets, only = cases.random_sets((2,) * n, V=700), torch.zeros(n, dtype=torch.uint8)
    only[[0, 7, n // 2, n - 1]] = 1
    results = {"entropy": rand(n).double(), "stats": torch.ones(n, 2).double()}
    known = sets.known | results | dict(labels=torch.zeros(n).long(), dlog_probs=rand(n).double())
    known |= dict(logits=rand(sets.K), dvalues=rand(sets.K), weight=rand(sets.V, 5))
    wanted = (only != 0)[:, None]
    for operator, name, shape in (
        ("sets_dhidden", "dhidden", (n, 5)),
        ("row_gradient", "dlogits", (2 * n,)),
    ):
        some, everywhere = left(*shape), left(*shape)
        call(ops, operator, known, only=only, **{name: some})
        call(ops, operator, known, **{name: everywhere})
        assert everywhere.isfinite().all()
        expected = torch.where(wanted, everywhere.view(n, -1), cases.LEFT)
        assert_same(some.view(n, -1), expected)


def test_rows_of_the_head_times_zero_are_not_read(ops):
    sets, weight, dhidden = cases.random_sets((2, 3), V=700), torch.full((700, 5), nan), left(2, 5)
    weight[sets.ids(1)] = rand(3, 5)
    weight[sets.ids(0)] = nan
    dvalues = rand(5).masked_fill(torch.isin(sets.token_ids, sets.token_ids[:2]), 0.0)
    call(ops, "sets_dhidden", sets.known, dvalues=dvalues, weight=weight, dhidden=dhidden)
    assert not dhidden[0].any()
    assert dhidden[1].isfinite().all()
    assert dhidden[1].any()


def values_of_both(ops, sets):
    """From logits, and from a head."""
    counted, logits, values = torch.ones(sets.N).bool(), rand(1, sets.N, sets.V), left(sets.K)
    call(ops, "gather_sets", sets.known, logits=logits, counted=counted, values=values)
    return values, cases.multiply(ops, sets, cases.head_of(sets, torch.float32, 5), counted)


def test_ids_at_every_place(ops):
    """The first id that is no token, one that stands twice, and the last token."""
    n, V = EVERY_PLACE, 700
    sets = cases.random_sets((n,) * 2 * n, V)
    beyond, twice = ids = sets.token_ids.view(2, n, n)
    beyond.fill_diagonal_(V)
    twice.diagonal()[1:] = twice.diagonal(-1)
    before = pad(ids[..., :-1], (1, 0), value=-1)
    broken = ((ids >= V) | (ids <= before)).flatten()
    for values in values_of_both(ops, sets):
        assert_same(values.isnan(), broken)
    sets = cases.random_sets(range(1, n + 1), V)
    sets.token_ids[sets.offsets[1:] - 1] = V - 1
    for values in values_of_both(ops, sets):
        assert values.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_every_length(ops, dtype):
    """The last number of a row of the head, and of the last hidden state, at every place."""
    sets = cases.random_sets((1, 1), V=1)
    for H in LENGTHS:
        head = cases.head_of(sets, dtype, H)
        values = cases.multiply(ops, sets, head, torch.ones(2).bool())
        terms = head["hidden"].double() * head["weight"].double()
        assert_sums(values, terms.sum(1), H, of=terms.abs().sum(1))
        check_dhidden(ops, sets, head, torch.float32)
        cases.check_dweight(ops, sets, head, torch.float32)


def test_the_columns_of_a_rank_begin_and_end_at_every_place(ops):
    def sets_of(n):
        place = torch.arange(n)
        ids = torch.cat((place - place[:, None] + n, place - place[:, None] + 2 * n)).int()
        return Sets(ids.flatten(), n * torch.arange(2 * n + 1), V=3 * n, shard=(n, n))

    check_move(ops, sets_of(EVERY_PLACE), torch.float32, torch.ones(2 * EVERY_PLACE).bool())
    sets = sets_of(OF_PRODUCTS)
    head = cases.head_of(sets, torch.float32, 5)
    check_multiply(ops, sets, head, torch.ones(sets.N).bool())
    check_dhidden(ops, sets, head, torch.float32)
