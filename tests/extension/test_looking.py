"""A run with new parts is looked at by somebody who has neither them nor torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ntkexp.progress import Silent
from ntkexp.report.inventory import flat
from ntkexp.report.plots.style import BLACK, COLOUR, GREY, colour
from ntkexp.report.run import load_tables
from ntkexp.run.execute import execute
from tests.extension.outside import Outside

LOOK = "import sys; from ntkexp.cli.main import run; print(run(sys.argv[1:]), 'torch' in sys.modules)"


def test_a_machine_and_a_rule_have_colours_of_their_own() -> None:
    found = {colour(name) for name in ("thirds", "frozen_middle", "my_machine")}
    assert len(found) == 3
    assert not found & {*COLOUR.values(), BLACK, GREY}


@pytest.mark.slow
def test_its_pictures_and_its_page_tell_of_them_without_torch(outside: Outside, tmp_path: Path) -> None:
    chosen = outside.experiment("loss=doubled", "optimizer=averaged", "steps=2")
    folder = execute(chosen, [], tmp_path, False, Silent())
    drawn = (folder / "plots" / "ladder.svg").read_text()
    assert all(colour(name) in drawn for name in ("thirds", "frozen_middle"))
    assert {"contributions.svg", "path_kernel.svg"} <= {file.name for file in (folder / "plots").iterdir()}
    asked = [sys.executable, "-c", LOOK, "report", "--out", str(tmp_path)]
    ended = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout.splitlines()[-1] == "0 False"
    page = (tmp_path / "report" / "index.html").read_text()
    assert all(name in page for name in ("thirds", "frozen middle"))
    config = flat(load_tables(folder).config)
    assert (config["data"], config["loss"], config["optimizer"]) == ("corners", "doubled", "averaged")
