"""Contents of the wheel and the sdist."""

from __future__ import annotations

import ast
import email
import functools
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import hf_offload

ROOT = Path(__file__).parent.parent
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "hf_offload_cli.py")
FOLDERS = ("hf_offload", "tests", "eval", "examples", "docs")
BUILD = "from setuptools import build_meta as build; build.build_sdist('out'); build.build_wheel('out')"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, made of a copy: a build leaves files behind, which the next one would take in."""
    folder = tmp_path_factory.mktemp("source")
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    for name in FOLDERS:  # of the others some files are enough to see that they stay out
        chosen = "*.py" if name == "hf_offload" else "[!.]*.py"
        for file in (ROOT / name).rglob(chosen) if name == "hf_offload" else list((ROOT / name).glob(chosen))[:3]:
            target = folder / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    shutil.copy(ROOT / "hf_offload" / "py.typed", folder / "hf_offload")
    (folder / "out").mkdir()
    subprocess.run([sys.executable, "-c", BUILD], cwd=folder, check=True, capture_output=True)
    return folder / "out"


MODULES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "hf_offload").rglob("*.py")}
SHIPPED = MODULES | {"hf_offload/py.typed", "hf_offload_cli.py"}


def test_the_wheel_holds_the_package_alone_and_the_sdist_what_a_build_needs(built: Path) -> None:
    (file,) = built.glob("*.whl")
    with zipfile.ZipFile(file) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        info = f"hf_offload-{hf_offload.__version__}.dist-info"
        about = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
        assert "hf-offload = hf_offload_cli:script" in wheel.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert names == SHIPPED
    assert (about["Name"], about["Version"]) == ("hf-offload", hf_offload.__version__)
    (file,) = built.glob("*.tar.gz")
    with tarfile.open(file) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert names >= SHIPPED | set(FILES)
    assert not [name for name in names if name.split("/")[0] in {"tests", "eval", "examples", "docs"}]


distributions = functools.cache(importlib.metadata.packages_distributions)
"""By module; it reads what is told of every package that is installed."""


def imported(*folders: str) -> set[str]:
    """Distributions whose modules the Python files of some folders import, in functions, too."""
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    own = {path.stem for path in files} | {path.parent.name for path in files} | {"hf_offload", "hf_offload_cli"}
    names = set()
    for file in [*files, ROOT / "hf_offload_cli.py"]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(str(node.module))
    tops = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - own
    found = distributions()
    return {normal(found.get(top, [top])[0]) for top in tops}


def declared(*extras: str) -> set[str]:
    """Distributions that the project asks for, with some of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return {normal(re.match(r"[\w.-]+", needed)[0]) for group in groups for needed in group}  # type: ignore[index]


def normal(name: str) -> str:
    return re.sub(r"[._-]+", "-", name).lower()


EVERYTHING = ("demo", "eval", "dev", "serve")
SERVER = {"fastapi", "uvicorn"}  # of the command `serve` alone


@pytest.mark.parametrize(
    ("folders", "extras", "optional"),
    [
        (["hf_offload"], ("serve",), {"triton", "lm-eval"}),  # with torch for CUDA; for `hf_offload.lm_eval` alone
        (["examples"], ("demo", "eval"), SERVER),
        (["eval"], ("demo", "eval"), {"llama-cpp-python", "llama-cpp", *SERVER}),  # a peer, where it is installed
        (["tests", "eval", "examples", "docs"], EVERYTHING, {"llama-cpp-python", "llama-cpp"}),
    ],
    ids=["package", "examples", "eval", "tests"],
)
def test_what_is_imported_is_declared(folders: list[str], extras: tuple[str, ...], optional: set[str]) -> None:
    """Not only what comes with something else, which may stop to bring it."""
    found = imported(*folders)
    assert len(found) > 5
    assert found - declared(*extras) <= optional
