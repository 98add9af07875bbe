"""Every feature against a direct computation by the appendix's formulas: ragged rows, groups, tiles."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_offload.policies.fluxion.block_attention import Partial, Tokens, attend, attend_blocks
from hf_offload.policies.fluxion.budgets import deviation_limit
from hf_offload.policies.fluxion.features import FEATURES, PromptStatistics, prompt_statistics, step_features
from hf_offload.tools.training.labels import needed_budgets

ROWS, KV, GROUP, DIM = 2, 2, 3, 8
SCALE = DIM**-0.5
SINKS, HOST, LOCAL, NEW = 32, 150, 48, 5
PADDING = 40  # tokens at the host's beginning that do not count in the second row
TAU, LAYER = 0.1, 7


def draw(count: int, seed: int) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(ROWS, KV, count, DIM, generator=generator) + 0.3 for _ in range(2))
    return Tokens(key, value, torch.ones(ROWS, count, dtype=torch.bool))


class Case:
    """A prompt and a decode step; the second row's host has padding that holds NaN."""

    def __init__(self) -> None:
        self.sinks, self.host, self.local, self.new = (draw(n, i) for i, n in enumerate((SINKS, HOST, LOCAL, NEW)))
        self.host.valid[1, :PADDING] = False
        for x in self.host[:2]:
            x[1, :, :PADDING] = torch.nan
        generator = torch.Generator().manual_seed(9)
        self.anchor, self.query = 2 * torch.randn(2, ROWS, KV * GROUP, DIM, generator=generator)
        blocks = -(-HOST // 16)
        self.scores = torch.randn(ROWS, KV * GROUP, blocks, generator=generator)
        self.scores[1, :, : PADDING // 16] = -torch.inf
        self.after = Tokens(*(torch.cat(pair, 2) for pair in zip(self.local[:2], self.new[:2], strict=True)),
                            torch.cat((self.local.valid, self.new.valid), 1))  # fmt: skip
        self.host_length = self.host.valid.sum(1)

    def statistics(self, tile: int = HOST) -> PromptStatistics:
        tiles = (Tokens(*(x[:, :, at : at + tile] for x in self.host[:2]), self.host.valid[:, at : at + tile])
                 for at in range(0, HOST, tile))  # fmt: skip
        return prompt_statistics(
            LAYER, self.anchor, self.sinks, self.local, tiles, self.scores, taus=[TAU], digest="quest", scale=SCALE
        )[0]

    def features(self, statistics: PromptStatistics) -> Tensor:
        sinks, local = (attend(self.query, part, SCALE) for part in (self.sinks, self.after))
        lengths = torch.stack((self.host_length, torch.full((ROWS,), SINKS + LOCAL + NEW)), 1).float()
        return step_features(statistics, self.query, sinks, local, lengths)


def kept(tokens: Tokens, row: int, head: int) -> tuple[Tensor, Tensor]:
    keep = tokens.valid[row]
    return tokens.key[row, head // GROUP, keep].double(), tokens.value[row, head // GROUP, keep].double()


def moments(x: Tensor) -> list[float]:
    mean, spread = x.mean(), x - x.mean()
    variance = spread.square().mean()
    return [float(v) for v in (mean, variance, (spread**3).mean() / variance**1.5, (spread**4).mean() / variance**2)]


def attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[float, Tensor]:
    scores = key @ query.double() / math.sqrt(DIM)
    return float(scores.logsumexp(0)), scores.softmax(0) @ value


def device_out(query: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    key, value = (torch.cat(x) for x in zip(*parts, strict=True))
    return attention(query, key, value)[1]


def direct(case: Case, row: int, head: int, budgets: Tensor) -> dict[str, float]:
    """The features by their formulas, one after the other."""
    sinks, host, local = (kept(part, row, head) for part in (case.sinks, case.host, case.local))
    after = kept(case.after, row, head)
    q, anchor = case.query[row, head].double(), case.anchor[row, head].double()
    norm, length = float(q.norm()), len(host[0])
    found = {"layer": LAYER, "head": head, "host_length": length, "device_length": SINKS + LOCAL + NEW}
    for name, place in (("key", 0), ("value", 1)):
        found[f"sink_{name}_norm"] = float(sinks[place].norm(dim=1).mean())
        found[f"host_mean_{name}_norm"] = float(host[place].mean(0).norm())
        for kind, value in zip(("mean", "variance", "skewness", "kurtosis"), moments(host[place].norm(dim=1)),
                               strict=True):  # fmt: skip
            found[f"host_{name}_norm_{kind}"] = value
    z = moments(host[0] @ anchor / (anchor.norm() * math.sqrt(DIM)))
    found |= dict(zip([f"anchor_z_{kind}" for kind in ("mean", "variance", "skewness", "kurtosis")], z, strict=True))
    found["mean_z"] = float(q @ host[0].mean(0) / (norm * math.sqrt(DIM)))
    for name, part in (("sink", sinks), ("host", host), ("local", local)):
        lse, out = attention(anchor, *part)
        found[f"anchor_{name}_lse"], found[f"anchor_{name}_out"] = lse, float(out.norm())
    for name, part in (("sink", sinks), ("local", after)):
        lse, out = attention(q, *part)
        found[f"{name}_lse"], found[f"{name}_out"] = lse, float(out.norm())
    found["host_lse"] = math.log(length) + norm * found["mean_z"] + norm**2 * z[1] / 2
    found |= {"query_norm": norm, "anchor_norm": float(anchor.norm())}
    found["query_cosine"] = float(q @ anchor / (q.norm() * anchor.norm()))
    found |= {f"anchor_budget_{size}": float(budgets[row, head, i]) for i, size in enumerate((16, 32, 64, 128))}
    every = range(KV * GROUP)
    found["largest_out"] = max(
        float(device_out(case.query[row, h], [kept(case.sinks, row, h), kept(case.after, row, h)]).norm())
        for h in every
    )
    found["anchor_largest_out"] = max(
        float(device_out(case.anchor[row, h], [kept(case.sinks, row, h), kept(case.local, row, h)]).norm())
        for h in every
    )
    return found


def anchor_budgets(case: Case) -> Tensor:
    """bgt* of the anchor by `needed_budgets`, whose own test compares it with a search."""
    full = torch.stack([
        torch.stack([
            device_out(case.anchor[row, h], [kept(part, row, h) for part in (case.sinks, case.host, case.local)])
            for h in range(KV * GROUP)
        ])
        for row in range(ROWS)
    ]).float()  # fmt: skip
    device = Tokens(*(torch.cat(pair, 2) for pair in zip(case.sinks[:2], case.local[:2], strict=True)),
                    torch.cat((case.sinks.valid, case.local.valid), 1))  # fmt: skip
    near: Partial = attend(case.anchor, device, SCALE)
    limit, found = deviation_limit(full, (TAU,)), []
    for row, first in enumerate((0, PADDING // 16)):  # a row's runs begin with its first block that has a token
        one, anchor = slice(row, row + 1), case.anchor[row : row + 1]
        host = Tokens(*(x[one, :, 16 * first :] for x in case.host[:2]), case.host.valid[one, 16 * first :])
        blocks, mine = attend_blocks(anchor, host, SCALE), (near[0][one], near[1][one])
        scores = case.scores[one, :, first:]
        found.append(needed_budgets(
            mine, anchor, host, blocks, scores, full[one], limit[one], scale=SCALE, digest="quest"
        ))  # fmt: skip
    return torch.cat(found)[:, :, 1:, 0]


def test_every_feature_is_its_formula() -> None:
    case = Case()
    found, budgets = case.features(case.statistics()), anchor_budgets(case)
    assert found.shape == (ROWS, KV * GROUP, 41)
    assert found.dtype == torch.float32
    assert len(set(FEATURES)) == 41
    assert 0 < float(budgets.min()) < float(budgets.max())
    for row in range(ROWS):
        for head in range(KV * GROUP):
            want = direct(case, row, head, budgets)
            assert set(want) == set(FEATURES)
            for name, value in zip(FEATURES, found[row, head].tolist(), strict=True):
                assert value == pytest.approx(want[name], rel=2e-4, abs=2e-5), (name, row, head)


@pytest.mark.parametrize("tile", [16, 64])
def test_tiles_make_no_difference(tile: int) -> None:
    case = Case()
    torch.testing.assert_close(
        case.features(case.statistics(tile)), case.features(case.statistics()), rtol=1e-4, atol=1e-5
    )


def test_equal_keys_have_no_skewness() -> None:
    """Norms that are all equal: variance, skewness and kurtosis are 0, not NaN."""
    case = Case()
    case.host.key[:] = 1.0
    found = case.features(case.statistics())
    assert torch.isfinite(found).all()
    for name in ("variance", "skewness", "kurtosis"):
        torch.testing.assert_close(
            found[..., FEATURES.index(f"host_key_norm_{name}")], torch.zeros(ROWS, KV * GROUP), atol=1e-5, rtol=0
        )


def test_estimate_of_the_hosts_mass_is_exact_for_the_anchor_of_normal_keys() -> None:
    """Many keys with normal products: log L + ‖q‖μ + ½‖q‖²σ² is near the true log-sum-exp."""
    generator = torch.Generator().manual_seed(3)
    key, value = torch.randn(2, 1, 1, 20000, DIM, generator=generator)
    host = Tokens(key, value, torch.ones(1, 20000, dtype=torch.bool))
    few = Tokens(key[:, :, :16], value[:, :, :16], host.valid[:, :16])
    anchor = torch.randn(1, 1, DIM, generator=generator)
    statistics, _ = prompt_statistics(
        0, anchor, few, few, [host], torch.zeros(1, 1, 1250), taus=[TAU], digest="quest", scale=SCALE
    )
    near = attend(anchor, few, SCALE)
    found = step_features(statistics, anchor, near, near, torch.tensor([[20000.0, 32.0]]))[0, 0]
    exact, estimate = (float(found[FEATURES.index(name)]) for name in ("anchor_host_lse", "host_lse"))
    assert estimate == pytest.approx(exact, abs=0.03)
