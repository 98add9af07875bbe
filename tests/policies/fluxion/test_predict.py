"""Properties of the heads in one launch, against the features and the network in torch; and parts that are joined."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pools import for_python, run

from hf_offload import ConstantPredictor
from hf_offload.attention.merge import merge_partials
from hf_offload.cpu.kernels.merge import join_parts
from hf_offload.policies.fluxion.features import FEATURES, PROMPT_FEATURES, PromptStatistics, step_features
from hf_offload.policies.fluxion.kernels import predictor as predictor_kernels
from hf_offload.policies.fluxion.kernels.predictor import (
    Network,
    PromptArrays,
    Rows,
    pack_network,
    predict_properties,
)
from hf_offload.policies.fluxion.kernels.selector import budget_of
from hf_offload.policies.fluxion.predictor import HeadPredictor, Predictor

(count_tokens,) = for_python(predictor_kernels.count_tokens)

BLOCK = 16


class Case:
    """A step of rows with padding in front, and a prompt of which something is known."""

    def __init__(self, batch: int, heads: int, dim: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        shape, self.length, self.end = (batch, heads), 300, 14
        fixed = torch.randn(*shape, len(PROMPT_FEATURES))
        self.known = PromptStatistics(fixed, torch.randn(*shape, 2, dim), torch.rand(shape))
        self.query = 3 * torch.randn(*shape, dim)
        self.sinks, self.near = ((torch.randn(*shape, dim), 4 * torch.randn(shape)) for _ in range(2))
        self.valid = torch.ones(batch, 320, dtype=torch.uint8)
        self.first = torch.full((batch,), 4, dtype=torch.int32)
        self.begins = torch.zeros(batch, dtype=torch.int32)
        if batch > 1:
            self.valid[1, :37], self.valid[1, 90:95] = 0, 0
            self.first[1], self.begins[1] = 7, 37
        if batch > 2:  # nothing on the host
            self.valid[2, :290], self.first[2], self.begins[2] = 0, 23, 290

    def features(self) -> torch.Tensor:
        low = self.first.clamp(max=self.end)
        far = torch.stack([row[f * BLOCK : self.end * BLOCK].sum() for row, f in zip(self.valid, low, strict=True)])
        total = self.valid[:, : self.length].sum(1)
        lengths = torch.stack((far, total - far), 1).float()
        return step_features(self.known, self.query, self.sinks, self.near, lengths)

    def needs(self, network: Network, threads: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        shape = tuple(self.query.shape[:2])
        made = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32), np.full(shape, 7, np.uint8)
        parts = [tuple(x.numpy() for x in part) for part in (self.sinks, self.near)]
        known = PromptArrays(*(getattr(self.known, name).numpy() for name in PromptArrays._fields))
        rows = Rows(self.first.numpy(), self.end, self.begins.numpy(), self.valid.numpy(), shape[0] > 1, BLOCK)
        launch = predict_properties(network, known, self.query.numpy(), *parts, rows, made, length=self.length)  # type: ignore[arg-type]
        run(launch, threads)
        return made


def net(features: torch.Tensor, seed: int = 0) -> HeadPredictor:
    torch.manual_seed(seed)
    made = HeadPredictor(tau=0.1, digest="quest", sinks=64, local=256, streaming_at=0.6)
    made.standardise(features.flatten(0, -2) + torch.randn(features.flatten(0, -2).shape))
    made = made.eval().requires_grad_(False)
    for layer in (made.first, made.second):
        for part in layer.parameters():
            part.copy_(part.half())  # as compiled code has them
    made.outputs.bias[2] -= made(features)[..., 2].median() - 0.41  # half of the heads stream: logit(0.6) is 0.405
    return made


def check(case: Case, predictor: Predictor, lost: torch.Tensor | None = None) -> None:
    """Heads that are `lost` are NaN in both forms, and stream in none."""
    want, network = predictor.predict(case.features()), predictor.network()
    got = case.needs(network)
    for mine, theirs in zip(got[:2], want[:2], strict=True):
        assert torch.equal(theirs.isnan(), torch.zeros_like(theirs, dtype=torch.bool) if lost is None else lost)
        torch.testing.assert_close(torch.from_numpy(mine), theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert np.array_equal(got[2] != 0, want.streaming.numpy())
    assert lost is None or not got[2][lost.numpy()].any()
    alone = case.needs(network, threads=1)
    assert all(np.array_equal(one, two, equal_nan=True) for one, two in zip(got, alone, strict=True))


@pytest.mark.parametrize(
    ("batch", "heads", "dim"),
    [
        (1, 9, 64),
        (3, 4, 16),
        (3, 32, 128),
        pytest.param(2, 14, 48, marks=pytest.mark.slow),
        pytest.param(1, 1, 256, marks=pytest.mark.slow),
    ],
)
def test_needs_are_those_of_the_torch_form(batch: int, heads: int, dim: int) -> None:
    case = Case(batch, heads, dim)
    predictor = net(case.features())
    check(case, predictor)
    assert len(set(case.needs(predictor.network())[2].ravel().tolist())) == (1 if heads == 1 else 2)


def test_weights_are_rounded_to_float16() -> None:
    case = Case(2, 9, 64)
    predictor = net(case.features())
    torch.manual_seed(1)
    for layer in (predictor.first, predictor.second):
        for part in layer.parameters():
            part.copy_(part + 1e-4 * torch.randn(part.shape))
    want, got = predictor.predict(case.features()), case.needs(predictor.network())
    for mine, theirs in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), theirs, rtol=0.01, atol=2e-3)
        assert not np.array_equal(mine, theirs.numpy())
    predictor.second.weight[3, 4] = 1e5
    with pytest.raises(ValueError, match="no float16"):
        predictor.network()


def test_outliers_and_missing_sinks() -> None:
    case = Case(2, 6, 32)
    predictor = net(case.features())
    case.query[0, 0] *= 1e6
    case.sinks[1][0], case.sinks[0][0] = -math.inf, 0.0  # a model without sinks: a feature that is -inf
    check(case, predictor)


def test_what_is_no_number_is_not_hidden() -> None:
    """Both forms say so, and such a head takes all that there is."""
    case, lost = Case(2, 6, 32), torch.zeros(2, 6, dtype=torch.bool)
    predictor = net(case.features())
    case.known.fixed[0, 1, 5], case.query[1, 3, 2] = math.nan, math.nan
    lost[0, 1] = lost[1, 3] = True
    check(case, predictor, lost)
    got = case.needs(predictor.network())
    assert [budget_of(*(part[each] for part in got), 32.0) for each in ((0, 1), (1, 3))] == [1.0, 1.0]
    case.sinks[0][0, 4, 7] = math.nan  # of one head; the largest output of a row is every head's feature
    lost[0] = True
    check(case, predictor, lost)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_constant_predictor_says_the_same_whatever_the_features(streaming: bool) -> None:
    case, constant = Case(3, 5, 16), ConstantPredictor(0.3, -0.01, streaming)
    case.sinks[1][:], case.near[1][:] = -math.inf, -math.inf  # makes a feature NaN
    case.known.fixed[0, 0] = math.inf
    for found, said in zip(
        case.needs(constant.network()), (np.float32(0.3), np.float32(-0.01), streaming), strict=True
    ):
        assert (found == said).all()


def test_tokens_that_count() -> None:
    valid = np.ones(100, np.uint8)
    assert count_tokens(valid, False, 10, 32, 64, 90) == (32, 48)
    valid[:10], valid[40], valid[70:72] = 0, 0, 0
    assert count_tokens(valid, True, 10, 32, 64, 90) == (31, 46)


@pytest.mark.parametrize("dim", [16, 80])
def test_joined_parts_are_attention_to_all(dim: int) -> None:
    torch.manual_seed(dim)
    parts = [(torch.randn(3, 5, dim), 6 * torch.randn(3, 5)) for _ in range(3)]
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


def test_refusals() -> None:
    layers = [(torch.zeros(*shape), torch.zeros(shape[0])) for shape in ((8, 3), (8, 8), (2, 8))]
    with pytest.raises(ValueError, match=r"\(2, 8\)\] are no network of 3 features"):
        pack_network((torch.zeros(3),) * 4, *layers, 0.0)  # type: ignore[arg-type]
    case = Case(1, 4, 16)
    layers[2] = torch.zeros(3, 8), torch.zeros(3)
    with pytest.raises(ValueError, match=f"of 3 features does not serve {len(FEATURES)}"):
        case.needs(pack_network((torch.zeros(3),) * 4, *layers, 0.0))  # type: ignore[arg-type]
    case.length = 330
    with pytest.raises(ValueError, match="length 330: valid covers 320"):
        case.needs(ConstantPredictor().network())
