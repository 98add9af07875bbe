"""What a budget of device memory buys: resident blocks."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_offload.cache.host_pool import MIN_SLAB_BLOCKS, growth
from hf_offload.cache.memory import size_text
from hf_offload.gpu.exchange import MOST_SLOTS as MOST_SLOTS
from hf_offload.knobs import shown
from hf_offload.policies.base import Policy

if TYPE_CHECKING:
    from hf_offload.cache.block_store import BlockStore

DEFAULT_RESIDENT = 2048  # tokens, for policies without a budget
_BLOCKS = re.compile(r"(\d{1,18}) blocks?")
_AMOUNT = re.compile(r"(\d{1,18}(?:\.\d{1,18})?) ?(?:([KMGT])(i?))?B", re.IGNORECASE)
_MOST_BYTES = 1 << 60


def parse_bytes(name: str, value: int | str) -> int:
    """An amount of memory in bytes.

    Args:
        name: of the knob, for the error.
        value: bytes, or a number with a unit: B; KiB, MiB, GiB, TiB (powers of 1024); KB, MB, GB, TB (of 1000).

    Raises:
        ValueError: it is neither, not positive, or more than an exbibyte.
    """
    nbytes = 0
    if isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    elif isinstance(value, str) and (found := _AMOUNT.fullmatch(value.strip())):
        number, prefix, binary = found.groups()
        power = 0 if prefix is None else 1 + "KMGT".index(prefix.upper())
        nbytes = math.floor(float(number) * (1024 if binary else 1000) ** power)
    if not 1 <= nbytes <= _MOST_BYTES:
        raise ValueError(
            f'{name}={shown(value)} is not an amount of memory; use bytes (an int) or a string such as "2GiB" or '
            '"512MiB" (KiB, MiB, GiB and TiB are powers of 1024; KB, MB, GB and TB are powers of 1000)'
        )
    return nbytes


def least_blocks(policy: Policy, block_size: int) -> int:
    """Blocks that a resident set has at least: those always resident, one for straddling sinks, one to recall into."""
    return policy.requirements.always_blocks(block_size) + 2


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """Device memory that the resident sets of all layers share evenly.

    The digests of the tokens that arrive first lie there too and are taken off, with room for a quarter more where that
    is made; those of later tokens come on top.

    Args:
        given: the amount as the user wrote it.
        nbytes: the same in bytes.
        layers: layers that share it.
        least: blocks that must be resident for a row and KV head.
        blocks: how many may be, where the user gave their number in place of an amount.
    """

    given: int | str
    nbytes: int
    layers: int
    least: int
    blocks: int | None = None

    def slots(self, store: BlockStore, tokens: int) -> int:
        """Blocks that a row and KV head of one layer keeps resident.

        Args:
            store: the layer's, still empty.
            tokens: how many arrive first, in every row.

        Raises:
            ValueError: the budget does not reach for what is always resident.
        """
        if self.blocks is not None:
            return self.blocks
        lines = store.batch * store.num_kv_heads
        block = lines * store.pool.record_bytes
        digests = 0
        if store.digests is not None and not store.scored_on_host:
            prompt = store.batch * -(-tokens // store.block_size)
            blocks = max(prompt, MIN_SLAB_BLOCKS)
            blocks += growth(blocks, blocks - prompt, store.batch)  # for the first token behind them
            digests = blocks * store.digests.block_bytes
        slots = (self.nbytes // self.layers - digests) // block
        if slots < self.least:
            needed = self.layers * (self.least * block + digests)
            raise ValueError(
                f"device_budget={self.given!r} is less than the {size_text(needed)} ({needed} bytes) that "
                f"{self.layers} layers need: {self.least} resident blocks of {store.block_size} tokens for each of "
                f"{store.batch} rows and {store.num_kv_heads} KV heads, and {size_text(self.layers * digests)} of "
                f"digests of {tokens} tokens; raise it, or lower block_size, sinks, recent or the batch"
            )
        return min(slots, MOST_SLOTS)


def check_slots(slots: int, block_size: int, what: str) -> None:
    """Raise ValueError if these are more slots than can be managed."""
    if slots > MOST_SLOTS:
        raise ValueError(
            f"{what} takes {slots} blocks of {block_size} for each row and KV head, more than {MOST_SLOTS}; use a "
            "smaller one, or a larger block_size"
        )


def make_budget(
    given: int | str | None, resident: int | None, layers: int, least: int, *, two_memories: bool
) -> DeviceBudget | None:
    """The budget that a user gave, or None.

    Args:
        given: the knob `device_budget`; resident: the knob that says the same in tokens.
        layers, least: see `DeviceBudget`.
        two_memories: whether anything is resident.

    Raises:
        ValueError: the amount is none, both knobs are given, there is one memory, or so few or many blocks cannot be.
    """
    if given is None:
        return None
    if resident is not None:
        raise ValueError(
            f"resident={shown(resident)} and device_budget={shown(given)} both say what is resident; use one of them"
        )
    if not two_memories:
        raise ValueError(
            f"device_budget={shown(given)}: with one memory nothing is resident; leave it out (or try two memories on "
            'the CPU with tier="split")'
        )
    if isinstance(given, str) and (found := _BLOCKS.fullmatch(given.strip())):
        blocks = int(found[1])
        if not least <= blocks <= MOST_SLOTS:
            raise ValueError(
                f"device_budget={given!r} is not within {least} blocks, which sinks, recent tokens and the tail take "
                f"and leave room beside, and {MOST_SLOTS}, for each row and KV head of a layer"
            )
        return DeviceBudget(given, 0, layers, least, blocks)
    return DeviceBudget(given, parse_bytes("device_budget", given), layers, least)


def resident_tokens(resident: int | None, policy: Policy, block_size: int) -> int:
    """The resident set in tokens, a whole number of blocks.

    Raises:
        ValueError: it is too small for what is always resident, or larger than can be managed.
    """
    window = policy.window_tokens(0)
    if window is not None:  # and a block whose tokens are being looked at
        if resident is not None:
            raise ValueError(f"resident={shown(resident)}: what is resident is the window of {policy}; leave it out")
        slots = -(-window // block_size) + 1
        check_slots(slots, block_size, f"the window of {window} tokens")
        return slots * block_size
    least, most = least_blocks(policy, block_size) * block_size, MOST_SLOTS * block_size
    if resident is None:
        wants = policy.requirements
        only_always = wants.scored_on_host or not wants.attends_blocks
        wanted = least if only_always else wants.budget or DEFAULT_RESIDENT
        if least > most:
            raise ValueError(
                f"sinks and recent (or local) tokens take {least // block_size} blocks of {block_size} for each row "
                f"and KV head, more than {MOST_SLOTS}; lower sinks or recent (local), or use a larger block_size"
            )
        resident = min(max(wanted, least), most)
    if isinstance(resident, bool) or not isinstance(resident, int) or resident < least:
        raise ValueError(
            f"resident={shown(resident)} tokens leave no room beside sinks, recent tokens and the tail; use at least "
            f"{least}"
        )
    if resident > most:
        raise ValueError(
            f"resident={shown(resident)} tokens are more than {MOST_SLOTS} blocks of {block_size} for each row and "
            f"KV head; use at most {most}, or a larger block_size"
        )
    return resident // block_size * block_size
