"""The mutants of `make mutants` are those of the package as it is."""

from __future__ import annotations

import re
import shutil

import pytest
from mutants.run import ROOT, Mutant, mutants, patch

EVERY = mutants()


def test_two_of_each_kind_change_little() -> None:
    kinds = [mutant.kind for mutant in EVERY]
    assert len(kinds) >= 30
    assert {kind for kind in kinds if kinds.count(kind) < 2} == set()
    for mutant in EVERY:
        text = mutant.path.read_text(encoding="utf-8")
        changed = re.findall(r"^[+-](?![+-]{2} ).*", text, re.MULTILINE)
        assert 1 <= len(changed) <= 5, mutant.name
        assert re.findall(r"^\+\+\+ b/(\w+)/", text, re.MULTILINE) == ["hf_offload"], mutant.name


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="patches are applied by git")
@pytest.mark.parametrize("mutant", EVERY, ids=lambda mutant: mutant.name)
def test_a_patch_applies_and_names_tests_that_exist(mutant: Mutant) -> None:
    patch(ROOT, mutant, "--check")
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).is_file(), test
        assert not name or f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), test
