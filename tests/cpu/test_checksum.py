"""Checksums of records against plain Python, and the changes that they detect."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from references import cpu as reference

from hf_offload.cpu.kernels.checksum import checksum_records


def sums_of(records: np.ndarray) -> np.ndarray:
    addresses = records.ctypes.data + np.arange(len(records), dtype=np.int64) * records.shape[1]
    sums = np.zeros(len(records), np.int64)
    checksum_records(addresses, records.shape[1], sums).run()
    return sums


@pytest.mark.parametrize("nbytes", [64, 512, 8192, 8256])
def test_is_the_reference(nbytes: int) -> None:
    records = np.random.default_rng(0).integers(0, 256, (70, nbytes), np.uint8)
    assert sums_of(records).tolist() == [reference.checksum(record.tobytes()) for record in records]


def test_notices_every_bit_and_pairs_of_highest_bits() -> None:
    clean = np.random.default_rng(1).integers(0, 256, 512, np.uint8)
    pairs = list(itertools.combinations(range(7, 512, 8), 2))
    altered = np.repeat(clean[None], 512 * 8 + len(pairs), 0)
    for bit in range(512 * 8):
        altered[bit, bit // 8] ^= 1 << bit % 8
    for row, pair in enumerate(pairs, 512 * 8):  # a product carries a highest bit nowhere, and two would cancel
        altered[row, list(pair)] ^= 128
    found = sums_of(altered).tolist()
    assert len({*found, *sums_of(clean[None]).tolist()}) == len(found) + 1
