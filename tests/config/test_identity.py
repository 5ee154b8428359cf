"""Two commands share an identity exactly if they compute the same thing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ntkexp.config.compose import compose
from ntkexp.experiment import identity as module
from ntkexp.experiment.identity import folder_name, identity
from ntkexp.mistake import Mistake
from ntkexp.records import folder


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "same",
    [
        ["device=cuda"],
        ["threads=2"],
        ["memory_gb=1"],
        ["checkpoint_seconds=0"],
        ["model.width=512", "loss=squared"],
        ["init.alpha=1"],
        ["path.rule=['secant','left']"],
    ],
    ids=" ".join,
)
def test_circumstances_and_spelling_do_not_count(same: list[str]) -> None:
    assert identity(compose(same)) == identity(compose([]))


def test_everything_else_counts() -> None:
    commands = ["seed=1", "model.width=64", "loss=hinge", "init.alpha=2", "path.rule=[left,secant]", "dtype=float32"]
    assert len({identity(compose([command])) for command in [*commands, "steps=300"]}) == len(commands) + 1


def test_results_of_another_version_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(compose([]))
    monkeypatch.setattr(module, "results_version", folder.results_version + 1)
    assert identity(compose([])) != before


def test_a_data_file_counts_by_its_contents(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    command = ["data=table", f"data.path={file}", "data.target=y"]
    with pytest.raises(Mistake, match="there is no such file"):
        identity(compose(command))
    file.write_text("x,y\n1,2\n")
    before = identity(compose(command))
    assert identity(compose(command)) == before
    file.write_text("x,y\n1,3\n")
    assert identity(compose(command)) != before


def test_the_source_of_a_component_from_elsewhere_counts(tmp_path: Path) -> None:
    file = tmp_path / "identified_net.py"
    text = "from ntkexp.model.networks import MLP\n\nclass Net(MLP):\n    pass\n"
    file.write_text(text)
    experiment = compose(["model._target_=identified_net.Net"], trust=[str(file)])
    before = identity(experiment)
    file.write_text(text + "# changed\n")
    assert identity(experiment) != before


def test_a_folder_is_named_by_what_a_person_looks_for() -> None:
    experiment = compose(["model.width=8", "seed=5"])
    assert re.fullmatch(r"mlp-w8-s5-[0-9a-f]{12}", folder_name(experiment))
    assert folder_name(experiment).endswith(identity(experiment)[:12])
