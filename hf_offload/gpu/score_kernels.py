# mypy: ignore-errors
"""Kernels of `score.py`: one program for some blocks of a (row, KV head), for all query heads of its group."""

import triton
import triton.language as tl

from .paged_kernels import bend

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def vectors_kernel(
    ready_ptr,  # [B, Hq, W]
    vectors_ptr,  # [P, Hkv, W]
    bias_ptr,  # [P]
    table_ptr,  # [B, N]
    limits_ptr,  # [2]
    out_ptr,  # [B, Hq, N]
    softcap,
    kv_heads,
    blocks,  # N
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP, padded for tl.dot
    WIDTH: tl.constexpr,  # W
    STEP: tl.constexpr,
    TILE: tl.constexpr,  # blocks of a program
    CAPPED: tl.constexpr,
):
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    sealed = tl.load(limits_ptr + 1)
    first = tl.program_id(0) * TILE
    n, g, w = first + tl.arange(0, TILE), tl.arange(0, ROWS), tl.arange(0, STEP)
    line = (row * kv_heads + head) * GROUP + g
    out_ptr += (line * blocks)[:, None] + n
    meant = (g < GROUP)[:, None] & (n < blocks)
    if first >= sealed:
        tl.store(out_ptr, tl.full((ROWS, TILE), float("-inf"), tl.float32), mask=meant)
        return
    alive = n < tl.minimum(sealed, blocks)
    physical = tl.load(table_ptr + row * blocks + n, mask=alive, other=0).to(tl.int64)
    bias = tl.load(bias_ptr + physical, mask=alive, other=float("-inf"))
    place = (physical * kv_heads + head) * WIDTH
    dots = tl.zeros((ROWS, TILE), tl.float32)
    for start in range(0, WIDTH, STEP):
        inside = start + w < WIDTH
        query = tl.load(ready_ptr + (line * WIDTH)[:, None] + start + w, mask=(g < GROUP)[:, None] & inside, other=0.0)
        vector = tl.load(
            vectors_ptr + place[None, :] + start + w[:, None], mask=alive[None, :] & inside[:, None], other=0.0
        )
        dots = tl.dot(query, vector, dots, input_precision="ieee")
    if CAPPED:
        dots = bend(dots, softcap)
    mass = tl.where((bias > float("-inf"))[None, :], dots + bias[None, :], float("-inf"))
    tl.store(out_ptr, mass, mask=meant)


@triton.jit
def weighted(query_ptr, weight_ptr, real, start, DIM: tl.constexpr, STEP: tl.constexpr):
    """STEP dimensions of query * weight from `start` on, [ROWS, STEP]; 0 beyond DIM and where a row is not real."""
    d = start + tl.arange(0, STEP)
    query = tl.load(query_ptr + d, mask=real & (d < DIM), other=0.0)
    return query * tl.load(weight_ptr + d, mask=d < DIM, other=0.0)


@triton.jit
def unpack(words, shifts, BITS: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr):
    """Integers of some bits in words [STEP / n, TILE, PAIRS], n to a word, as the fp16 numbers [STEP, COLUMNS] that
    have these bits: subnormal ones, which tensor cores multiply exactly. A conversion would cost more than the rest.
    """
    integers = (words[:, None] >> shifts[None, :, None, None]) & ((1 << BITS) - 1)
    return tl.reshape(integers.to(tl.int16).to(tl.float16, bitcast=True), (STEP, COLUMNS))


@triton.jit
def submeans_kernel(
    query_ptr,  # [B, Hq, D]
    codes_ptr,  # [P, Hkv, D / 8, S] int32: eight dimensions of four bits, the lowest first, 8 too large
    levels_ptr,  # [P, Hkv, D / 16, S] int32: bits 8i + 4j + 2k are dimension 8j + 2i + k, 1.5 too large
    sizes_ptr,  # [P, Hkv, S] int32: scale of the codes, scale of the levels, both bfloat16
    bias_ptr,  # [P, S]
    center_ptr,  # [Hkv, D]
    sigma_ptr,  # [Hkv, D]
    table_ptr,  # [B, N]
    limits_ptr,  # [2]
    out_ptr,  # [B, Hq, N]
    scale,
    softcap,
    kv_heads,
    blocks,  # N
    GROUP: tl.constexpr,
    HALF: tl.constexpr,  # GROUP, padded for tl.dot: twice as many rows are multiplied
    PAIRS: tl.constexpr,  # S
    DIM: tl.constexpr,  # D
    DIM_PAD: tl.constexpr,
    STEP: tl.constexpr,  # dimensions that are unpacked at a time
    TILE: tl.constexpr,  # blocks of a program
    COLUMNS: tl.constexpr,  # TILE * PAIRS
    CAPPED: tl.constexpr,
):
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    sealed = tl.load(limits_ptr + 1)
    first = tl.program_id(0) * TILE
    n, g, j = first + tl.arange(0, TILE), tl.arange(0, HALF), tl.arange(0, PAIRS)
    line = (row * kv_heads + head) * GROUP
    out_ptr += ((line + g) * blocks)[:, None] + n
    meant = (g < GROUP)[:, None] & (n < blocks)
    if first >= sealed:
        tl.store(out_ptr, tl.full((HALF, TILE), float("-inf"), tl.float32), mask=meant)
        return
    alive = n < tl.minimum(sealed, blocks)
    physical = tl.load(table_ptr + row * blocks + n, mask=alive, other=0).to(tl.int64)
    record = (physical * kv_heads + head) * PAIRS

    # Every query head has two rows: what fp16 holds of sigma * query with 1024 as its largest, and what that leaves.
    r = tl.arange(0, 2 * HALF)
    real = (r % HALF < GROUP)[:, None]
    query_ptr += ((line + r % HALF) * DIM)[:, None]
    center_ptr += head * DIM
    sigma_ptr += head * DIM
    query = weighted(query_ptr, sigma_ptr, real, 0, DIM, DIM_PAD)
    unit = 1024.0 / tl.maximum(tl.max(tl.abs(query), 1), 1e-30)
    dots = tl.zeros((2 * HALF, COLUMNS), tl.float32)
    swings = tl.zeros((2 * HALF, COLUMNS), tl.float32)
    d = tl.arange(0, 16)
    for start in range(0, DIM, STEP):
        exact = weighted(query_ptr, sigma_ptr, real, start, DIM, STEP) * unit[:, None]
        part = exact.to(tl.float16)
        part = tl.where((r < HALF)[:, None], part, (exact - part.to(tl.float32)).to(tl.float16))

        word = start // 8 + tl.arange(0, STEP // 8)
        codes = tl.load(
            codes_ptr + (record * (DIM // 8))[None, :, None] + (word * PAIRS)[:, None, None] + j,
            mask=alive[None, :, None] & (word < DIM // 8)[:, None, None],
            other=0,
        )
        dots = tl.dot(part, unpack(codes, 4 * tl.arange(0, 8), 4, STEP, COLUMNS), dots)

        word = start // 16 + tl.arange(0, STEP // 16)
        levels = tl.load(
            levels_ptr + (record * (DIM // 16))[None, :, None] + (word * PAIRS)[:, None, None] + j,
            mask=alive[None, :, None] & (word < DIM // 16)[:, None, None],
            other=0,
        )
        swings = tl.dot(part, unpack(levels, d % 8 // 2 * 8 + d // 8 * 4 + d % 2 * 2, 2, STEP, COLUMNS), swings)

    # Both rows of a head have the same facts. The smallest fp16 number is 2 ** -24.
    worth = tl.max(tl.reshape(scale * 16777216.0 / unit, (2, HALF)), 0)[:, None]
    total = tl.max(tl.reshape(scale * tl.sum(query, 1), (2, HALF)), 0)[:, None]
    middle = tl.sum(weighted(query_ptr, center_ptr, real, 0, DIM, DIM_PAD), 1)
    middle = tl.max(tl.reshape(scale * middle, (2, HALF)), 0)[:, None]
    dots = worth * tl.sum(tl.reshape(dots, (2, HALF, COLUMNS)), 0) - 8.0 * total
    swings = worth * tl.sum(tl.reshape(swings, (2, HALF, COLUMNS)), 0) - 1.5 * total

    sizes = tl.load(sizes_ptr + record[:, None] + j, mask=alive[:, None], other=0)
    bias = tl.load(bias_ptr + physical[:, None] * PAIRS + j, mask=alive[:, None], other=float("-inf"))
    sizes, bias = tl.reshape(sizes, (1, COLUMNS)), tl.reshape(bias, (1, COLUMNS))
    code_scale = ((sizes >> 16) << 16).to(tl.float32, bitcast=True)
    level_scale = (sizes << 16).to(tl.float32, bitcast=True)
    mean, swing = code_scale * dots + middle, tl.abs(level_scale * swings)
    if CAPPED:  # of both keys
        more, less = bend(mean + swing, softcap), bend(mean - swing, softcap)
        mean, swing = 0.5 * (more + less), 0.5 * (more - less)
    mean = tl.where(bias > float("-inf"), mean + bias, float("-inf"))
    swing = tl.where(bias > float("-inf"), swing, 0.0)
    mean, swing = tl.reshape(mean, (HALF, TILE, PAIRS)), tl.reshape(swing, (HALF, TILE, PAIRS))
    peak = tl.max(mean + swing, 2)
    peak = tl.where(peak > float("-inf"), peak, 0.0)
    mean -= peak[:, :, None]
    mass = tl.sum(tl.exp(mean + swing) + tl.exp(mean - swing), 2)  # 2 cosh(swing) of each pair
    mass = tl.where(mass > 0.0, peak + tl.log(mass) - LN2, float("-inf"))
    tl.store(out_ptr, mass, mask=meant)
