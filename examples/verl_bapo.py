"""verl's own ``ppo_loss`` with the policy loss ``bapo`` and with ``vanilla``, on a CPU.

verl finds the loss by itself (entry point ``verl.plugins``). The configs come from YAML, as in a
run of ``verl.trainer.main_ppo``; the batch is synthetic, as stale as in off-policy training::

    python examples/verl_bapo.py --preset recipe
"""

from __future__ import annotations

import torch
import typer
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass

import bapo_kernels.integrations.verl  # noqa: F401  for verl before 0.9, which has no plugins

YAML = """
_target_: verl.workers.config.ActorConfig
strategy: fsdp
rollout_n: 8
ppo_mini_batch_size: 64
ppo_micro_batch_size_per_gpu: 8
loss_agg_mode: token-mean
policy_loss:
  _target_: bapo_kernels.integrations.verl.BAPOPolicyLossConfig
  loss_mode: bapo
"""


def main(preset: str = "paper", staleness: float = 0.3) -> None:
    """Loss, metrics and gradient of one micro-batch of 8 x 512 tokens."""
    given = OmegaConf.create(YAML)
    given.policy_loss.preset = preset
    config = omega_conf_to_dataclass(given)
    assert "bapo" in POLICY_LOSS_REGISTRY

    g = torch.Generator().manual_seed(0)
    old = -2 * torch.rand(8, 512, generator=g)
    log_prob = (old + staleness * torch.randn(8, 512, generator=g)).requires_grad_()
    rewards = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1])
    advantages = ((rewards - rewards.mean()) / rewards.std())[:, None].expand(8, 512)
    response_mask = torch.arange(512)[None] < torch.randint(64, 513, (8, 1), generator=g)
    config.global_batch_info.update(dp_size=1, batch_num_tokens=int(response_mask.sum()))

    table = Table(title=f"One micro-batch in verl, preset {preset}")
    table.add_column("")
    columns = {}
    for name in ("vanilla", "bapo"):
        log_prob.grad = None
        loss, metrics = get_policy_loss_fn(name)(
            old_log_prob=old,
            log_prob=log_prob,
            advantages=advantages,
            response_mask=response_mask,
            loss_agg_mode=config.loss_agg_mode,
            config=config,
        )
        loss.backward()
        columns[name] = {
            "loss": loss.item(),
            "gradient norm": log_prob.grad.norm().item(),
            **metrics,
        }
        table.add_column(name, justify="right")
    for row in columns["bapo"]:
        values = (columns[name].get(row) for name in columns)
        table.add_row(row, *("" if v is None else f"{v:+.4f}" for v in values))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
