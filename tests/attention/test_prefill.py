"""Attention of prompts and appends against dense attention: all masks, and bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairwise import covering
from tiny import prompt, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from hf_offload import HybridCache
from hf_offload.attention.prefill import append_attention, attend
from hf_offload.scores import Scores


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1).double(), v.repeat_interleave(group, 1).double()
    scores = q.double() @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(1, 2)


def append(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, tile: int, softcap: float | None
) -> torch.Tensor:
    """Attention of the newest tokens, of which there are queries; the others come in tiles."""
    past = k.shape[2] - q.shape[2]
    tiles = [(i, k[:, :, i : min(i + tile, past)], v[:, :, i : min(i + tile, past)]) for i in range(0, past, tile)]
    new = k[:, :, past:], v[:, :, past:]
    return append_attention(q, *new, past, tiles, mask, scores=Scores(0.3, softcap), tile=tile)


@pytest.mark.parametrize(
    ("sizes", "kind", "softcap"),
    covering(
        [(0, 1, 8), (0, 37, 16), (50, 1, 16), (50, 37, 16), (13, 700, 600)],
        ["none", "padding", "bool", "float"],
        [None, 4.0],
    ),
)
def test_equals_dense_attention(sizes: tuple[int, int, int], kind: str, softcap: float | None) -> None:
    past, new, tile = sizes
    generator = torch.Generator().manual_seed(past + new)
    total = past + new
    q = torch.randn(2, 6, new, 16, generator=generator)
    k, v = (torch.randn(2, 2, total, 16, generator=generator) for _ in range(2))
    seen = (torch.arange(total) <= torch.arange(past, total)[:, None]).expand(2, 1, new, total).clone()
    mask = None
    if kind == "padding":
        mask = torch.ones(2, total, dtype=torch.bool)
        mask[1, : total // 3] = False
        seen &= mask[:, None, None]
    elif kind != "none":
        seen &= torch.rand(2, 1, new, total, generator=generator) > 0.2
        seen[..., 0] = True
        mask = seen if kind == "bool" else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    got, want = append(q, k, v, mask, tile, softcap), dense(q, k, v, seen, 0.3, softcap)
    rows = seen.any(-1)[:, 0]  # queries that are padding themselves see nothing, and nobody reads them
    assert torch.isfinite(got).all()
    assert torch.allclose(got[rows].double(), want[rows], atol=2e-6 * (1 + want[rows].abs().max()))


@pytest.mark.parametrize(
    ("kind", "numbers", "tile", "softcap"),
    covering(
        ["bool", "forbidden", "least", "least of some", "little"],
        [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)],
        [4096, 16],
        [None, 50.0],
    ),
)
def test_queries_that_a_mask_leaves_nothing(kind: str, numbers: Any, tile: int, softcap: float | None) -> None:
    """False and −inf for all keys give 0, as under sdpa; the least value for all that are not −inf gives their mean."""
    torch.manual_seed(0)
    past, new, total, (dtype, tolerance) = 50, 30, 80, numbers
    q, k, v = (torch.randn(2, heads, size, 16).to(dtype) for heads, size in ((4, new), (2, total), (2, total)))
    seen = (torch.arange(total) <= torch.arange(past, total)[:, None]).expand(2, 1, new, total).clone()
    seen[0, 0, 3], seen[1, 0, 29] = False, False
    mask, want = seen, dense(q, k, v, seen, 0.3, softcap)
    shared = v.repeat_interleave(2, 1).double()
    nothing = kind in ("bool", "forbidden")
    want[0, 3], want[1, 29] = (0.0, 0.0) if nothing else (shared[0].mean(1), shared[1].mean(1))
    if kind != "bool":
        least = float("-inf") if nothing else torch.finfo(dtype).min
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, least)
    if kind == "least of some":
        mask[0, 0, 3, 20:] = float("-inf")
        want[0, 3] = shared[0, :, :20].mean(1)
    if kind == "little":  # but more than the least value, in one of several tiles
        mask[0, 0, 3, 40] = -1e9
        want[0, 3] = shared[0, :, 40]
    torch.testing.assert_close(append(q, k, v, mask, tile, softcap).double(), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("additive", [False, True])
def test_logits_behind_a_query_that_attends_nothing_are_those_of_sdpa(additive: bool) -> None:
    """A dense mask over a prompt, and two decode steps after it."""
    stock, model, ids = tiny_model("llama", "sdpa"), tiny_model("llama"), prompt(1, 42)[0]
    seen = torch.ones(1, 1, 40, 40, dtype=torch.bool, device=ids.device).tril()
    seen[0, 0, 0], seen[0, 0, 17] = False, False
    mask = torch.zeros(seen.shape, device=ids.device).masked_fill(~seen, float("-inf")) if additive else seen
    found = []
    for one in (stock, model):
        cache = DynamicCache(config=one.config) if one is stock else HybridCache(one, "full")
        with torch.no_grad():
            logits = [one(ids[:, :40], attention_mask=mask, past_key_values=cache).logits]
            logits += [one(ids[:, i : i + 1], past_key_values=cache).logits for i in (40, 41)]
        found.append(torch.cat(logits, 1))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    ("queries", "keys", "kind"),
    [(37, 37, "causal"), (5, 203, "all"), (5, 203, "masked"), (130, 64, "all"), (130, 64, "masked")],
)
def test_fused_attention_of_a_gpu(queries: int, keys: int, kind: str, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(queries)
    q = torch.randn(2, 6, queries, 64, generator=generator).to("cuda", dtype)
    k, v = (torch.randn(2, 2, keys, 64, generator=generator).to("cuda", dtype) for _ in range(2))
    seen = torch.ones(2, 1, queries, keys, dtype=torch.bool, device="cuda")
    bias = None
    if kind == "causal":
        seen = seen.tril()
    if kind == "masked":
        seen[1, ..., : keys // 3] = False
        bias = torch.zeros(seen.shape, dtype=dtype, device="cuda").masked_fill(~seen, torch.finfo(dtype).min / 2)
    out, lse = attend(q, k, v, bias, kind == "causal", Scores(0.2))
    assert torch.allclose(out.double(), dense(q, k, v, seen, 0.2, None).transpose(1, 2), atol=tolerance)
    scores = (q.double() @ k.repeat_interleave(3, 1).double().transpose(2, 3) * 0.2).masked_fill(~seen, float("-inf"))
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=tolerance)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made inside."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return out


def test_scores_with_a_softcap_are_made_piece_by_piece() -> None:
    q, k = torch.randn(1, 4, 1500, 16), torch.randn(1, 2, 1500, 16)
    with Largest() as made:
        got = append(q, k, k, None, 64, 5.0)
    assert torch.allclose(
        got.double(), dense(q, k, k, torch.ones(1500, 1500, dtype=torch.bool).tril(), 0.3, 5.0), atol=1e-5
    )
    assert made.nbytes <= 4 * 4 * 512 * 1500 // 2  # half of 512 queries to all keys
