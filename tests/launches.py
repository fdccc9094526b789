"""Launches of a call: those of ATen and of collectives, one each, and those of our operators."""

from torch.utils._python_dispatch import TorchDispatchMode

from bapo_kernels.core.operators import SCHEMAS

# The most that an operator of the CUDA backend launches. Of prepare they are one to three: zeros,
# counts and the rest, or all in one block. Sums over sets are one without long ones.
LAUNCHES = dict.fromkeys(SCHEMAS, 1) | dict(prepare=3, contributions=2, search=2)
LAUNCHES |= dict(head_sets_pass=4, sets_dhidden=2, sets_dweight=2)
# Without a kernel: allocations, and what returns what it got.
_NONE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_NONE |= {"detach", "alias", "lift_fresh"}


class CountLaunches(TorchDispatchMode):
    """Collects what each operator call launches on a GPU, as ``(operator, launches)``."""

    def __init__(self):
        super().__init__()
        self.launches = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        namespace, name = op._schema.name.split("::")
        if namespace.startswith("bapo_kernels"):
            self.launches.append((name, LAUNCHES[name]))
        elif not op.is_view and name not in _NONE:
            self.launches.append((name, 1))
        return op(*args, **(kwargs or {}))

    def total(self):
        return sum(count for _, count in self.launches)
