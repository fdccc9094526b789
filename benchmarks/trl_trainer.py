"""``BAPOTrainer`` against TRL's ``GRPOTrainer``: time and peak memory of training steps.

``python -m benchmarks.trl_trainer`` trains a tiny Qwen3 on the CPU, and with ``--device cuda`` one
of the shapes of Qwen3-0.6B. Weights are random, and every trainer is given the same answers, so
that none generates any. Each runs in a separate process, which gives its own peak memory.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .records import append, environment, summary

RESULTS = Path(__file__).parent / "results" / "trl.jsonl"
GROUP = 4  # answers to a prompt
MICRO_BATCHES = 4  # of a step, so that it has as many groups as a micro-batch has answers
TRAINERS = {
    "TRL's GRPO": {},
    "BAPO, fused": dict(bapo_head="fused", bapo_scope="call"),
    "BAPO, log-probs, then loss": dict(bapo_head="log_probs", bapo_scope="call"),
    "BAPO, TRL's head": dict(bapo_head="trl", bapo_scope="call"),
    "BAPO, fused, scope step": dict(bapo_head="fused", bapo_scope="step"),
    "BAPO, fused, scope lagged": dict(bapo_head="fused", bapo_scope="lagged"),
}


@dataclass(frozen=True)
class Case:
    """A Qwen3, and its micro-batches of ``B`` answers of ``T/2`` to ``T`` tokens."""

    dtype: str
    B: int
    T: int
    V: int
    H: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    steps: int  # the first is not timed

    def model(self) -> Any:
        """With random weights, on torch's default device."""
        from transformers import AutoModelForCausalLM, Qwen3Config

        config = Qwen3Config(
            vocab_size=self.V,
            hidden_size=self.H,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            tie_word_embeddings=self.tied,
            pad_token_id=0,
            eos_token_id=1,
        )
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, self.dtype))

    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Random tokens, the same for every trainer, in the place of generated answers."""
        g = torch.Generator().manual_seed(trainer.state.global_step)
        lengths = torch.randint(self.T // 2, self.T + 1, (len(prompts),), generator=g)
        answers = [torch.randint(2, self.V, (n,), generator=g).tolist() for n in lengths.tolist()]
        prompt = list(range(2, 2 + self.T // 8))
        return {"prompt_ids": [prompt] * len(prompts), "completion_ids": answers, "logprobs": None}


CASES = {
    "cpu": Case("float32", 8, 64, 151_936, 512, 1, 512, 4, 2, 64, tied=False, steps=4),
    "cuda": Case("bfloat16", 4, 2_048, 151_936, 1_024, 28, 3_072, 16, 8, 128, tied=True, steps=8),
}


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Every other prompt has no correct answer, hence no advantage, as in practice."""
    return [float(i % 2 == 0 and i // GROUP % 2 == 0) for i in range(len(completion_ids))]


class Stopwatch:
    """Times and memory of a training: ``begin`` and ``end`` are those of a micro-batch.

    A step begins with its first loss, not with its rollout.
    """

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        self.micro_batches: list[float] = []
        self.steps: list[float] = []
        self.peaks: list[float] = []
        self.step_began: float | None = None

    def now(self) -> float:
        """Milliseconds, when all work so far is done."""
        if self.on_gpu:
            torch.cuda.synchronize()
        return 1e3 * time.perf_counter()

    def begin(self) -> None:
        self.began = self.now()
        if self.step_began is None:
            self.step_began = self.began
            self.reset_peak()

    def end(self) -> None:
        self.micro_batches.append(self.now() - self.began)

    def end_step(self) -> None:
        """After the optimizer."""
        assert self.step_began is not None
        self.steps.append(self.now() - self.step_began)
        self.peaks.append(self.peak())
        self.step_began = None

    def reset_peak(self) -> None:
        """Possible on a GPU only."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> float:
        """In MiB: of the tensors on a GPU since the reset, or of the process."""
        if self.on_gpu:
            return torch.cuda.max_memory_allocated() / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(name: str, case: Case, device: str) -> dict[str, Any]:
    """Trains, and returns the record of the steps after the first."""
    options = TRAINERS[name]
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOTrainer

    from bapo_kernels.integrations.trl import BAPOTrainer, BAPOTrainerConfig

    watch = Stopwatch(device)

    class Timed(GRPOTrainer if name == "TRL's GRPO" else BAPOTrainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            watch.begin()
            return super().compute_loss(*args, **kwargs)

        def training_step(self, *args: Any) -> torch.Tensor:
            result = super().training_step(*args)
            watch.end()
            return result

    class EndOfStep(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.end_step()

    torch.manual_seed(0)
    with torch.device(device):
        model = case.model()
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Timed(
            model=model,
            reward_funcs=reward,
            rollout_func=case.rollout,
            callbacks=[EndOfStep()],
            args=BAPOTrainerConfig(
                output_dir=folder,
                per_device_train_batch_size=case.B,
                gradient_accumulation_steps=MICRO_BATCHES,
                num_generations=GROUP,
                num_iterations=2,
                max_completion_length=case.T,
                max_steps=case.steps,
                learning_rate=1e-4,
                use_cpu=device == "cpu",
                bf16=case.dtype == "bfloat16",
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                **options,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["a prompt"] * 64}),
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
            ),
        )
        watch.reset_peak()
        before = watch.peak()
        trainer.train()
    times, steps = watch.micro_batches[MICRO_BATCHES:], watch.steps[1:]
    return {
        "case": f"TRL micro-batch: {name}",
        **asdict(case),
        "trl": version("trl"),
        "transformers": version("transformers"),
        **summary(times),
        "ms_mean": statistics.mean(times),  # includes the extra forward of scope "step"
        "step_ms": statistics.median(steps),
        "peak_MiB": max(watch.peaks),
        "grown_MiB": max(watch.peaks) - before,
    }


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    tokens: Annotated[int | None, typer.Option(help="of the longest answer")] = None,
    vocab: int | None = None,
    out: Annotated[Path, typer.Option(help="JSON lines file for the records")] = RESULTS,
) -> None:
    """Runs every trainer, appends its record to a file, and prints its times."""
    case = CASES[device]
    case = replace(case, T=tokens or case.T, V=vocab or case.V)
    context = multiprocessing.get_context("spawn")
    here = environment(device)  # the file of records may be in the repository
    print(case, flush=True)
    measured = 0
    for name in TRAINERS:
        try:
            with ProcessPoolExecutor(1, mp_context=context) as alone:
                r = alone.submit(run, name, case, device).result()
        except Exception as error:  # which must not keep the others from running
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            continue
        append(out, [here | r])
        measured += 1
        times = "step {step_ms:,.0f} ms, micro-batch {ms:,.0f} ms ({ms_20:,.0f} to {ms_80:,.0f})"
        print(f"{name}: {times.format(**r)}, peak {r['peak_MiB']:,.0f} MiB", flush=True)
    print(f"{measured} of {len(TRAINERS)} trainers measured")
    raise typer.Exit(measured < len(TRAINERS))


if __name__ == "__main__":
    typer.run(main)
