"""The contract of a policy: which blocks a step attends, which are resident, and when blocks are copied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.cache.layer import HybridLayer
    from hf_offload.cache.stats import LayerStats
    from hf_offload.fields import Field, LayerSizes
    from hf_offload.gpu.merge import HostPartial
    from hf_offload.scores import Scores


EVER = 2**31
"""`Plan.until` of a plan that no number of blocks ends."""


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


class Partial(NamedTuple):
    """Attention of a decode step over some of its keys.

    Args:
        out: `[B, Hq, D]` fp32; with two memories also in splits, `[B, Hq, S, D]`; anything where `lse` is −inf.
        lse: `[B, Hq]` or `[B, Hq, S]` fp32, natural logarithm of Σ exp(score); −inf where nothing was attended.
    """

    out: Any
    lse: Any


class RunningPartial(ABC):
    """A partial that the CPU is at work on beside the device (`attention.cpu_partial`); the core waits for it."""

    predicted: torch.Tensor | None = None
    """The query `[B, Hq, D]` that it attends with."""

    @abstractmethod
    def share(self, step: Step) -> torch.Tensor | float:
        """Tokens that it attends, as a share of the budget; on the device, where that alone knows."""

    @abstractmethod
    def partial(self) -> HostPartial:
        """Wait for it; what the merge needs.

        Raises:
            WorkerError: the work failed.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Let the work end, whatever comes of it."""


@dataclass(slots=True)
class Plan:
    """What a decode step of one layer attends, in partials that share no key; the core merges them by log-sum-exp.

    Args:
        partials: made by the step's services (`Step.attend`), or by the policy itself. With two memories one of them
            may be running.
        until: with one memory the plan serves later steps, too, as long as the rows have fewer blocks than this and
            nothing has changed that its services depend on; 0: this step alone.
    """

    partials: tuple[Partial | RunningPartial, ...]
    until: int = 0


class LayerState:
    """What a method remembers of one layer. The cache tells it what happens there; each method here does nothing.

    A state lives until `HybridCache.reset`. What it must keep for forks, saved caches, drafts and changes of the rows
    is what `tensors` gives and `load` takes back; a method overrides the others where that would cost too much.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of what it holds of tokens on the model's device."""
        return 0

    @property
    def slots(self) -> int | None:
        """Blocks of a row and KV head for which it wants room on the device; None: as many as the cache has."""
        return None

    # --- what happens ------------------------------------------------------------------------------------------------

    def before_append(self, layer: HybridLayer) -> None:
        """A prompt, a chunk of one or a new turn is about to be stored; it may yet be taken back by `crop`."""

    def append(self, layer: HybridLayer, query: torch.Tensor, scores: Scores) -> None:
        """It was stored; `query` `[B, Hq, Q, D]` is of its tokens."""

    def before_token(self, layer: HybridLayer) -> None:
        """A decode step begins."""

    def token(self, layer: HybridLayer) -> None:
        """A decode step has stored its token and attended; not told of steps that a CUDA graph replays."""

    def placed(self, layer: HybridLayer, query_heads: int | None = None) -> None:
        """With two memories: what is resident was decided and loaded.

        Args:
            layer: the layer.
            query_heads: of the model; None: as many as before.
        """

    def block_opened(self, layer: HybridLayer, block: int) -> None:
        """With two memories: a block that the next token begins got a slot."""

    def unplaced(self, layer: HybridLayer) -> None:
        """What is resident is about to be dropped, and decoding begins anew: append, crop, changed padding."""

    def cancelled(self) -> None:
        """The step that was prepared does not come: undo what `Policy.before_layer` has done to the state."""

    def padding_changed(self, layer: HybridLayer, block: int) -> None:
        """Tokens that were there before, in block `block` or behind it, became valid or invalid."""

    def adopted(self, layer: HybridLayer) -> None:
        """There are tokens of which nothing was told: of a cache that was taken over, or of an interrupted forward."""

    def prepare_crop(self, layer: HybridLayer, length: int) -> None:
        """Do what may fail of the crop that comes."""

    def crop(self, layer: HybridLayer, length: int) -> None:
        """Only the first `length` tokens stay, behind `unplaced`; allocates nothing that `prepare_crop` could have."""

    def select_rows(self, layer: HybridLayer, rows: torch.Tensor) -> None:
        """The rows of an index stay, int64 `[n]`, in its order."""
        self.load(layer, {name: x[rows.to(x.device)] if x.ndim else x.clone() for name, x in self.tensors().items()})

    def settle(self) -> None:
        """Wait for what it has in flight, before anything moves, is freed, copied or saved.

        Raises:
            WorkerError: that failed.
        """

    # --- what lasts --------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, torch.Tensor]:
        """What it must keep between two forwards, by name.

        For `select_rows` as it is here the first dimension is the rows', or there is none.
        """
        return {}

    def load(self, layer: HybridLayer, tensors: dict[str, torch.Tensor]) -> None:
        """Be what a state was that gave these; nothing: as new. They are the caller's: what is kept is copied.

        Tensors that a captured CUDA graph reads are written in place.
        """

    def share(self, layer: HybridLayer, source: Any) -> None:
        """Be, in a fork, what the state `source` is of the same layer in the cache that was forked."""
        self.load(layer, source.tensors())

    def snapshot(self) -> Any:
        """What `restore` goes back to when the decode steps from here on are taken back."""
        return {name: x.clone() for name, x in self.tensors().items()}

    def restore(self, layer: HybridLayer, snapshot: Any) -> None:
        """Go back; the tokens are cropped already."""
        self.load(layer, snapshot)

    def report(self, stats: LayerStats) -> None:
        """Fill in the statistics that it knows of."""


@dataclass(frozen=True)
class Requirements:
    """What a policy needs of the cache; asked once, when the cache is made.

    Args:
        budget: tokens that a row and KV head attends in a step; None: no limit.
        sinks: tokens at the start of each row, the first real one counted first, that are always attended and resident.
        recent: newest sealed tokens that are always attended and resident; the unsealed tail comes on top.
        digest: the digest that blocks need (`cache.digests.DIGESTS`), or None.
        digest_memory: where blocks are scored with two memories. `"host"`: the CPU itself chooses what it attends, and
            only what is always attended need be resident.
        leaves_out: whether a step may leave out tokens that are cached; true with a budget.
        attends_blocks: whether steps attend blocks; otherwise the states hold what is attended, apart from all blocks.
        query_window: how many of a prompt's last queries are kept, for `Policy.place` and for whoever learns from them.
        learns_from_prompts: whether it learns from a prompt's queries, so that keys and values are not all it knows.
        capturable: whether a decode step can be captured as a CUDA graph: the host decides nothing in it.
    """

    budget: int | None = None
    sinks: int = 0
    recent: int = 0
    digest: str | None = None
    digest_memory: Literal["device", "host"] = "device"
    leaves_out: bool = False
    attends_blocks: bool = True
    query_window: int = 0
    learns_from_prompts: bool = False
    capturable: bool = False

    def __post_init__(self) -> None:
        if self.budget is not None:
            object.__setattr__(self, "leaves_out", True)

    @property
    def scored_on_host(self) -> bool:
        """Whether the CPU itself chooses what it attends."""
        return self.digest_memory == "host"

    def always_blocks(self, block_size: int) -> int:
        """Blocks that are always attended: sinks, recent ones and the tail (sinks behind padding may need one more)."""
        return -(-self.sinks // block_size) + -(-self.recent // block_size) + 1


@dataclass(frozen=True)
class Policy(ABC):
    """Base class of policies: which blocks a decode step attends, which are resident, and when blocks are copied.

    A policy is a frozen dataclass of its knobs, which `__post_init__` checks. It has a `name`, says what it needs of
    the cache in `requirements`, and implements `plan`. `register_policy` makes it known.
    """

    name: ClassVar[str]
    block_size: ClassVar[int] = 32
    """Tokens of a block by default."""

    @property
    def requirements(self) -> Requirements:
        """What it needs of the cache."""
        return Requirements()

    # --- making a cache ----------------------------------------------------------------------------------------------

    def for_model(self, identity: Callable[[], dict[str, Any]]) -> Policy:
        """This policy for a model, with what has to be read for it.

        Args:
            identity: tells what identifies the model in whatever dtype (`cache.fingerprint.likeness`).
        """
        return self

    def check(self, *, block_size: int, two: bool) -> None:
        """Raise ValueError if the knobs make no sense with blocks of this size, or with one memory or `two`."""
        wants = self.requirements
        least = wants.always_blocks(block_size) * block_size
        if wants.budget is not None and wants.budget < least:
            raise ValueError(
                f"budget={wants.budget} is less than the {least} tokens that sinks, recent tokens and the tail take in "
                f"blocks of {block_size}; raise budget or lower sinks, recent or block_size"
            )

    def for_memories(self, *, two: bool) -> Policy:
        """This policy where a saved cache is loaded: without knobs that make no sense there but changed no token."""
        return self

    def looks_ahead(self, index: int, *, two: bool, beside_device: bool) -> bool:
        """Whether `before_layer` wants a layer's predicted query one layer early.

        Args:
            index: of the layer.
            two: whether there are two memories.
            beside_device: whether the model computes on a device beside the CPU.
        """
        return False

    def window_tokens(self, length: int) -> int | None:
        """Tokens that are resident of `length` cached ones, where the policy decides that; None: the cache does."""
        return None

    def state_bytes(self, sizes: LayerSizes, slots: int) -> tuple[int, int]:
        """Bytes that a layer's state holds on the device and on the host, if decoding starts with these sizes.

        Args:
            sizes: of the layer.
            slots: blocks of a row and KV head that are resident; 0 with one memory.
        """
        return 0, 0

    # --- remembering -------------------------------------------------------------------------------------------------

    def new_state(self, layer: HybridLayer) -> LayerState:
        """What this method remembers of one layer, whose store is there and empty."""
        return LayerState()

    def state_fields(self, sizes: LayerSizes) -> dict[str, Field]:
        """What `LayerState.tensors` gives for a layer, if it gives anything: saved caches are compared with it."""
        return {}

    def must_be_resident(self, layer: HybridLayer, blocks: int) -> torch.Tensor:
        """Which of a layer's first blocks, the newest aside, a step relies on being resident: bool `[B, blocks]`."""
        assert layer.store is not None
        wants = layer.requirements
        needed = torch.zeros(layer.batch_size, blocks, dtype=torch.bool)
        if wants.scored_on_host:
            low, high = (torch.from_numpy(end)[:, None] for end in layer.store.padding.sinks(wants.sinks))
            number = torch.arange(blocks)
            needed |= (number >= low) & (number < high)
            needed[:, max(layer.store.sealed - -(-wants.recent // layer.store.block_size), 0) :] = True
        return needed

    # --- a decode step -----------------------------------------------------------------------------------------------

    def before_layer(self, step: Step) -> None:
        """Layer-ahead work: called one decoder layer early, with `step.query` predicted."""
        return

    @abstractmethod
    def plan(self, step: Step) -> Plan:
        """What a decode step attends."""

    def after_layer(self, step: Step, plan: Plan) -> None:
        """Recall, averages; called when the layer's attention is done."""
        return

    def place(self, step: Step, slots: int) -> Selection:
        """Which blocks are resident (at most `slots` for a row and KV head) when decoding starts.

        `step.query` holds the prompt's last queries, `[B, Hq, query_window, D]`, or that of the step that comes where
        nobody has kept them.
        """
        wants = step.layer.requirements
        if wants.scored_on_host:  # no sink may be left out for a newer block
            return step.recent(min(slots, wants.always_blocks(step.block_size)))
        return step.recent(slots)
