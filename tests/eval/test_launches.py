"""Kernels that decode steps launch, by name and order."""

from __future__ import annotations

import csv
import importlib
import pkgutil
from collections import defaultdict

import pytest
from typer.testing import CliRunner

import common
import hf_offload.gpu
import launches
from hf_offload.policies.hgca.kernels import resident_weights


@pytest.mark.parametrize("row", ["window:budget=96", "hgca rescue"])
def test_launches_are_listed_in_their_order(tmp_path, row):
    out = tmp_path / "launches.csv"
    result = CliRunner().invoke(common.command(launches.main), ["--row", row, "--context", "200", "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = defaultdict(list)
    with out.open(newline="") as file:
        for line in csv.DictReader(file):
            of = found[line["layer"], line["step"], int(line["steps"]), line["by"]]
            assert int(line["order"]) == len(of)
            of.append(line["kernel"].removesuffix("_kernel"))
    assert {key[:2] for key in found} >= {(layer, step) for layer in ("first", "last") for step in ("first", "fills")}
    usual = max((key for key in found if key[0] == "middle" and key[3] == "GPU"), key=lambda key: key[2])
    assert usual[1] == "usual"
    names = found[usual]
    assert names.index("write_token") < names.index("paged_attention") < names.index("merge") == len(names) - 1
    (filling,) = (names for key, names in found.items() if key[:2] == ("middle", "fills") and key[3] == "GPU")
    assert filling[: len(names)] == names
    assert "open_block" in filling[len(names) :]
    beside = found[*usual[:3], "beside"]
    assert beside == (["attention", "draw", "attention", "join"] if row == "hgca rescue" else ["attention"])


def test_every_kernel_of_triton_has_its_function():
    files = pkgutil.iter_modules(hf_offload.gpu.__path__)
    modules = [importlib.import_module(f"hf_offload.gpu.{file.name}") for file in files]
    names = {name for module in [*modules, resident_weights] for name in vars(module) if name.endswith("_kernel")}
    names.remove("fetch_packed_kernel")  # that `fetch` launches in place of its other one
    assert set(launches.all_kernels().values()) == names
