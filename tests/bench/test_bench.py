"""The benchmark runs, and prints its tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.bench.__main__ import main


@pytest.mark.slow
def test_the_quick_benchmark_prints_its_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    main(["--quick", "--threads=1", f"--plot={tmp_path / 'cost.svg'}", f"--cells={tmp_path / 'cells'}"])
    torch.set_num_threads(threads)
    titles = [line for line in capsys.readouterr().out.splitlines() if line and not line.startswith(" ")]
    assert [title.split()[0] for title in titles] == [
        "torch",
        "Tangent",
        "A",
        "A",
        "Kernels",
        "Whole",
        "A",
        "Adam,",
        "Engine:",
        "Reading",
        "Sketches",
        "Language:",
        "Precision:",
        "Scale:",
        "Following:",
        *["Attribution,"] * 3,
        "Shares",
        "In",
    ]
    assert (tmp_path / "cost.svg").read_text("utf-8").count("snapshots") >= 3
