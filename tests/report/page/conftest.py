"""A page with a sweep of hostile names, a run with pictures and a damaged run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from ntkexp.report.loaded_run import load_run
from ntkexp.report.material import gather
from ntkexp.report.page.build import write
from tests.report.drawn import save
from tests.report.synthetic import WIDTHS, write_sweep

HOSTILE = "<script>alert('&')</script>"


@pytest.fixture(scope="session")
def outputs(finished: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    axes: dict[str, Sequence[int | str]] = {"model.width": WIDTHS, "model.activation": ["relu", HOSTILE]}
    write_sweep(folder, "width", axes, seeds=range(5), failed=[1])
    copied = shutil.copytree(finished["two classes"], folder / "runs" / "mlp-w512-s0-picture")
    save(load_run(copied), copied / "plots")
    broken = shutil.copytree(finished["regression"], folder / "runs" / "mlp-w512-s0-broken")
    (broken / "metrics.csv").write_text("")
    return folder


@pytest.fixture(scope="session")
def page(outputs: Path) -> Path:
    return write(gather([], outputs), outputs / "report", "ntkexp report")


@pytest.fixture(scope="module")  # its event loop would block other event loops
def browser() -> Iterator[Browser]:
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if found is None:
        pytest.skip("no Chromium on this machine; `apt-get install chromium` brings it")
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
