# mypy: ignore-errors
"""Kernels of `seal.py`: one program for a KV head of a block, or some of its pairs."""

import triton
import triton.language as tl


@triton.jit
def vectors_kernel(
    ids_ptr,  # [n]
    k_ptr,  # [n, Hkv, T, D], strides given
    valid_ptr,  # [n, T] bool: a pointer to int1, which Triton loads byte by byte
    vectors_ptr,  # [P, Hkv, W]
    bias_ptr,  # [P]
    block_stride,
    head_stride,
    token_stride,
    heads,
    BOUNDS: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # DIM, padded to a power of two
    TILE: tl.constexpr,  # tokens at a time
):
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, t = tl.arange(0, WIDTH), tl.arange(0, TILE)
    k_ptr += block * block_stride + head * head_stride
    valid_ptr += block * TOKENS
    count = tl.zeros([TILE], tl.int32)
    if BOUNDS:
        high = tl.full([WIDTH], float("-inf"), tl.float32)
        low = tl.full([WIDTH], float("inf"), tl.float32)
    else:
        total = tl.zeros([WIDTH], tl.float32)
    for start in range(0, TOKENS, TILE):
        counts = tl.load(valid_ptr + start + t) != 0
        where = k_ptr + (start + t).to(tl.int64)[:, None] * token_stride + d[None, :]
        mask = counts[:, None] & (d < DIM)[None, :]
        count += counts.to(tl.int32)
        keys = tl.load(where, mask=mask, other=0.0).to(tl.float32)
        if BOUNDS:
            high = tl.maximum(high, tl.max(tl.where(mask, keys, float("-inf")), 0))
            low = tl.minimum(low, tl.min(tl.where(mask, keys, float("inf")), 0))
        else:
            total += tl.sum(keys, 0)
    number = tl.sum(count, 0)
    physical = tl.load(ids_ptr + block)
    if BOUNDS:
        vectors_ptr += (physical * heads + head) * (2 * DIM)
        tl.store(vectors_ptr + d, high, mask=d < DIM)
        tl.store(vectors_ptr + DIM + d, low, mask=d < DIM)
        bias = tl.where(number > 0, 0.0, float("-inf"))
    else:
        vectors_ptr += (physical * heads + head) * DIM
        tl.store(vectors_ptr + d, total / tl.maximum(number, 1).to(tl.float32), mask=d < DIM)
        bias = tl.where(number > 0, tl.log(tl.maximum(number, 1).to(tl.float32)), float("-inf"))
    if head == 0:
        tl.store(bias_ptr + physical, bias)


@triton.jit
def rounded(x):
    """Numbers of at least 0 as bfloat16 in the upper halves of int32 words, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16


@triton.jit
def submeans_kernel(
    ids_ptr,  # [n]
    k_ptr,  # [n, Hkv, T, D], strides given
    valid_ptr,  # [n, T] bool: a pointer to int1, which Triton loads byte by byte
    codes_ptr,  # [P, Hkv, D / 8, S] int32: eight dimensions of four bits, the lowest first, 8 too large
    levels_ptr,  # [P, Hkv, D / 16, S] int32: bits 8i + 4j + 2k are dimension 8j + 2i + k, 2 too large
    sizes_ptr,  # [P, Hkv, S] int32: scale of the codes, scale of the levels, both bfloat16
    bias_ptr,  # [P, S]
    center_ptr,  # [Hkv, D]
    sigma_ptr,  # [Hkv, D]
    block_stride,
    head_stride,
    token_stride,
    heads,
    PAIRS: tl.constexpr,  # S
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # DIM, padded to a power of two
    TILE: tl.constexpr,  # pairs of a program
    MOST: tl.constexpr,  # largest code
    STEP: tl.constexpr,
    LEAST: tl.constexpr,
):
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, j = tl.arange(0, WIDTH), tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = d < DIM
    k_ptr += block * block_stride + head * head_stride + (2 * j).to(tl.int64)[:, None] * token_stride + d[None, :]
    valid_ptr += block * (2 * PAIRS) + 2 * j
    one, two = tl.load(valid_ptr) != 0, tl.load(valid_ptr + 1) != 0
    count = one.to(tl.int32) + two.to(tl.int32)
    first = tl.load(k_ptr, mask=one[:, None] & inside[None, :], other=0.0).to(tl.float32)
    second = tl.load(k_ptr + token_stride, mask=two[:, None] & inside[None, :], other=0.0).to(tl.float32)
    center = tl.load(center_ptr + head * DIM + d, mask=inside, other=0.0)
    sigma = tl.load(sigma_ptr + head * DIM + d, mask=inside, other=1.0)

    mean = (first + second) / tl.maximum(count, 1).to(tl.float32)[:, None]
    standard = tl.where(inside[None, :], (mean - center[None, :]) / sigma[None, :], 0.0)
    scale = rounded(tl.maximum(tl.max(tl.abs(standard), 1) / MOST, LEAST))
    code = tl.floor(standard / scale.to(tl.float32, bitcast=True)[:, None] + 0.5)
    code = tl.minimum(tl.maximum(code, -MOST), MOST).to(tl.int32) + 8

    half = tl.where((count == 2)[:, None], (first - second) * 0.5 / sigma[None, :], 0.0)
    size = rounded(STEP * tl.sqrt(tl.sum(half * half, 1) / DIM))
    level = tl.floor(half / tl.maximum(size.to(tl.float32, bitcast=True), LEAST)[:, None])
    level = tl.minimum(tl.maximum(level, -2.0), 1.0).to(tl.int32) + 2

    physical = tl.load(ids_ptr + block)
    record = (physical * heads + head) * PAIRS
    eight, sixteen = tl.arange(0, 8), tl.arange(0, 16)
    word = tl.arange(0, WIDTH // 8)
    packed = tl.sum(tl.reshape(code, (TILE, WIDTH // 8, 8)).to(tl.int64) << (4 * eight)[None, None, :], 2)
    where = codes_ptr + record * (DIM // 8) + word[None, :] * PAIRS + j[:, None]
    tl.store(where, packed.to(tl.int32), mask=(word < DIM // 8)[None, :])
    word = tl.arange(0, WIDTH // 16)
    shift = sixteen % 8 // 2 * 8 + sixteen // 8 * 4 + sixteen % 2 * 2
    packed = tl.sum(tl.reshape(level, (TILE, WIDTH // 16, 16)).to(tl.int64) << shift[None, None, :], 2)
    where = levels_ptr + record * (DIM // 16) + word[None, :] * PAIRS + j[:, None]
    tl.store(where, packed.to(tl.int32), mask=(word < DIM // 16)[None, :])
    tl.store(sizes_ptr + record + j, scale | (size >> 16))
    if head == 0:
        bias = tl.where(count > 0, tl.log(tl.maximum(count, 1).to(tl.float32)), float("-inf"))
        tl.store(bias_ptr + physical * PAIRS + j, bias)
