"""What a layer knew before its last prompt or append: a crop that takes that back brings this back."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from hf_offload.cache.context import Context
from hf_offload.cache.keeping import copy_marked
from hf_offload.cache.weighing import Weighing
from hf_offload.fields import Field, LayerSizes, check_tensors
from hf_offload.knobs import MOST
from hf_offload.policies.salience import SalienceRule

if TYPE_CHECKING:
    from hf_offload.cache.salience import Salience


@dataclass(frozen=True, slots=True)
class Before:
    """What was known with `length` tokens.

    Args:
        length: tokens.
        window_blocks, evicted: of the window, and before it.
        known: bool `[B]`.
        weighing: how far the last prompt or append was.
        kept: uint8 `[B, Hkv, t]`, marks of the tokens before the window.
        weights: float32 `[B · Hkv, E]`, averages of those that are kept when they were.
        average: float32 `[B, Hq, length - t]`, of the tokens of the window.
        host: float32 `[B, Hq, t]`, of the tokens before it, where a further chunk of the same append may come; None
            otherwise: the next append weighs them anew.
    """

    length: int
    window_blocks: int
    evicted: int
    known: np.ndarray
    weighing: Weighing
    kept: np.ndarray
    weights: np.ndarray
    average: np.ndarray
    host: np.ndarray | None

    def select_rows(self, rows: np.ndarray) -> Before:
        """The same of the rows of an index, in its order."""
        heads = self.kept.shape[1]
        lists = (rows[:, None] * heads + np.arange(heads)).ravel()
        weighing = replace(self.weighing, queries=self.weighing.queries[rows])
        host = None if self.host is None else self.host[rows]
        return replace(
            self, known=self.known[rows], weighing=weighing, kept=self.kept[rows],
            weights=self.weights[lists], average=self.average[rows], host=host,
        )  # fmt: skip

    def pack(self) -> dict[str, np.ndarray]:
        """All of it as arrays that nobody else holds, for a saved cache."""
        weighing = self.weighing
        numbers = (
            self.length, self.window_blocks, self.evicted, weighing.border, weighing.prompt, weighing.decoded,
        )  # fmt: skip
        found: dict[str, np.ndarray] = {
            "numbers": np.array(numbers, np.int64), "known": self.known, "queries": weighing.queries.copy(),
            "kept": self.kept, "weights": self.weights, "average": self.average,
        }  # fmt: skip
        return found if self.host is None else found | {"host": self.host}

    @classmethod
    def unpack(cls, packed: dict[str, np.ndarray], rule: SalienceRule, window_blocks: int | None) -> Before:
        """What `pack` gave; `window_blocks`: of the window, if that is another one now."""
        length, blocks, evicted, border, prompt, decoded = packed["numbers"].tolist()
        weighing = Weighing(rule, packed["queries"], border, bool(prompt), bool(decoded))
        return cls(
            length, window_blocks or blocks, evicted, packed["known"], weighing,
            packed["kept"], packed["weights"], packed["average"], packed.get("host"),
        )  # fmt: skip


def earlier_fields(
    sizes: LayerSizes, found: dict[str, torch.Tensor], heads: Container[int], most_window: int
) -> dict[str, Field]:
    """What `Before.pack` gives for a layer.

    Args:
        sizes: of the layer.
        found: the tensors that are there.
        heads: how many query heads there may be.
        most_window: most blocks of a window.

    Raises:
        ValueError: the numbers, on which shapes depend, are wrong.
    """
    rows, most = sizes.rows, (sizes.tokens, most_window, sizes.full_blocks, sizes.tokens, 1, 1)
    numbers = {"numbers": Field(torch.int64, (6,), (0, 1, 0, 0, 0, 0), most)}
    check_tensors("earlier ", {name: part for name, part in found.items() if name == "numbers"}, numbers)
    length, _, evicted, *_ = found["numbers"].tolist()
    border = evicted * sizes.block_size
    if border > length:
        raise ValueError(f"earlier numbers say that {border} of {length} tokens had left the window")
    fields = numbers | {
        "known": Field(torch.bool, (rows,)),
        "queries": Field(torch.int64, (rows,), 0, MOST),
        "kept": Field(torch.uint8, (*sizes.lines, border), 0, 1),
        "weights": Field(torch.float32, (rows * sizes.kv_heads, range(sizes.tokens + 1))),
        "average": Field(torch.float32, (rows, heads, length - border)),
    }
    return fields | ({"host": Field(torch.float32, (rows, heads, border))} if "host" in found else {})


def _look_back(salience: Salience, length: int, *, chunk: bool) -> Before:
    border, context = salience.evicted * salience.store.block_size, salience.context
    return Before(
        length, salience.window_blocks, salience.evicted, salience.known.copy(), replace(salience.weighing),
        salience.kept[:, :, :border].copy(), context.salience[:, : int(context.counts.max(initial=0))].copy(),
        salience.average[:, :, border:length].copy(), salience.average[:, :, :border].copy() if chunk else None,
    )  # fmt: skip


def _go_back(salience: Salience, then: Before, length: int, context: Context) -> None:
    """Know what was known then of the first `length` tokens, those that are left; context: of what was kept."""
    border = then.kept.shape[2]
    salience.window_blocks, salience.evicted = then.window_blocks, _evicted_then(salience, then, length)
    salience.known, salience.weighing = then.known.copy(), replace(then.weighing)
    salience.average[:, :, border : then.length] = then.average
    if then.host is not None:
        salience.average[:, :, :border] = then.host
    salience.kept[:, :, :border] = then.kept
    salience.context = context
    wide = min(then.weights.shape[1], salience.context.capacity)
    salience.context.salience[:, :wide] = then.weights[:, :wide]


def _evicted_then(salience: Salience, then: Before, length: int) -> int:
    return min(then.evicted, length // salience.store.block_size)


class Earlier:
    """What was known before the last prompt or append, and before its last chunk, by the tokens that there were."""

    def __init__(self) -> None:
        self._known: list[Before] = []
        self._ready: tuple[Before, int, Context] | None = None
        """For a crop that is prepared: what it goes back to, the tokens that are left, and what was kept of them."""

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        parts = (part for one in self._known for part in (one.kept, one.weights, one.average, one.host))
        return sum(part.nbytes for part in parts if part is not None)

    def note(self, salience: Salience, length: int, *, chunk: bool) -> None:
        """Tokens arrive behind `length` others, as a further chunk or not; nothing is in flight or resident."""
        self._known = [*(self._known[:1] if chunk else ()), _look_back(salience, length, chunk=chunk)]
        self._ready = None

    def decoded(self) -> None:
        """A token was decoded."""
        self._known = [replace(one, host=None) for one in self._known]
        self._ready = None

    def prepare(self, salience: Salience, length: int) -> None:
        """Do what may fail of `crop`."""
        then = next((one for one in self._known if one.length >= length), None)
        if then is None:
            self._ready = None
        elif self._ready is None or self._ready[0] is not then or self._ready[1] != length:
            self._ready = then, length, copy_marked(salience, then.kept, _evicted_then(salience, then, length))

    def crop(self, salience: Salience, length: int) -> bool:
        """Go back to what was known before tokens that a crop to `length` takes; was it known with just as many?"""
        self.prepare(salience, length)
        ready, self._ready = self._ready, None
        self._known = [one for one in self._known if one.length <= length]
        if ready is not None:
            _go_back(salience, *ready)
        return ready is not None and ready[0].length == length

    def select_rows(self, rows: np.ndarray) -> None:
        """Keep the rows of an index, in its order."""
        self._known = [one.select_rows(rows) for one in self._known]
        self._ready = None

    def copy_from(self, other: Earlier) -> None:
        """Know what another one knows, whose tokens are the same."""
        self._known = list(other._known)

    def pack(self) -> dict[str, np.ndarray]:
        """All of it as arrays, for a saved cache."""
        return {f"{i}.{name}": part for i, one in enumerate(self._known) for name, part in one.pack().items()}

    def unpack(self, packed: dict[str, np.ndarray], rule: SalienceRule, window_blocks: int | None) -> None:
        """What `pack` gave, with the same tokens; `window_blocks` as in `Before.unpack`."""
        found: dict[int, dict[str, np.ndarray]] = {}
        for name, part in packed.items():
            number, _, mine = name.partition(".")
            found.setdefault(int(number), {})[mine] = part.copy()
        self._known = [Before.unpack(found[number], rule, window_blocks) for number in sorted(found)]

    def clear(self) -> None:
        """Forget it."""
        self._known.clear()
        self._ready = None
