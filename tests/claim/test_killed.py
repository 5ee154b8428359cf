"""Claims that are killed at random moments end, by the same command, with the same verdicts and the same bytes."""

from __future__ import annotations

import json
import random
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from ntkexp.records.claim import TIMINGS
from tests.claim.subject import CLAIM
from tests.sweep.commands import ended, running
from tests.sweep.test_killed import kill_tree

pytestmark = pytest.mark.slow
KILLS = 2


def claims(folder: Path, out: Path) -> subprocess.Popen[str]:
    """The claim in a file of a user's, begun."""
    return running("claims", "mine", "--quick", "--json", f"--config-dir={folder}", f"--out={out}")


def kept(out: Path) -> dict[str, bytes]:
    """Everything in the claims' folders but the time that they took; the command that is kept names its place."""
    files = [file for file in sorted((out / "claims").glob("mine-*/*")) if file.name not in {TIMINGS, "verdict.json"}]
    return {str(file.relative_to(out)): file.read_bytes() for file in files}


def test_killed_claims_go_on(tmp_path: Path) -> None:
    (tmp_path / "claim").mkdir()
    (tmp_path / "claim" / "mine.yaml").write_text(yaml.safe_dump(CLAIM))
    undisturbed, out, luck = tmp_path / "undisturbed", tmp_path / "killed", random.Random(0)
    expected = ended(claims(tmp_path, undisturbed))
    assert expected.status == 0, expected.err
    for _ in range(KILLS):
        process = claims(tmp_path, out)
        time.sleep(luck.uniform(1, 9))
        kill_tree(process, luck)
        process.communicate()
    found = ended(claims(tmp_path, out))
    assert [told(one, out) for one in json.loads(found.out)] == [
        told(one, undisturbed) for one in json.loads(expected.out)
    ]
    assert kept(out) == kept(undisturbed)
    assert len(list((out / "claims" / "runs").iterdir())) == 8


def told(claim: dict[str, str], out: Path) -> dict[str, str]:
    """What is told of a claim, wherever it lies, and however long it took."""
    return claim | {"command": claim["command"].replace(str(out), "out"), "cpu_minutes": ""}
