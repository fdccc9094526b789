"""Launches of a call: those of ATen and of collectives, one each, and those of our operators."""

from torch.utils._python_dispatch import TorchDispatchMode

# The most that an operator of the CUDA backend launches. Of prepare they are one to three: zeros,
# counts and the rest, or all in one block. Sums over sets are one without long ones.
LAUNCHES = {
    "prepare": 3,
    "row_statistics": 1,
    "row_pass": 1,
    "row_pass_": 1,
    "row_gradient": 1,
    "row_gradient_": 1,
    "contributions": 2,
    "solve": 1,
    "search": 2,
    "token_loss": 1,
    "sequence_log_ratios": 1,
    "add_sequence_means_": 1,
    "find_labels": 1,
    "gather_sets": 1,
    "multiply_sets": 1,
    "scatter_sets": 1,
    "head_sets_pass": 4,
    "sets_dhidden": 2,
    "sets_dweight": 2,
    "scale_": 1,
}
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class CountLaunches(TorchDispatchMode):
    """Collects what each operator call launches on a GPU, as ``(operator, launches)``."""

    def __init__(self):
        super().__init__()
        self.launches = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        namespace, name = op._schema.name.split("::")
        if namespace.startswith("bapo_kernels"):
            self.launches.append((name, LAUNCHES[name]))
        elif not op.is_view and name not in _ALLOCATIONS and not _hands_through(op):
            self.launches.append((name, 1))
        return op(*args, **(kwargs or {}))

    def total(self):
        return sum(count for _, count in self.launches)


def _hands_through(op):
    """Whether an operator returns what it got, without a kernel."""
    return op._schema.name in ("aten::detach", "aten::alias", "aten::lift_fresh")
