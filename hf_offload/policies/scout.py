"""ScoutAttention: block-sparse attention on GPU and CPU with layer-ahead prediction and asynchronous recall."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from hf_offload.blocks.digests import DIGESTS
from hf_offload.fields import Field, LayerSizes
from hf_offload.knobs import MOST, check_choice, check_flag, check_number, check_tokens, shown
from hf_offload.policies.base import EVER, LayerState, Plan, Policy, Requirements, Selection, attends_all, check_dense
from hf_offload.policies.choices import BUDGET, SAMPLES, SINKS, BestBlocks, DrawnPairs, check_samples
from hf_offload.policies.recall import ADAPTIVE, RecallClock, check_recall

if TYPE_CHECKING:
    from hf_offload.attention.host_partial import BlockHostPartial
    from hf_offload.attention.step import Step
    from hf_offload.cache.layer import HybridLayer

LOOKAHEADS = ("auto", "attend", "select", "off")
JOINS = ("max", "mean", "raw")
SYNCHRONOUS = (0, 1, 2)  # hidden states change much in the first layers, so that predicted queries are poor


@dataclass(slots=True)
class ScoutState(LayerState):
    """Scout's state of one layer.

    Args:
        clock: decides when the layer recalls.
        predicted: the next step's selection, made one layer early; or None.
        ahead: the host partial started with it, or None.
        score: the prediction's scores, where they are the only ones, or None.
    """

    clock: RecallClock
    predicted: Selection | None = None
    ahead: BlockHostPartial | None = None
    score: Any = None

    def cancelled(self) -> None:
        self.predicted = self.ahead = self.score = None

    def unplaced(self, layer: HybridLayer) -> None:
        self.clock.reset()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"since": self.clock.since, "ratio": self.clock.ratio}

    def load(self, layer: HybridLayer, tensors: dict[str, torch.Tensor]) -> None:
        self.cancelled()
        if not tensors:
            self.clock.reset()
            return
        self.clock.since.copy_(tensors["since"])  # in place for captured graphs
        self.clock.ratio.copy_(tensors["ratio"])


@dataclass(frozen=True)
class Scout(Policy):
    """Attend the best blocks within a budget: resident ones on the device, the others on the CPU, one layer ahead.

    Source: ScoutAttention, section 3 and algorithm 1. Differences from the paper: digests of key pairs, a softmax for
    each head before heads are joined, a first-order correction of attention with a predicted query, and recall by the
    running CPU ratio.

    Args:
        budget: number of tokens whose best blocks each row and KV head attends; sinks, recent tokens and the open
            block included (the paper's).
        samples: in place of a budget, attend pairs of keys drawn by their estimated attention: a pair with at least
            1 / samples of a head's attention, and of the others one for each 1 / samples of their sum, with the weight
            of what it stands for (`cpu.kernels.draw_pairs`). Neither given: samples=512 with one memory; with two, and
            with another digest or `join="raw"`, budget=2048. With two memories the device attends all that is
            resident, and the CPU draws from what is not; digests lie on the host. It needs `digest="submean"`.
        digest: `"submean"`, `"quest"` (the paper's) or `"mean"`.
        join: how the query heads of a KV head are joined: `"max"`, `"mean"`: of the softmax of each head's scores;
            `"raw"`: the mean of the scores (the paper's).
        sinks: first tokens of a row that are always attended and resident, rounded up to blocks, with one memory and
            samples to pairs.
        recent: newest tokens in sealed blocks that are always attended and resident, rounded in the same way.
        lookahead: `"attend"`: the CPU attends one layer early with the predicted query (the paper's). `"select"`:
            blocks are chosen and read, or pairs drawn, one layer early, and attended with the real query. `"off"`:
            neither. `"auto"`: `"attend"` in CUDA graphs, `"off"` in eager steps, where the prediction's launches take
            longer than what it hides. The first two need two memories:
            there the device waits for the CPU; with one memory both would wait for the same cores.
        synchronous_layers: numbers of layers that use no predicted query; None: 0, 1 and 2, whose predictions are poor.
            Layer 0 never uses one.
        correction: correct the early host partial to first order: `lse + scale·(q − q_predicted)·k̄`.
        recall: when resident blocks are exchanged: `"adaptive"`: when the CPU ratio exceeds `threshold`; a number:
            the number of steps between exchanges; 0: never; a path: as the file of `hf-offload profile` says.
        threshold: CPU ratio that adaptive recall tolerates (section 3.4: 0.12); with `samples` the CPU's share of the
            attended tokens.
        smoothing: recall ranks blocks by scores averaged over steps, with this weight on past steps, in [0, 1); 0: the
            last query alone (the paper's).
        attend_resident: whether the device attends `"all"` resident blocks or the `"selected"` ones (the paper's); with
            `samples` always all. With all, a layer whose query is predicted scores no block with the real one: the CPU
            attends what the prediction chose, and the blocks' worth is learnt from it. Where all blocks are resident,
            `dense` decides.
        place_queries: how many of the prompt's last queries choose the first resident set.
        dense: whether steps attend all tokens while all are resident, without a choice: exact, and no digest is scored.
            `"auto"`: within the budget, and where a GPU takes less time for it (`policies.base.DENSE_BYTES`).

    Raises:
        ValueError: a knob has a value that is not allowed.
    """

    name = "scout"
    budget: int | None = None
    samples: int | None = None
    digest: str = "submean"
    join: Literal["max", "mean", "raw"] = "max"
    sinks: int = SINKS
    recent: int = 32
    lookahead: Literal["auto", "attend", "select", "off"] = "auto"
    synchronous_layers: tuple[int, ...] | None = None
    correction: bool = True
    recall: int | str | Path = ADAPTIVE
    threshold: float = 0.12
    smoothing: float = 0.8
    attend_resident: Literal["selected", "all"] = "all"
    place_queries: int = 16
    dense: Literal["auto"] | bool = "auto"

    def __post_init__(self) -> None:
        check_samples(self.budget, self.samples, self.digest, self.join)
        check_tokens("sinks", self.sinks, least=0)
        check_tokens("recent", self.recent, least=0)
        check_tokens("place_queries", self.place_queries)
        check_choice("digest", self.digest, tuple(DIGESTS))
        check_choice("join", self.join, JOINS)
        check_choice("lookahead", self.lookahead, LOOKAHEADS)
        check_choice("attend_resident", self.attend_resident, ("selected", "all"))
        check_number("threshold", self.threshold, "a share of the budget", above=0, below=1)
        check_flag("correction", self.correction)
        check_dense(self.dense)
        check_number("smoothing", self.smoothing, "a weight", least=0, below=1)
        if self.synchronous_layers is not None:
            layers = self.synchronous_layers
            if not isinstance(layers, (tuple, list)) or not all(type(i) is int and 0 <= i <= MOST for i in layers):
                raise ValueError(
                    f"synchronous_layers={shown(layers)} are not layer numbers; use a tuple of integers from 0"
                )
            object.__setattr__(self, "synchronous_layers", tuple(layers))
        check_recall(self.recall)

    @classmethod
    def paper(cls, budget: int = 2048, **knobs: object) -> Scout:
        """The paper's form: Quest's digest, raw scores, attention with the predicted query, no correction or smoothing.

        It needs two memories, as `lookahead="attend"` does.

        Args:
            budget: as for `Scout`.
            knobs: other knobs of `Scout`.
        """
        form: dict[str, object] = {
            "digest": "quest",
            "join": "raw",
            "lookahead": "attend",
            "synchronous_layers": (0,),
            "correction": False,
            "smoothing": 0.0,
            "attend_resident": "selected",
            "dense": False,
            **knobs,
        }
        return cls(budget=budget, **form)  # type: ignore[arg-type]

    @property
    def requirements(self) -> Requirements:
        drawn = self.samples is not None
        return Requirements(
            budget=self.budget, sinks=self.sinks, recent=self.recent, digest=self.digest, leaves_out=True,
            digest_memory="host" if drawn else "device", chooses_resident=drawn, query_window=self.place_queries,
            holds_all=True, recalls=self.recall != 0, capturable=True,
        )  # fmt: skip

    def attends_all(self, layer: HybridLayer, tokens: int) -> bool:
        return attends_all(self.dense, layer, tokens, self.choice.tokens)

    def mode(self, index: int, *, two_memories: bool, on_device: bool) -> str:
        """The lookahead that a layer uses: `"attend"`, `"select"` or `"off"`; arguments as for `looks_ahead`."""
        mode = self.lookahead
        if mode == "auto":
            mode = "attend" if on_device else "off"
        synchronous = SYNCHRONOUS if self.synchronous_layers is None else self.synchronous_layers
        return mode if two_memories and index > 0 and index not in synchronous else "off"

    def check(self, *, block_size: int, two_memories: bool) -> None:
        super().check(block_size=block_size, two_memories=two_memories)
        if not two_memories and self.lookahead in ("attend", "select"):
            raise ValueError(
                f'lookahead={self.lookahead!r} needs two memories; use tier="split", a model on a GPU, or '
                'lookahead="auto"'
            )
        if not two_memories and isinstance(self.recall, str | Path) and self.recall != ADAPTIVE:
            raise ValueError(
                f"recall={str(self.recall)!r} needs two memories: with one nothing is recalled; leave it out, or use "
                'tier="split" or a model on a GPU'
            )

    def with_defaults(self, *, two_memories: bool) -> Scout:
        if self.budget is not None or self.samples is not None:
            return self
        drawn = not two_memories and self.digest == "submean" and self.join != "raw"
        return replace(self, samples=SAMPLES) if drawn else replace(self, budget=BUDGET)

    def for_memories(self, *, two_memories: bool) -> Scout:
        return self if two_memories or self.lookahead == "auto" else replace(self, lookahead="off")

    def new_state(self, layer: HybridLayer) -> ScoutState:
        return ScoutState(RecallClock.of(self.recall, self.threshold, layer.index, layer.device))

    def state_fields(self, sizes: LayerSizes) -> dict[str, Field]:
        clock = Field(torch.float32)
        return {"since": clock, "ratio": clock}

    def looks_ahead(self, index: int, *, two_memories: bool, on_device: bool) -> bool:
        return self.mode(index, two_memories=two_memories, on_device=on_device) != "off"

    @property
    def choice(self) -> BestBlocks | DrawnPairs:
        """What steps attend."""
        if self.samples is not None:
            return DrawnPairs(self.samples, self.join)
        assert self.budget is not None, "with defaults"
        return BestBlocks(self.budget, self.join)

    def before_layer(self, step: Step) -> None:
        """Select for the next layer by its predicted query, and start the host partial (alg. 1: 3-7)."""
        state: ScoutState = step.state
        layer = step.layer
        state.score, state.predicted = self.choice.predict(step)
        host = step.split(state.predicted)[1]
        if host is None:
            return
        if self.mode(layer.index, two_memories=layer.two_memories, on_device=layer.on_device) == "attend":
            state.ahead = step.attend_early(host, correct=self.correction)
        else:
            step.read_ahead(host)

    def plan(self, step: Step) -> Plan:
        """Attend resident blocks and join the host partial, or split the real query's choice (alg. 1: 8-12)."""
        state: ScoutState = step.state
        choice, predicted, ahead = self.choice, state.predicted, state.ahead
        blocks = choice.blocks(step.block_size)
        if not step.layer.two_memories and step.num_blocks <= blocks:  # no resident set whose worth needs scores
            return Plan(step.attend(step.all_blocks()), until=blocks + 1)
        state.predicted = state.ahead = None
        whole = self.attend_resident == "all" and not step.all_resident
        if ahead is not None and whole:  # nothing depends on the real query's scores
            return Plan((*step.attend_split(step.resident_blocks(), None), ahead))
        state.score = None
        selection = choice.select(step, predicted, self.smoothing)
        device, host = step.split(selection if ahead is not None else predicted or selection)
        if whole:
            device = step.resident_blocks() or device
        if ahead is not None:
            return Plan((*step.attend_split(device, None), ahead))
        return Plan(step.attend_split(device, host), until=EVER)

    def after_layer(self, step: Step, plan: Plan) -> None:
        """Recall blocks that the real query wanted, off the critical path (section 3.4)."""
        if step.layer.two_memories:
            self.choice.learn(step, plan, step.state.score, self.smoothing)
            step.state.score = None
            step.recall(step.state.clock)

    def place(self, step: Step, slots: int) -> Selection:
        """Return the blocks with the highest scores by the prompt's last queries; without digests the newest ones."""
        if step.store.awaits_digests:
            return step.recent(slots)
        score = step.score(self.join)
        step.learn(score, 0.0)
        return step.select(score, slots)
