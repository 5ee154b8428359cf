"""The README's commands, verbatim and in order, in an empty folder; and the table it shows is the one they print."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.process import printed
from tests.docs.readme import COMMANDS, ROOT, SETUPS, blocks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table of measurements, and a module."""
    from sklearn.datasets import load_iris  # noqa: PLC0415  slow to import where tests are only collected

    place = tmp_path_factory.mktemp("stranger")
    iris = load_iris()
    rows = [[*map(str, x), iris.target_names[label]] for x, label in zip(iris.data, iris.target, strict=True)]
    lines = [",".join(row) for row in [["length", "width", "petal length", "petal width", "species"], *rows]]
    (place / "measurements.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (place / "my_net.py").write_bytes((ROOT / "tests" / "config" / "own_net.py").read_bytes())
    return place


def shell(line: str, folder: Path) -> str:
    """What a line prints on stdout."""
    return printed(["bash", "-c", line], folder)


def test_the_default_run_prints_the_table_shown(folder: Path) -> None:
    (_, _, command) = SETUPS[0].split(" && ")
    printed, shown = rows(shell(command, folder)), rows(blocks("text")[1])
    assert list(printed) == list(shown)
    for machine, errors in shown.items():
        # processors round differently, and kinks amplify that: errors at rounding agree in kind, others to 5 %
        for error, other in zip(errors, printed[machine], strict=True):
            assert other == pytest.approx(error, rel=0.05, abs=1e-12, nan_ok=True), machine


def rows(text: str) -> dict[str, list[float]]:
    """The errors of each machine on the three splits, read under their headings."""
    header, *lines = text.partition("machine ")[2].partition("\n\n")[0].splitlines()
    ends = [len("machine ") + header.index(split) + len(split) for split in ("train", "probe", "test")]
    cells = {line.split()[0]: [line[:end].split()[-1] for end in ends] for line in lines}
    return {machine: [float(cell.replace("–", "nan")) for cell in found] for machine, found in cells.items()}


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_runs(line: str, folder: Path) -> None:
    assert shell(line, folder)
