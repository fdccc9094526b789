"""The search for the clip bounds: one pass over the tokens, one tiny solve, no host read.

Imports core, and the reference where no kernel can run. A table of masses at the points of both
grids has the order of the kernels, so that a saved one keeps its meaning.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .backends import choose
from .checks import (
    check_device,
    check_floating,
    check_group,
    names_instead,
    outside_inference_mode,
    refuse,
    require,
)
from .config import GRID_FIELDS, BAPOConfig
from .core.arguments.options import TokenOptions
from .core.arguments.prepare import prepared
from .core.arguments.ranks import check_ranks
from .core.arguments.single import check_search, config_or_default
from .core.arguments.together import token_arguments
from .core.distributed import device_of_tables, rows_of_ranks
from .core.tokens import contributions, solve, with_log_ratios
from .output import REPORT, ClipBounds
from .reference.search import contribution_table, search_metrics, solve_table

SEARCH_METRICS = tuple(name for name in REPORT if name.startswith("bapo_"))

# The fields of a config that its table depends on.
TABLE_FIELDS = (*GRID_FIELDS, "token_weight", "contribution", "ratio_level")


class ContributionHistogram:
    """Contributions of many tokens to the search, gathered call by call.

    The masses matter at the points of two grids alone, which are known beforehand: a table has the
    negative mass at every lower and the positive mass at every upper point. Tables add up over
    chunks, micro-batches and ranks, and their sum tells where Algorithm 1 of the paper stops.

    Scope *step*: ``update`` with the log-probs of every micro-batch of an optimizer step, ``solve``
    once, and pass the result as ``bounds=`` to every call. Scope *lagged*: ``update`` with what the
    calls of this step return, and ``solve`` for the next. Nothing is read on the host, unless
    no kernel can run (``solve`` is then the reference's).

    Args:
        config: grids, token weight and contribution of the search.
        device: where the sums are kept; default: the device of the first update.

    Examples:
        >>> histogram = ContributionHistogram(BAPOConfig(token_weight="uniform", target=0.48))
        >>> for r, A in ((1.5, 2.0), (1.0, -3.0)):  # two micro-batches, of one token each
        ...     _ = histogram.update(torch.tensor([r]).log(), torch.zeros(1), torch.tensor([A]))
        >>> histogram.solve()  # 2*1.4/(2*1.4 + 3*1.0) is the first share not below 0.48
        ClipBounds(lower=tensor(0.6000), upper=tensor(1.4000))
    """

    def __init__(
        self, config: BAPOConfig | None = None, device: torch.device | str | None = None
    ) -> None:
        self.config = config_or_default(config)
        check_search(self.config)
        self.table: Tensor | None = None if device is None else empty_table(self.config, device)
        self._is_placed = device is not None
        self._solved: tuple[Tensor, Tensor, BAPOConfig] | None = None

    def update(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor | None,
        advantages: Tensor,
        response_mask: Tensor | None = None,
        *,
        rollout_log_probs: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> ContributionHistogram:
        """Adds the tokens of one call. Shapes as in :func:`bapo_loss_from_log_probs`.

        Tokens after the last of ``cu_seqlens`` are masked; float64 runs on the reference.
        """
        batch = old_log_probs, advantages, response_mask
        options: TokenOptions = dict(rollout_log_probs=rollout_log_probs, cu_seqlens=cu_seqlens)
        config = self.config
        arguments = token_arguments(log_probs, *batch, config=config, for_search=True, **options)
        backend = choose(None, log_probs, "log_probs")
        table, self._is_placed = self._table_on(log_probs.device), True
        check_device("log_probs", log_probs, table, "the histogram")
        if backend == "reference":
            tokens = *batch, rollout_log_probs, None, cu_seqlens
            table += contribution_table(self.config, log_probs, *tokens)
        else:
            call = prepared(backend, arguments)
            flat = log_probs.detach().double().reshape(-1)
            table += contributions(with_log_ratios(call, flat), flat)[0]
        return self

    @outside_inference_mode
    def solve(
        self, config: BAPOConfig | None = None, process_group: dist.ProcessGroup | None = None
    ) -> ClipBounds:
        """The bounds for all tokens so far, of every rank of ``process_group``.

        Args:
            config: default: the histogram's; what its table depends on must be the same.
            process_group: every rank of it must call; a rank may have no tokens.

        Raises:
            ValueError: the table depends on a value of ``config`` that is not the histogram's, the
                surrogate has no bounds, or the ranks differ in their first call.
        """
        check_group("process_group", process_group)
        config = self.config if config is None else config_or_default(config)
        check_search(config)
        for name in TABLE_FIELDS:
            mine, other = getattr(self.config, name), getattr(config, name)
            if mine != other:
                refuse(f"config.{name}", f"be that of the histogram ({mine!r})", repr(other))
        table = self._table_on(device_of_tables(process_group))
        backend = choose(None, table.new_empty(0, dtype=torch.float32), "table")
        rows = table[None]
        if process_group is not None:
            check_ranks("solve", None, config, table, process_group)
            rows = rows_of_ranks(table, process_group)
        if backend == "reference":
            bounds, masses = solve_table(config, rows.sum(0))
        else:
            bounds, masses = solve(backend, rows, config.options)
        self._solved = bounds, masses, config
        return ClipBounds(*bounds.unbind())

    @property
    @outside_inference_mode
    def metrics(self) -> dict[str, Tensor]:
        """The ``bapo_...`` metrics of the last :meth:`solve`; empty before the first.

        One call of a loss over the tokens of that decision would report the same
        (:attr:`BAPOOutput.metrics`). Nothing is read on the host.

        Examples:
            >>> histogram = ContributionHistogram(BAPOConfig(token_weight="uniform", target=0.48))
            >>> _ = histogram.update(torch.tensor([1.5, 1]).log(), None, torch.tensor([2.0, -3.0]))
            >>> _ = histogram.solve()  # on-policy: 2/(2 + 3) whatever the bounds are
            >>> histogram.metrics["bapo_pos_share"], histogram.metrics["bapo_saturated"]
            (tensor(0.4000), tensor(1.))
        """
        if self._solved is None:
            return {}
        bounds, masses, config = self._solved
        metrics = search_metrics(ClipBounds(*bounds.unbind()), masses, config)
        return {name: value.float() for name, value in metrics.items()}

    def reset(self) -> None:
        """Forgets all tokens."""
        if self.table is not None:
            self.table.zero_()

    def load(self, table: Tensor) -> None:
        """Replaces the sums by those of another histogram with the same grids (its ``table``).

        Raises:
            ValueError: the table has another shape, or sums that are not finite and >= 0. Nothing
                changes then.
        """
        check_floating("table", table)
        empty = empty_table(self.config, table.device)
        rule = f"have shape {tuple(empty.shape)}, as the grids of config ask for"
        require(table.shape == empty.shape, "table", rule, tuple(table.shape))
        bad = table[~((table >= 0) & (table < torch.inf))].tolist()
        require(not bad, "table", "have sums that are finite and >= 0", bad[:1])
        self.table = (empty if self.table is None else self.table).copy_(table)

    @outside_inference_mode
    def _table_on(self, device: torch.device | None) -> Tensor:
        """The sums, which loaded ones follow to the device of the first update."""
        if self.table is None:
            self.table = empty_table(self.config, device or "cpu")
        elif device is not None and not self._is_placed:
            self.table = self.table.to(device)
        return self.table


@names_instead
def find_clip_bounds(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor | None = None,
    *,
    config: BAPOConfig | None = None,
    rollout_log_probs: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> ClipBounds:
    """The bounds at which the paper's loop stops (Algorithm 1), in one pass over the tokens.

    A step past the maximum stops there, as in the authors' code; Algorithm 1 as printed refuses it.

    Args:
        log_probs, old_log_probs: ``[...]`` floating point; ``old_log_probs=None`` is on-policy.
            float64 runs on the reference.
        advantages: ``[...]``, or ``[B]`` for log-probs ``[B, S]``.
        response_mask: ``[...]`` bool, int or float; zero is masked. Masked entries may hold
            anything.
        config: grids, order, target.
        rollout_log_probs: ``[...]``, weight of a token; default: ``old_log_probs``.
        cu_seqlens: ``[B + 1]`` sequence offsets of packed ``[N]`` tokens, from 0; tokens after the
            last offset are masked.
        process_group: the search covers the tokens of all its ranks, by one all-reduce.

    Returns:
        0-dim float32 tensors on the device of ``log_probs``. If an unmasked token has an old
        log-prob that is not finite, or a NaN, they are the starting bounds.

    Examples:
        >>> log_probs, old = torch.tensor([1.5, 1.0]).log(), torch.zeros(2)
        >>> config = BAPOConfig(token_weight="uniform", target=0.48)
        >>> find_clip_bounds(log_probs, old, torch.tensor([2.0, -3.0]), config=config)
        ClipBounds(lower=tensor(0.6000), upper=tensor(1.4000))
        >>> find_clip_bounds(log_probs, old, torch.tensor([2.0, -9.0]), config=config)  # in vain
        ClipBounds(lower=tensor(0.9000), upper=tensor(3.))
    """
    histogram = ContributionHistogram(config)
    tokens = log_probs, old_log_probs, advantages, response_mask
    histogram.update(*tokens, rollout_log_probs=rollout_log_probs, cu_seqlens=cu_seqlens)
    return histogram.solve(process_group=process_group)


@outside_inference_mode
def empty_table(config: BAPOConfig, device: torch.device | str) -> Tensor:
    """float64 zeros: a negative mass per point of the lower grid, then a positive per upper."""
    kind = torch.device(device).type
    require(kind != "meta", "the device of a histogram", "have memory", kind)
    return torch.zeros(config.options.points(), dtype=torch.float64, device=device)
