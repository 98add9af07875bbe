"""Properties of the heads in one launch, against the features and the network in torch; and parts that are joined."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pools import run

from hf_offload import ConstantPredictor
from hf_offload.attention.merge import merge_partials
from hf_offload.cpu.kernels.merge import join_parts
from hf_offload.policies.fluxion.features import PROMPT_FEATURES, PromptStatistics
from hf_offload.policies.fluxion.kernels.predictor import Network, Rows, predict_properties, step_features
from hf_offload.policies.fluxion.kernels.selector import budget_of
from hf_offload.policies.fluxion.predictor import HeadPredictor

BLOCK = 16


class Case:
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

    def features(self) -> torch.Tensor:
        low = self.first.clip(max=self.end)
        far = [int(row[f * BLOCK : self.end * BLOCK].sum()) for row, f in zip(self.valid, low, strict=True)]
        lengths = [(n, int(row[: self.length].sum()) - n) for n, row in zip(far, self.valid, strict=True)]
        return torch.from_numpy(step_features(self.known, self.query, self.sinks, self.near, lengths))

    def needs(self, network: Network, threads: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        shape = self.query.shape[:2]
        made = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32), np.full(shape, 7, np.uint8)
        rows = Rows(self.first, self.end, self.begins, self.valid, shape[0] > 1, BLOCK)
        launch = predict_properties(
            network, self.known, self.query, self.sinks, self.near, rows, made, length=self.length
        )
        run(launch, threads)
        return made


def net(features: torch.Tensor) -> HeadPredictor:
    torch.manual_seed(0)
    made = HeadPredictor(tau=0.1, digest="quest", sinks=64, local=256, streaming_at=0.6)
    made.standardise(features.flatten(0, -2) + torch.randn(features.flatten(0, -2).shape))
    made = made.eval().requires_grad_(False)
    for layer in (made.first, made.second):
        for part in layer.parameters():
            part.copy_(part.half())  # as compiled code has them
    made.outputs.bias[2] -= made(features)[..., 2].median() - 0.41  # half of the heads stream: logit(0.6) is 0.405
    return made


def check(case: Case, predictor: HeadPredictor, lost: torch.Tensor | None = None) -> None:
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


@pytest.mark.parametrize(
    ("batch", "heads", "dim"), [(3, 14, 48), (3, 4, 16), pytest.param(3, 32, 128, marks=pytest.mark.slow)]
)
def test_properties_are_those_of_the_network_in_torch(batch: int, heads: int, dim: int) -> None:
    case = Case(batch, heads, dim)
    predictor = net(case.features())
    check(case, predictor)
    predictor.second.weight[3, 4] = 1e5
    with pytest.raises(ValueError, match="no float16"):
        predictor.network()


def test_outliers_missing_sinks_and_what_is_no_number() -> None:
    """A head of whose features one is NaN takes all that there is."""
    case, lost = Case(2, 6, 48), torch.zeros(2, 6, dtype=torch.bool)
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
    case, constant = Case(3, 4, 16), ConstantPredictor(0.3, -0.01, streaming)
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
