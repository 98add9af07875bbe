"""The mutants of `make mutants` are those of the package as it is."""

from __future__ import annotations

import shutil

import pytest
from mutants.run import ROOT, Mutant, mutants, patch

EVERY = mutants()


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="patches are applied by git")
@pytest.mark.parametrize("mutant", EVERY, ids=lambda mutant: mutant.name)
def test_a_patch_applies_and_names_tests_that_exist(mutant: Mutant) -> None:
    patch(ROOT, mutant, "--check")
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).is_file(), test
        assert not name or f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), test
