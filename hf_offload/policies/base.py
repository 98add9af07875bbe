"""The contract of policies with the core: `Policy`, `Requirements`, `LayerState`, `Plan`, `Partial`, `Selection`."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch

from hf_offload.knobs import check_choice, check_count, check_flag, shown

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.cache.layer import HybridLayer
    from hf_offload.cache.stats import LayerStats
    from hf_offload.fields import Field, LayerSizes
    from hf_offload.gpu.merge import HostResult
    from hf_offload.scores import Scores


EVER = 2**31
"""`Plan.until` of a plan that is valid for any number of blocks."""


DENSE_BYTES = 640 << 20
"""Keys and values of a layer, all rows, that a GPU attends in less time than it takes to choose among them."""


def check_dense(dense: object) -> None:
    """Check the knob `dense`.

    Raises:
        ValueError: the value is not allowed.
    """
    if dense != "auto" and not isinstance(dense, bool):
        raise ValueError(f'dense={shown(dense)} is not True, False or "auto"; use one of these')


def attends_all(dense: bool | str, layer: HybridLayer, tokens: int, budget: int) -> bool:
    """`Policy.attends_all` by the knob `dense`: "auto": within the budget, and where a choice would take longer.

    Args:
        dense: the knob.
        layer: the layer.
        tokens: of a row.
        budget: tokens that a step would attend.
    """
    if dense != "auto":
        return bool(dense)
    store = layer.store
    assert store is not None
    token_bytes = store.batch * store.num_kv_heads * store.pool.record_bytes / store.block_size
    return tokens <= budget or tokens * token_bytes <= DENSE_BYTES


@dataclass(slots=True)
class Selection:
    """What each row and KV head attends: NumPy arrays with one memory, device tensors with two.

    Args:
        items: `[B, Hkv, C]` int32, ascending numbers of blocks, or of pairs of tokens; entries from `counts` on are
            ignored. Pairs are listed on the host, with two memories, too.
        counts: `[B, Hkv]` int32.
        unit: tokens of an item: the block size, or 2.
        weights: a `decode_attention.Pairs`, what drawn pairs stand for; None: items are blocks.
        slots: `[B, Hkv, C]` int32, the slots of resident blocks; None for others.
    """

    items: Any
    counts: Any
    unit: int
    weights: Any = None
    slots: Any = None


class Partial(NamedTuple):
    """Attention of a decode step over some of its keys.

    Args:
        out: fp32 `[B, Hq, D]`, with two memories also in splits, `[B, Hq, S, D]`; undefined where `lse` is −inf.
        lse: fp32 `[B, Hq]` or `[B, Hq, S]`, natural logarithm of Σ exp(score); −inf without keys.
    """

    out: Any
    lse: Any


class Estimate(NamedTuple):
    """The part of a step whose log mass is estimated: of drawn pairs, or of blocks attended with a predicted query.

    Args:
        selection: the pairs or blocks.
        lse: fp32 array `[B, Hq]`, their log mass as the merge takes it.
    """

    selection: Selection
    lse: Any


class HostPartial(ABC):
    """A partial that the CPU computes beside the device; the core waits for it. See `attention.host_partial`."""

    predicted: torch.Tensor | None = None
    """`[B, Hq, D]`, the query that the CPU attends with."""

    @abstractmethod
    def share(self, step: Step) -> torch.Tensor | float:
        """Return the attended tokens as a share of the budget: a device tensor `[]`, or a float if the host knows."""

    @abstractmethod
    def result(self) -> HostResult:
        """Wait for the CPU and return the result for the merge.

        Raises:
            WorkerError: the work failed.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Wait for the CPU and drop the result."""

    def estimate(self, step: Step) -> Estimate | None:
        """Return the part of the step whose log mass is estimated, after `result`; None: none."""
        return None

    def block_shares(self) -> torch.Tensor | None:
        """Return the blocks' shares of the attention, fp32 `[B, Hkv, N]` on the device, after `result`, if known."""
        return None


@dataclass(slots=True)
class Plan:
    """Attention of one layer's decode step: partials over disjoint keys, which the core merges by log-sum-exp.

    Args:
        partials: results of the step's services (`Step.attend`), or of the policy's own computation. With two memories
            one of them may be a `HostPartial`.
        until: with one memory, later steps reuse the plan while rows have fewer blocks than this and nothing changes
            that its services depend on; 0: the plan is for this step only.
    """

    partials: tuple[Partial | HostPartial, ...]
    until: int = 0
    host: HostPartial | None = field(default=None, init=False)
    """The one of the partials that is a `HostPartial`."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            TypeError: an item of `partials` is none, or `until` is no integer.
            ValueError: `partials` is empty or has several host partials, or `until` is negative.
        """
        self.partials = tuple(self.partials)
        if not self.partials:
            raise ValueError(
                "Plan.partials is empty; a step attends at least its own token: step.attend(step.recent(1))"
            )
        for item in self.partials:
            if isinstance(item, HostPartial):
                if self.host is not None:
                    raise ValueError(
                        "a plan has several host partials, of which one is allowed; join their blocks, or attend one "
                        "on the device"
                    )
                self.host = item
            elif not isinstance(item, Partial):
                raise TypeError(
                    f"Plan.partials holds a {type(item).__name__}; it takes partials: hf_offload.Partial(out, lse), or "
                    "what step.attend(...) returns, which is a tuple of them"
                )
        if isinstance(self.until, bool) or not isinstance(self.until, int):
            raise TypeError(f"Plan.until={shown(self.until)} is not a number of blocks")
        if self.until < 0:
            raise ValueError(f"Plan.until={self.until} is negative; use 0 for a plan that serves its own step alone")


class LayerState:
    """A policy's state of one layer. The core calls these methods on events; the defaults do nothing.

    A state lives until `HybridCache.reset`. Forks, saved caches, drafts and changes of the rows copy it by `tensors`
    and `load`. A policy overrides `share`, `snapshot`, `restore`, `select_rows` and `check_rows` where that costs much.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of the token data that the state holds on the model's device."""
        return 0

    @property
    def slots(self) -> int | None:
        """The number of slots that the state wants for a row and KV head; None: the cache decides."""
        return None

    # --- events ------------------------------------------------------------------------------------------------------

    def before_append(self, layer: HybridLayer) -> None:
        """Before a prompt, a chunk of one or a new turn is stored; `crop` may undo it.

        `layer.past` is the number of stored tokens; `layer.get_seq_length()` has the new ones in it.
        """

    def append(self, layer: HybridLayer, query: torch.Tensor, scores: Scores) -> None:
        """After a prompt, a chunk of one or a new turn was stored.

        Args:
            layer: the layer.
            query: `[B, Hq, Q, D]`, queries of the new tokens.
            scores: parameters of the model's scores.
        """

    def before_token(self, layer: HybridLayer) -> None:
        """Before a decode step."""

    def token(self, layer: HybridLayer) -> None:
        """After a decode step that stored a token; not called for replays of a CUDA graph."""

    def placed(self, layer: HybridLayer, query_heads: int | None = None) -> None:
        """With two memories, after the resident set was placed.

        Args:
            layer: the layer.
            query_heads: the model's query heads; None: unchanged.
        """

    def block_opened(self, layer: HybridLayer, block: int) -> None:
        """With two memories, after the block that the next token starts got a slot."""

    def unplaced(self, layer: HybridLayer) -> None:
        """Before the resident set is dropped, to be placed again: an append, a crop, new padding, a failed step."""

    def cancelled(self) -> None:
        """Undo the changes of `Policy.before_layer`, whose step does not follow."""

    def padding_changed(self, layer: HybridLayer, block: int) -> None:
        """After older tokens, in block `block` or a later one, became valid or invalid."""

    def adopted(self, layer: HybridLayer) -> None:
        """After tokens were stored without events: from another cache, or by an interrupted forward."""

    def prepare_crop(self, layer: HybridLayer, length: int) -> None:
        """Do the part of a crop to `length` tokens that may fail."""

    def crop(self, layer: HybridLayer, length: int) -> None:
        """Crop to the first `length` tokens, after `unplaced`, without allocations that `prepare_crop` can make."""

    def check_rows(self, layer: HybridLayer) -> None:
        """Check, before rows change, that `select_rows` can follow.

        Raises:
            ValueError: a tensor has not the rows as its first dimension.
        """
        for name, x in self.tensors().items():
            if x.ndim and len(x) != layer.batch_size:
                raise ValueError(
                    f"{type(self).__name__}.tensors gives {name!r} of shape {list(x.shape)} for {layer.batch_size} "
                    "rows; give tensors with the rows first, or 0-d ones, or override check_rows and select_rows"
                )

    def select_rows(self, layer: HybridLayer, rows: torch.Tensor) -> None:
        """Keep the rows of an index, int64 `[n]`, in its order."""
        self.load(layer, {name: x[rows.to(x.device)] if x.ndim else x.clone() for name, x in self.tensors().items()})

    def wait(self) -> None:
        """Wait for the state's work in flight, before anything is moved, freed, copied or saved.

        Raises:
            WorkerError: the work failed.
        """
        if settle := getattr(self, "settle", None):  # its former name
            warnings.warn(f"{type(self).__name__}.settle is called wait now; rename it", FutureWarning, stacklevel=2)
            settle()

    # --- contents ----------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state's contents between two forwards, by name.

        For the default `select_rows` each has the rows as its first dimension, or none (0-d).
        """
        return {}

    def load(self, layer: HybridLayer, tensors: dict[str, torch.Tensor]) -> None:
        """Restore the contents that `tensors` returned, copied; an empty dict resets the state.

        Tensors that a captured CUDA graph reads are written in place.
        """

    def share(self, layer: HybridLayer, source: Any) -> None:
        """Take over, in a fork, the contents of `source`, the same layer's state in the forked cache."""
        self.load(layer, source.tensors())

    def snapshot(self) -> Any:
        """Return a snapshot for `restore`, which undoes the decode steps after it."""
        return {name: x.clone() for name, x in self.tensors().items()}

    def restore(self, layer: HybridLayer, snapshot: Any) -> None:
        """Restore a snapshot, after the tokens were cropped."""
        self.load(layer, snapshot)

    def report(self, stats: LayerStats) -> None:
        """Fill in the layer's statistics that only the state knows."""


@dataclass(frozen=True)
class Requirements:
    """A policy's requirements on the cache, read once when the cache is made.

    Args:
        budget: tokens that a row and KV head attends in a step; None: no limit.
        sinks: first valid tokens of each row that are always attended and resident.
        recent: newest sealed tokens that are always attended and resident, in addition to the unsealed tail.
        digest: the name of the blocks' digest (`blocks.digests.DIGESTS`), or None.
        digest_memory: the memory in which blocks are scored when there are two. With `"host"` the CPU chooses what it
            attends.
        chooses_resident: whether more blocks are resident than those that are always attended, although blocks are
            scored on the host.
        leaves_out: whether a step may leave out cached tokens; set to True with a budget.
        attends_blocks: whether steps attend blocks; False: the states hold copies of all attended tokens.
        query_window: number of a prompt's last queries to keep, for `Policy.place` and the states.
        learns_from_prompts: whether the states depend on a prompt's queries, and not on keys and values alone.
        holds_all: whether it is of use that all blocks are resident, where a device has room for them.
        recalls: whether steps exchange resident blocks by their worth, for which a device sorts the slots.
        capturable: whether a decode step can be captured as a CUDA graph, that is, the host decides nothing in it.
    """

    budget: int | None = None
    sinks: int = 0
    recent: int = 0
    digest: str | None = None
    digest_memory: Literal["device", "host"] = "device"
    chooses_resident: bool = False
    leaves_out: bool = False
    attends_blocks: bool = True
    query_window: int = 0
    learns_from_prompts: bool = False
    holds_all: bool = False
    recalls: bool = True
    capturable: bool = False

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ValueError: a value that is not allowed.
        """
        if self.budget is not None:
            check_count("budget", self.budget)
            object.__setattr__(self, "leaves_out", True)
        for name in ("sinks", "recent", "query_window"):
            check_count(name, getattr(self, name), least=0)
        for name in (
            "chooses_resident", "leaves_out", "attends_blocks", "learns_from_prompts", "holds_all", "recalls",
            "capturable",
        ):  # fmt: skip
            check_flag(name, getattr(self, name))
        check_choice("digest_memory", self.digest_memory, ("device", "host"))
        if not (self.digest is None or isinstance(self.digest, str)):
            raise ValueError(f"digest={shown(self.digest)} is not the name of a digest")

    @property
    def scored_on_host(self) -> bool:
        """Whether the CPU chooses the blocks that it attends."""
        return self.digest_memory == "host"

    def always_blocks(self, block_size: int) -> int:
        """Return the number of blocks always attended: sinks, recent, tail. Sinks after padding may take one more."""
        return -(-self.sinks // block_size) + -(-self.recent // block_size) + 1


@dataclass(frozen=True)
class Policy(ABC):
    """Base class of policies: which blocks a decode step attends, which are resident, and when blocks are copied.

    A policy is a frozen dataclass of its knobs, which `__post_init__` checks. It has a `name` and `requirements`, and
    implements `plan`. `register_policy` registers it under its name.
    """

    name: ClassVar[str]
    block_size: ClassVar[int] = 32
    """Default tokens of a block."""

    @property
    def requirements(self) -> Requirements:
        """The policy's requirements on the cache."""
        return Requirements()

    # --- making a cache ----------------------------------------------------------------------------------------------

    def for_model(self, identity: Callable[[], dict[str, Any]]) -> Policy:
        """Return this policy for a model, with the files read that it needs.

        Args:
            identity: returns the model's identity, which is the same in all dtypes (`files.fingerprint.likeness`).
        """
        return self

    def check(self, *, block_size: int, two_memories: bool) -> None:
        """Check the knobs for a block size and one or two memories.

        Raises:
            ValueError: a knob is not allowed there.
        """
        wants = self.requirements
        if not isinstance(wants, Requirements):
            raise TypeError(
                f"{type(self).__name__}.requirements is a {type(wants).__name__}, not a hf_offload.Requirements; make "
                "it an attribute or a property"
            )
        least = wants.always_blocks(block_size) * block_size
        if wants.budget is not None and wants.budget < least:
            raise ValueError(
                f"budget={wants.budget} is less than the {least} tokens that sinks, recent tokens and the tail take in "
                f"blocks of {block_size}; raise budget or lower sinks, recent or block_size"
            )

    def with_defaults(self, *, two_memories: bool) -> Policy:
        """Return this policy for one or two memories, with the defaults that depend on their number."""
        return self

    def for_memories(self, *, two_memories: bool) -> Policy:
        """Return this policy for a loaded cache, without knobs that need two memories and affect no token."""
        return self

    def looks_ahead(self, index: int, *, two_memories: bool, on_device: bool) -> bool:
        """Whether `before_layer` is called for a layer, with its predicted query.

        Args:
            index: number of the layer.
            two_memories: whether the cache has device and host memory, or one for both.
            on_device: whether the model computes on a device other than the CPU, in steps captured as a CUDA graph.
        """
        return False

    def attends_all(self, layer: HybridLayer, tokens: int) -> bool:
        """Whether a step with `tokens` tokens, all of them resident, attends them all; `plan` is not asked then."""
        return False

    def window_tokens(self, length: int) -> int | None:
        """Return the number of resident tokens for `length` cached ones; None: the cache's knobs decide."""
        return None

    def state_bytes(self, sizes: LayerSizes, slots: int) -> tuple[int, int]:
        """Return the bytes of a layer's state on the device and on the host, when decoding starts.

        Args:
            sizes: sizes of the layer.
            slots: resident blocks of a row and KV head; 0 with one memory.
        """
        return 0, 0

    # --- states ------------------------------------------------------------------------------------------------------

    def new_state(self, layer: HybridLayer) -> LayerState:
        """Return a new state of one layer, whose store exists and is empty."""
        return LayerState()

    def state_fields(self, sizes: LayerSizes) -> dict[str, Field]:
        """Return the fields of `LayerState.tensors`, unless that is empty, for the check of saved caches."""
        return {}

    def must_be_resident(self, layer: HybridLayer, blocks: int) -> torch.Tensor:
        """Return which of a layer's first `blocks` blocks must be resident in a step: bool `[B, blocks]`."""
        assert layer.store is not None
        wants = layer.requirements
        needed = torch.zeros(layer.batch_size, blocks, dtype=torch.bool, device="cpu")
        if wants.scored_on_host:
            low, high = (torch.from_numpy(end)[:, None] for end in layer.store.padding.sinks(wants.sinks))
            number = torch.arange(blocks, device="cpu")
            needed |= (number >= low) & (number < high)
            needed[:, max(layer.store.sealed - -(-wants.recent // layer.store.block_size), 0) :] = True
        return needed

    # --- a decode step -----------------------------------------------------------------------------------------------

    def before_layer(self, step: Step) -> None:
        """Do layer-ahead work; called one decoder layer early, with a predicted `step.query`."""
        return

    @abstractmethod
    def plan(self, step: Step) -> Plan:
        """Return the plan of a decode step: the partials that it attends."""

    def plan_without_digests(self, step: Step) -> Plan:
        """Plan a step of rows too short for digests (`blocks.digests.STATISTICS_TOKENS`): attend all blocks."""
        return Plan(step.attend(step.all_blocks()), until=EVER)

    def after_layer(self, step: Step, plan: Plan) -> None:
        """Recall blocks and update averages; called after the layer's attention."""
        return

    def place(self, step: Step, slots: int) -> Selection:
        """Return the blocks that are resident when decoding starts, at most `slots` for a row and KV head.

        `step.query` holds the prompt's last queries, `[B, Hq, query_window, D]`, or the next step's query if they were
        not kept.
        """
        wants = step.layer.requirements
        if wants.scored_on_host:  # all sinks must fit beside the newest blocks
            return step.recent(min(slots, wants.always_blocks(step.block_size)))
        return step.recent(slots)
