"""SmolLM2-135M-Instruct, where it has been downloaded; importing this raises where it has not."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[1] / "build" / "smollm2"
if not FOLDER.exists():
    raise ImportError("python examples/smollm2_model.py downloads the model")


@lru_cache(maxsize=1)
def smollm2(dtype: torch.dtype) -> Any:
    """The causal language model, all of whose weights learn, with gradient checkpointing."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype).train()
    model.gradient_checkpointing_enable()
    return model
