"""What a wheel does where it is installed, as one line of JSON; run there, outside of this tree.

Versions, backends or why they are absent, the checks of ``validate``, and whether the library finds
torch's stream, which only a CUDA build of torch has.
"""

import ctypes
import json
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

import torch

import bapo_kernels
from bapo_kernels.debug import environment

LIBRARY = Path(bapo_kernels.__file__).parent / "_C.abi3.so"
STREAM = "aoti_torch_get_current_cuda_stream"
BESIDE = "triton", "typer"  # what torch brings along, if it does; what the extra cli does


def validate() -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report"
        command = [sys.executable, "-m", "bapo_kernels", "validate", f"--json={file}"]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, cwd=folder)
        checks = json.loads(file.read_text())["checks"]
    return {"checks": len(checks), "exit status": done.returncode}


def main() -> None:
    logits = torch.zeros(2, 5, requires_grad=True)
    out = bapo_kernels.bapo_loss(logits, torch.tensor([1, 3]), None, torch.tensor([1.0, -0.5]))
    out.loss.backward()
    facts = {
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "torch": torch.__version__,
        **{found.name: found.version for name in BESIDE for found in distributions(name=name)},
        "cuda of torch": torch.version.cuda,
        # Looked up where the library's own reference to it is: in what it is linked to.
        "finds the stream": hasattr(ctypes.CDLL(str(LIBRARY)), STREAM),
        "report": environment(),
        "bytes of the library": LIBRARY.stat().st_size,
        "loss": out.loss.item(),
        "validate": validate(),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
