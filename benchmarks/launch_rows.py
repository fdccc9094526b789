"""``python -m benchmarks.launch_rows``: launches each kernel twice, for a profiler or a sanitizer.

The data is that of the targets with mixed rows, which include undecided ones. With ``--sets`` every
row has a sampling mask, from logits and from hidden states with a trained head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
import typer

from .cases import SAMPLING_MASK, Batch, Case
from .methods.ours import train


def main(
    backend: Annotated[list[str], typer.Option(help="repeatable")],
    device: str = "cuda",
    N: int = 8_192,
    V: Annotated[list[int], typer.Option(help="repeatable")] = [151_936],  # noqa: B006
    H: int = 1_024,
    dtype: str = "bfloat16",
    sets: Annotated[bool, typer.Option("--sets", help="rows with a sampling mask")] = False,
) -> None:
    """Computes loss and gradient twice per backend."""
    cases = []
    for vocabulary in V:
        case = Case("logits", "loss", "any", N, vocabulary, H, dtype)
        if sets:
            case = replace(case, sweep=SAMPLING_MASK)
            cases += [case, replace(case, level="hidden")]
        else:
            cases.append(replace(case, layout="mixed", data="on-policy"))
    for case in cases:
        batch = Batch(case, device)
        for name in backend:
            for _ in range(2):
                batch.release()
                loss, _ = train(batch, backend=name)
            print(f"{name}, {case.level}, V = {case.V:,}: loss {loss.item():.6f}", flush=True)
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    typer.run(main)
