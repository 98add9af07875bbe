"""Exact attention over everything that is cached: the oracle, and offloading without sparsity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hf_offload.knobs import check_choice
from hf_offload.policies.base import Plan, Policy, Selection

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.cache.layer import HybridLayer


@dataclass(frozen=True)
class Full(Policy):
    """Attend every block: on the device what is resident, on the CPU the rest, or that on the device, too.

    `host="fetch"` is how FlexGen (Sheng et al. 2023) serves a cache that lies in host memory: every step brings all of
    it over the link. FlexGen fetches for the next layer while one computes; here a layer fetches what it needs itself,
    in tiles of `prefill_tile`.

    Args:
        host: who attends what is not resident: `"attend"`: the CPU; `"fetch"`: the device, to which it is brought in
            every step. With one memory both are the same.

    Raises:
        ValueError: another value.
    """

    name = "full"
    host: Literal["attend", "fetch"] = "attend"

    def __post_init__(self) -> None:
        check_choice("host", self.host, ("attend", "fetch"))

    def repeats(self, layer: HybridLayer, host: Selection) -> bool:
        return True

    def plan(self, step: Step) -> Plan:
        device, host = step.split(step.all_blocks())
        if self.host == "fetch" and step.layer.has_slots:
            return Plan(device=device, fetched=host)
        return Plan(device=device, host=host)
