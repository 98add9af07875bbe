"""Every feature against a direct computation by the appendix's formulas: ragged rows, groups, tiles."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_offload.policies.fluxion.block_attention import Tokens, attend, attend_blocks
from hf_offload.policies.fluxion.budgets import deviation_limit
from hf_offload.policies.fluxion.features import FEATURES, MOMENTS, prompt_statistics
from hf_offload.policies.fluxion.kernels.predictor import step_features
from hf_offload.tools.training.labels import needed_budgets

ROWS, KV, GROUP, DIM = 2, 2, 3, 16
HEADS, SCALE = KV * GROUP, DIM**-0.5
SINKS, HOST, LOCAL, NEW = 32, 150, 48, 5
PADDING = 40  # tokens at the host's beginning that do not count in the second row
TAU, LAYER = 0.1, 7


def draw(count: int, seed: int) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(ROWS, KV, count, DIM, generator=generator) + 0.3 for _ in range(2))
    return Tokens(key, value, torch.ones(ROWS, count, dtype=torch.bool))


def joined(one: Tokens, two: Tokens) -> Tokens:
    return Tokens(
        *(torch.cat(pair, 2) for pair in zip(one[:2], two[:2], strict=True)), torch.cat((one.valid, two.valid), 1)
    )


class Case:
    """A prompt and a decode step; the second row's host has padding that holds NaN."""

    def __init__(self) -> None:
        self.sinks, self.host, self.local, new = (draw(n, i) for i, n in enumerate((SINKS, HOST, LOCAL, NEW)))
        self.after = joined(self.local, new)
        self.host.valid[1, :PADDING] = False
        for x in self.host[:2]:
            x[1, :, :PADDING] = torch.nan
        generator = torch.Generator().manual_seed(9)
        self.anchor, self.query = 2 * torch.randn(2, ROWS, HEADS, DIM, generator=generator)
        self.scores = torch.randn(ROWS, HEADS, -(-HOST // 16), generator=generator)
        self.scores[1, :, : PADDING // 16] = -torch.inf

    def features(self, tile: int = HOST) -> Tensor:
        tiles = (Tokens(*(x[:, :, at : at + tile] for x in self.host[:2]), self.host.valid[:, at : at + tile])
                 for at in range(0, HOST, tile))  # fmt: skip
        statistics, _ = prompt_statistics(
            LAYER, self.anchor, self.sinks, self.local, tiles, self.scores, taus=[TAU], digest="quest", scale=SCALE
        )
        sinks, local = (
            tuple(x.contiguous().numpy() for x in attend(self.query, part, SCALE)) for part in (self.sinks, self.after)
        )
        lengths = [(count, SINKS + LOCAL + NEW) for count in self.host.valid.sum(1).tolist()]
        return torch.from_numpy(step_features(statistics.arrays, self.query.numpy(), sinks, local, lengths))


def kept(tokens: Tokens, row: int, head: int) -> tuple[Tensor, Tensor]:
    keep = tokens.valid[row]
    return tokens.key[row, head // GROUP, keep].double(), tokens.value[row, head // GROUP, keep].double()


def moments(x: Tensor) -> list[float]:
    mean, spread = x.mean(), x - x.mean()
    variance = spread.square().mean()
    return [float(v) for v in (mean, variance, (spread**3).mean() / variance**1.5, (spread**4).mean() / variance**2)]


def attention(query: Tensor, *parts: tuple[Tensor, Tensor]) -> tuple[float, Tensor]:
    key, value = (torch.cat(x) for x in zip(*parts, strict=True))
    scores = key @ query.double() / math.sqrt(DIM)
    return float(scores.logsumexp(0)), scores.softmax(0) @ value


def direct(case: Case, row: int, head: int, budgets: Tensor) -> dict[str, float]:
    """The features by their formulas, one after the other."""
    sinks, host, local, after = (kept(x, row, head) for x in (case.sinks, case.host, case.local, case.after))
    q, anchor = case.query[row, head].double(), case.anchor[row, head].double()
    norm, length = float(q.norm()), len(host[0])
    found = {"layer": LAYER, "head": head, "host_length": length, "device_length": SINKS + LOCAL + NEW}
    for name, place in (("key", 0), ("value", 1)):
        found[f"sink_{name}_norm"] = float(sinks[place].norm(dim=1).mean())
        found[f"host_mean_{name}_norm"] = float(host[place].mean(0).norm())
        named = [f"host_{name}_norm_{kind}" for kind in MOMENTS]
        found |= dict(zip(named, moments(host[place].norm(dim=1)), strict=True))
    z = moments(host[0] @ anchor / (anchor.norm() * math.sqrt(DIM)))
    found |= dict(zip([f"anchor_z_{kind}" for kind in MOMENTS], z, strict=True))
    found["mean_z"] = float(q @ host[0].mean(0) / (norm * math.sqrt(DIM)))
    for name, part in (("sink", sinks), ("host", host), ("local", local)):
        lse, out = attention(anchor, part)
        found[f"anchor_{name}_lse"], found[f"anchor_{name}_out"] = lse, float(out.norm())
    for name, part in (("sink", sinks), ("local", after)):
        lse, out = attention(q, part)
        found[f"{name}_lse"], found[f"{name}_out"] = lse, float(out.norm())
    found["host_lse"] = math.log(length) + norm * found["mean_z"] + norm**2 * z[1] / 2
    found |= {"query_norm": norm, "anchor_norm": float(anchor.norm())}
    found["query_cosine"] = float(q @ anchor / (q.norm() * anchor.norm()))
    found |= {f"anchor_budget_{size}": float(budgets[row, head, i]) for i, size in enumerate((16, 32, 64, 128))}
    for name, queries, newest in (
        ("largest_out", case.query, case.after),
        ("anchor_largest_out", case.anchor, case.local),
    ):
        outs = [attention(queries[row, h], *(kept(x, row, h) for x in (case.sinks, newest)))[1] for h in range(HEADS)]
        found[name] = max(float(out.norm()) for out in outs)
    return found


def anchor_budgets(case: Case) -> Tensor:
    """bgt* of the anchor by `needed_budgets`, whose own test compares it with a search."""
    parts, found = (case.sinks, case.host, case.local), []
    outs = [
        attention(case.anchor[row, h], *(kept(x, row, h) for x in parts))[1]
        for row in range(ROWS)
        for h in range(HEADS)
    ]
    full = torch.stack(outs).float().view(ROWS, HEADS, DIM)
    near, limit = attend(case.anchor, joined(case.sinks, case.local), SCALE), deviation_limit(full, (TAU,))
    for row, first in enumerate((0, PADDING // 16)):  # a row's runs begin with its first block that has a token
        one = slice(row, row + 1)
        host = Tokens(*(x[one, :, 16 * first :] for x in case.host[:2]), case.host.valid[one, 16 * first :])
        anchor = case.anchor[one]
        found.append(needed_budgets(
            (near[0][one], near[1][one]), anchor, host, attend_blocks(anchor, host, SCALE), case.scores[one, :, first:],
            full[one], limit[one], scale=SCALE, digest="quest",
        ))  # fmt: skip
    return torch.cat(found)[:, :, 1:, 0]


def test_every_feature_is_its_formula() -> None:
    case = Case()
    found, budgets = case.features(), anchor_budgets(case)
    assert found.shape == (ROWS, HEADS, len(set(FEATURES))) == (ROWS, HEADS, 41)
    assert 0 < float(budgets.min()) < float(budgets.max())
    for row in range(ROWS):
        for head in range(HEADS):
            want = direct(case, row, head, budgets)
            assert set(want) == set(FEATURES)
            for name, value in zip(FEATURES, found[row, head].tolist(), strict=True):
                assert value == pytest.approx(want[name], rel=2e-4, abs=2e-5), (name, row, head)
    torch.testing.assert_close(case.features(tile=16), found, rtol=1e-4, atol=1e-5)


def test_equal_keys_have_no_skewness() -> None:
    """Norms that are all equal: variance, skewness and kurtosis are 0, not NaN."""
    case = Case()
    case.host.key[:] = 1.0
    found = case.features()
    assert torch.isfinite(found).all()
    columns = [FEATURES.index(f"host_key_norm_{name}") for name in MOMENTS[1:]]
    torch.testing.assert_close(found[..., columns], torch.zeros(ROWS, HEADS, 3), atol=1e-5, rtol=0)
