"""GRPO with the BAPO loss in TRL, on a CPU: a tiny Qwen3 with the real vocabulary of 151,936.

The script makes the model, the tokenizer and the prompts; nothing is downloaded. Completions are
rewarded for letters in alphabetical order. Every batch of rollouts is used for three updates, so
the policy that learns is not the one that sampled::

    python examples/trl_bapo.py --scope step
"""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import torch
import typer
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, Qwen3ForCausalLM

from bapo_kernels.integrations.trl import BAPOTrainer, BAPOTrainerConfig

WORDS = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz"]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
    )
    made = Qwen3ForCausalLM(config)
    with torch.no_grad():  # at the start the known words are the likely ones
        made.lm_head.weight[: len(WORDS)].mul_(40)
        made.lm_head.weight[len(WORDS) :].mul_(0.01)
    return made


def in_order(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Share of neighbouring tokens in alphabetical order."""
    pairs = [list(pairwise(ids)) for ids in completion_ids]
    return [sum(a < b for a, b in of_one) / max(len(of_one), 1) for of_one in pairs]


def main(scope: str = "lagged", preset: str = "paper", steps: int = 12) -> None:
    """Trains and prints what the search decided at every step."""
    prompts = ["a b", "k l m", "t u", "f g h"] * 16
    with tempfile.TemporaryDirectory() as folder:
        trainer = BAPOTrainer(
            model=model(),
            reward_funcs=in_order,
            args=BAPOTrainerConfig(
                output_dir=str(Path(folder)),
                per_device_train_batch_size=16,
                gradient_accumulation_steps=2,
                num_generations=8,
                num_iterations=3,
                max_completion_length=8,
                max_steps=steps,
                learning_rate=1e-3,
                bapo_scope=scope,
                bapo_preset=preset,
                use_cpu=not torch.cuda.is_available(),
                bf16=False,
                logging_steps=1,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer(),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    table = Table(title=f"BAPO in TRL, scope {scope}, preset {preset}")
    for column in ("step", "reward", "loss", "clip low", "clip high", "positive share", "clipped"):
        table.add_column(column, justify="right")
    for i, entry in enumerate(e for e in trainer.state.log_history if "loss" in e):
        names = ("bapo/clip_low", "bapo/clip_high", "bapo/pos_share", "clip_ratio/region_mean")
        reward = f"{entry['reward']:.2f}" if "reward" in entry else ""
        values = (f"{entry[name]:.2f}" if name in entry else "" for name in names)
        table.add_row(str(i + 1), reward, f"{entry['loss']:+.3f}", *values)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
