"""The wheel is the product: installed away from the checkout it has its configs, its types and its command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.readme import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel was installed, without what it depends on."""
    place = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(place), str(ROOT)], check=True)
    (wheel,) = place.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(place / "site"), str(wheel)], check=True)
    return place / "site"


def files(folder: Path) -> dict[str, bytes]:
    """The YAML files under a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.yaml")}


def test_the_configs_are_in_it(installed: Path) -> None:
    assert files(installed / "ntkexp" / "configs") == files(ROOT / "configs")


def test_it_says_that_it_is_typed(installed: Path) -> None:
    assert (installed / "ntkexp" / "py.typed").is_file()


def test_it_finds_its_configs_by_itself(installed: Path, tmp_path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "ntkexp", "config", "--tree"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "model=mlp (default)" in shown.stdout
