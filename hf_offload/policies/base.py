"""The contract of a policy: which blocks a step attends, which are resident, and when blocks are copied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from hf_offload.attention.step import Step
    from hf_offload.cache.layer import HybridLayer
    from hf_offload.fields import Field, LayerSizes
    from hf_offload.policies.salience import SalienceRule


EVER = 2**31
"""`Plan.until` of a plan that no number of blocks ends."""
SCHEDULES = ("priority", "none", "uniform", "length")
"""How the CPU and the device may share the choice of the host's blocks and the attention to them."""


@dataclass(slots=True)
class Selection:
    """Logical blocks for each row and KV head.

    Args:
        blocks: `[B, Hkv, C]` int32, ascending; entries from `counts` on mean nothing. Arrays with one memory, tensors
            on the device with two.
        counts: `[B, Hkv]` int32.
        slots: `[B, Hkv, C]` int32, where resident blocks lie.
    """

    blocks: Any
    counts: Any
    slots: Any = None

    @property
    def total(self) -> int:
        """Blocks in all rows and heads."""
        return int(self.counts.sum())


@dataclass(slots=True)
class Plan:
    """Who computes what in one decode step of one layer; the parts share no block.

    Args:
        device: resident blocks, attended by the device.
        host: blocks attended by the CPU with the query of this step.
        fetched: host blocks that the device attends once they have been copied to it.
        ahead: a CPU part that was started one layer early, with a predicted query.
        kept: single tokens that the CPU attends, a list for each row and KV head (`cache.context.Context`); the blocks
            beside them are the window, whose tokens' weights are averaged.
        near: sinks and newest blocks, which have been attended (`attention.step.Near`).
        retrieved: a CPU part that chooses its blocks itself, of those that are not near, and has been started.
        attended: out `[B, Hq, D]` and lse `[B, Hq]` fp32, where the policy has attended everything itself.
        until: with one memory the plan serves later steps, too, as long as the rows have fewer blocks than this and
            nothing has changed that its services depend on; 0: this step alone.
    """

    device: Selection | None = None
    host: Selection | None = None
    fetched: Selection | None = None
    ahead: Any = None
    kept: Any = None
    near: Any = None
    retrieved: Any = None
    attended: tuple[torch.Tensor, torch.Tensor] | None = None
    until: int = 0


@dataclass(frozen=True)
class Policy(ABC):
    """Base class of policies: which blocks a decode step attends, which are resident, and when blocks are copied.

    A policy is a frozen dataclass of its knobs, which `__post_init__` checks. It has a `name` and implements `plan`.
    `register_policy` makes it known.
    """

    name: ClassVar[str]
    block_size: ClassVar[int] = 32
    """Tokens of a block by default."""

    @property
    def digest_name(self) -> str | None:
        """The digest that blocks need, or None."""
        return None

    @property
    def sink_tokens(self) -> int:
        """Tokens at the start of each row, the first real one counted first, that are always attended and resident."""
        return 0

    @property
    def recent_tokens(self) -> int:
        """Newest sealed tokens that are always attended and resident; the unsealed tail comes on top."""
        return 0

    @property
    def budget_tokens(self) -> int | None:
        """Tokens a row and KV head attends in a step, or None for all of them."""
        return None

    @property
    def leaves_out(self) -> bool:
        """Whether a step may leave out tokens that are cached."""
        return self.budget_tokens is not None

    @property
    def retrieves(self) -> bool:
        """Whether the CPU itself chooses what it attends: digests lie there; what is always attended is resident."""
        return False

    @property
    def task_schedule(self) -> str | None:
        """Where the CPU chooses: one of `SCHEDULES`, or None for `"priority"` on a GPU and `"none"` without one."""
        return "none"

    @property
    def attends_blocks(self) -> bool:
        """Whether steps attend blocks; otherwise the policy's states hold what is attended, apart from all blocks."""
        return True

    def line_bytes(self, length: int, head_dim: int, itemsize: int) -> int:
        """Bytes that a state holds on the device for a row and KV head, if decoding starts with `length` tokens."""
        return 0

    def state_bytes(self, state: Any) -> int:
        """Bytes of what a layer's state holds of tokens on the model's device."""
        return 0

    @property
    def salience(self) -> SalienceRule | None:
        """How single tokens are kept for the CPU by their attention weights, or None: nobody averages weights."""
        return None

    @property
    def reads_prompts(self) -> bool:
        """Whether it learns from a prompt's queries, so that keys and values alone are not all that it knows."""
        asks = self.query_window > 0 and (self.retrieves or not self.attends_blocks)
        return self.salience is not None or asks

    def window_tokens(self, length: int) -> int | None:
        """Tokens of the window, of `length` that are cached; None: as many as are resident."""
        return None

    @property
    def query_window(self) -> int:
        """How many of a prompt's last queries are kept, for `place` and for whoever learns from them."""
        return 0

    def check_blocks(self, block_size: int) -> None:
        """Raise ValueError if the knobs make no sense with this block size."""
        budget = self.budget_tokens
        least = self.always_blocks(block_size) * block_size
        if budget is not None and budget < least:
            raise ValueError(
                f"budget={budget} is less than the {least} tokens that sinks, recent tokens and the tail take in "
                f"blocks of {block_size}; raise budget or lower sinks, recent or block_size"
            )

    def check_memories(self, *, two: bool) -> None:
        """Raise ValueError if the knobs make no sense with one memory, or with two."""
        return

    def for_memories(self, *, two: bool) -> Policy:
        """This policy where a saved cache is loaded: without knobs that make no sense there but changed no token."""
        return self

    def always_blocks(self, block_size: int) -> int:
        """Blocks that are always attended: sinks, recent ones and the tail (sinks behind padding may need one more)."""
        sinks, recent = -(-self.sink_tokens // block_size), -(-self.recent_tokens // block_size)
        return sinks + recent + 1

    def new_state(self, layer: HybridLayer) -> Any:
        """What this method remembers of one layer; dropped by `reset`."""
        return None

    def pack_state(self, state: Any) -> dict[str, torch.Tensor]:
        """What a layer's state holds between two forwards, for a fork or a saved cache.

        Raises:
            TypeError: this policy has states, but no `pack_state` and `unpack_state` of its own.
        """
        if state is not None:
            raise TypeError(f"{type(self).__name__} needs pack_state and unpack_state: its layers have states")
        return {}

    def state_fields(self, sizes: LayerSizes) -> dict[str, Field]:
        """What `pack_state` gives for a layer, if it gives anything: what a saved cache holds is compared with it."""
        return {}

    def unpack_state(self, state: Any, packed: dict[str, torch.Tensor]) -> None:
        """Make a new state what another was that gave `packed`."""
        return

    def select_rows(self, state: Any, rows: torch.Tensor) -> Any:
        """What is remembered when a layer keeps the rows of an index, int64 `[n]`; by default rows do not matter."""
        return state

    def for_model(self, identity: Callable[[], dict[str, Any]]) -> Policy:
        """This policy for a model, with what has to be read for it.

        Args:
            identity: tells what identifies the model in whatever dtype (`cache.fingerprint.likeness`).
        """
        return self

    def looks_ahead(self, layer: HybridLayer) -> bool:
        """Whether `before_layer` wants this layer's predicted query one layer early."""
        return False

    def may_look_ahead(self, *, beside_device: bool) -> bool:
        """Whether `looks_ahead` may become true for a layer once tokens are there.

        Args:
            beside_device: whether the model lies on a device beside the CPU.
        """
        return type(self).looks_ahead is not Policy.looks_ahead

    def before_layer(self, step: Step) -> None:
        """Layer-ahead work: called one decoder layer early, with `step.query` predicted."""
        return

    @abstractmethod
    def plan(self, step: Step) -> Plan:
        """Who computes what in a decode step."""

    def after_layer(self, step: Step, plan: Plan) -> None:
        """Recall, averages; called when the layer's attention is done."""
        return

    def place(self, step: Step, slots: int) -> Selection:
        """Which blocks are resident (at most `slots` for a row and KV head) when decoding starts.

        `step.query` holds the prompt's last queries, `[B, Hq, query_window, D]`.
        """
        if self.retrieves:  # no sink may be left out for a newer block
            return step.recent(min(slots, self.always_blocks(step.block_size)))
        return step.recent(slots)
