"""Forged files: any contents are refused by a ValueError or load; no process dies."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import forging
import pytest
import torch
from forks import in_fork
from safetensors.torch import load_file
from tiny import tiny_model

from hf_offload.files import tensor_file
from hf_offload.files.fingerprint import likeness
from hf_offload.policies.fluxion.features import FEATURES
from hf_offload.policies.fluxion.predictor import HeadPredictor, read_about, save_predictors

QUICK = ("scout-split", "hgca-split", "full-int8-one", "linear-one")
OTHERS = (
    "scout-one", "scout-attend-split", "scout-quest-int8-one", "full-int8-split", "window-split", "quest-split",
    "hgca-one", "hgca-int8-one", "fixed_hybrid-split", "fluxion-one", "fluxion-split", "h2o-split", "infinigen-one",
    "infinigen-int8-split", "sliding-split",
)  # fmt: skip


@pytest.mark.parametrize(
    ("every", "cases"),
    [
        pytest.param(131, QUICK, id="some"),
        *(pytest.param(1, (case,), id=case, marks=pytest.mark.slow) for case in (*QUICK, *OTHERS)),
    ],
)
def test_every_forged_field_is_refused_or_serves(tmp_path: Path, every: int, cases: tuple[str, ...]) -> None:
    assert in_fork(lambda: forging.main(tmp_path, every, cases), 1800.0) == 0


def test_a_forged_predictor_is_refused_or_loads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path, refused = tiny_model("llama"), tmp_path / "predictor.safetensors", list[str]()
    made, known = HeadPredictor(tau=0.1, digest="submean", sinks=16, local=32), likeness(model.config, model.model)
    made.standardise(torch.randn(500, len(FEATURES)))
    save_predictors(path, known, {0.1: made}, {"samples": 3})
    about, tensors = read_about(path), load_file(path)
    for _, forge in (*forging.text_forgeries(about), *forging.tensor_forgeries(tensors, 1))[::7]:
        text, mine = copy.deepcopy(about), dict(tensors)
        forge(text, mine, {})
        tensor_file.replace(path, tensor_file.pack(json.dumps(text), mine))
        try:
            HeadPredictor.load(path, known)
        except ValueError as error:
            refused.append(str(error))
    for _, forged in forging.header_forgeries(path.read_bytes()):
        path.write_bytes(forged)
        with pytest.raises(ValueError, match="predictor"):
            HeadPredictor.load(path, known)
    assert len(refused) > 20
    assert max(map(len, refused)) < 900
