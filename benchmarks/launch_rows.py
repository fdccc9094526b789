"""``python -m benchmarks.launch_rows``: launches each row kernel twice, for a profiler.

The data is that of the targets with mixed rows, which include undecided ones.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from .cases import Batch, Case
from .methods.ours import train


def main(
    backend: Annotated[list[str], typer.Option(help="repeatable")],
    device: str = "cuda",
    N: int = 8_192,
    V: int = 151_936,
    dtype: str = "bfloat16",
) -> None:
    """Computes loss and gradient twice per backend."""
    case = Case("logits", "loss", "any", N, V, 1, dtype, layout="mixed", data="on-policy")
    batch = Batch(case, device)
    for name in backend:
        for _ in range(2):
            batch.release()
            loss, _ = train(batch, backend=name)
        print(f"{name}: loss {loss.item():.6f}", flush=True)
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    typer.run(main)
