"""The policy: a small decoder that walks, and its supervised warm-up."""

from __future__ import annotations

import copy
from functools import lru_cache

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from bapo_kernels import log_probs

from .board import MOVES, PROMPT, SIZE, VOCABULARY, Walks, draw_prompts, noisy_walks

WARM_UP_STEPS = 300
WARM_UP_BATCH = 128
WARM_UP_LR = 2e-3
AIM = 0.15  # share of the moves of the warm-up that are made towards the goal


def build_policy() -> Qwen3ForCausalLM:
    """Two layers of width 64."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=PROMPT + MOVES,
    )
    return Qwen3ForCausalLM(config)


def tokens_of(walks: Walks, moves: int) -> Tensor:
    """The prompt and the first moves as token ids."""
    prompts = walks.prompts + SIZE * torch.arange(PROMPT)
    return torch.cat([prompts, walks.moves[:, :moves]], -1)


def move_logits(policy: Qwen3ForCausalLM, walks: Walks) -> Tensor:
    """``[B, MOVES, VOCABULARY]``: the logits that each move was drawn from."""
    return policy(tokens_of(walks, MOVES - 1), use_cache=False).logits[:, PROMPT - 1 :]


@torch.no_grad()
def walk_on(
    policy: Qwen3ForCausalLM, walks: Walks, moves: int, generator: torch.Generator | None
) -> Walks:
    """Draws the next moves of all walks; the most likely ones without a generator."""
    cache = DynamicCache()
    tokens = tokens_of(walks, walks.made)
    for _ in range(moves):
        logits = policy(tokens, past_key_values=cache, use_cache=True).logits[:, -1]
        logp = logits.float().log_softmax(-1)
        if generator is None:
            tokens = logp.argmax(-1, keepdim=True)
        else:
            tokens = torch.multinomial(logp.exp(), 1, generator=generator)
        walks.move(tokens[:, 0], logp.gather(-1, tokens)[:, 0])
    return walks


def success(policy: Qwen3ForCausalLM, prompts: Tensor, generator: torch.Generator | None) -> float:
    """Share of walks that reach the goal."""
    return walk_on(policy, Walks.begin(prompts), MOVES, generator).rewards.mean().item()


def held_out_prompts(count: int) -> Tensor:
    return draw_prompts(count, torch.Generator().manual_seed(99), held_out=True)


def warm_policy(seed: int, steps: int | None = None) -> Qwen3ForCausalLM:
    """A copy of the policy that all arms of a seed start from."""
    return copy.deepcopy(_warmed_up(seed, WARM_UP_STEPS if steps is None else steps))


@lru_cache(maxsize=1)
def _warmed_up(seed: int, steps: int) -> Qwen3ForCausalLM:
    """Next-move prediction on noisy walks."""
    torch.manual_seed(seed)
    policy = build_policy()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=WARM_UP_LR)
    for _ in range(steps):
        walks = noisy_walks(draw_prompts(WARM_UP_BATCH, generator), AIM, generator)
        logp, _ = log_probs(move_logits(policy, walks), walks.moves)
        optimizer.zero_grad()
        (-logp[walks.mask].mean()).backward()
        optimizer.step()
    return policy
