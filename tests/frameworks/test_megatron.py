"""The head inside the installed megatron-core: CPU processes, gloo."""
# ruff: noqa: E402  # megatron-core is imported after a check that it is installed

import contextlib
import functools
import itertools
import math
from collections import Counter
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import EPS, assert_within_budget, needs_native
from packaging.version import Version
from parity import assert_gradient, assert_gradients, assert_trained
from torch.distributed.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from world import world

megatron = pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core import distributed, parallel_state
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils import get_batch_on_this_cp_rank

from bapo_kernels import (
    BAPOConfig,
    bapo_linear_loss,
    bapo_loss,
    bapo_loss_from_log_probs,
    linear_log_probs,
    reference,
)
from bapo_kernels.integrations.megatron import FusedHead
from bapo_kernels.tools.budget import in_some_orders, largest

pytestmark = [
    needs_native,
    pytest.mark.xdist_group("megatron"),
    pytest.mark.filterwarnings("ignore"),
]
B, S, V, H = 3, 8, 64, 32
STEPS, LEARNING_RATE, TEMPERATURE = 3, 0.2, 0.7
HAS_HOOK = Version(megatron.__version__) >= Version("0.18")
needs_hook = pytest.mark.skipif(not HAS_HOOK, reason="needs megatron-core 0.18")
CONFIG = BAPOConfig.paper(target=0.6)
SUMMED = BAPOConfig.paper(target=0.6, loss_agg_mode="token-sum")


class _ForCuda(TorchFunctionMode):
    """Makes on the CPU what megatron-core asks to make on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return args[0] if function is torch.Tensor.cuda else function(*args, **kwargs)


class Norm(torch.nn.LayerNorm):
    """What a layer has from Apex or Transformer Engine, which need a GPU."""

    def __init__(self, config, hidden_size, eps, **_):
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


class Attention(torch.nn.Module):
    """Attention over the sequences of both context-parallel ranks; Megatron's needs a GPU."""

    def __init__(self, *_, **__):
        super().__init__()

    def forward(self, query, key, value, attention_mask, **_):
        group = parallel_state.get_context_parallel_group()

        def whole(x):
            chunks = torch.cat(functional.all_gather(x, group)).chunk(4)
            return torch.cat([chunks[i] for i in (0, 2, 3, 1)])  # rank 0 has the outer two

        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, whole(key), whole(value)))
        found = scaled_dot_product_attention(query, key, value, ~attention_mask)
        return found.permute(2, 0, 1, 3).flatten(2)


@functools.lru_cache(1)
def make_groups(tensor, pipeline, context):
    """Megatron's process groups, unless they are those of the call before."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor, pipeline, context_parallel_size=context, distributed_timeout_minutes=1
    )


@contextlib.contextmanager
def layout(tensor=1, pipeline=1, context=1):
    """Megatron's process groups, without a GPU."""
    make_groups(tensor, pipeline, context)
    # Its tracker for inference keeps no state of a GPU's generator.
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    with pytest.MonkeyPatch.context() as patch, _ForCuda():
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        for name in ("synchronize", "current_stream"):
            patch.setattr(torch.cuda, name, lambda *_: None)
        yield


def config_of(**options):
    """Of a tiny model in the present layout."""
    given = dict(
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        num_layers=2, hidden_size=H, num_attention_heads=4, pipeline_dtype=torch.float32,
        use_cpu_initialization=True, init_method_std=0.2, attention_dropout=0.0, hidden_dropout=0.0,
        bias_dropout_fusion=False, bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
    )  # fmt: skip
    return TransformerConfig(**given | options)


def layer_of(config):
    """Megatron's layer, with this file's stand-ins for classes that need a GPU."""
    layer = gpt_layer_specs.get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if config.context_parallel_size > 1:
        layer.submodules.self_attention.submodules.core_attention = Attention
    return layer


def model_of(tied=False, dtype=torch.float32, first=True, last=True, fusion=False, **options):
    """A tiny model, with the same parameters in every layout."""
    config = config_of(**options)
    layers = config.num_layers // config.pipeline_model_parallel_size
    block, further = TransformerBlockSubmodules([layer_of(config)] * layers, Norm), None
    if config.mtp_num_layers:
        make = gpt_layer_specs.get_gpt_mtp_block_spec
        further = make(config, block, use_transformer_engine=False)
        of_further = further.layer_specs[0].submodules
        of_further.enorm = of_further.hnorm = of_further.layer_norm = Norm
    torch.manual_seed(0)
    of_stage = dict(pre_process=first, post_process=last, mtp_block_spec=further)
    model = GPTModel(config, block, V, S, share_embeddings_and_output_weights=tied, **of_stage)
    if last:
        model.output_layer.gradient_accumulation_fusion = fusion
    return model.to(dtype)


def batch():
    """Tokens and their positions; labels, old log-probs, advantages and mask."""
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, V, (B, S + 1), generator=g)
    advantages = torch.randn(B, S, generator=g)
    mask = torch.rand(B, S, generator=g) < 0.8
    old = -4 + 0.5 * torch.randn(B, S, generator=g)
    positions = torch.arange(S).expand(B, S)
    causal = torch.ones(S, S, dtype=torch.bool).triu(1)[None, None]
    return (tokens[:, :-1], positions, causal), (tokens[:, 1:], old, advantages, mask)


def micro_batches():
    (tokens, positions, causal), arguments = batch()
    return [
        ((tokens[b : b + 1], positions[b : b + 1], causal), [x[b : b + 1] for x in arguments])
        for b in range(B)
    ]


def counted_tokens():
    return int(batch()[1][3].sum())


def in_ddp(model, inner=None):
    config = distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return distributed.DistributedDataParallel(model.config, config, inner or model)


def of_logits(model, inputs, arguments, config=CONFIG):
    """The loss of the reference, of the whole logits in float64."""
    return reference.bapo_loss(model(*inputs).double(), *arguments, config=config)


def of_micro_batches(model, *_):
    """The mean over the tokens of all micro-batches."""
    losses = [of_logits(model, *each, SUMMED).loss for each in micro_batches()]
    return SimpleNamespace(loss=sum(losses) / counted_tokens())


def of_head(model, inputs, arguments, **others):
    head = FusedHead(bapo_linear_loss, *arguments, config=CONFIG)
    return head.forward(model, *inputs, **others)


def of_head_with_labels(model, inputs, arguments):
    return of_head(model, inputs, arguments, labels=arguments[0])


def of_cross_entropy(model, inputs, arguments):
    """The same loss by the log-probs of megatron-core's vocab_parallel_cross_entropy."""
    labels, *others = arguments
    return bapo_loss_from_log_probs(-model(*inputs, labels=labels), *others, config=CONFIG)


def train(model, output, momentum=0.9):
    """Losses of the optimizer steps, and the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=momentum)
    losses, context = [], model.config.context_parallel_size > 1
    for _ in range(STEPS):
        optimizer.zero_grad()
        out = output(model, *batch())
        out.loss.backward()
        for parameter in model.parameters():
            if getattr(parameter, "sequence_parallel", False) or context:
                dist.all_reduce(parameter.grad)  # as Megatron's finalize_model_grads does
        if context:
            dist.all_reduce(out.loss.detach())
        optimizer.step()
        losses.append(out.loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@functools.cache
def plain_rank(rank, tied=False, output=of_logits, momentum=0.9):
    """Of plain layers on one rank: in float64, in float32 in some orders, and before."""

    def run(dtype):
        return train(model_of(tied, dtype), output, momentum)

    with layout():
        same = in_some_orders(functools.partial(run, torch.float32))
        return run(torch.float64), same, dict(model_of(tied, torch.float64).named_parameters())


def assert_same_training(losses, parameters, truth, same, before):
    """A loss is a mean of ratios times advantages."""
    _, (_, old, advantages, _) = batch()
    got, *others = (torch.tensor(made) for made in (losses, *(of_one[0] for of_one in same)))
    exact = torch.tensor(truth[0], dtype=torch.float64)
    assert_within_budget("losses", got, others, exact, largest(old) * largest(advantages))
    of_orders = [made for _, made in same]
    assert_trained(parameters, of_orders, truth[1], before, STEPS, largest(old))


def layout_rank(rank, output, tensor=1, context=1, **options):
    """Losses and parameters, and the dimension of those that are shards."""
    with layout(tensor, context=context):
        model = model_of(**options)
        dimension = {
            name: parameter.partition_dim
            for name, parameter in model.named_parameters()
            if tensor > 1 and getattr(parameter, "tensor_model_parallel", False)
        }
        return *train(model, output), dimension


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with world(2, tmp_path_factory.mktemp("megatron")) as two:
        yield two


def of_part(model, inputs, arguments):
    """The loss of this context-parallel rank's part of the sequences."""
    names = "tokens", "positions", "attention_mask", "labels", "old", "advantages", "mask"
    whole = {name: x.contiguous() for name, x in zip(names, inputs + arguments, strict=True)}
    group = parallel_state.get_context_parallel_group()
    one_size = {"is_hybrid_cp": False} if HAS_HOOK else {}
    part = get_batch_on_this_cp_rank(whole, **one_size, cp_group=group)
    tokens, positions, causal, *arguments = part.values()
    counts = dict(process_group=group, batch_num_tokens=counted_tokens())
    head = FusedHead(bapo_linear_loss, *arguments, config=CONFIG, **counts)
    return head.forward(model, tokens, positions, causal)


LAYOUTS = {
    "tensor": (of_head, dict(tensor=2)),
    "tensor, tied": (of_head, dict(tensor=2, tied=True)),
    "sequence": (of_head, dict(tensor=2, sequence_parallel=True)),
    "sequence, tied": (of_head, dict(tensor=2, sequence_parallel=True, tied=True)),
    # Megatron's function divides the sequences: rank 0 has their outer two quarters.
    "context": (of_part, dict(context=2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_three_steps(ranks, name):
    """Losses and parameters of each rank, of which some are shards along a dimension."""
    output, options = LAYOUTS[name]
    tied, results = "tied" in name, ranks.run(layout_rank, output, **options)
    truth, *plain = ranks.run(plain_rank, tied)[0]
    dimension = results[0][2]
    assert ("embedding.word_embeddings.weight" in dimension) == (name != "context")
    assert ("output_layer.weight" in dimension) == (name != "context" and not tied)
    assert max(abs(a - b) for a, b in itertools.pairwise(truth[0])) > 1e-3
    shards = {
        key: torch.cat([parameters[key] for _, parameters, _ in results], at)
        for key, at in dimension.items()
    }
    for losses, parameters, _ in results:
        assert_same_training(losses, parameters | shards, truth, *plain)


class Collectives(TorchDispatchMode):
    """Name and number of elements of every collective in forward and backward."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            name = function._schema.name.removeprefix("c10d::").strip("_")
            self.made.append((name, max(x.numel() for x in tensors)))
        return function(*args, **(kwargs or {}))


def collectives_rank(rank, sequence_parallel):
    with layout(tensor=2):
        found = []
        for output in (of_cross_entropy, of_head):
            model = model_of(sequence_parallel=sequence_parallel)
            output(model, *batch())  # the first call compares the ranks
            with Collectives() as collectives:
                output(model, *batch()).loss.backward()
            found.append(Counter(collectives.made))
        return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_collectives_of_a_step(ranks, sequence_parallel):
    """Those of the layers are the same, so what differs is the head's."""
    mask = batch()[1][3]
    # Megatron gathers the hidden states a second time and scatters their summed gradient.
    again = [("allgather_base", B * S * H), ("reduce_scatter_base", B * S * H)]
    of_rows = [("allreduce", B * S)] * 3  # maximum, logit of the label, sum
    sizes, statistics = ("allgather_base", 2), ("allgather_base", 2 * 4 * int(mask.sum()))
    gradient = ("allreduce", B * S * H)
    for theirs, ours in ranks.run(collectives_rank, sequence_parallel):
        assert ours - theirs == Counter([sizes, statistics] + [gradient] * sequence_parallel)
        assert theirs - ours == Counter(of_rows + again * sequence_parallel)
        assert ours.total() < theirs.total()


def gradients_rank(rank, tied, wrapped, fusion):
    """Of the head's weight after two micro-batches, which Megatron's DDP adds if there is one."""
    with layout(tensor=2):
        model = model_of(tied, fusion=fusion)
        outermost = in_ddp(model) if wrapped else model
        for _ in range(2):
            of_head(outermost, *batch()).loss.backward()
        weight = (model.embedding.word_embeddings if tied else model.output_layer).weight
        if not wrapped:
            return weight.grad, None
        assert weight.grad is None
        return weight.main_grad.clone(), weight.grad_added_to_main_grad


@pytest.mark.parametrize(("tied", "wrapped"), [(False, True), (True, True), (False, False)])
def test_gradient_accumulation_fusion(ranks, tied, wrapped):
    """The gradient is added to ``main_grad`` once, by the head or by DDP; else to ``grad``."""
    without, fused = (ranks.run(gradients_rank, tied, wrapped, fusion) for fusion in (False, True))
    for (expected, added), (got, added_by_head) in zip(without, fused, strict=True):
        assert (added, added_by_head) == ((False, True) if wrapped else (None, None))
        assert expected.any(1).all()
        # Of two micro-batches, and of both uses of a tied weight: three additions, in any order.
        inherited = 3 * EPS[torch.float32] * largest(expected)
        assert_within_budget("gradient", got, expected, expected, inherited=inherited)


def bfloat16_rank(rank):
    """Loss and gradient of one sequence with labels ``[S]``: alone, in Megatron's wrappers."""
    inputs, arguments = micro_batches()[0]
    head, found = FusedHead(bapo_linear_loss, *(x[0] for x in arguments), config=CONFIG), []
    with layout(tensor=2):
        for wrapped, fusion in ((False, False), (True, False), (True, True)):
            model = model_of(dtype=torch.bfloat16, fusion=fusion, bf16=True)
            whole = in_ddp(model, Float16Module(model.config, model)) if wrapped else model
            out = head.forward(whole, *inputs)
            out.loss.backward()
            assert (out.log_probs.shape, out.log_probs.dtype) == ((S,), torch.float32)
            weight = model.output_layer.weight
            assert weight.dtype == torch.bfloat16
            found.append((out.loss.detach(), weight.main_grad if wrapped else weight.grad.float()))
    return found


def test_bfloat16_in_megatrons_wrappers(ranks):
    """``Float16Module`` would return a plain tuple; the head returns what its function does."""
    for alone, *wrapped in ranks.run(bfloat16_rank):
        assert alone[1].any(1).all()
        for loss, main_grad in wrapped:
            assert torch.equal(loss, alone[0])
            assert torch.equal(main_grad, alone[1]), "rounded to bfloat16 in all"


def scheduled(model):
    """Steps of Megatron's schedule, a micro-batch for each sequence; losses, parameters."""

    def step(batches, model):
        (tokens, positions, causal), arguments = next(batches)
        head = FusedHead(bapo_linear_loss, *arguments, config=SUMMED)

        def loss_of(output):
            counted = arguments[3].sum().int()
            return output.loss, counted, {"loss": output.loss.detach().clone()}

        return head.forward(model, tokens, positions, causal), loss_of

    model.config.finalize_model_grads_func = distributed.finalize_model_grads
    run, losses = get_forward_backward_func(), []
    given = dict(forward_step_func=step, model=model, forward_only=False)
    sizes = dict(num_microbatches=B, seq_length=S, micro_batch_size=1)
    for _ in range(STEPS):
        model.zero_grad_buffer()
        found = run(data_iterator=iter(micro_batches()), **given, **sizes)
        losses.append(sum(logged["loss"].item() for logged in found) / counted_tokens())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LEARNING_RATE * parameter.main_grad
    return losses, {name: p.detach() for name, p in model.module.named_parameters()}


def pipeline_rank(rank):
    with layout(pipeline=2):
        of_stage = dict(first=rank == 0, last=rank == 1, pipeline_model_parallel_size=2)
        model, whole = model_of(**of_stage, calculate_per_token_loss=True), model_of().state_dict()
        own = {n: whole[n.replace("layers.0", f"layers.{rank}")] for n in model.state_dict()}
        model.load_state_dict(own)
        return scheduled(in_ddp(model))


def test_two_pipeline_stages(ranks):
    """Megatron's own schedule; the first stage has no head and passes hidden states on."""
    truth, *plain = ranks.run(plain_rank, output=of_micro_batches, momentum=0.0)[0]
    (none, first), (losses, last) = ranks.run(pipeline_rank)
    assert none == [0.0] * STEPS
    found = first | {name.replace("layers.0", "layers.1"): p for name, p in last.items()}
    assert_same_training(losses, found, truth, *plain)


def biased_rank(rank, skip_bias_add):
    """Log-probs with gradients, by a head with a bias and by Megatron's functions."""
    with layout(tensor=2):
        config = config_of()
        options = dict(init_method=torch.nn.init.normal_, skip_bias_add=skip_bias_add)
        layer = ColumnParallelLinear(H, V, config=config, **options)
        layer.bias.data = torch.linspace(-1, 1, V).chunk(2)[rank].clone()
        hidden = torch.linspace(-1, 1, S * B * H).sin().view(S, B, H).requires_grad_()
        _, (labels, _, advantages, _) = batch()
        of_model = dict(output_layer=layer, output_weight=None, config=config)
        leaves = [hidden, layer.weight, layer.bias][: 2 if skip_bias_add else 3]

        def of_megatron():
            logits, _ = layer(hidden)
            return found(-vocab_parallel_cross_entropy(logits, labels.T.contiguous()).T)

        def found(x):
            return [x.detach(), *torch.autograd.grad(x, leaves, advantages)]

        ours, _ = FusedHead(linear_log_probs, labels)(hidden_states=hidden, **of_model)
        weights = [leaf.detach() for leaf in leaves]
        return found(ours), in_some_orders(of_megatron), weights


@pytest.mark.parametrize("skip_bias_add", [False, True])
def test_bias_of_the_output_layer(ranks, skip_bias_add):
    results, (_, (labels, _, advantages, _)) = ranks.run(biased_rank, skip_bias_add), batch()
    (hidden, *of_first), (_, *of_second) = (leaves for *_, leaves in results)
    whole = [hidden, *(torch.cat(parts) for parts in zip(of_first, of_second, strict=True))]
    hidden, weight, *bias = leaves = [x.double().requires_grad_() for x in whole]
    given = hidden.transpose(0, 1), weight, labels
    log_probs, _ = reference.linear_log_probs(*given, bias=bias[0] if bias else None)
    truth = torch.autograd.grad(log_probs, leaves, advantages.double())
    for rank, (ours, theirs, _) in enumerate(results):
        of_rank = log_probs.detach(), truth[0], *(x.chunk(2)[rank] for x in truth[1:])
        numbers = list(zip(ours, zip(*theirs, strict=True), of_rank, strict=True))
        assert_within_budget("log_probs", *numbers[0])
        for of_leaf in numbers[1:]:
            assert_gradient("gradient", *of_leaf, largest(log_probs))


UNSUPPORTED = {  # what has the attribute, its value, and the message
    "output_layer": ("output_layer", None, "be a ColumnParallelLinear with an unchanged forward"),
    "output_layer.weight": ("output_layer.weight", True, "not be managed by Megatron-FSDP"),
    "use_mup": ("config", True, "be False, got True"),
    "defer_embedding_wgrad_compute": ("config", True, "be False, got True"),
    "disable_grad_reduce": ("output_layer", True, "be False, got True"),
    "gtp_remat_size": ("output_layer", 2, "be 1, got 2"),
    "mtp_num_layers": ("config", 1, "be None for a model without output_processor, got 1"),
    "inference_context": (None, None, "be None, got object"),
    "labels": (None, None, "be None for a model without output_processor, got a tensor"),
}
ATTRIBUTES = {"output_layer": "forward", "output_layer.weight": "__fsdp_param__"}


def test_a_function_without_a_head_is_refused():
    rule = "function must be bapo_linear_loss, linear_log_probs, .*, got bapo_loss"
    with pytest.raises(ValueError, match=rule):
        FusedHead(bapo_loss, torch.zeros(2, dtype=torch.long))


def unsupported_rank(rank, name):
    """For every way to give the model what is not supported."""
    owner, value, message = UNSUPPORTED[name]
    with layout():
        model, calls, context = model_of(), [((), {})], object()
        inputs, arguments = batch()
        if name == "inference_context":
            calls = [((), {name: context}), ((None, None, context), {})]
            calls.append(((), dict(inference_params=context)))  # deprecated
        elif name == "labels":
            calls = [((), {name: arguments[0]}), ((None, arguments[0]), {})]
        else:
            setattr(attrgetter(owner)(model), ATTRIBUTES.get(name, name), value)
        for further, keywords in calls:
            head = FusedHead(bapo_linear_loss, *arguments)
            with pytest.raises(ValueError, match=f"^{name} must {message}"):
                head.forward(model, *inputs, *further, **keywords)
            assert name == "output_layer" or "forward" not in vars(model.output_layer)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported(ranks, name):
    if HAS_HOOK and name in ("labels", "mtp_num_layers"):
        pytest.skip("supported by this megatron-core")
    ranks.run(unsupported_rank, name)


def hybrid_of(**options):
    """megatron-core's successor of the ``GPTModel``, which has no ``output_processor``."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.spec_utils import ModuleSpec

    config = config_of(**options)
    layers = HybridStackSubmodules(attention_layer=layer_of(config))
    stack = ModuleSpec(HybridStack, {"post_layer_norm": False}, layers)
    torch.manual_seed(0)
    pattern = dict(hybrid_layer_pattern="**", position_embedding_type="learned_absolute")
    return HybridModel(config, stack, V, S, **pattern)


def both_heads_rank(rank, model_of, output, **options):
    """Gradients with Megatron's head, in some orders and in float64, and with this one."""

    def run(of_output, dtype=torch.float32):
        model = model_of(sequence_parallel=True, **options).to(dtype)
        of_output(model, *batch()).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    with layout(tensor=2):
        theirs = in_some_orders(functools.partial(run, of_cross_entropy))
        return theirs, run(of_cross_entropy, torch.float64), run(output)


def assert_same_gradients(theirs, truth, ours):
    """The truth is Megatron's too, whose cross entropy takes float32."""
    assert_gradients(ours, theirs, truth, math.log(V))


@needs_hook
@pytest.mark.parametrize("tied", [False, True])
def test_multi_token_prediction(ranks, tied):
    """The loss of the second head, for the token after next, stays Megatron's."""
    options = dict(mtp_num_layers=1, tied=tied)
    for *theirs, ours in ranks.run(both_heads_rank, model_of, of_head_with_labels, **options):
        assert ours["mtp.layers.0.eh_proj.weight"].any()
        assert_same_gradients(*theirs, ours)


@needs_hook
def test_hybrid_model(ranks):
    for of_rank in ranks.run(both_heads_rank, hybrid_of, of_head):
        assert_same_gradients(*of_rank)


class Values(torch.nn.Module):
    """In place of attention over packed sequences, for which Megatron needs a GPU."""

    def forward(self, query, key, value, *_, **__):
        return value.flatten(1)


def verl_rank(rank):
    """Log-probs, entropies and gradients by verl's own head of logits and by this one."""
    from verl.models.mcore import model_forward, model_forward_fused
    from verl.utils.megatron import tensor_parallel

    from bapo_kernels.integrations import verl_megatron  # noqa: F401  # replaces verl's

    def of_logits(logits, label):
        scaled = logits / TEMPERATURE
        entropy = tensor_parallel.vocab_parallel_entropy(scaled.clone())
        log_probs = tensor_parallel.vocab_parallel_log_probs_from_logits(scaled, label)
        return {"log_probs": log_probs, "entropy": entropy}

    def run(fused, dtype=torch.float32):
        model = model_of(sequence_parallel=True, dtype=dtype)
        model.embedding.add_position_embedding = False
        for layer in model.decoder.layers:
            layer.self_attention.core_attention = Values()
        if fused:
            model_forward_fused.patch_fused_forward(model)
            forward = model_forward_fused.fused_forward_model_engine()
            output = forward(model, tokens, tokens.clone(), {}, TEMPERATURE, True, 0)
        else:
            forward = model_forward.gptmodel_forward_model_engine
            output = forward(model, tokens, {}, of_logits, {"label": tokens.clone()})
        log_probs, entropy = (output[name].values() for name in ("log_probs", "entropy"))
        (log_probs.square() + 0.3 * entropy).sum().backward()
        found = {"log_probs": log_probs.detach(), "entropy": entropy.detach()}
        return found | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    rows = [row[: S - 3 * b] for b, row in enumerate(batch()[0][0])]
    tokens = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    with layout(tensor=2), torch.compiler.set_stance("force_eager"):
        theirs = in_some_orders(functools.partial(run, False))
        return theirs, run(False, torch.float64), run(True)


@needs_hook
def test_verls_engine(ranks):
    """verl's own functions for packed sequences, before and behind the head."""
    pytest.importorskip("verl", reason="needs verl")
    for *theirs, ours in ranks.run(verl_rank):
        assert len(ours["log_probs"]) == 8 + 5 + 2
        assert ours["output_layer.weight"].any(1).all()
        assert_same_gradients(*theirs, ours)


def refused_rank(rank):
    from benchmarks import megatron_step
    from benchmarks.gate import WrongAnswerError

    with layout(tensor=2), pytest.MonkeyPatch.context() as patch:
        for name, right in dict(megatron_step.METHODS).items():
            assert megatron_step.measure(name, megatron_step.SMALL)["ms"] > 0
            wrong = lambda *arguments, of=right: 1.01 * of(*arguments)  # noqa: E731
            patch.setitem(megatron_step.METHODS, name, wrong)
            with pytest.raises(WrongAnswerError):
                megatron_step.measure(name, megatron_step.SMALL)


def test_the_benchmark_times_correct_methods(ranks):
    ranks.run(refused_rank)
