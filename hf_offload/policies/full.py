"""Exact attention over everything that is cached: the oracle, and offloading without sparsity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_offload.policies.base import Plan, Policy

if TYPE_CHECKING:
    from hf_offload.attention.step import Step


@dataclass(frozen=True)
class Full(Policy):
    """Attend every block: on the device what is resident, on the CPU the rest."""

    name = "full"

    def plan(self, step: Step) -> Plan:
        device, host = step.split(step.all_blocks())
        return Plan(device=device, host=host)
