"""The player of other processors: it reads pytest's records, and libraries follow its settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from ntkexp.kernel.features.adjoint import inner
from ntkexp.kernel.features.blocks import Rows
from tests.processors import PROCESSORS, Outcome, every_nth, read
from tests.shapes import checked

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


@pytest.mark.parametrize("count", [1, 5])
def test_samples_of_the_files_are_disjoint_and_all_of_them(count: int) -> None:
    samples = [every_nth(count, first) for first in range(count)]
    together = [file for sample in samples for file in sample]
    assert len(together) == len(set(together))
    assert set(together) == set(every_nth(1, 0))
    assert "tests/test_processors.py" in together
    assert samples[0] == every_nth(count, count)


SEEN = """
import torch
addresses = [torch.empty(size).data_ptr() % 64 for size in range(1, 3000, 7)]
print(torch.backends.cpu.get_cpu_capability().lower(), sum(map(bool, addresses)) > len(addresses) / 2)
"""
HASH = 'print(hash("seed"))'


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSORS)
def test_libraries_are_made_to_compute_otherwise(name: str, tmp_path: Path) -> None:
    chosen = PROCESSORS[name]
    if reason := chosen.missing():
        pytest.skip(reason)

    environment = chosen.environment(tmp_path)

    def seen(program: str) -> list[str]:
        return subprocess.check_output([sys.executable, "-c", program], env=environment, text=True).split()

    capability, unaligned = seen(SEEN)
    expected = chosen.settings.get("ATEN_CPU_CAPABILITY", capability)
    assert capability == expected
    assert unaligned == str(chosen.unaligned)
    assert seen(HASH) == seen(HASH)  # hashes are seeded


# Shapes in signatures are checked while tests run.


def test_a_function_refuses_sizes_that_differ() -> None:
    with pytest.raises(TypeCheckError, match="size"):
        inner(torch.ones(2, 1, 3), torch.ones(2, 1, 4))


def test_a_function_refuses_another_number_of_axes() -> None:
    with pytest.raises(TypeCheckError, match="left"):
        inner(torch.ones(2, 3), torch.ones(2, 1, 3))


def test_a_dataclass_refuses_another_number_of_axes() -> None:
    with pytest.raises(TypeCheckError, match="rows"):
        Rows(torch.ones(2, 3), "weight")


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (3, 3)])
def test_one_call_that_fits_excuses_no_other(sizes: tuple[int, int]) -> None:
    """Neither one of other arguments, nor one that returns something else."""

    @checked
    def rows(x: Float[Tensor, "row size"], count: int, size: int) -> Float[Tensor, "row size"]:
        return torch.ones(count, size)

    rows(torch.ones(2, 2), 2, 2)
    with pytest.raises(TypeCheckError, match="return value"):
        rows(torch.ones(2, 2), *sizes)
    with pytest.raises(TypeCheckError, match="parameters"):
        rows(torch.ones(2), 2, 2)
