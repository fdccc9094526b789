"""Gradients of a head from samples, with the seeds of the reference: kernels draw the same sets."""

from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from accuracy import assert_as_reference, assert_rounded, assert_same
from helpers import needs_native, per_token, real_in_turns
from sample_operators import *  # noqa: F403 - its tests
from sample_operators import of_labels_alone
from test_labels import OF_HEAD, OPTIONS, gradients_of, head_of, labels_of, options_of
from test_linear import CONFIGS, DTYPES, B, H, S, build, check, problem, staleness_of
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from bapo_kernels import (
    BAPOLinearLoss,
    SamplingMask,
    bapo_linear_loss,
    linear_log_probs,
    mean_metrics,
    reference,
)
from bapo_kernels.core.head import sampled
from bapo_kernels.core.operators import ops_of
from bapo_kernels.reference.sampled import uniforms
from bapo_kernels.tools.budget import GRADIENTS

pytestmark = needs_native


@pytest.fixture
def ops(backend, device, interpreted):
    """Those of a backend, for tensors on the CPU."""

    def there(operator):
        def run(*arguments):
            moved = [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments]
            operator(*moved)
            for mine, other in zip(arguments, moved, strict=True):
                if mine is not other:
                    mine.copy_(other)

        return run

    made = {name: there(operator) for name, operator in vars(ops_of(backend)).items()}
    return SimpleNamespace(**made, shapes=((12, 5_003),) if interpreted else ((40, 30_011),))


CASES = [(torch.float32, *of) for of in product(CONFIGS, [False, True])]
CASES += [(dtype, "entropy", True) for dtype in DTYPES[1:]]


@pytest.mark.parametrize(("dtype", "name", "frozen"), CASES)
def test_options(same_seeds, backend, device, dtype, name, frozen):
    """Logits of half precision would be rounded, and have other sets."""
    real = real_in_turns(CONFIGS, name, frozen)
    given = problem(dtype, device, build(name), staleness_of(dtype), real=real)
    for C, chunk_tokens, sets in ((16, 5, "all"), (100, None, "live")):
        options = dict(chunk_tokens=chunk_tokens, logits_dtype=torch.float32, frozen=frozen)
        check(*given, backend, sets, gradient_samples=C, **options)


@pytest.mark.parametrize("temperature", [(B, S), (B,)], ids=str)
def test_temperatures_bounds_and_masks(same_seeds, backend, device, temperature):
    """Of tokens and of sequences; rows with a set stay exact, and join the same sums."""
    parameters, case = problem(torch.bfloat16, device, build("entropy"), None, sets=True)
    bounds = per_token((B,), 5, 0.7, 0.95).to(device), per_token((B, S), 6, 1.05, 1.3).to(device)
    temperature = per_token(temperature, 9, 0.5, 2.0).to(device)
    case = case.with_options(temperature=temperature, bounds=bounds)
    for frozen in (False, True):
        options = dict(gradient_samples=16, logits_dtype=torch.float32, frozen=frozen)
        check(parameters, case, backend, chunk_tokens=5, **options)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_several_labels(same_seeds, backend, device, name, frozen):
    """Of which some repeat, are none, or have a logit of -inf; with a gradient of the entropy."""
    leaves, labels = head_of(OF_HEAD, None)[:3], labels_of(9, OF_HEAD).to(device)
    leaves = [x.to(device) for x in leaves]
    options, _ = options_of(name, labels.cpu(), device, OF_HEAD)
    leaves[0][0, 1] = torch.nan  # of -100 alone
    weights = torch.randn(*labels.shape) * (torch.rand(*labels.shape[:2], 1) > 0.3)
    weights = weights, torch.randn(*labels.shape[:2])

    def run(kind, function=reference.linear_log_probs, **more):
        given = [x.to(kind) for x in leaves]
        for leaf in given[: 1 if frozen else 3]:
            leaf.requires_grad_()
        more = options | dict(gradient_samples=20) | more
        return gradients_of(function, given, labels, weights, **more)[2:]

    got = run(torch.float32, linear_log_probs, backend=backend, chunk_tokens=4)
    assert_as_reference(got, run, roundings=20, names=GRADIENTS)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("frozen", [False, True])
def test_compiled(same_seeds, frozen):
    """In one graph for any number of tokens; that of entries is known when it runs."""
    torch._dynamo.reset()
    compiled = torch.compile(bapo_linear_loss, fullgraph=True, dynamic=True, backend="inductor")
    for S_ in (S, S + 4):
        given = problem(torch.float32, "cpu", build("entropy"), shape=(B, S_), seed=S_, sets=True)
        with torch._dynamo.config.patch(error_on_recompile=S_ != S):
            options = dict(frozen=frozen, chunk_tokens=9, gradient_samples=16)
            check(*given, "cpu", function=compiled, **options)


def small_head(rows=12, columns=400):
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, H), torch.randn(columns, H)
    return hidden, weight, torch.randint(columns, (rows,))


def sampled_gradients(hidden, weight, labels, incoming=1.0, function=linear_log_probs, **options):
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    options = dict(gradient_samples=16) | options
    logp, entropy = function(*leaves, labels, **options)
    loss = (logp * incoming).sum() + 0.1 * (entropy * (torch.as_tensor(incoming) != 0)).sum()
    return torch.autograd.grad(loss, leaves)


def test_bits_and_places():
    """The same for any number of threads and rows at a time, and in another place of a batch."""
    hidden, weight, labels = small_head(64)
    hidden[:, :4] = 1.0  # products of exact numbers: whatever their order
    hidden, weight = hidden.round(), weight.round()
    dhidden, dweight = sampled_gradients(hidden, weight, labels)
    before = torch.get_num_threads()
    for threads, chunk_tokens in ((1, 7), (2, None), (2, 5)):
        torch.set_num_threads(threads)
        made = sampled_gradients(hidden, weight, labels, chunk_tokens=chunk_tokens)
        torch.set_num_threads(before)
        assert_same(made, (dhidden, dweight))
    flipped, _ = sampled_gradients(hidden.flip(0), weight, labels.flip(0))
    assert_same(flipped.flip(0), dhidden)
    exact, _ = sampled_gradients(hidden, weight, labels, gradient_samples=None)
    assert (dhidden != exact).any(1).all()


def test_recomputed_under_a_checkpoint():
    given = small_head()

    def again(*arguments, **options):
        return checkpoint(partial(linear_log_probs, **options), *arguments, use_reentrant=False)

    assert_same(sampled_gradients(*given, function=again), sampled_gradients(*given))


def test_rows_without_a_gradient_may_hold_anything():
    hidden, weight, labels = small_head()
    incoming = torch.ones(len(labels))
    incoming[3] = 0.0
    expected = sampled_gradients(hidden, weight, labels, incoming)
    hidden[3] = torch.nan
    assert_same(sampled_gradients(hidden, weight, labels, incoming), expected)


def test_nan_reaches_the_label_and_the_hidden_state():
    hidden, weight, labels = small_head()
    hidden[3] = torch.nan
    dhidden, dweight = sampled_gradients(hidden, weight, labels)
    assert dhidden[3].isnan().all()
    assert dweight[labels[3]].isnan().all()
    assert not dhidden[torch.arange(12) != 3].isnan().any()
    assert dweight.isnan().any(1).sum() == 1


@pytest.mark.parametrize("label", [400, -7])
def test_a_label_outside_of_the_vocabulary(label):
    """The loss is NaN, and so is the gradient of its hidden state, as of exact gradients."""
    hidden, weight, labels = small_head()
    labels[3] = label
    for samples in (None, 16):
        x = hidden.clone().requires_grad_()
        given = x, weight, labels, None, torch.ones(len(labels))
        out = bapo_linear_loss(*given, gradient_samples=samples)
        out.loss.backward()
        assert out.loss.isnan()
        assert x.grad.isnan().all(1).tolist() == [n == 3 for n in range(len(labels))]


def test_labels_without_doubt_are_kept_alone():
    """What beside them is below 2^-100; the gradient is that of the exact call."""
    hidden, weight, labels = small_head()
    weight[:, 0], weight[labels[0], 0], hidden[:, 0] = 0.0, 100.0, 10.0
    given = hidden, weight, labels[:1].expand(len(labels))
    options = dict(gradient_samples=16, bounds=(0.8, 1.2))
    hidden.requires_grad_()
    out = bapo_linear_loss(*given, None, torch.ones(len(labels)), **options)
    assert out.metrics["gradient_entries"] <= len(labels)
    assert out.metrics["gradient_noise"] == 0.0


def test_as_many_samples_as_columns_are_exact():
    given = small_head()
    exact = sampled_gradients(*given, gradient_samples=None)
    assert_same(sampled_gradients(*given, gradient_samples=400), exact)
    fewer = sampled_gradients(*given, gradient_samples=399)
    assert not torch.equal(fewer[0], exact[0])


def test_autocast_with_a_float32_head(same_seeds):
    """Its gradient is float32, of operands that were rounded."""
    hidden, weight, labels = small_head()
    with torch.autocast("cpu", torch.bfloat16):
        made = sampled_gradients(hidden, weight, labels, logits_dtype=torch.float32)
    assert [gradient.dtype for gradient in made] == [torch.float32] * 2

    def expected(kind):
        operands = (x.bfloat16().to(kind) for x in (hidden, weight))
        dhidden, dweight = sampled_gradients(*operands, labels, function=reference.linear_log_probs)
        return dhidden.bfloat16().to(kind), dweight

    assert_as_reference(made, expected, roundings=10)


def test_sets_and_samples_are_summed_before_they_are_rounded():
    """The gradient of a weight in half precision is the rounded one of a float32 weight."""
    hidden, weight, labels = small_head(40)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    sets = [
        sorted({*range(0, 400, 3), label}) if n % 2 else []
        for n, label in enumerate(labels.tolist())
    ]
    options = dict(sampling_mask=SamplingMask.from_lists(sets), logits_dtype=torch.float32)
    _, rounded = sampled_gradients(hidden, weight, labels, **options)
    with torch.autocast("cpu", torch.bfloat16):
        _, dweight = sampled_gradients(hidden, weight.float(), labels, **options)
    assert_same(rounded, dweight.bfloat16())


def test_parts_that_are_frozen_and_adapters():
    """The other gradients stay the same; those of a sum of products are autograd's."""
    hidden, weight, labels = small_head()
    _, dweight = sampled_gradients(hidden, weight, labels)
    leaf = weight.clone().requires_grad_()
    logp, entropy = linear_log_probs(hidden, leaf, labels, gradient_samples=16)
    (logp.sum() + 0.1 * entropy.sum()).backward()
    assert_same(leaf.grad, dweight)
    B = torch.randn(len(weight), 2, requires_grad=True)
    A = torch.randn(2, H, requires_grad=True)
    sum_ = weight - 2.0 * (B @ A).detach() + 2.0 * (B @ A)  # W, but for roundings
    logp, entropy = linear_log_probs(hidden, sum_, labels, gradient_samples=16)
    (made,) = torch.autograd.grad(logp.sum() + 0.1 * entropy.sum(), A, retain_graph=True)
    (of_sum,) = torch.autograd.grad(logp.sum() + 0.1 * entropy.sum(), sum_)
    assert_rounded(made, 2.0 * B.detach().T @ of_sum, 100, of=made.abs().max())


def gradient_of_fsdp2(rank):
    """Of a head that two ranks share, whose search is over both."""
    hidden, weight, labels = small_head()
    model = torch.nn.Linear(*weight.shape[::-1], bias=False)
    with torch.no_grad():
        model.weight.copy_(weight)
    fully_shard(model)
    given = hidden, model.weight, labels, None, torch.linspace(-1.0, 1.0, len(labels))
    options = dict(gradient_samples=16, process_group=torch.distributed.group.WORLD)
    bapo_linear_loss(*given, **options).loss.backward()
    return model.weight.grad.full_tensor()


@pytest.mark.xdist_group("world")
def test_fsdp2(worlds):
    """The same tokens on both ranks, so that the mean of their gradients is that of one."""
    hidden, weight, labels = small_head()
    weight.requires_grad_()
    A = torch.linspace(-1.0, 1.0, len(labels))
    bapo_linear_loss(hidden, weight, labels, None, A, gradient_samples=16).loss.backward()
    for got in worlds(2).run(gradient_of_fsdp2):
        assert_same(got, weight.grad)


def test_no_rows():
    hidden, weight, labels = small_head()
    for none in (labels[:0], torch.full_like(labels, -100)):
        made = sampled_gradients(hidden[: len(none)], weight, none)
        assert not any(gradient.any() for gradient in made)


def test_entries_and_noise():
    """As they are defined: the entries of all rows, and the sum of g^2*t*T."""
    hidden, weight, labels = small_head()
    weight.requires_grad_()
    A, C = torch.linspace(-1.0, 1.0, len(labels)), 16
    options = dict(gradient_samples=C, bounds=(0.8, 1.2))
    out = bapo_linear_loss(hidden, weight, labels, None, A, **options)
    log_p = (hidden @ weight.detach().T).double().log_softmax(1)
    p = log_p.exp()
    p_label = p.gather(1, labels[:, None])
    t = (1.0 - p_label) / C
    small = torch.where(p < t, p, 0.0).scatter(1, labels[:, None], 0.0).sum(1)
    noise = ((A / len(A)) ** 2 * t[:, 0] * small).sum()
    assert_rounded(out.metrics["gradient_noise"], noise, 100)
    assert out.metrics["gradient_entries"] <= len(A) * (C + 1)
    assert out.metrics["gradient_entries"] > len(A)
    twice = mean_metrics([out, out])
    assert twice["gradient_entries"] == 2 * out.metrics["gradient_entries"]


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "2", 65_537])
def test_errors(wrong):
    hidden, weight, labels = small_head()
    rule = r"gradient_samples must be None or an integer from 1 to 65,536, got"
    with pytest.raises(ValueError, match=rule):
        linear_log_probs(hidden, weight, labels, gradient_samples=wrong)
    loss = BAPOLinearLoss(gradient_samples=wrong)
    with pytest.raises(ValueError, match=rule):
        loss(hidden, weight, labels, None, torch.ones(12))


PARTS = [slice(0, 150), slice(150, 150), slice(150, 400)]  # of three ranks, one of them empty


def gradients_of_rank(rank, several):
    """Of this rank's rows of the head, and of all hidden states."""
    hidden, weight, labels = small_head()
    if several:
        labels = torch.stack(
            [labels, (labels + 200) % 400, labels, torch.full_like(labels, 400)], 1
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampled, "row_seeds", lambda _, labels: of_labels_alone(labels))
        options = dict(vocab_group=torch.distributed.group.WORLD, chunk_tokens=5)
        given = hidden, weight[PARTS[rank]], labels
        return given, sampled_gradients(*given, **options)


@pytest.mark.xdist_group("world")
@pytest.mark.parametrize("several", [False, True])
def test_ranks_draw_among_their_columns(worlds, several):
    """With t and seeds of whole rows and ids of the whole vocabulary; each shares what is its own.

    Above t, where nothing is drawn, entries are those of the whole call.
    """
    answers = worlds(3).run(gradients_of_rank, several)
    (hidden, _, labels), _ = answers[0]
    weight = torch.cat([given[1] for given, _ in answers]).double()
    log_p = (hidden.double() @ weight.T).log_softmax(1)
    p, columns = log_p.exp(), labels.view(len(labels), -1)
    known = columns < 400
    counts = torch.zeros_like(p).scatter_add_(1, columns.clamp(max=399), known.double())
    beside = torch.where(counts > 0, 0.0, p)
    t = beside.sum(1, keepdim=True) / 16
    u = uniforms(of_labels_alone(labels)[:, None], torch.arange(400))
    small = (beside < t) & (counts == 0)
    drawn, log_ratio = small & (beside >= t * u), log_p - (p * log_p).sum(1, keepdim=True)
    entries = torch.where(small, 0.0, torch.stack([p, p * log_ratio]))
    for part in PARTS:
        mine, here = drawn[:, part], small[:, part]
        n = mine.sum(1, keepdim=True).clamp(min=1)
        share = torch.where(here, p[:, part], 0.0).sum(1, keepdim=True) / n
        exact = torch.where(here, (p * log_ratio)[:, part], 0.0).sum(1, keepdim=True)
        shown = torch.where(mine, share * log_ratio[:, part], 0.0)
        shown = torch.where(mine, shown + (exact - shown.sum(1, keepdim=True)) / n, 0.0)
        entries[:, :, part] += torch.stack([torch.where(mine, share, 0.0), shown])
    of_labels = known.sum(1, keepdim=True)
    dlogits = counts - of_labels * entries[0] - 0.1 * entries[1]
    exact = dlogits @ weight
    for _, (dhidden, _) in answers:
        assert_rounded(dhidden, exact, 100, of=exact.abs().max())
    whole, exact = torch.cat([dweight for _, (_, dweight) in answers]), dlogits.T @ hidden.double()
    assert_rounded(whole, exact, 100, of=exact.abs().max())
