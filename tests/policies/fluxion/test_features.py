"""Features by the appendix's formulas; properties of the heads in one launch; and parts that are joined."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pools import run
from torch import Tensor

from hf_offload import ConstantPredictor
from hf_offload.attention.merge import merge_partials
from hf_offload.cpu.kernels.merge import join_parts
from hf_offload.policies.fluxion.block_attention import Tokens, attend, attend_blocks
from hf_offload.policies.fluxion.budgets import deviation_limit
from hf_offload.policies.fluxion.features import FEATURES, MOMENTS, PROMPT_FEATURES, PromptStatistics, prompt_statistics
from hf_offload.policies.fluxion.kernels.predictor import Network, Rows, predict_properties, step_features
from hf_offload.policies.fluxion.kernels.selector import budget_of
from hf_offload.policies.fluxion.predictor import HeadPredictor
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


class Prompt:
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


def direct(case: Prompt, row: int, head: int, budgets: Tensor) -> dict[str, float]:
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


def anchor_budgets(case: Prompt) -> Tensor:
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
    case = Prompt()
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
    case = Prompt()
    case.host.key[:] = 1.0
    found = case.features()
    assert torch.isfinite(found).all()
    columns = [FEATURES.index(f"host_key_norm_{name}") for name in MOMENTS[1:]]
    torch.testing.assert_close(found[..., columns], torch.zeros(ROWS, HEADS, 3), atol=1e-5, rtol=0)


# --- the properties that a network makes of them ----------------------------------------------------------------------


class Step:
    """A step of rows with padding in front, and a prompt of which something is known."""

    def __init__(self, batch: int, heads: int, dim: int) -> None:
        torch.manual_seed(0)
        shape, self.length, self.end = (batch, heads), 300, 14
        fixed = torch.randn(*shape, len(PROMPT_FEATURES))
        self.known = PromptStatistics(fixed, torch.randn(*shape, 2, dim), torch.rand(shape)).arrays
        self.query = 3 * torch.randn(*shape, dim).numpy()
        self.sinks, self.near = ((torch.randn(*shape, dim).numpy(), 4 * torch.randn(shape).numpy()) for _ in range(2))
        self.valid = np.ones((batch, 320), np.uint8)
        self.first, self.begins = np.full(batch, 4, np.int32), np.zeros(batch, np.int32)
        if batch > 1:
            self.valid[1, :37], self.valid[1, 90:95], self.valid[1, 250] = 0, 0, 0
            self.first[1], self.begins[1] = 7, 37
        if batch > 2:  # nothing on the host
            self.valid[2, :290], self.first[2], self.begins[2] = 0, 23, 290

    def features(self) -> Tensor:
        low = self.first.clip(max=self.end)
        far = [int(row[f * 16 : self.end * 16].sum()) for row, f in zip(self.valid, low, strict=True)]
        lengths = [(n, int(row[: self.length].sum()) - n) for n, row in zip(far, self.valid, strict=True)]
        return torch.from_numpy(step_features(self.known, self.query, self.sinks, self.near, lengths))

    def needs(self, network: Network, threads: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        shape = self.query.shape[:2]
        made = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32), np.full(shape, 7, np.uint8)
        rows = Rows(self.first, self.end, self.begins, self.valid, int(shape[0] > 1), 16)
        launch = predict_properties(
            network, self.known, self.query, self.sinks, self.near, rows, made, length=self.length
        )
        run(launch, threads)
        return made


def net(features: Tensor) -> HeadPredictor:
    torch.manual_seed(0)
    made = HeadPredictor(tau=0.1, digest="quest", sinks=64, local=256, streaming_at=0.6)
    made.standardise(features.flatten(0, -2) + torch.randn(features.flatten(0, -2).shape))
    made = made.eval().requires_grad_(False)
    for layer in (made.first, made.second):
        for part in layer.parameters():
            part.copy_(part.half())  # as compiled code has them
    made.outputs.bias[2] -= made(features)[..., 2].median() - 0.41  # half of the heads stream: logit(0.6) is 0.405
    return made


def check(case: Step, predictor: HeadPredictor, lost: Tensor | None = None) -> None:
    """Heads that are `lost` are NaN in both forms, and stream in none."""
    want, network = predictor.predict(case.features()), predictor.network()
    got = case.needs(network)
    for mine, theirs in zip(got[:2], want[:2], strict=True):
        assert torch.equal(theirs.isnan(), torch.zeros_like(theirs, dtype=torch.bool) if lost is None else lost)
        torch.testing.assert_close(torch.from_numpy(mine), theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert np.array_equal(got[2] != 0, want.streaming.numpy())
    assert 0 < got[2].sum() < got[2].size
    alone = case.needs(network, threads=1)
    assert all(np.array_equal(one, two, equal_nan=True) for one, two in zip(got, alone, strict=True))


@pytest.mark.parametrize(("batch", "heads", "dim"), [(3, 14, 48), (3, 4, 16)])
def test_properties_are_those_of_the_network_in_torch(batch: int, heads: int, dim: int) -> None:
    case = Step(batch, heads, dim)
    predictor = net(case.features())
    check(case, predictor)
    predictor.second.weight[3, 4] = 1e5
    with pytest.raises(ValueError, match="no float16"):
        predictor.network()


def test_outliers_missing_sinks_and_what_is_no_number() -> None:
    """A head of whose features one is NaN takes all that there is."""
    case, lost = Step(2, 6, 48), torch.zeros(2, 6, dtype=torch.bool)
    predictor = net(case.features())
    case.query[0, 0] *= 1e6
    case.sinks[1][0], case.sinks[0][0] = -math.inf, 0.0  # a model without sinks: a feature that is -inf
    check(case, predictor)
    case.known.fixed[0, 1, 5], case.query[1, 3, 2] = math.nan, math.nan
    lost[0, 1] = lost[1, 3] = True
    check(case, predictor, lost)
    got = case.needs(predictor.network())
    assert [budget_of(*(part[each] for part in got), 32.0) for each in ((0, 1), (1, 3))] == [1.0, 1.0]
    case.sinks[0][1, 4, 7] = math.nan  # of one head; the largest output of a row is every head's feature
    lost[1] = True
    check(case, predictor, lost)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_constant_predictor_says_the_same_whatever_the_features(streaming: bool) -> None:
    case, constant = Step(3, 4, 16), ConstantPredictor(0.3, -0.01, streaming)
    case.sinks[1][:], case.near[1][:] = -math.inf, -math.inf  # makes a feature NaN
    case.known.fixed[0, 0] = math.inf
    said = np.float32(0.3), np.float32(-0.01), streaming
    assert all((found == each).all() for found, each in zip(case.needs(constant.network()), said, strict=True))


def test_joined_parts_are_attention_to_all() -> None:
    torch.manual_seed(0)
    parts = [(torch.randn(3, 5, 80), 6 * torch.randn(3, 5)) for _ in range(3)]
    parts[0][1][0, 0] = parts[1][1][0, 1] = parts[2][1][0, 2] = parts[1][1][1] = -math.inf
    for _, lse in parts:
        lse[2, 4] = -math.inf
    want = merge_partials([(out.masked_fill(lse.isinf()[..., None], 0.0), lse) for out, lse in parts])
    parts[1][0][1], parts[2][0][0, 2] = math.nan, math.nan  # of what attended nothing
    mine, one, two = (tuple(x.numpy() for x in part) for part in parts)
    run(join_parts(*mine, one, two), threads=2)  # type: ignore[arg-type]
    seen = want[1].isfinite()
    torch.testing.assert_close(parts[0][0][seen], want[0][seen], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parts[0][1], want[1], rtol=1e-6, atol=1e-6)
