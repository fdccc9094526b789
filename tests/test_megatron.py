"""The head inside the installed megatron-core: CPU processes, gloo."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from helpers import EPS, assert_within_budget, needs_native
from torch.overrides import TorchFunctionMode
from world import world

pytest.importorskip("megatron.core", reason="needs megatron-core")

from bapo_kernels import BAPOConfig, bapo_linear_loss, linear_log_probs, reference

pytestmark = [
    needs_native,
    pytest.mark.xdist_group("megatron"),
    pytest.mark.filterwarnings("ignore"),
]
B, S, V, H = 3, 8, 64, 32
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


@contextlib.contextmanager
def layout(tensor=1, pipeline=1):
    """Megatron's process groups, without a GPU."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    parallel_state.initialize_model_parallel(tensor, pipeline)
    # Its tracker for inference keeps no state of a GPU's generator.
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    with pytest.MonkeyPatch.context() as patch, _ForCuda():
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        yield
    parallel_state.destroy_model_parallel()


def model_of(tied=False, dtype=torch.float32, first=True, last=True, **options):
    """A tiny model, with the same parameters in every layout."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    given = dict(
        num_layers=2,
        hidden_size=H,
        num_attention_heads=4,
        use_cpu_initialization=True,
        init_method_std=0.2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        pipeline_dtype=torch.float32,
    )
    config = TransformerConfig(**given | options)
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    layers = config.num_layers // config.pipeline_model_parallel_size
    torch.manual_seed(0)
    model = GPTModel(
        config,
        TransformerBlockSubmodules([layer] * layers, Norm),
        V,
        S,
        share_embeddings_and_output_weights=tied,
        pre_process=first,
        post_process=last,
    )
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


def of_logits(model, inputs, arguments):
    """The loss of the reference, of the whole logits in float64."""
    return reference.bapo_loss(model(*inputs).double(), *arguments, config=CONFIG)


def of_head(model, inputs, arguments):
    from bapo_kernels.integrations.megatron import FusedHead

    return FusedHead(bapo_linear_loss, *arguments, config=CONFIG).forward(model, *inputs)


def of_log_probs(model, inputs, arguments):
    """The same loss, by the log-probs of the head."""
    from bapo_kernels import bapo_loss_from_log_probs
    from bapo_kernels.integrations.megatron import FusedHead

    labels, *others = arguments
    log_probs, _ = FusedHead(linear_log_probs, labels).forward(model, *inputs)
    return bapo_loss_from_log_probs(log_probs, *others, config=CONFIG)


def train(model, output):
    """Losses of three optimizer steps, and the parameters."""
    inputs, arguments = batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        out = output(model, inputs, arguments)
        out.loss.backward()
        for parameter in model.parameters():
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad)  # as Megatron's finalize_model_grads does
        optimizer.step()
        losses.append(out.loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def plain_rank(rank, tied):
    """Plain layers on one rank, in float64 and float32."""
    with layout():
        return [
            train(model_of(tied, dtype), of_logits) for dtype in (torch.float64, torch.float32)
        ]


def tensor_rank(rank, tied, sequence_parallel, output):
    with layout(tensor=2):
        model = model_of(tied, tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
        dimension = {
            name: parameter.partition_dim
            for name, parameter in model.named_parameters()
            if getattr(parameter, "tensor_model_parallel", False)
        }
        return *train(model, output), dimension


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with world(2, tmp_path_factory.mktemp("megatron")) as two:
        yield two


@pytest.mark.parametrize("output", [of_head, of_log_probs])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_three_steps(ranks, tied, sequence_parallel, output):
    truth, plain = ranks.run(plain_rank, tied)[0]
    results = ranks.run(tensor_rank, tied, sequence_parallel, output)
    for losses, _, _ in results:
        assert losses == pytest.approx(truth[0], rel=1e-5, abs=1e-6)
    assert max(abs(a - b) for a, b in itertools.pairwise(truth[0])) > 1e-3
    dimension = results[0][2]
    assert "embedding.word_embeddings.weight" in dimension
    assert ("output_layer.weight" in dimension) != tied
    for name, expected in truth[1].items():
        shards = [parameters[name] for _, parameters, _ in results]
        if name in dimension:
            shards = [torch.cat(shards, dimension[name])]
        for whole in shards:
            # Three steps of two ranks round a few times where one process does once.
            inherited = 16 * EPS[torch.float32] * expected.abs().max().item()
            assert_within_budget(name, whole, plain[1][name], expected, inherited=inherited)
