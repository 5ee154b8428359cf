"""The player of other processors: what it reads from pytest, and that libraries heed what it tells them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.processors import PROCESSORS, Outcome, read

RECORD = """<testsuites><testsuite>
<testcase classname="tests.a" name="passes"/>
<testcase classname="tests.a" name="skips"><skipped message="no such processor"/></testcase>
<testcase classname="tests.a" name="fails"><failure message="assert 2 &lt; 1&#10; where 2"/></testcase>
<testcase classname="tests.b" name="breaks"><error message=""/></testcase>
</testsuite></testsuites>"""


def test_what_failed_is_read_with_its_reason() -> None:
    found = read(ElementTree.fromstring(RECORD).iter("testcase"))
    assert found.tests == 4
    assert found.failed == ["tests.a::fails: assert 2 < 1", "tests.b::breaks: "]
    assert not found.sound


@pytest.mark.parametrize(
    ("outcome", "sound"), [(Outcome(3, []), True), (Outcome(0, []), False), (Outcome(3, ["a"]), False)]
)
def test_no_tests_are_no_evidence(outcome: Outcome, sound: bool) -> None:
    assert outcome.sound == sound


SEEN = """
import torch
addresses = [torch.empty(size).data_ptr() % 64 for size in range(1, 3000, 7)]
print(torch.backends.cpu.get_cpu_capability().lower(), sum(map(bool, addresses)) > len(addresses) / 2, hash("seed"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSORS)
def test_libraries_are_made_to_compute_otherwise(name: str, tmp_path: Path) -> None:
    chosen = PROCESSORS[name]
    if reason := chosen.missing():
        pytest.skip(reason)

    def seen() -> list[str]:
        command = [sys.executable, "-c", SEEN]
        return subprocess.check_output(command, env=chosen.environment(tmp_path), text=True).split()

    capability, unaligned, order = seen()
    expected = chosen.settings.get("ATEN_CPU_CAPABILITY", capability)
    assert capability == expected
    assert unaligned == str(chosen.unaligned)
    assert seen()[2] == order  # hashes are seeded
