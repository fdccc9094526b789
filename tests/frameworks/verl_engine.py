"""verl's own FSDP engine on CPU processes, around a tiny model.

verl has no platform for a CPU, and patches models for attention kernels of GPUs; these are replaced
here. Mini-batches, epochs, micro-batches, FSDP2, loss and optimizer steps are verl's.
"""

from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

B, P, R, V = 8, 3, 7, 31  # of all ranks
TEMPERATURE, LR = 0.8, 0.05


def tiny_model(kind=Qwen3ForCausalLM):
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, head_dim=8)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False)
    model = kind(Qwen3Config(vocab_size=V, **sizes, **heads))
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model


def padded(prompts, responses, vocabulary, g):
    """Random tokens of these lengths as verl has them: prompts padded on the left."""
    P, R = prompts.max(), responses.max()
    at = torch.arange(P + R)
    attention = ((at >= P - prompts[:, None]) & (at < P + responses[:, None])).long()
    tokens = torch.randint(vocabulary, attention.shape, generator=g)
    return dict(
        input_ids=tokens, prompts=tokens[:, :P], responses=tokens[:, P:], attention_mask=attention,
        response_mask=attention[:, P:], position_ids=(attention.cumsum(-1) - 1).clamp(min=0),
    )  # fmt: skip


def rollout():
    """Prompts padded on the left, responses on the right, with log-probs of an older policy."""
    g = torch.Generator().manual_seed(1)
    prompts = torch.tensor([3, 1, 2, 3, 2, 2, 1, 3])
    responses = torch.tensor([7, 3, 6, 1, 5, 7, 2, 4])
    batch = padded(prompts, responses, V, g)
    A = torch.tensor([1.0, -1.2, 0.8, -1.0, 1.1, -0.9, 0.7, -1.3])
    batch["advantages"] = A[:, None].expand(B, R).clone()
    with torch.no_grad():
        logp = log_probs(tiny_model(), batch)
    noise = 0.5 * torch.randn(B, R, generator=g)
    batch["old_log_probs"] = torch.where(batch["response_mask"] > 0, logp + noise, 0.0)
    return batch


def logits(model, batch):
    """Of the responses ``[B, R, V]``, divided by the temperature."""
    names = ("input_ids", "attention_mask", "position_ids")
    return model(**{name: batch[name] for name in names}).logits[:, P - 1 : -1] / TEMPERATURE


def log_probs(model, batch):
    """Of the responses ``[B, R]``, in plain PyTorch."""
    log_p = logits(model, batch).log_softmax(-1)
    return log_p.gather(-1, batch["responses"][..., None]).squeeze(-1)


def on_a_cpu():
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    counters = ("memory_allocated", "memory_reserved")
    none = {f"{most}{name}": lambda: 0 for name in counters for most in ("", "max_")}
    none |= dict(mem_get_info=lambda: (0, 0), empty_cache=lambda: None)

    class PlatformCPU(PlatformCUDA):
        device_name = "cpu"
        device_module = SimpleNamespace(**vars(torch.cpu), **none)

        def current_device(self):
            return "cpu"

    platform_manager._current_platform = PlatformCPU()


def engine_of(folder):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp import FSDPEngineWithLMHead

    class Engine(FSDPEngineWithLMHead):
        def _build_module(self):
            return tiny_model()

    float32 = dict(param_dtype="fp32", reduce_dtype="fp32", buffer_dtype="fp32")
    if dist.get_rank() == 0:  # others would read half of a file
        tiny_model().save_pretrained(folder)
    dist.barrier()
    engine = Engine(
        HFModelConfig(path=folder, load_tokenizer=False, use_remove_padding=False),
        FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, mixed_precision=float32),
        FSDPOptimizerConfig(optimizer="SGD", lr=LR, weight_decay=0.0, clip_grad=1e9),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def data_of(rank, ranks):
    from verl import DataProto
    from verl.workers.utils.padding import left_right_2_no_padding

    data = DataProto.from_dict(tensors=rollout(), meta_info=dict(temperature=TEMPERATURE))
    return left_right_2_no_padding(data.chunk(ranks)[rank].to_tensordict())


def train(rank, folder, policy_loss, epochs):
    """As verl's worker: the metrics of each optimizer step, and all parameters at the end.

    An epoch has two mini-batches, of two micro-batches on each of two ranks.
    """
    on_a_cpu()
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    from bapo_kernels.integrations.verl import BAPOPolicyLossConfig

    sizes = dict(rollout_n=1, ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=1)
    loss = BAPOPolicyLossConfig(**policy_loss)
    config = ActorConfig(strategy="fsdp2", policy_loss=loss, **sizes)
    engine, ranks = engine_of(folder), dist.get_world_size()
    logged = []
    with engine.train_mode():
        loader = dict(seed=0, dataloader_kwargs=dict(shuffle=False))
        data = data_of(rank, ranks)
        for mini_batch in tu.make_iterator(data, 4 // ranks, epochs=epochs, **loader):
            options = dict(use_dynamic_bsz=False, micro_batch_size_per_gpu=1, global_batch_size=4)
            tu.assign_non_tensor(mini_batch, use_remove_padding=False, **options)
            outputs = engine.train_batch(mini_batch, partial(ppo_loss, config=config))
            metrics = outputs["metrics"].items()
            logged.append({k: x.aggregate() if hasattr(x, "aggregate") else x for k, x in metrics})
    full = {name: p.full_tensor().detach() for name, p in engine.module.named_parameters()}
    return logged, full
