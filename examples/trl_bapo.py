"""SmolLM2-135M-Instruct in TRL on a CPU, with the task of examples/smollm2.py; all weights learn.

Every batch of rollouts is used for three updates, so the policy that learns is not the one that
sampled. Checkpoints are in ``--out``; ``--resume`` goes on from the last one::

    python examples/trl_bapo.py --scope step
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import typer
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from smollm2 import CHAT, largest, reward
from smollm2_model import END, END_ID, fetch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from bapo_kernels.integrations.trl import BAPOTrainer, BAPOTrainerConfig

OPTIONS: dict[str, Any] = dict(
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    num_generations=8,
    num_iterations=3,
    max_completion_length=16,
    learning_rate=2e-5,
    lr_scheduler_type="constant",
    use_cpu=not torch.cuda.is_available(),
    bf16=False,
    logging_steps=1,
    save_steps=3,
    save_total_limit=1,
    report_to="none",
    disable_tqdm=True,
)


def questions(count: int) -> Dataset:
    """Prompts that begin the answer, and the right numbers."""
    r = random.Random(0)
    drawn = [largest(r) for _ in range(count)]
    prompts = [CHAT.format(question, begun) for question, begun, _ in drawn]
    return Dataset.from_dict({"prompt": prompts, "answer": [answer for *_, answer in drawn]})


def ended_and_right(
    completions: list[str], completion_ids: list[list[int]], answer: list[int], **_: object
) -> list[float]:
    """TRL decodes without special tokens, so the end of a completion is in its ids alone."""
    ends = [END * (ids[-1] == END_ID) for ids in completion_ids]
    return [reward(*each) for each in zip(map(str.__add__, completions, ends), answer, strict=True)]


def trainer_of(out: Path, scope: str, preset: str, steps: int, **options: Any) -> BAPOTrainer:
    """The trainer, which has trained nothing yet; other options of TRL replace those below."""
    model = fetch()
    return BAPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=ended_and_right,
        args=BAPOTrainerConfig(
            str(out),
            max_steps=steps,
            bapo_scope=scope,
            bapo_preset=preset,
            **OPTIONS | options,
        ),
        train_dataset=questions(512),
        # TRL pads prompts on the left; end and padding are one token here.
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
    )


def main(
    scope: str = "lagged",
    preset: str = "paper",
    steps: int = 12,
    out: Path = Path("out/trl"),
    resume: bool = False,
) -> None:
    """Trains and prints what the search decided at every step."""
    trainer = trainer_of(out, scope, preset, steps)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    table = Table(title=f"BAPO in TRL, scope {scope}, preset {preset}")
    for column in ("step", "reward", "loss", "clip low", "clip high", "positive share", "clipped"):
        table.add_column(column, justify="right")
    for entry in (e for e in trainer.state.log_history if "loss" in e):
        names = ("bapo/clip_low", "bapo/clip_high", "bapo/pos_share", "clip_ratio/region_mean")
        values = (f"{entry[name]:.2f}" if name in entry else "" for name in ("reward", *names))
        reward, *others = values
        table.add_row(str(entry["step"]), reward, f"{entry['loss']:+.3f}", *others)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
