"""The head inside the installed megatron-core: CPU processes, gloo."""
# ruff: noqa: E402  # megatron-core is imported after a check that it is installed

import contextlib
import functools
import math
from operator import attrgetter

import pytest
import torch
import torch.distributed as dist
from accuracy import assert_same
from helpers import EPS, assert_within_budget, needs_native
from packaging.version import Version
from parity import assert_gradients
from torch.overrides import TorchFunctionMode
from world import world

megatron = pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core import distributed, parallel_state
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from bapo_kernels import (
    BAPOConfig,
    bapo_linear_loss,
    bapo_loss,
    bapo_loss_from_log_probs,
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
TEMPERATURE = 0.7
HAS_HOOK = Version(megatron.__version__) >= Version("0.18")
CONFIG = BAPOConfig.paper(target=0.6)


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


@functools.lru_cache(1)
def make_groups(tensor):
    """Megatron's process groups, unless they are those of the call before."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor, distributed_timeout_minutes=1)


@contextlib.contextmanager
def layout(tensor=1):
    """Megatron's process groups, without a GPU."""
    make_groups(tensor)
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
        num_layers=2, hidden_size=H, num_attention_heads=4, use_cpu_initialization=True,
        init_method_std=0.2, attention_dropout=0.0, hidden_dropout=0.0, bias_dropout_fusion=False,
        bias_activation_fusion=False, gradient_accumulation_fusion=False,
    )  # fmt: skip
    return TransformerConfig(**given | options)


def layer_of_gpt():
    """Megatron's layer, with this file's stand-in for a class that needs a GPU."""
    layer = gpt_layer_specs.get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    return layer


def model_of(tied=False, dtype=torch.float32, last=True, fusion=False, **options):
    """A tiny model, with the same parameters in every layout."""
    config, further = config_of(**options), None
    block = TransformerBlockSubmodules([layer_of_gpt()] * config.num_layers, Norm)
    if config.mtp_num_layers:
        make = gpt_layer_specs.get_gpt_mtp_block_spec
        further = make(config, block, use_transformer_engine=False)
        norms = further.layer_specs[0].submodules
        norms.enorm = norms.hnorm = norms.layer_norm = Norm
    torch.manual_seed(0)
    stage = dict(post_process=last, mtp_block_spec=further)
    model = GPTModel(config, block, V, S, share_embeddings_and_output_weights=tied, **stage)
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


# Loss of the batch, by the logits in float64, by megatron-core's cross entropy, and by the head.


def by_logits(model, inputs, arguments):
    return reference.bapo_loss(model(*inputs).double(), *arguments, config=CONFIG).loss


def of_cross_entropy(model, inputs, arguments):
    labels, *others = arguments
    log_probs = -model(*inputs, labels=labels)
    return bapo_loss_from_log_probs(log_probs, *others, config=CONFIG).loss


def by_head(model, inputs, arguments, **others):
    head = FusedHead(bapo_linear_loss, *arguments, config=CONFIG)
    return head.forward(model, *inputs, **others).loss


def of_head_with_labels(model, inputs, arguments):
    return by_head(model, inputs, arguments, labels=arguments[0])


def found(model, output):
    """The loss and the gradients of parameters by name, summed over ranks as Megatron does."""
    loss = output(model, *batch())
    loss.backward()
    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad)  # as finalize_model_grads does
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@functools.cache
def plain_rank(rank, tied):
    """Found in plain layers on one rank: in float32 in some orders, and in float64."""
    with layout():
        same = in_some_orders(lambda: found(model_of(tied), by_logits))
        return same, found(model_of(tied, torch.float64), by_logits)


def layout_rank(rank, **options):
    """What is found, and the dimension of the parameters that are shards."""
    with layout(tensor=2):
        model = model_of(**options)
        dimension = {
            name: parameter.partition_dim
            for name, parameter in model.named_parameters()
            if getattr(parameter, "tensor_model_parallel", False)
        }
        return *found(model, by_head), dimension


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with world(2, tmp_path_factory.mktemp("megatron")) as two:
        yield two


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallelism(ranks, sequence_parallel, tied):
    """Loss and gradients of each rank, of which some are shards along a dimension."""
    results = ranks.run(layout_rank, sequence_parallel=sequence_parallel, tied=tied)
    (same, truth), dimension = ranks.run(plain_rank, tied)[0], results[0][2]
    assert "embedding.word_embeddings.weight" in dimension
    assert ("output_layer.weight" in dimension) != tied
    shards = {
        key: torch.cat([gradients[key] for _, gradients, _ in results], at)
        for key, at in dimension.items()
    }
    _, (_, old, advantages, _) = batch()
    inherited = largest(old) * largest(advantages)  # a loss is a mean of these products
    for loss, gradients, _ in results:
        assert_within_budget("loss", loss, [loss for loss, _ in same], truth[0], inherited)
        plain = [gradients for _, gradients in same]
        assert_gradients(gradients | shards, plain, truth[1], largest(old))


def gradients_rank(rank, tied, wrapped, dtype, fusion):
    """Of the head's weight after two micro-batches, which Megatron's DDP adds if there is one."""
    inputs, arguments = batch()
    inputs = [*(x[:1] for x in inputs[:2]), inputs[2]]
    # Labels [S], as of packed sequences.
    head = FusedHead(bapo_linear_loss, *(x[0] for x in arguments), config=CONFIG)
    with layout(tensor=2):
        model = model_of(tied, dtype, fusion=fusion, bf16=dtype == torch.bfloat16)
        whole = Float16Module(model.config, model) if model.config.bf16 else model
        if wrapped:
            options = distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True)
            whole = distributed.DistributedDataParallel(model.config, options, whole)
        for _ in range(2):
            out = head.forward(whole, *inputs)
            out.loss.backward()
        assert (out.log_probs.shape, out.log_probs.dtype) == ((S,), torch.float32)
        weight = (model.embedding.word_embeddings if tied else model.output_layer).weight
        if not wrapped:
            return weight.grad, None
        assert weight.grad is None
        return weight.main_grad.clone(), weight.grad_added_to_main_grad


WRAPPED = [
    (False, True, torch.float32),
    (True, True, torch.float32),
    (False, False, torch.float32),
    # Float16Module would return a plain tuple; the head returns what its function does.
    (False, True, torch.bfloat16),
]


@pytest.mark.parametrize(("tied", "wrapped", "dtype"), WRAPPED)
def test_gradient_accumulation_fusion(ranks, tied, wrapped, dtype):
    """The gradient is added to ``main_grad`` once, by the head or by DDP; else to ``grad``."""
    run = functools.partial(ranks.run, gradients_rank, tied, wrapped, dtype)
    for (expected, added), (got, added_by_head) in zip(run(False), run(True), strict=True):
        assert (added, added_by_head) == ((False, True) if wrapped else (None, None))
        assert expected.any(1).all()
        # Of two micro-batches, and of both uses of a tied weight: three additions, in any order.
        inherited = 3 * EPS[torch.float32] * largest(expected)
        assert_within_budget("gradient", got, expected, expected, inherited=inherited)


def pipeline_rank(rank):
    """A stage without a head, and the same stage of Megatron."""
    with layout():
        model, (inputs, arguments) = model_of(last=False), batch()
        return FusedHead(bapo_linear_loss, *arguments).forward(model, *inputs), model(*inputs)


def test_first_stage_of_a_pipeline(ranks):
    """It has no head and passes hidden states on."""
    for got, expected in ranks.run(pipeline_rank):
        assert_same(got, expected)


class Biased(torch.nn.Module):
    """Hidden states and an output layer with a bias, which no ``GPTModel`` has."""

    post_process = True

    def __init__(self, skip_bias_add):
        super().__init__()
        self.config, rank = config_of(), dist.get_rank()
        options = dict(init_method=torch.nn.init.normal_, skip_bias_add=skip_bias_add)
        self.output_layer = ColumnParallelLinear(H, V, config=self.config, **options)
        self.output_layer.bias.data = torch.linspace(-1, 1, V).chunk(2)[rank].clone()
        self.output_layer.bias.requires_grad_(not skip_bias_add)
        self.hidden = torch.nn.Parameter(torch.linspace(-1, 1, S * B * H).sin().view(S, B, H))

    def forward(self, tokens, positions, causal, labels=None):
        logits, _ = self.output_layer(self.hidden)
        return labels is None or vocab_parallel_cross_entropy(logits, labels.T.contiguous()).T


def hybrid_of(**options):
    """megatron-core's successor of the ``GPTModel``, which has no ``output_processor``."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.spec_utils import ModuleSpec

    config = config_of(**options)
    layers = HybridStackSubmodules(attention_layer=layer_of_gpt())
    stack = ModuleSpec(HybridStack, {"post_layer_norm": False}, layers)
    torch.manual_seed(0)
    pattern = dict(hybrid_layer_pattern="**", position_embedding_type="learned_absolute")
    return HybridModel(config, stack, V, S, **pattern)


def both_heads_rank(rank, make, output, **options):
    """Gradients with Megatron's head, in some orders and in float64, and with this one."""

    def run(loss_of, dtype=torch.float32):
        model = make(**options).to(dtype)
        loss_of(model, *batch()).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    with layout(tensor=2):
        theirs = in_some_orders(functools.partial(run, of_cross_entropy))
        return run(output), theirs, run(of_cross_entropy, torch.float64)


SEQUENCE = dict(sequence_parallel=True)
FURTHER = SEQUENCE | dict(mtp_num_layers=1)
MODELS = {
    "bias": (Biased, by_head, dict(skip_bias_add=False)),
    "skipped bias": (Biased, by_head, dict(skip_bias_add=True)),
    # The loss of the second head, for the token after next, stays Megatron's.
    "multi-token prediction": (model_of, of_head_with_labels, FURTHER),
    "multi-token prediction, tied": (model_of, of_head_with_labels, FURTHER | dict(tied=True)),
    "hybrid": (hybrid_of, by_head, SEQUENCE),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_and_megatrons_cross_entropy(ranks, name):
    """The truth is Megatron's too, whose cross entropy takes float32."""
    if not HAS_HOOK and "bias" not in name:
        pytest.skip("needs megatron-core 0.18")
    make, output, options = MODELS[name]
    for got, same, truth in ranks.run(both_heads_rank, make, output, **options):
        assert all(got[key].any() for key in got if "eh_proj" in key or "output_layer" in key)
        assert_gradients(got, same, truth, math.log(V))


class Values(torch.nn.Module):
    """In place of attention over packed sequences, for which Megatron needs a GPU."""

    def forward(self, query, key, value, *_, **__):
        return value.flatten(1)


def verl_rank(rank):
    """Log-probs, entropies and gradients by verl's own head of logits and by this one."""
    from verl.models.mcore import model_forward, model_forward_fused
    from verl.utils.megatron import tensor_parallel

    from bapo_kernels.integrations import verl_megatron  # noqa: F401  # replaces verl's

    def label_probs(logits, label):
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
            output = forward(model, tokens, {}, label_probs, {"label": tokens.clone()})
        log_probs, entropy = (output[name].values() for name in ("log_probs", "entropy"))
        (log_probs.square() + 0.3 * entropy).sum().backward()
        made = {"log_probs": log_probs.detach(), "entropy": entropy.detach()}
        return made | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    rows = [row[: S - 3 * b] for b, row in enumerate(batch()[0][0])]
    tokens = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    with layout(tensor=2), torch.compiler.set_stance("force_eager"):
        theirs = in_some_orders(functools.partial(run, False))
        return run(True), theirs, run(False, torch.float64)


@pytest.mark.skipif(not HAS_HOOK, reason="needs megatron-core 0.18")
def test_verls_engine(ranks):
    """verl's own functions for packed sequences, before and behind the head."""
    pytest.importorskip("verl", reason="needs verl")
    for got, same, truth in ranks.run(verl_rank):
        assert len(got["log_probs"]) == 8 + 5 + 2
        assert got["output_layer.weight"].any(1).all()
        assert_gradients(got, same, truth, math.log(V))


def test_a_function_without_a_head_is_refused():
    rule = "function must be bapo_linear_loss, linear_log_probs, .*, got bapo_loss"
    with pytest.raises(ValueError, match=rule):
        FusedHead(bapo_loss, torch.zeros(2, dtype=torch.long))


HOOK = "be None for a model without output_processor, got"
UNSUPPORTED = {  # what has the attribute, its value, and the message
    "output_layer": ("output_layer", None, "be a ColumnParallelLinear with an unchanged forward"),
    "output_layer.weight": ("output_layer.weight", True, "not be managed by Megatron-FSDP"),
    "use_mup": ("config", True, "be False, got True"),
    "defer_embedding_wgrad_compute": ("config", True, "be False, got True"),
    "disable_grad_reduce": ("output_layer", True, "be False, got True"),
    "gtp_remat_size": ("output_layer", 2, "be 1, got 2"),
    "mtp_num_layers": ("config", 1, f"{HOOK} 1"),
    "inference_context": (None, None, "be None, got object"),
    "labels": (None, None, f"{HOOK} a tensor"),
}
ATTRIBUTES = {"output_layer": "forward", "output_layer.weight": "__fsdp_param__"}


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
