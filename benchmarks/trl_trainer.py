"""``BAPOTrainer`` against TRL's ``GRPOTrainer``: loss and backward of a micro-batch, peak memory.

``python -m benchmarks.trl_trainer`` trains the same tiny Qwen3 with a vocabulary of 151,936 on the
same prompts with the same seed. Each trainer runs in a separate process, which gives its own peak
memory.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from .records import append, environment

RESULTS = Path(__file__).parent / "results" / "trl.jsonl"
WORDS = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz"]
V, H, B, T = 151_936, 512, 8, 64
TRAINERS = {
    "TRL's GRPO": {},
    "BAPO, fused": dict(bapo_head="fused", bapo_scope="call"),
    "BAPO, log-probs, then loss": dict(bapo_head="log_probs", bapo_scope="call"),
    "BAPO, TRL's head": dict(bapo_head="trl", bapo_scope="call"),
    "BAPO, fused, scope step": dict(bapo_head="fused", bapo_scope="step"),
    "BAPO, fused, scope lagged": dict(bapo_head="fused", bapo_scope="lagged"),
}


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Half of the prompts have no correct answer, hence no advantage, as in practice."""
    return [float(ids[0] % 2 == 0 and i < B // 2) for i, ids in enumerate(completion_ids)]


def run(name: str) -> dict[str, Any]:
    """Trains for 4 optimizer steps, 12 micro-batches, and times loss and backward of each."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOTrainer

    from bapo_kernels.integrations.trl import BAPOTrainer, BAPOTrainerConfig

    ours = name != "TRL's GRPO"
    times: list[float] = []

    class Timed(BAPOTrainer if ours else GRPOTrainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.begin = time.perf_counter()
            return super().compute_loss(*args, **kwargs)

        def training_step(self, *args: Any) -> torch.Tensor:
            result = super().training_step(*args)
            times.append(1e3 * (time.perf_counter() - self.begin))
            return result

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=V,
            hidden_size=H,
            intermediate_size=H,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            tie_word_embeddings=False,
            pad_token_id=0,
            eos_token_id=1,
        )
    )
    with torch.no_grad():
        model.lm_head.weight[: len(WORDS)].mul_(40)
        model.lm_head.weight[1].zero_()  # answers of full length
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = Whitespace()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Timed(
            model=model,
            reward_funcs=reward,
            args=BAPOTrainerConfig(
                output_dir=folder,
                per_device_train_batch_size=B,
                gradient_accumulation_steps=3,
                num_generations=4,
                num_iterations=2,
                max_completion_length=T,
                max_steps=4,
                learning_rate=1e-4,
                use_cpu=True,
                bf16=False,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                **TRAINERS[name],
            ),
            train_dataset=Dataset.from_dict({"prompt": ["a b", "k l m", "t u", "f g h"] * 16}),
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
            ),
        )
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    low, _, high = (statistics.quantiles(times[2:], n=5)[i] for i in (0, 1, 3))
    return {
        "case": f"TRL micro-batch: {name}",
        "B": B,
        "T": T,
        "V": V,
        "H": H,
        "dtype": "float32",
        "ms": statistics.median(times[2:]),
        "ms_mean": statistics.mean(times[2:]),  # includes the extra forward of scope "step"
        "ms_20": low,
        "ms_80": high,
        "repetitions": len(times) - 2,
        "peak_MiB": peak / 1024,
        "grown_MiB": (peak - before) / 1024,
    }


def main(out: Path = RESULTS) -> None:
    """Runs every trainer, prints a table, and appends records to a file of JSON lines."""
    context = multiprocessing.get_context("spawn")
    records = []
    for name in track(TRAINERS, "trainers"):
        with ProcessPoolExecutor(1, mp_context=context) as alone:
            records.append(alone.submit(run, name).result())
    table = Table(title=f"Loss and backward of {B} x {T} tokens, V = {V:,}, H = {H}")
    for column in ("", "ms", "20 % .. 80 %", "mean", "peak MiB"):
        table.add_column(column, justify="right" if column else "left")
    for r in records:
        spread = f"{r['ms_20']:.0f} .. {r['ms_80']:.0f}"
        others = f"{r['ms_mean']:.0f}", f"{r['peak_MiB']:.0f}"
        table.add_row(r["case"].split(": ")[1], f"{r['ms']:.0f}", spread, *others)
    Console().print(table)
    append(out, [{**environment(), **record} for record in records])


if __name__ == "__main__":
    typer.run(main)
