"""The commands, with a module of the user's: resuming needs the trust again, a report needs none."""

from __future__ import annotations

from pathlib import Path

import pytest

from ntkexp.cli.main import run
from tests.config.components import OWN
from tests.run.commands import TINY, only_run
from tests.run.test_execute import full_disk

TRUST = ("--trust", str(OWN))


@pytest.mark.slow
def test_a_run_is_begun_resumed_and_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train = ("train", *TINY, "steps=3", "model=module", f"model.path={OWN}", f"--out={tmp_path}", "--quiet")
    with pytest.MonkeyPatch.context() as patch:
        full_disk(patch, "results.csv")
        assert run([*train, *TRUST]) == 1
    folder = str(only_run(tmp_path))
    capfd.readouterr()
    assert run(["resume", folder]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert f"runs only if you say so; add `--trust {OWN}`" in said
    assert run(["resume", folder, *TRUST]) == 0
    assert run(["report", folder]) == 0
    assert "secant" in capfd.readouterr().out
