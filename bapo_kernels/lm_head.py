"""The head of a language model, verified to be what the losses from hidden states compute.

May import ``lora`` and the checks. A head that is taken for a plain one without a measurement would
train another model than the one that samples.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .checks import is_dtensor, require
from .lora import OTHERWISE, adapted, hooks_of, kind_of, without_adapters

# These wrappers synchronise gradients in a forward of their own.
_WRAPPERS = {
    "DataParallel",
    "DeepSpeedEngine",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
}
_INSIDE = (
    "be used inside of the forward that {} wraps: outside, gradients are not synchronised "
    "(docs/distributed.md, DDP and FSDP2 from hidden states)"
)
_FLAGS = (type(None), bool, int, float, str)
# A soft cap is linear, curved or saturated at these logits.
_PROBES = [2.0**power for power in (-40, -20, 0, 2, 4, 6, 8, 20, 40)]


@dataclass(frozen=True, eq=False)
class LMHead:
    """Everything between the hidden states of a model and its logits.

    ``logits = softcap*tanh(logit_scale*z/softcap)``, or ``logit_scale*z`` without a soft cap, with
    ``z = hidden @ weight.T + bias`` and ``hidden = decoder(tokens).last_hidden_state``.

    :meth:`of` verifies that a model computes this, and measures its scale and soft cap. It runs the
    model's own forward with stand-ins for decoder and head, so it computes no layer and guesses no
    name of a model's config. Make the object once, before or after PEFT, DDP or FSDP2: it looks up
    the layers at every use.

    Attributes:
        model: the causal language model, or the head alone.
        decoder_name: name of the submodule that turns tokens into hidden states.
        logit_scale, final_logit_softcapping: as in :class:`BAPOConfig`.

    Examples:
        >>> head = LMHead.of(torch.nn.Linear(4, 10))  # or of a causal language model
        >>> config = BAPOConfig.paper(temperature=0.7, **head.transform)
        >>> hidden, labels = torch.ones(2, 4), torch.tensor([3, 7])
        >>> options = dict(bias=head.bias, config=config)
        >>> out = bapo_linear_loss(hidden, head.weight, labels, None, torch.ones(2), **options)
        >>> out.loss.item()
        -1.0
    """

    model: torch.nn.Module = field(repr=False)
    decoder_name: str = ""
    logit_scale: float = 1.0
    final_logit_softcapping: float | None = None

    @classmethod
    def of(cls, model: torch.nn.Module) -> LMHead:
        """The head of a Hugging Face causal language model, also within PEFT, or a Linear layer.

        Raises:
            ValueError: ``model`` is a wrapper such as DDP, has a hook, or does anything else
                between tokens and logits; or its head is not a plain linear layer. Such a head is
                quantised, has a hook or another forward, or has an adapter that is neither merged,
                disabled nor plain LoRA (without bias, without dropout in training mode, and no
                variant such as DoRA).
        """
        whole: Any = getattr(model, "_orig_mod", model)  # torch.compile's
        wrapper = {kind.__name__ for kind in type(whole).__mro__} & _WRAPPERS
        require(not wrapper, "LMHead", _INSIDE.format("DDP"), f"a {type(whole).__name__}")
        adapters = getattr(whole, "peft_config", None) or {}
        at_tokens = any(getattr(a, "alora_invocation_tokens", None) for a in adapters.values())
        rule = "have no adapter that its own forward switches on (aLoRA)" + OTHERWISE
        require(not at_tokens, "model", rule, type(whole).__name__)
        base: Any = whole.get_base_model() if hasattr(whole, "get_base_model") else whole
        rule = "be a causal language model, or its head"
        require(isinstance(_layer(base), torch.nn.Module), "model", rule, type(base).__name__)
        _linear(_layer(base))
        tuner = getattr(whole, "base_model", base) if whole is not base else base  # PEFT's
        hooks = [hook for module in {model, whole, tuner, base} for hook in hooks_of(module)]
        require(not hooks, "model", "have no hooks" + OTHERWISE, f"{type(whole).__name__} {hooks}")
        if not hasattr(base, "get_output_embeddings"):
            return cls(base)
        failures: list[Exception] = []
        for name in _decoders(base):
            try:
                return cls(base, name, *_measured(whole, base, name))
            except Exception as failure:
                failures.append(failure)
        why = failures[0] if failures else ValueError("it has no decoder")
        rule = "be decoder(tokens), a linear head, a scale and a soft cap" + OTHERWISE
        got = f"{type(base).__name__}: {str(why) or repr(why)}"
        raise ValueError(f"the model must {rule}, got {got}") from why

    @property
    def decoder(self) -> torch.nn.Module:
        """The module whose ``decoder(tokens).last_hidden_state``, ``[..., H]``, the head takes."""
        require(bool(self.decoder_name), "model", "be a causal language model", "its head alone")
        decoder = self.model.get_submodule(self.decoder_name)
        state = getattr(self.model, "_get_fsdp_state", None)  # FSDP2's, if it shards the model
        if state is not None and not hasattr(decoder, "_get_fsdp_state"):
            inside = state()._training_state.name != "IDLE"
            require(inside, "LMHead.decoder", _INSIDE.format("FSDP2"), "a use outside")
        return decoder

    @property
    def weight(self) -> Tensor:
        """``[V, H]``; a DTensor if the layer's weight is one.

        With LoRA, ``base + sum scaling*(B @ A)`` over the active adapters, differentiable. Each use
        computes it, so read it once per loss. It is summed in float32 and rounded once to the dtype
        of the base (the model rounds the products of each token instead). The sum takes as much
        memory as the base. Its gradient takes a product that a frozen head does without: 6NVH
        operations in all instead of 4NVH.
        """
        layer = _layer(self.model)
        return adapted(layer, _linear(layer).weight)

    @property
    def bias(self) -> Tensor | None:
        """``[V]``, or ``None``."""
        return _linear(_layer(self.model)).bias

    @property
    def transform(self) -> dict[str, float | None]:
        """Scale and soft cap, as options of :class:`BAPOConfig` and the log-probs functions."""
        return dict(
            logit_scale=self.logit_scale, final_logit_softcapping=self.final_logit_softcapping
        )


def _layer(model: Any) -> Any:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else model


def _linear(layer: Any) -> torch.nn.Linear:
    """The linear layer that a head applies, unwrapped from PEFT; anything else raises."""
    adapters, layer = layer, without_adapters(layer)
    kind = " around ".join(dict.fromkeys(map(kind_of, (adapters, layer))))
    rule = "be a plain torch.nn.Linear" + OTHERWISE
    plain = isinstance(layer, torch.nn.Linear) and type(layer).forward is torch.nn.Linear.forward
    require(plain, "lm_head", rule, kind)
    hook = vars(layer).get("_hf_hook")  # of accelerate, where layers are on several devices
    moved = type(hook).__name__ == "AlignDevicesHook" and not hook.offload
    require(moved or "forward" not in vars(layer), "lm_head", rule, f"{kind} with another forward")
    hooks = hooks_of(layer)
    require(not hooks, "lm_head", rule, f"{kind} with hooks {hooks}")
    weight = layer.weight
    plain = type(weight) in (Tensor, torch.nn.Parameter) or is_dtensor(weight)
    rule = "have a weight of floating point" + OTHERWISE
    got = f"{type(weight).__name__} of {weight.dtype}"
    require(plain and weight.is_floating_point(), "lm_head", rule, got)
    return layer  # type: ignore[no-any-return]


def _decoders(base: Any) -> list[str]:
    """Names of the submodules that can be the decoder."""
    names = {module: name for name, module in base.named_modules() if name}
    found = [getattr(base, name, None) for name in ("base_model", "model")]
    found.insert(1, base.get_decoder() if hasattr(base, "get_decoder") else None)
    return list(dict.fromkeys(names[module] for module in found if module in names))


class _StandIn(torch.nn.Module):
    """Takes the place of a module: records the arguments of its calls and returns ``answer``."""

    def __init__(self, module: torch.nn.Module, answer: Any) -> None:
        super().__init__()
        vars(self).update(module=module, answer=answer, calls=[])
        vars(self).update(_parameters=module._parameters, _modules=module._modules)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["module"], name)

    def forward(self, *args: Any, **options: Any) -> Any:
        self.calls.append([*enumerate(args), *options.items()])
        return self.answer


class _Hidden(tuple):  # type: ignore[type-arg]
    """The output of a decoder, by index or by name, with nothing but hidden states."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[0] if name == "last_hidden_state" else None


@contextmanager
def _replaced(model: torch.nn.Module, *stand_ins: _StandIn) -> Iterator[None]:
    by_module = {stand_in.module: stand_in for stand_in in stand_ins}
    homes = [home._modules for home in model.modules()]
    homes = [modules for modules in homes if by_module.keys() & set(modules.values())]
    originals = [dict(modules) for modules in homes]
    for modules in homes:
        modules.update({name: by_module.get(m, m) for name, m in modules.items()})
    try:
        yield
    finally:
        for modules, original in zip(homes, originals, strict=True):
            modules.update(original)


def _measured(whole: Any, base: Any, decoder_name: str) -> tuple[float, float | None]:
    """Measures scale and soft cap: runs the model's forward between two stand-ins."""
    decoder, layer = base.get_submodule(decoder_name), base.get_output_embeddings()
    V, H = (linear := _linear(layer)).out_features, linear.in_features
    T = len(_PROBES)
    hidden = torch.arange(float(T * H), device="cpu").view(1, T, H) % 17 - 8  # exact in any dtype
    tokens = hidden.new_zeros(1, T, dtype=torch.int64)
    # Each column has its own probes, the first all of them in order: its digits to the base T.
    t, v = torch.arange(T, device="cpu")[:, None], torch.arange(V, device="cpu")
    probes = torch.tensor(_PROBES, dtype=torch.float64, device="cpu")[(t + v // T**t) % T]
    z = (probes * (1 - 2 * ((t + v) % 2)))[None]
    # The model may write into what the stand-ins return, hence the copies.
    for_decoder, for_head = _StandIn(decoder, _Hidden([hidden.clone()])), _StandIn(layer, z.clone())
    # Otherwise a compiled forward would be compiled again.
    dynamo = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if dynamo else nullcontext()
    cpu = torch.device("cpu")  # for what the forward makes, also inside of another default
    with _replaced(whole, for_decoder, for_head), torch.enable_grad(), eager, cpu:
        logits = whole.forward(input_ids=tokens).logits

    times = len(for_decoder.calls), len(for_head.calls)
    _expect(times == (1, 1), f"{decoder_name} and head are called {times} times, not once each")
    given = [(name, x) for name, x in for_decoder.calls[0] if not isinstance(x, _FLAGS)]
    tokens_alone = len(given) == 1 and given[0][1] is tokens
    names = [name for name, _ in given]
    _expect(tokens_alone, f"{decoder_name} gets other than the tokens alone: {names}")
    taken = for_head.calls[0][0][1]
    same = taken.shape == hidden.shape and torch.equal(taken.float(), hidden)
    _expect(same, f"the head takes other than the output of {decoder_name}")
    trained = taken.requires_grad or logits.requires_grad
    _expect(not trained, "parameters outside of decoder and head have a gradient")
    _expect(logits.shape == z.shape, f"logits of shape {tuple(logits.shape)}, not {tuple(z.shape)}")
    return _scale_and_softcap(logits.double(), z)


def _scale_and_softcap(logits: Tensor, z: Tensor) -> tuple[float, float | None]:
    """Finds what turns ``z`` into logits: the slope at small ``z``, and the limit at large."""
    scale, top = (float(f"{x:.12g}") for x in ((logits / z)[0, 0, 0], logits[0, -1, 0]))
    softcap = top if abs(top) < scale * _PROBES[-2] else None
    expected = scale * z
    if softcap is not None:
        expected = softcap * torch.tanh(expected / softcap)
    right = scale > 0 and bool(((logits - expected).abs() <= 1e-6 * expected.abs()).all())
    _expect(right, "logits are more than scaled and capped")
    return scale, softcap


def _expect(ok: bool, otherwise: str) -> None:
    if not ok:
        raise ValueError(otherwise)
