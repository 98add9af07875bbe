"""The size of the resident sets, from the knobs `device_budget` and `resident`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_offload.blocks.host_pool import growth
from hf_offload.blocks.memory import size_text
from hf_offload.gpu.block_topk import MOST_BLOCKS as MOST_BLOCKS
from hf_offload.gpu.exchange import MOST_EXCHANGED as MOST_EXCHANGED
from hf_offload.knobs import check_count, shown
from hf_offload.policies.base import Policy

if TYPE_CHECKING:
    from hf_offload.blocks.block_store import BlockStore

DEFAULT_RESIDENT = 2048  # tokens, for policies without a budget
BUDGETS = 1.5
"""Resident tokens by default, in budgets: the CPU attends half as much as with one budget, and recalls are rarer."""
_BLOCKS = re.compile(r"(\d{1,18}) blocks?")
_AMOUNT = re.compile(r"(\d{1,18}(?:\.\d{1,18})?) ?(?:([KMGT])(i?))?B", re.IGNORECASE)
_MOST_BYTES = 1 << 60


def parse_bytes(name: str, value: int | str) -> int:
    """Parse an amount of memory; return bytes.

    Args:
        name: the knob, for the error.
        value: bytes, or a number with a unit: B; KiB, MiB, GiB, TiB (powers of 1024); KB, MB, GB, TB (of 1000).

    Raises:
        ValueError: the value is neither, not positive, or more than an exbibyte.
    """
    nbytes = 0
    if isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    elif isinstance(value, str) and (match := _AMOUNT.fullmatch(value.strip())):
        number, prefix, binary = match.groups()
        power = 0 if prefix is None else 1 + "KMGT".index(prefix.upper())
        nbytes = math.floor(float(number) * (1024 if binary else 1000) ** power)
    if not 1 <= nbytes <= _MOST_BYTES:
        raise ValueError(
            f'{name}={shown(value)} is not an amount of memory; use bytes (an int) or a string such as "2GiB" or '
            '"512MiB" (KiB, MiB, GiB and TiB are powers of 1024; KB, MB, GB and TB are powers of 1000)'
        )
    return nbytes


def least_blocks(policy: Policy, block_size: int) -> int:
    """The least slots of a resident set: the always resident blocks, one for unaligned sinks, one for recalls."""
    return policy.requirements.always_blocks(block_size) + 2


def most_blocks(policy: Policy) -> int:
    """The most slots of a resident set: those that a recall sorts, or a row's blocks."""
    return MOST_EXCHANGED if policy.requirements.recalls else MOST_BLOCKS


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """Device memory that the resident sets of all layers share evenly.

    It includes the digests of the first prompt, with the spare room that their store allocates. Digests of later tokens
    are not counted.

    Args:
        given: the amount as the user wrote it.
        nbytes: the amount in bytes.
        layers: number of layers that share it.
        least, most: least and largest number of resident blocks for each row and KV head.
        blocks: the number of resident blocks, if the user gave that instead of an amount; else None.
    """

    given: int | str
    nbytes: int
    layers: int
    least: int
    most: int
    blocks: int | None = None

    def slots(self, store: BlockStore, tokens: int) -> int:
        """The number of resident blocks for each row and KV head of one layer.

        Args:
            store: the layer's store, still empty.
            tokens: tokens of the first prompt in every row.

        Raises:
            ValueError: the budget is too small for the always resident blocks.
        """
        if self.blocks is not None:
            return self.blocks
        lines = store.batch * store.num_kv_heads
        block = lines * store.pool.record_bytes
        digests = 0
        if store.digests is not None and not store.scored_on_host:
            capacity = digest_capacity(store.batch * -(-tokens // store.block_size), store.batch)  # prompt, next token
            digests = capacity * store.digests.block_bytes
        slots = (self.nbytes // self.layers - digests) // block
        if slots < self.least:
            needed = self.layers * (self.least * block + digests)
            raise ValueError(
                f"device_budget={self.given!r} is less than the {size_text(needed)} ({needed} bytes) that "
                f"{self.layers} layers need: {self.least} resident blocks of {store.block_size} tokens for each of "
                f"{store.batch} rows and {store.num_kv_heads} KV heads, and {size_text(self.layers * digests)} of "
                f"digests of {tokens} tokens; raise it, or lower block_size, sinks, recent or the batch"
            )
        return min(slots, self.most)


def digest_capacity(*counts: int) -> int:
    """The capacity in blocks of a store of digests that has grown by these numbers of blocks, one after the other."""
    capacity = used = 0
    for count in counts:
        capacity += growth(capacity, capacity - used, count)
        used += count
    return capacity


def check_slots(slots: int, block_size: int, what: str) -> None:
    """Raise ValueError if there are more than `MOST_EXCHANGED` slots."""
    if slots > MOST_EXCHANGED:
        raise ValueError(
            f"{what} takes {slots} blocks of {block_size} for each row and KV head, more than {MOST_EXCHANGED}; use a "
            "smaller one, or a larger block_size"
        )


def make_budget(
    given: int | str | None, resident: int | None, layers: int, policy: Policy, block_size: int, *, two_memories: bool
) -> DeviceBudget | None:
    """Return the budget given by the user, or None.

    Args:
        given: the knob `device_budget`; resident: the knob `resident`, the same in tokens.
        layers: number of layers that share it.
        policy: the policy; block_size: tokens in a block.
        two_memories: whether there are resident sets at all.

    Raises:
        ValueError: not an amount, both knobs given, one memory, or a number of blocks out of range.
    """
    if given is None:
        return None
    least, most = least_blocks(policy, block_size), most_blocks(policy)
    if resident is not None:
        raise ValueError(
            f"resident={shown(resident)} and device_budget={shown(given)} both set the size of the resident set; use "
            "one of them"
        )
    if not two_memories:
        raise ValueError(
            f"device_budget={shown(given)}: with one memory nothing is resident; leave it out (or try two memories on "
            'the CPU with tier="split")'
        )
    if isinstance(given, str) and (match := _BLOCKS.fullmatch(given.strip())):
        blocks = int(match[1])
        if not least <= blocks <= most:
            raise ValueError(
                f"device_budget={given!r} is not within {least} blocks (sinks, recent tokens, the tail, and room for "
                f"others) and {most} for each row and KV head of a layer"
            )
        return DeviceBudget(given, 0, layers, least, most, blocks)
    return DeviceBudget(given, parse_bytes("device_budget", given), layers, least, most)


def resident_tokens(resident: int | None, policy: Policy, block_size: int, cached: int = 0) -> int:
    """The size of a resident set in tokens, a multiple of the block size, with `cached` tokens in the cache.

    Raises:
        ValueError: `resident` is too small for the always resident blocks, or more than `most_blocks`.
    """
    window = policy.window_tokens(cached)
    if window is not None:  # plus a block that is leaving the window
        if resident is not None:
            raise ValueError(f"resident={shown(resident)}: what is resident is the window of {policy}; leave it out")
        slots = -(-window // block_size) + 1
        check_slots(slots, block_size, f"the window of {window} tokens")
        return slots * block_size
    slots = most_blocks(policy)
    least, most = least_blocks(policy, block_size) * block_size, slots * block_size
    if resident is None:
        wants = policy.requirements
        only_always = (wants.scored_on_host and not wants.chooses_resident) or not wants.attends_blocks
        wanted = DEFAULT_RESIDENT if wants.budget is None else int(BUDGETS * wants.budget)
        if only_always:
            wanted = least
        if least > most:
            raise ValueError(
                f"sinks and recent (or local) tokens take {least // block_size} blocks of {block_size} for each row "
                f"and KV head, more than {slots}; lower sinks or recent (local), or use a larger block_size"
            )
        resident = min(max(wanted, least), most)
    if isinstance(resident, bool) or not isinstance(resident, int) or resident < least:
        raise ValueError(
            f"resident={shown(resident)} tokens leave no room beside sinks, recent tokens and the tail; use at least "
            f"{least}"
        )
    check_count("resident", resident, most=most, hint=f" ({slots} blocks a KV head), or a larger block_size")
    return resident // block_size * block_size
