"""``LMHead`` against the logits of the models themselves."""

import copy
from functools import partial

import pytest
import torch
from accuracy import assert_same
from causal_lm import CausalLM, H, Logits, V, recipe
from helpers import EPS, assert_within_budget
from parity import assert_gradients

from bapo_kernels import BAPOConfig, linear_log_probs, reference
from bapo_kernels import lora as our_lora
from bapo_kernels.lm_head import LMHead
from bapo_kernels.lora import _Adapted
from bapo_kernels.tools.budget import in_some_orders, largest

transformers = pytest.importorskip("transformers")

TOKENS = torch.tensor([[3, 14, 15, 9], [5, 3, 5, 8]])

# Every family in transformers that changes the logits after its head, with the option that does it,
# and some that do not.
CAP = {"final_logit_softcapping": 1.5}
SCALE, DIVISOR = {"logit_scale": 0.3}, {"logits_scaling": 3.0}
FAMILIES = {
    **dict.fromkeys(("Cohere", "Cohere2", "Cohere2Moe"), SCALE),
    "FalconH1": {"lm_head_multiplier": 0.3},
    **dict.fromkeys(("Gemma2", "Gemma3", "Gemma3n", "Gemma4", "Gemma4Unified"), CAP),
    **dict.fromkeys(("Granite", "GraniteMoe", "GraniteMoeHybrid", "GraniteMoeShared"), DIVISOR),
    "HyperCLOVAX": DIVISOR,  # multiplies
    **dict.fromkeys(("NanoChat", "VaultGemma"), CAP),
    "RecurrentGemma": {"logits_soft_cap": 1.5},
    "xLSTM": {"output_logit_soft_cap": 1.5},
    "DeepseekV3": {},
    "GPT2LMHeadModel": {},
    "Qwen3": {},
    "GPTNeoX": {},  # the head is embed_out
    "Llama4": {},  # base_model is the model itself
    "OPT": {},  # the decoder is model.decoder
    "Phi": {},  # has a bias
    "Qwen2_5_VLForConditionalGeneration": {},
}
TEXT = dict(
    vocab_size=V, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=32,
)  # fmt: skip
SIZES = TEXT | dict(
    n_embd=16, embedding_dim=16, n_layer=1, num_blocks=1, n_head=2, num_heads=2, head_dim=8,
    ffn_dim=16, moe_intermediate_size=16, intermediate_size_mlp=16, shared_intermediate_size=16,
    n_positions=32, word_embed_proj_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
    topk_group=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
    v_head_dim=8, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_n_groups=1,
    mamba_d_state=8, mamba_expand=1, mamba_chunk_size=4, lru_width=16, laurel_rank=4,
    vocab_size_per_layer_input=V, hidden_size_per_layer_input=8, num_kv_shared_layers=0,
    global_head_dim=8,
)  # fmt: skip
ROPE = dict(rope_type="default", mrope_section=[1, 1, 2])
VISION = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=16)
MULTIMODAL = dict(text_config=TEXT | dict(rope_parameters=ROPE), vision_config=VISION)


def family(name, **options):
    """A small model of a family, with logits that are not all close to 0."""
    whole = name.endswith(("Model", "Generation"))
    kind = getattr(transformers, name if whole else f"{name}ForCausalLM")
    config = kind.config_class
    sizes = {key: value for key, value in SIZES.items() if key in vars(config())}
    sizes = MULTIMODAL if "Conditional" in name else sizes
    if name == "DeepseekV3":  # its attention has as many of both
        sizes |= dict(num_key_value_heads=2)
    model = kind(config(**sizes | options, experts_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in model.get_output_embeddings().parameters():
            parameter.normal_(0, 0.5)
    return model


def own_log_probs(model):
    """From the logits of the model."""
    logits = model(input_ids=TOKENS, use_cache=False).logits[:, :-1]
    return torch.log_softmax(logits, -1).gather(-1, TOKENS[:, 1:, None]).squeeze(-1)


def log_probs_of(head):
    hidden = head.decoder(input_ids=TOKENS, use_cache=False).last_hidden_state[:, :-1]
    options = head.transform | dict(bias=head.bias)
    several = torch.stack([TOKENS[:, 1:], TOKENS[:, :-1]], -1)
    log_probs, _ = linear_log_probs(hidden, head.weight, TOKENS[:, 1:], **options)
    assert torch.equal(
        log_probs, linear_log_probs(hidden, head.weight, several, **options)[0][..., 0]
    )
    return log_probs


def assert_own_log_probs(head, model):
    same, truth = in_some_orders(partial(own_log_probs, model)), own_log_probs(in_double(model))
    assert_within_budget("log_probs", log_probs_of(head), same, truth)
    return largest(truth)


def in_double(model):
    return copy.deepcopy(model).double()


@pytest.mark.parametrize("name", FAMILIES)
def test_model_families(name):
    model = family(name, **FAMILIES[name])
    head = LMHead.of(model)
    with torch.no_grad():
        assert_own_log_probs(head, model)
    plain = dict(logit_scale=1.0, final_logit_softcapping=None)
    assert (head.transform == plain) == (not FAMILIES[name])


def gradients(model, log_probs):
    model.zero_grad()
    (log_probs * torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_training(model):
    """Log-probs and all gradients are those of the model's own logits."""
    head, exact = LMHead.of(model), in_double(model)
    truth = gradients(exact, own_log_probs(exact))
    same = in_some_orders(lambda: gradients(model, own_log_probs(model)))
    size, got = assert_own_log_probs(head, model), gradients(model, log_probs_of(head))
    assert any(gradient.abs().max() > 1e-3 for gradient in got.values())
    assert_gradients(got, same, truth, size)
    return head, got


@pytest.mark.parametrize("tied", [False, True])
def test_gradients(tied):
    """The gradient of a tied embedding has the parts of both its uses, each once."""
    _, got = assert_same_training(family("Gemma2", tie_word_embeddings=tied, **CAP))
    assert ("lm_head.weight" in got) == (not tied)


def adapted(kind="LoraConfig", **options):
    """Llama with adapters whose weights are not zero."""
    peft = pytest.importorskip("peft")
    options = dict(target_modules=["q_proj", "v_proj"], r=2) | options
    config = getattr(peft, kind)(**options)
    model = peft.get_peft_model(family("Llama"), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "hada_" in name:
            torch.nn.init.normal_(parameter, 0, 0.5)
    return model


def test_copy_of_the_head_that_peft_trains():
    model = adapted(modules_to_save=["lm_head"])
    with torch.no_grad():
        model.lm_head.modules_to_save["default"].weight.mul_(2)
    head, got = assert_same_training(model)
    assert any("modules_to_save" in name for name in got)
    with model.disable_adapter():
        assert head.weight is model.lm_head.original_module.weight
        assert_own_log_probs(head, model)


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(our_lora, "_BLOCK", 7)


def lora(**options):
    return adapted(target_modules=["lm_head"], **options)


@pytest.mark.parametrize("frozen", ["all others", "the head", "nothing"])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "lora_alpha": 3}], ids=str)
def test_lora_on_the_head(options, frozen):
    """A, B, the head itself and the layers below, if trained, get the gradients of the loss."""
    model = lora(r=4, **options)
    adapters = {name for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in model.named_parameters():
        below = "base_layer" not in name and frozen == "the head"
        parameter.requires_grad_(name in adapters or below or frozen == "nothing")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    _, got = assert_same_training(model)
    assert got.keys() == trained
    assert all(gradient.any() for gradient in got.values())


def test_several_lora_adapters():
    """Those that are active now, and merged or disabled ones as the model has them."""
    peft = pytest.importorskip("peft")
    model = lora(r=2, task_type="CAUSAL_LM")
    for name, target in (("second", "lm_head"), ("elsewhere", "q_proj")):
        options = dict(r=3, lora_alpha=1, init_lora_weights=False)
        model.add_adapter(name, peft.LoraConfig(target_modules=[target], **options))
    head, layer = LMHead.of(model), model.lm_head
    for names in (["default"], ["second"], ["default", "second"], ["elsewhere"]):
        model.base_model.set_adapter(names)
        _, got = assert_same_training(model)
        assert {name.split(".")[-2] for name in got} == set(names)
    assert head.weight is layer.base_layer.weight

    model.base_model.set_adapter(["default", "second"])
    exact, both = exact_sum(layer), head.weight.detach()
    model.merge_adapter()
    assert head.weight is layer.base_layer.weight
    assert_within_budget("weight", both, head.weight.detach(), exact)
    assert_own_log_probs(head, model)
    model.unmerge_adapter()
    with model.disable_adapter():
        assert head.weight is layer.base_layer.weight
        assert_own_log_probs(head, model)
    # What PEFT added and subtracted is rounded, twice for each adapter.
    inherited = 4 * EPS[torch.float32] * largest(exact)
    assert_within_budget("weight", head.weight.detach(), both, exact, inherited=inherited)


def exact_sum(layer):
    """The weight with its active adapters, in float64."""
    parts = [(layer.lora_A[n].weight, layer.lora_B[n].weight, n) for n in layer.active_adapters]
    sums = [layer.scaling[name] * (B.double() @ A.double()) for A, B, name in parts]
    return (layer.base_layer.weight.double() + sum(sums)).detach()


def test_second_derivatives_of_a_lora_weight():
    weight, B, A = (
        torch.randn(*size).double().requires_grad_() for size in ((9, 4), (9, 2), (2, 4))
    )
    assert torch.autograd.gradgradcheck(_Adapted.apply, (weight, B, A))


def test_lora_is_rounded_once():
    """A weight in bfloat16 is the nearest to the exact sum, also under autocast."""
    model = lora(r=4, lora_alpha=3).bfloat16()
    exact, head = exact_sum(model.lm_head), LMHead.of(model)
    with torch.autocast("cpu", torch.bfloat16):
        weight = head.weight
    assert weight.dtype == torch.bfloat16
    assert_same(head.weight, weight)
    ulp = 2.0 ** (exact.abs().log2().floor() - 7)
    half = 0.5 + 2**16 * EPS[torch.float32]  # the sum is float32 before
    assert ((weight.double() - exact).abs() <= half * ulp).all()


RULE = "lm_head must have no adapter of its own but plain LoRA: merge it, disable it, or leave"
OTHER_ADAPTERS = [
    ("LoHaConfig", {}, "peft.tuners.loha.layer.Linear around torch.nn.modules.linear.Linear"),
    ("LoraConfig", {"use_dora": True}, "Linear with DoraLinearVariant"),
    ("LoraConfig", {"lora_dropout": 0.1}, "Linear with a dropout of 0.1 in training mode"),
]


@pytest.mark.parametrize(("kind", "options", "got"), OTHER_ADAPTERS)
def test_adapter_on_the_head_raises(kind, options, got):
    """It raises, also if it is added later, until it is merged, disabled or without dropout."""
    model = adapted(kind, target_modules=["lm_head"], **options).train()
    with model.disable_adapter():
        head = LMHead.of(model)
        assert_own_log_probs(head, model)
    for use in (lambda: LMHead.of(model), lambda: head.weight, lambda: head.bias):
        with pytest.raises(ValueError, match=f"{RULE}.*got .*{got}"):
            use()
    if "lora_dropout" in options:
        assert_own_log_probs(LMHead.of(model.eval()), model)
    model.merge_adapter()
    assert_own_log_probs(head, model)
    with model.disable_adapter(), pytest.raises(ValueError, match=RULE):
        head.weight  # noqa: B018  PEFT has not unmerged it yet


class FourBit(torch.nn.Linear):
    """Like bitsandbytes: another forward."""

    def forward(self, hidden):
        raise NotImplementedError


class Quantised(torch.Tensor):
    """Like torchao: a tensor that only claims to be floating point."""


def with_weight(weight):
    layer = torch.nn.Linear(H, V)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


COLUMN = torch.tensor([3])
CHANGES = (
    lambda z: z + 0.01,
    lambda z: z.log_softmax(-1),
    lambda z: 3 * z / (3 + z.abs()),
    lambda z: -z,
    lambda z: z.clamp(-30, 30),
    lambda z: z.index_fill_(-1, COLUMN, -1e9),  # as Chameleon
    lambda z: z.index_copy_(-1, COLUMN, 2 * z[..., 3:4]),
    lambda z: z.index_copy_(-1, COLUMN, z[..., 3:4].clamp(max=99)),
    lambda z: z.index_copy_(-1, COLUMN, z[..., 13:14]),
)
INPUTS = "model gets other than the tokens alone: "
HIDDEN = "the head takes other than the output of model"
CALLS = "model and head are called "
OTHERS = [
    *(("logits are more than scaled and capped", lambda m, i, f=f: f(m.of(i))) for f in CHANGES),
    (INPUTS + "[0, 1]", lambda m, ids: m.lm_head(m.hidden(ids, (ids > 0).float()))),
    (INPUTS + "[0]", lambda m, ids: m.of(ids + 1)),
    (HIDDEN, lambda m, ids: m.lm_head(m.hidden(ids) / 12)),
    (HIDDEN, lambda m, ids: m.lm_head(m.hidden(ids).div_(12))),
    (HIDDEN, lambda m, ids: m.lm_head(m.hidden(ids)[:, -1:])),
    (CALLS + "(2, 1) times", lambda m, ids: (m.hidden(ids), m.of(ids))[1]),
    (CALLS + "(1, 2) times", lambda m, ids: m.lm_head(h := m.hidden(ids)) + m.lm_head(h)),
    (CALLS + "(1, 0) times", lambda m, ids: m.hidden(ids) @ m.lm_head.weight.T),
    ("parameters outside of decoder and head have a gradient", lambda m, i: m.of(i) * m.scale),
    ("logits of shape (1, 9, 30), not (1, 9, 31)", lambda m, ids: m.of(ids)[..., :-1]),
]


class Other(CausalLM):
    """Something other than decoder, head, scale and soft cap."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.scale = logits, torch.nn.Parameter(torch.tensor(2.0))

    def hidden(self, *inputs):
        return self.model(*inputs).last_hidden_state

    def of(self, ids):
        return self.lm_head(self.hidden(ids))

    def forward(self, input_ids):
        return Logits(self.logits(self, input_ids))


def around_llama(kind, **options):
    """PEFT that the model's own forward applies, and ``decoder(tokens)`` would not."""
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(family("Llama", num_key_value_heads=2), config)


def with_head(head, model=CausalLM):
    """A model with this head, or with this change of its own."""
    model = model()
    if isinstance(head, torch.nn.Module):
        model.lm_head = head
    else:
        head(model.lm_head)
    return model


class WithoutDecoder(CausalLM):
    base_model = None

    def __init__(self):
        super().__init__()
        self.decoder = self._modules.pop("model")


class Base(torch.nn.Module):
    """As transformers' base models have it."""

    def get_output_embeddings(self):
        return None


def hooked(whole, inner=""):
    whole.get_submodule(inner).register_forward_hook(lambda *_: None)
    return whole


PLAIN = "lm_head must be a plain torch.nn.Linear (otherwise"
FLOATING = "lm_head must have a weight of floating point (otherwise"
NO_MODEL = "must be a causal language model, or its head, got"
HEADS = [  # or a change of a plain layer
    (torch.nn.Sequential(torch.nn.Linear(H, H), torch.nn.Linear(H, V)), PLAIN),
    (FourBit(H, V), PLAIN),
    (with_weight(torch.zeros(V, H, dtype=torch.int8)), FLOATING),
    (with_weight(torch.zeros(V, H).as_subclass(Quantised)), FLOATING),
    (lambda layer: setattr(layer, "forward", torch.nn.Linear(H, V).forward), PLAIN),
    (lambda layer: layer.register_forward_hook(print), PLAIN),
    (lambda layer: layer.register_forward_pre_hook(print), PLAIN),
    (lambda layer: layer.register_full_backward_hook(print), PLAIN),
]
LORA_CHANGES = [
    (lambda layer: layer.lora_B.update({"default": torch.nn.Linear(2, V)}), "with lora_bias"),
    (lambda layer: layer.register_forward_hook(print), "with hooks or another forward"),
    (lambda layer: setattr(layer, "forward", layer.base_layer.forward), "or another forward"),
    (lambda layer: layer.lora_B.default.register_forward_hook(print), "whose A and B are more"),
    (lambda layer: setattr(layer, "base_layer", lora().lm_head), "around another adapter"),
]
TWO = dict(num_virtual_tokens=2)
NO_HOOKS = "model must have no hooks (otherwise"
REFUSED = [
    (lambda: hooked(family("Llama")), (NO_HOOKS, "lambda")),
    (lambda: hooked(torch.compile(family("Llama"))), (NO_HOOKS, "lambda")),
    *(
        (lambda inner=inner: hooked(adapted(), inner), (NO_HOOKS, "lambda"))
        for inner in ("", "base_model", "base_model.model")
    ),
    *((partial(with_head, head), (rule,)) for head, rule in HEADS),
    *((lambda head=head: with_head(head).lm_head, (rule,)) for head, rule in HEADS),
    *((partial(with_head, change, lora), (RULE, got)) for change, got in LORA_CHANGES),
    (
        partial(with_head, lambda layer: setattr(layer, "base_layer", FourBit(H, V)), lora),
        (PLAIN, f"got peft.tuners.lora.layer.Linear around {__name__}.FourBit"),
    ),
    *((partial(Other, logits), (f"got Other: {got}",)) for got, logits in OTHERS),
    (lambda: "a name", (NO_MODEL,)),
    (Base, (NO_MODEL,)),
    (WithoutDecoder, ("got WithoutDecoder: it has no decoder",)),
    (partial(around_llama, "PromptTuningConfig", **TWO), ("tokens alone: ['inputs_embeds']",)),
    (partial(around_llama, "PrefixTuningConfig", **TWO), ("tokens alone: ['input_ids', ",)),
    (partial(around_llama, "LoraConfig", alora_invocation_tokens=[3]), ("its own forward",)),
]


@pytest.mark.parametrize(("make", "parts"), REFUSED)
def test_other_models_raise(make, parts):
    given = make()
    modules = dict(given.named_modules()) if isinstance(given, torch.nn.Module) else {}
    with pytest.raises(ValueError) as raised:
        LMHead.of(given)
    assert all(part in str(raised.value) for part in parts)
    assert not modules or dict(given.named_modules()) == modules, "the stand-ins are gone"


def test_sharded_lora_raises(monkeypatch):
    monkeypatch.setattr(our_lora, "is_dtensor", lambda weight: True)
    with pytest.raises(ValueError, match=f"{RULE}.*with sharded weights"):
        LMHead.of(lora())


TAILS = [(1.0, None), (0.0625, None), (1 / 12, None), (1.0, 30.0), (3.7, 0.5)]


@pytest.mark.parametrize(("scale", "cap"), TAILS)
def test_transforms_are_measured_exactly(scale, cap):
    def tail(z):
        return z.mul_(scale) if cap is None else cap * torch.tanh(scale * z / cap)

    head = LMHead.of(CausalLM(tail=tail))
    assert abs(head.logit_scale - scale) <= 5e-12 * scale  # it has twelve digits
    assert head.final_logit_softcapping == cap


def test_layers_are_looked_up_at_every_use():
    """The head may be replaced, and the model compiled, afterwards."""
    model = CausalLM(bias=True)
    head, alone = LMHead.of(model), LMHead.of(model.lm_head)
    assert head.weight is alone.weight is model.lm_head.weight
    assert head.bias is alone.bias is model.lm_head.bias
    with pytest.raises(ValueError, match="model must be a causal language model, got its head"):
        alone.decoder  # noqa: B018
    model.lm_head = torch.nn.Linear(H, V + 1, bias=False)
    assert head.weight is model.lm_head.weight
    assert head.bias is None
    assert LMHead.of(torch.compile(model)).model is model
    model.tail = torch.sinh
    model.forward = torch.compile(model.forward, backend=pytest.fail)
    with pytest.raises(ValueError, match="logits are more than scaled and capped"):
        LMHead.of(model)


def test_layers_on_several_devices():
    """accelerate may move the inputs to the device of the head, but not offload its weight."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = CausalLM()
    hooks.add_hook_to_module(model.lm_head, hooks.AlignDevicesHook("cpu", io_same_device=True))
    assert LMHead.of(model).weight is model.lm_head.weight
    hooks.add_hook_to_module(model.lm_head, hooks.AlignDevicesHook("cpu", offload=True))
    with pytest.raises(ValueError, match="Linear with another forward"):
        LMHead.of(model)


def test_policy_of_the_documentation():
    """PolicyLoss of docs/distributed.md; for its gradients see test_ranks.py."""
    model, A = family("Gemma2", **CAP), torch.tensor([1.0, -1.0])
    policy = recipe()(model, temperature=0.7)
    assert policy.config == BAPOConfig.paper(temperature=0.7, final_logit_softcapping=1.5)
    assert dict(policy.named_parameters()).keys() == dict(model.named_parameters("model")).keys()

    def theirs(model):
        logits = model(input_ids=TOKENS).logits[:, :-1] / 0.7
        return reference.bapo_loss(logits, TOKENS[:, 1:], None, A).log_probs

    same = in_some_orders(partial(theirs, model))
    out = policy(TOKENS, None, A)
    assert_within_budget("log_probs", out.log_probs, same, theirs(in_double(model)))


@pytest.mark.compile
def test_compiled():
    policy, head, hidden = recipe()(CausalLM()), LMHead.of(lora(r=4)), torch.randn(2, 3, 16)
    for function in (
        lambda: policy(TOKENS, None, torch.tensor([1.0, -1.0])).loss,
        lambda: linear_log_probs(hidden, head.weight, TOKENS[:, 1:])[0],
    ):
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        assert_same(compiled(), function())
