"""What is special to sampling masks, with which tests of losses and log-probs have cases too."""

import copy
import io
import pickle
from dataclasses import FrozenInstanceError
from functools import partial
from itertools import pairwise

import pytest
import torch
from accuracy import assert_as_reference, assert_same
from helpers import (
    DEVICES,
    KERNELS,
    Case,
    case_with_sets,
    check_with_sets,
    examples,
    make_case,
    needs_native,
    poisoned_memory,
    real_in_turns,
    run_kernel,
    run_kernel_with_sets,
    unmasked_tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_linear import DTYPES, H, V, check, problem, run
from test_loss import NO_EXPLANATION, OPTIONS, build_config
from torch._subclasses.fake_tensor import FakeTensorMode

from bapo_kernels import (
    BAPOConfig,
    SamplingMask,
    bapo_linear_loss,
    bapo_loss,
    linear_log_probs,
    log_probs,
    reference,
)
from bapo_kernels.core.call import SamplingSets
from bapo_kernels.core.head import head
from bapo_kernels.core.head.sets import by_column, by_column_on_cpu
from bapo_kernels.tools.budget import Result


def unread(logits):
    """NaN outside of the sets."""
    return logits.masked_fill(logits == -torch.inf, torch.nan)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["paper", "entropy", "temperatures"])
def test_in_place(backend, device, dtype, name):
    """The bits of the gradient that is not in place, with zeros outside of the sets."""
    config_options, options = OPTIONS[name]
    options = options | dict(config=build_config(config_options))
    real = real_in_turns(OPTIONS, name, DTYPES.index(dtype))
    case, mask = case_with_sets(dtype=dtype, device=device, real=real, **options)
    expected = run_kernel_with_sets(case, mask, backend)
    leaf = unread(case.logits).requires_grad_()
    logits, options = leaf * 1, case.options | dict(sampling_mask=mask, inplace=True)
    out = bapo_loss(logits, *case.arguments(), backend=backend, **options)
    assert_same(Result(out, torch.autograd.grad(out.loss, leaf)), expected)
    if dtype != torch.float16:  # made in forward
        assert_same(logits.detach(), expected.gradient)


def test_rows_without_a_set_have_the_same_bits(backend, device):
    """As without a mask, and as in a call of their own; rows with a set too."""
    case, mask = case_with_sets((6, 7), 65, device=device, bounds=(0.8, 1.25), batch_num_tokens=9)

    def parts(rows=slice(0, 6)):
        tokens = [t[rows] for t in case.arguments()]
        given = Case(case.logits[rows], *tokens, case.options), mask[7 * rows.start : 7 * rows.stop]
        return parts_of(run_kernel_with_sets(*given, backend))

    got, whole = parts(), (mask.offsets.diff() == 0).view(6, 7)
    assert_same(parts(), got)
    assert 0 < whole.sum() < 42
    for a, b in zip(parts_of(run_kernel(case, backend)), got, strict=True):
        assert_same(a[whole], b[whole])
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        for a, b in zip(parts(rows), got, strict=True):
            assert_same(a, b[rows])


def parts_of(result):
    return result.output.log_probs, result.output.entropy, result.gradient


# Of hidden states.


def test_rows_of_the_head_that_no_set_has_are_never_read(backend, device):
    """They may be full of NaN, and their gradient is 0."""
    parameters, case = problem(torch.float32, device, BAPOConfig(entropy_coef=0.1))
    sets = [[max(label, 0), n + 30] for n, label in enumerate(case.labels.flatten().tolist())]
    case = case.with_options(sampling_mask=SamplingMask.from_lists(sets, device))
    expected = run(bapo_linear_loss, parameters, case, backend=backend)
    unmasked = unmasked_tokens(case).flatten().tolist()
    used = {i for ids, counts in zip(sets, unmasked, strict=True) if counts for i in ids}
    unused = [v for v in range(V) if v not in used]
    for p in parameters[1:]:
        p[unused] = torch.nan
    got = run(bapo_linear_loss, parameters, case, backend=backend)
    for a, b in zip(got.gradients, expected.gradients, strict=True):
        assert_same(a, b)
        assert a.isfinite().all()
    assert not got.gradients[1][unused].any()
    assert_same(got.output.loss, expected.output.loss)


def test_parameters_of_any_strides(backend, device):
    """As views of other tensors; they are read as if they were contiguous."""
    parameters, case = problem(torch.float32, device, BAPOConfig(), sets=True)

    def strided(hidden, weight, *tokens, bias, **options):
        views = hidden.mT.contiguous().mT, weight.T.contiguous().T, bias.repeat_interleave(2)[::2]
        assert not any(view.is_contiguous() for view in views)
        return bapo_linear_loss(*views[:2], *tokens, bias=views[2], **options)

    check(parameters, case, backend, function=strided)


# What breaks a rule.

OTHERS = {  # than those that hold the label
    "twice": lambda V: [V // 2] * 2,
    "too large": lambda V: [V],
    "negative": lambda V: [-1],
    "beyond 32 bits": lambda V: [2**33 + V // 2],
}
WRONG = [*OTHERS, *(f"{kind}, with the label" for kind in OTHERS)]
KINDS = ["none", "label", "few", "all", "lacks the label", *WRONG]


def set_of(kind, label, V, g):
    order = torch.randperm(V, generator=g).tolist()
    label = label if 0 <= label < V else order[0]
    few = [label, *(i for i in order[: V // 3] if i != label)][::-1]
    if kind in WRONG:
        name, *with_label = kind.split(", ")
        wrong = OTHERS[name](V)
        return [*few, *wrong] if with_label else wrong
    outside = [i for i in order[: 1 + V // 2] if i != label]
    return {"none": [], "label": [label], "few": few, "all": order}.get(kind, outside)


@settings(max_examples=examples(40), phases=NO_EXPLANATION)
@given(
    backend=st.sampled_from(KERNELS or ["none"]),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=7),
    V=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    of_ids=st.sampled_from([torch.int32, torch.int64]),
    of_offsets=st.sampled_from([torch.int32, torch.int64]),
    statistics=st.sampled_from(["all", "live"]),
    seed=st.integers(0, 2**20),
)
@pytest.mark.skipif(not KERNELS, reason="no kernels")
def test_any_sets(backend, kinds, V, dtype, of_ids, of_offsets, statistics, seed):
    """Rows whose set is wrong are NaN, unless they are masked; they change no other row."""
    device, N, g = DEVICES[backend], len(kinds), torch.Generator().manual_seed(seed)
    if of_ids == torch.int32:
        kinds = [kind.replace("beyond 32 bits", "negative") for kind in kinds]
    labels = make_case((N,), V, logits=torch.zeros(N, V), seed=seed).labels.tolist()
    sets = [set_of(kind, label, V, g) for kind, label in zip(kinds, labels, strict=True)]
    wrong = torch.tensor([kind in WRONG for kind in kinds], device=device)
    right = [[] if kind in WRONG else ids for kind, ids in zip(kinds, sets, strict=True)]
    config = BAPOConfig(entropy_coef=0.1 if seed % 2 else 0.0)
    options = dict(sets=right, seed=seed, config=config, poison=False)
    case, _ = case_with_sets((N,), V, dtype, device, **options)
    ids = torch.tensor([i for ids in sets for i in ids], dtype=of_ids, device=device)
    offsets = torch.tensor([0, *map(len, sets)], device=device).cumsum(0)
    mask = SamplingMask(ids, offsets.to(of_offsets))

    labelled, unmasked = case.labels != -100, unmasked_tokens(case)
    both = log_probs(case.logits, case.labels, sampling_mask=mask, backend=backend)
    hidden, weight = torch.randn(N, 5, device=device), torch.randn(V, 5, device=device)
    given = dict(sampling_mask=mask, backend=backend)
    of_hidden = linear_log_probs(hidden, weight, case.labels, **given)
    for values in (*both, *of_hidden):
        assert_same(values.isnan(), wrong & labelled)
    out = run_kernel_with_sets(case, mask, backend, statistics=statistics).output
    counted = unmasked & ((case.advantages != 0) | (seed % 2 == 1))
    if statistics == "all" or seed % 2 == 1:
        counted = unmasked
    assert out.loss.isnan() == (wrong & counted).any()

    case.response_mask = case.response_mask & ~wrong
    check_with_sets(case, mask, backend, statistics=statistics)


@pytest.fixture
def of_poison():
    with poisoned_memory():
        yield


BROKEN_OFFSETS = [
    [0, 2, 4, 5, 7],
    [0, 2, 4, 5, 5],
    [1, 2, 3, 4, 6],
    [0, 4, 2, 5, 6],
    [0, 7, 2, 4, 6],
    [-5, 1, 2, 3, 6],
    [0, -1, 2, 3, 6],
    [0, 9, 9, 9, 9],
    [0, 2**62, -(2**62), 3, 6],
    [-1] * 5,
]


@pytest.mark.parametrize("level", ["logits", "in place", "hidden states", "frozen head"])
@pytest.mark.parametrize("offsets", BROKEN_OFFSETS)
def test_broken_offsets(backend, device, of_poison, level, offsets):
    """As on a GPU, where nobody reads them: the loss is NaN, and nothing foreign is touched."""
    ids = torch.tensor([5, 5, 3, 0, 2**31 - 1, -(2**31)], dtype=torch.int32, device=device)
    mask = SamplingMask._of(ids, torch.tensor(offsets, device=device))
    labels = torch.tensor([3, 0, 8, 9], device=device)
    batch = labels, None, torch.ones(4, device=device)
    options = dict(sampling_mask=mask, backend=backend)
    hidden = torch.randn(4, H, device=device, requires_grad=True)
    weight = torch.randn(10, H, device=device).requires_grad_(level != "frozen head")
    loss, both_of = bapo_linear_loss, linear_log_probs
    if of_logits := level in ("logits", "in place"):
        loss, both_of = partial(bapo_loss, inplace=level == "in place"), log_probs

    def operands():
        return (hidden @ weight.T,) if of_logits else (hidden, weight)

    for shown in (False, True):
        response_mask = torch.full((4,), shown, device=device)
        out = loss(*operands(), *batch, response_mask, **options)
        both = both_of(*operands(), labels, **options)
        assert out.loss.isnan() == shown
        assert both[0].isnan().any()
        out.loss.backward(retain_graph=True)
        assert shown or not hidden.grad.any()
        if level == "hidden states":  # values that no row has are not summed
            assert shown or not weight.grad.any()
        torch.autograd.grad(both, hidden, [torch.ones_like(x) for x in both])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("entropy_coef", [0.1, 0.0])
def test_fresh_memory_reaches_no_result(
    backend, device, dtype, entropy_coef, of_poison, monkeypatch
):
    monkeypatch.setattr(head, "SUM_BYTES", 0)  # chunks as asked for
    config = BAPOConfig(entropy_coef=entropy_coef)
    case, mask = case_with_sets((3, 8), 65, dtype, device, config=config, staleness=0.4)
    check_with_sets(case, mask, backend)
    given = problem(dtype, device, config, sets=True)
    for frozen in (False, True):
        check(*given, backend, frozen=frozen, chunk_tokens=5)


def test_offsets_beyond_32_bits(backend, device):
    """Rows past 2^31 elements; the memory between the logits of the sets is never read."""
    rows, V = 3, 2**30
    logits = torch.empty(rows, V, dtype=torch.bfloat16, device=device)
    sets = [[5, 0, V - 1], [V - 1], [V - 2, 7, 9, V // 2]]
    for row, ids in zip(logits, sets, strict=True):
        row[ids] = torch.randn(len(ids), device=device).bfloat16()
    labels = torch.tensor([ids[0] for ids in sets], device=device)
    mask = SamplingMask.from_lists(sets, device)
    got = log_probs(logits, labels, sampling_mask=mask, backend=backend)

    def expected(kind):
        of_sets = [row[ids].to(kind) for row, ids in zip(logits, sets, strict=True)]
        values = [reference.log_probs(x, labels[0] * 0) for x in of_sets]
        return [torch.stack(of_all) for of_all in zip(*values, strict=True)]

    assert_as_reference(got, expected, operand=got[0].abs().max().item())


# Compilers.


@pytest.mark.compile
def test_traced_values_are_not_read():
    """As on a GPU: ids are sorted unseen, and offsets that break their rule become -1."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def made(token_ids, offsets):
        mask = SamplingMask(token_ids, offsets)
        both = SamplingMask.cat([mask, mask])
        return mask._ids, mask._offsets, both._offsets

    ids, *offsets = made(torch.tensor([9, 3, 2**40, -(2**40), 0]), torch.tensor([0, 2, 2, 5]))
    assert ids.tolist() == [3, 9, -1, 0, 2**31 - 1]
    assert [o.tolist() for o in offsets] == [[0, 2, 2, 5], [0, 2, 2, 5, 7, 7, 10]]
    for broken in BROKEN_OFFSETS:
        ids, *offsets = made(torch.arange(6), torch.tensor(broken))
        assert sorted(ids.tolist()) == [*range(6)]
        assert [set(o.tolist()) for o in offsets] == [{-1}, {-1}]


# The class.

SETS = [[7, 3], [], [5, 0, 2], [], [1], []]


def lists_of(mask):
    """The sets as the kernels read them."""
    ids, offsets = mask._ids.tolist(), mask._offsets.tolist()
    assert (mask._ids.dtype, mask._offsets.dtype) == (torch.int32, torch.int64)
    assert offsets[0] == 0
    assert offsets[-1] == len(ids)
    return [ids[a:b] for a, b in pairwise(offsets)]


SORTED = [sorted(ids) for ids in SETS]


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_constructors(kind):
    ids = torch.tensor([i for ids in SETS for i in ids], dtype=kind)
    counts = torch.tensor([*map(len, SETS)], dtype=kind).view(2, 3)
    padded = torch.tensor([[-1, *ids, -1, -100, -1, -1][:5] for ids in SETS], dtype=kind)
    allowed = torch.tensor([[v in ids for v in range(9)] for ids in SETS])
    offsets = torch.tensor([0, 2, 2, 5, 5, 6, 6], dtype=kind)
    for mask in (
        SamplingMask(ids, offsets),
        SamplingMask.from_lists(SETS),
        SamplingMask.from_counts(ids, counts),
        SamplingMask.from_padded(padded.view(2, 3, 5)),
        SamplingMask.from_bool(allowed.view(2, 3, 9)),
    ):
        assert lists_of(mask) == SORTED
        assert len(mask) == 6


def test_of_no_rows_and_of_no_ids():
    for mask, rows in (
        (SamplingMask.from_lists([]), 0),
        (SamplingMask.from_lists([[], []]), 2),
        (SamplingMask.from_padded(torch.full((2, 3), -1)), 2),
        (SamplingMask.from_padded(torch.empty(0, 3, dtype=torch.int64)), 0),
        (SamplingMask.from_bool(torch.zeros(2, 9, dtype=torch.bool)), 2),
        (SamplingMask.from_bool(torch.empty(0, 9, dtype=torch.bool)), 0),
    ):
        assert lists_of(mask) == [[]] * rows
        assert len(mask) == rows
        assert lists_of(mask[:1]) == [[]] * min(rows, 1)
        assert lists_of(SamplingMask.cat([mask, mask])) == [[]] * (2 * rows)
    assert lists_of(SamplingMask.from_bool(torch.ones(2, 3, dtype=torch.bool))) == [[0, 1, 2]] * 2


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("of", [list, sorted])
def test_later_writes_change_no_mask(of, kind):
    """Whether or not the ids have to be sorted; the reference reads the ids as they were given."""
    ids, offsets = torch.tensor(of([7, 3, 5]), dtype=kind), torch.tensor([0, 3, 3], dtype=kind)
    mask = SamplingMask(ids, offsets)
    ids.zero_(), offsets.zero_()
    assert lists_of(mask) == [[3, 5, 7], []]
    assert mask.token_ids.tolist() == of([7, 3, 5])
    assert mask.offsets.tolist() == [0, 3, 3]
    assert mask.token_ids.dtype == mask.offsets.dtype == kind


def test_ids_beyond_32_bits_stay_in_no_vocabulary():
    ids = [2**40, 3, 2**32 + 3, -(2**40), 2**31]
    assert lists_of(SamplingMask.from_lists([ids])) == [[-1, 3, *[2**31 - 1] * 3]]
    for n in ids[2:] + ids[:1]:
        assert lists_of(SamplingMask.from_lists([[n]]))[0][0] in (-1, 2**31 - 1)


@given(
    sets=st.lists(st.lists(st.integers(-1, 12), max_size=5), max_size=8),
    cuts=st.lists(st.integers(-10, 10), max_size=4),
)
def test_slices_and_their_concatenation(sets, cuts):
    mask, expected = SamplingMask.from_lists(sets), [sorted(ids) for ids in sets]
    assert lists_of(mask) == expected
    for a, b in pairwise([None, *cuts, None]):
        assert lists_of(mask[a:b]) == expected[a:b]
    places = sorted({0, len(sets), *(abs(cut) % (len(sets) + 1) for cut in cuts)})
    parts = [mask[a:b] for a, b in pairwise(places)] or [mask]
    whole = SamplingMask.cat(parts)
    assert lists_of(whole) == expected
    assert_same(whole.offsets, mask._offsets)


def from_file(mask):
    """As torch reads files by default, without the code of any class that it does not know."""
    file = io.BytesIO()
    torch.save({"mask": mask}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["mask"]


def test_other_devices_copies_and_files():
    mask = SamplingMask.from_lists(SETS)
    assert mask.to("cpu") is mask.to(torch.device("cpu"), non_blocking=True) is mask
    there = mask.to("meta")
    assert {t.device.type for t in (there.token_ids, there.offsets, there._ids)} == {"meta"}
    assert len(there) == 6
    assert SamplingMask.from_lists(SETS, device="meta")._offsets.device.type == "meta"
    for copied in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert lists_of(copied) == SORTED
        assert_same(copied.token_ids, mask.token_ids)
    with pytest.raises(FrozenInstanceError):
        mask.offsets = mask.offsets + 1
    loaded = from_file(mask)
    assert lists_of(loaded) == SORTED
    assert_same(loaded.token_ids, mask.token_ids)
    with pytest.raises(ValueError, match=r"offsets must rise from 0 to 1, got 7 at \(1,\)"):
        from_file(SamplingMask._of(torch.arange(1), torch.tensor([0, 7])))


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("without_memory", [lambda: torch.device("meta"), FakeTensorMode])
def test_values_on_a_device_are_not_read(without_memory, kind):
    """Tensors without memory have none to read; fake ones say that they are on a CPU."""
    with without_memory():
        ids, offsets = torch.empty(6, dtype=torch.int64), torch.empty(4, dtype=kind)
        mask = SamplingMask(ids.to(kind), offsets)
        assert (mask._ids.shape, mask._ids.dtype) == ((6,), torch.int32)
        assert len(SamplingMask.cat([mask, mask])) == 6
        assert len(SamplingMask.from_counts(ids, offsets.view(2, 2))) == 4


ONE, NONE, META = torch.tensor([0, 1]), torch.arange(0), torch.tensor([0, 1], device="meta")
OF_ONE, OF_META = (SamplingMask.from_lists([[1]], device) for device in ("cpu", "meta"))
MINUS = SamplingMask._of(ONE, torch.tensor([-1, -1, -1]))
BAD = [
    ("token_ids must be a tensor, got l", SamplingMask, [1], ONE),
    ("token_ids must be int32 or int64, got torch.float32", SamplingMask, torch.ones(1), ONE),
    ("offsets must be int32 or int64, got torch.bool", SamplingMask, NONE, ONE.bool()),
    (r"token_ids must have shape \(K,\), got \(1, 2\)", SamplingMask, ONE[None], ONE),
    (r"offsets must have shape \(N \+ 1,\), got \(0,\)", SamplingMask, NONE, NONE),
    (r"offsets must have shape \(N \+ 1,\), got \(\)", SamplingMask, NONE, ONE[0]),
    (r"offsets must be on the device of token_ids \(cpu\), got meta", SamplingMask, NONE, META),
    (r"offsets must rise from 0 to 2, got 1 at \(2,\)", SamplingMask.from_counts, ONE, ONE),
    (r"offsets must rise .* got 2 at \(2,\)", SamplingMask.from_counts, ONE, torch.tensor([3, -1])),
    ("counts must be int32 or int64, got torch.fl", SamplingMask.from_counts, ONE, torch.ones(2)),
    (r"token_ids must have shape \(..., K\), got \(\)", SamplingMask.from_padded, ONE[0]),
    ("allowed must be bool, got torch.int64", SamplingMask.from_bool, ONE[None]),
    ("rows must be a slice, got 0", OF_ONE.__getitem__, 0),
    ("rows must have step 1, got 2", OF_ONE.__getitem__, slice(None, None, 2)),
    (r"masks must be SamplingMasks, got \['list'\]", SamplingMask.cat, [[[1]]]),
    ("masks must be one or more, got 0", SamplingMask.cat, []),
    (
        r"masks .* the device of the first one \(cpu\), got meta",
        SamplingMask.cat,
        [OF_ONE, OF_META],
    ),
    (r"offsets must rise from 0 to 2, got -1 at \(0,\)", MINUS.__getitem__, slice(1, None)),
]
OF_LISTS = "sets must have a list of int64 ids for each row .*sum.sets, .*, got "
BAD += [
    (f"{OF_LISTS}{shown}$", SamplingMask.from_lists, sets)
    for sets, shown in (
        ([[1, 2.5]], r"\[1, 2.5\] at \(0,\)"),
        ([[1], None], r"None at \(1,\)"),
        ([1, 2, 3], r"1 at \(0,\)"),
        ([[[1, 2], [3]], [[4], [5]]], r"\[\[1, 2\], \[3\]\] at \(0,\)"),
        ([[[1], [2]]], r"\[\[1\], \[2\]\] at \(0,\)"),
        ([[], ["a"]], r"\['a'\] at \(1,\)"),
        ([[2**63]], r"\[9223372036854775808\] at \(0,\)"),
        ([[3], [True]], r"\[True\] at \(1,\)"),
    )
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad[0])
def test_errors_of_the_class(bad):
    message, function, *arguments = bad
    with pytest.raises(ValueError, match=message):
        function(*arguments)


@pytest.mark.parametrize("offsets", BROKEN_OFFSETS)
def test_offsets_on_a_cpu_are_checked(offsets):
    with pytest.raises(ValueError, match="offsets must rise from 0 to 6, got "):
        SamplingMask(torch.arange(6), torch.tensor(offsets))


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("first", [None, 3])
def test_the_counting_sort_is_that_of_pytorch(threads, first):
    """With rows that have no set, ids of no token and of other ranks, and offsets that break."""
    generator, width = torch.Generator().manual_seed(4), 6
    counts = torch.randint(0, 5, (97,), generator=generator)
    token_ids = torch.randint(-2, 11, (int(counts.sum()),), generator=generator).int()
    rising = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    span = None if first is None else torch.tensor([first, 9])
    before = torch.get_num_threads()
    for offsets in (rising, rising.flip(0), rising + 3, rising[:1]):
        sets = SamplingSets(token_ids, offsets, *[None] * 2, span)
        order, rows, segments = by_column(sets, width)
        torch.set_num_threads(threads)
        got = by_column_on_cpu(sets, width)
        torch.set_num_threads(before)
        assert_same(got[2], segments)
        here = slice(*segments[[0, -1]].tolist())
        assert_same(got[0][here], order[here])
        if offsets is rising:
            assert_same(got[1][here], rows[here])
        assert_same(got[0].sort().values, order.sort().values)
        assert ((got[1] >= 0) & (got[1] < max(1, len(offsets) - 1))).all()


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("terms", [1, 3, 4, 5, 63, 64, 65, 128, 130])
def test_sums_of_many_rows_on_a_cpu(dtype, terms):
    """Around the numbers of rows that are added at once; those without a factor hold NaN."""
    width, ids = 37, torch.arange(terms + 2).int()
    matrix = torch.randn(terms + 2, width).to(dtype)
    factors = torch.randn(terms + 2)
    factors[[0, terms // 2 + 1]] = 0.0
    matrix[factors == 0.0] = torch.nan
    of_row, of_column = torch.full((1, width), torch.nan), torch.full((1, width), torch.nan)
    ops, offsets = torch.ops.bapo_kernels, torch.tensor([0, terms + 2])
    ops.sets_dhidden(factors, matrix, ids, offsets, None, None, of_row)
    order = torch.arange(terms + 2), ids, offsets
    ops.sets_dweight(factors, matrix, *order, False, of_column, None)
    exact = factors.double() @ matrix.nan_to_num().double()
    size = factors.double().abs() @ matrix.nan_to_num().double().abs()
    for got in (of_row, of_column):
        assert ((got[0] - exact).abs() <= 2.0**-24 * 20 * size).all()
