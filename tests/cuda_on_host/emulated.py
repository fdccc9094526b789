"""The devices and the schedules that tests emulate."""

import os

from bapo_kernels.core import autograd, call, rows, tokens
from bapo_kernels.core.arguments import prepare
from bapo_kernels.core.head import sampled, sets

CALLERS = (autograd, call, prepare, rows, sampled, sets, tokens)  # of operators
# Compute capability, whose code a device executes, shared memory per multiprocessor, clusters that
# are active at once; and the number of blocks that hold a row of 40 KB, 0 for the generic row pass.
DEVICES = {
    "H100": ((9, 228 << 10, 3), 2),
    "one block": ((9, 256 << 10, 3), 1),
    "B200, four blocks": ((10, 28 << 10, 2), 4),
    "RTX 5090, eight blocks": ((12, 24 << 10, 2), 8),
    "sixteen blocks, one cluster": ((9, 20 << 10, 1), 16),
    "A100": ((8, 164 << 10, 0), 0),
    # For tests that name them: the others cover what these do, in more schedules.
    "B200": ((10, 228 << 10, 3), 2),
    "MIG": ((9, 228 << 10, 0), 0),  # a partition of a GPU, where no cluster fits
}
EVERYWHERE = [name for name in DEVICES if name not in ("B200", "MIG")]
if arch := os.environ.get("EMULATE_ARCH"):  # of every device with clusters
    major, most_bytes = int(arch) // 10, 100 if arch == "120" else 256
    for name, ((old, bytes_, clusters), blocks) in DEVICES.items():
        device = (major if old > 8 else 8), min(bytes_, most_bytes << 10), clusters
        DEVICES[name] = device, {1: 2, 16: 0}.get(blocks, blocks) if arch == "120" else blocks
FIRST_SEED = int(os.environ.get("EMULATE_FIRST", "1"))
SEEDS = range(FIRST_SEED, FIRST_SEED + int(os.environ.get("EMULATE_SEEDS", "1")))
ROUNDING = int(os.environ.get("EMULATE_ROUNDING", "1"))  # seed of the errors of exp
