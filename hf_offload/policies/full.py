"""Exact attention over all cached tokens, the reference for sparse policies; also FlexGen's fetching of all blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hf_offload.knobs import check_choice
from hf_offload.policies.base import EVER, Plan, Policy, Requirements

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.cache.layer import HybridLayer


@dataclass(frozen=True)
class Full(Policy):
    """Attend every cached token: exact attention.

    With two memories the device attends resident blocks and the CPU attends the others. `host="fetch"` is FlexGen's
    method (Sheng et al. 2023): each step copies every block to the device. FlexGen fetches one layer ahead; here each
    layer fetches its own blocks, in tiles of `prefill_tile`.

    Args:
        host: `"attend"`: the CPU attends blocks that are not resident; `"fetch"`: each step copies them to the device.
            With one memory both are the same.

    Raises:
        ValueError: `host` has another value.
    """

    name = "full"
    host: Literal["attend", "fetch"] = "attend"

    def __post_init__(self) -> None:
        check_choice("host", self.host, ("attend", "fetch"))

    @property
    def requirements(self) -> Requirements:
        return Requirements(holds_all=True, recalls=False, capturable=True)

    def attends_all(self, layer: HybridLayer, tokens: int) -> bool:
        return True

    def plan(self, step: Step) -> Plan:
        device, host = step.split(step.all_blocks())
        if self.host == "fetch" and step.layer.two_memories and host is not None:
            return Plan((*step.attend_split(device, None), step.attend_fetched(host)))
        return Plan(step.attend_split(device, host), until=EVER)
