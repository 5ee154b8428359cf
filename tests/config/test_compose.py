"""What a command describes is what is built, and a configuration that is shown or saved brings the same about again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ntkexp.component import Component
from ntkexp.config.build import Builder, build, component_class, keys
from ntkexp.config.choices import NO_CHOICES, Choices, folders, shipped, tree
from ntkexp.config.compose import compose, resolve
from ntkexp.config.field_types import KEYS, OPTIONS, bases
from ntkexp.config.plain_yaml import read
from ntkexp.experiment.experiment import Experiment
from ntkexp.mistake import Mistake

FILES = sorted(file for file in shipped().glob("*/*.yaml") if file.parent.name not in NO_CHOICES)
PLACES = dict(keys(resolve([]).tree, Experiment, Builder()))
COMMANDS: tuple[list[str], ...] = (
    [],
    ["model.width=64", "path.rule=[gauss]", "seed=3"],
    ["optimizer=sgd", "optimizer.batch=8", "loss=cross_entropy", "schedule=list", "schedule.factors=[1,0.5]"],
    ["init=mean_field", "init.alpha=1e-3", "path.schedule=[0,2,5]", "stop_at_loss=1e-6"],
    ["data=table", "data.path=~/a b.csv", "data.target=7", "data.missing=drop"],
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_every_file_names_a_component_and_all_of_its_keys(file: Path) -> None:
    tree = read(file)
    kind = component_class(tree.pop("_target_"), Component, "")
    assert set(tree) == set(kind.model_fields)


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_every_option_is_of_its_groups_kind(file: Path) -> None:
    place = next(field for key, field in PLACES.items() if key.split(".")[-1] == file.parent.name)
    assert issubclass(component_class(read(file)["_target_"], Component, ""), bases(place.annotation))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_fields_of_an_experiment_build_it_again(command: list[str]) -> None:
    experiment = compose(command)
    assert build(experiment.fields()) == experiment


@pytest.mark.sample(2)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_is_shown_composes_to_the_same(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(resolve(command).as_yaml())
    assert compose([], tmp_path) == compose(command)


def test_an_override_wins_and_the_last_of_two_counts() -> None:
    assert compose(["model.width=7", "seed=1", "seed=2", "+model.depth=3", "++threads=2"]).fields()["model"] == {
        "_target_": "ntkexp.model.MLP",
        "width": 7,
        "depth": 3,
        "activation": {"_target_": "ntkexp.layer.ReLU"},
    }
    assert compose(["seed=1", "seed=2"]).seed == 2


def test_rules_are_looked_up_in_order() -> None:
    names = [type(rule).__name__ for rule in compose(["path.rule=[gauss,left,secant]"]).path.rule]
    assert names == ["Gauss", "Left", "Secant"]
    assert [type(rule).__name__ for rule in compose(["path.rule=left"]).path.rule] == ["Left"]


def test_a_reference_is_followed() -> None:
    assert compose(["seed=17", "model.width=${seed}"]).model.width == 17


@pytest.mark.parametrize(
    "text",
    [
        "~/x y.csv",
        "a=b.csv",
        "größe (1),2.csv",
        "[odd].csv",
        "12",
        "true",
        "{a}/b.csv",
        "it's.csv",
        'say "x".csv',
        "a: b # c.csv",
        "/a/*?.csv",
        "$HOME/é.csv",
    ],
)
def test_text_is_taken_as_it_stands(text: str) -> None:
    given = resolve(["data=table", f"data.path={text}", f"data.target={text}", f"device={text}"]).tree
    assert (given["data"]["path"], given["data"]["target"], given["device"]) == (text, text, text)


def test_quotes_and_null_keep_their_meaning_for_text() -> None:
    given = resolve(["data=table", "data.path='a b.csv'", "data.target=${device}", "device='cuda:0'"]).tree
    assert given["data"]["path"] == "a b.csv"
    assert given["data"]["target"] == given["device"] == "cuda:0"


def test_a_users_file_comes_first_and_is_listed(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "rule").mkdir()
    (tmp_path / "model" / "mlp.yaml").write_text("_target_: ntkexp.model.MLP\nwidth: 9  # mine\n")
    (tmp_path / "model" / "tiny.yaml").write_text("_target_: ntkexp.model.MLP\nwidth: 2\n")
    (tmp_path / "rule" / "textbook.yaml").write_text("_target_: ntkexp.path.rule.Left\n")
    assert compose([], tmp_path).model.width == 9
    assert compose(["model=tiny", "model.depth=0"], tmp_path).model.width == 2
    assert compose(["path.rule=[textbook]"], tmp_path).path.rule == compose(["path.rule=[left]"]).path.rule
    assert "    width: 9  # mine" in tree(Choices(folders(tmp_path)))
    assert compose([]).model.width == 512


def test_the_tree_has_every_option_and_every_key() -> None:
    choices = Choices(folders(None))
    text = tree(choices)
    for group in choices.groups():
        for option in choices.options(group):
            place = next(key for key in PLACES if key.split(".")[-1] == group)
            asked = f"{place}={option}" if place == group else f"{place}=[{option}]"
            assert asked in [line.removesuffix(" (default)") for line in text.splitlines()]
            assert all(f"    {key.split('.')[1]}: " in text for key in choices.keys(group, option))
    assert "activation: relu  # relu, tanh" in text
    assert "_target_" not in text


NET = """
from ntkexp.model.networks import MLP

class Net(MLP):
    more: int = 1
"""


def test_code_from_elsewhere_runs_only_if_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "trusted_net.py").write_text(NET)
    (tmp_path / "trusted_pack").mkdir()
    (tmp_path / "trusted_pack" / "net.py").write_text(NET)
    by_file = ["model._target_=trusted_net.Net", "model.more=2"]
    by_package = ["model._target_=trusted_pack.net.Net", "model.more=3"]
    with pytest.raises(Mistake, match="imported only if you say so"):
        compose(by_file)
    assert compose(by_file, trust=["trusted_net.py"]).fields()["model"]["more"] == 2
    assert compose(by_package, trust=["trusted_pack"]).fields()["model"]["more"] == 3
    with pytest.raises(Mistake, match="lies outside"):
        compose(by_file, trust=["trusted_pack"])


def test_a_component_written_out_has_keys_of_its_own() -> None:
    leaky = "model.activation={_target_: ntkexp.layer.LeakyReLU}"
    assert compose([leaky, "model.activation.slope=0.3"]).fields()["model"]["activation"]["slope"] == 0.3


def test_a_fault_in_a_trusted_file_is_said_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "faulty_net.py").write_text("\n\n1 / 0\n")
    with pytest.raises(Mistake, match=r"faulty_net.py, line 3: ZeroDivisionError: division by zero"):
        compose([], trust=[str(tmp_path / "faulty_net.py")])


def test_a_fault_in_a_trusted_package_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "faulty_pack").mkdir()
    (tmp_path / "faulty_pack" / "net.py").write_text("1 / 0\n")
    with pytest.raises(Mistake, match=r"faulty_pack\.net cannot be imported: ZeroDivisionError"):
        compose(["model._target_=faulty_pack.net.Net"], trust=["faulty_pack"])


def test_every_alias_is_of_something_that_there_is_and_is_no_key_itself() -> None:
    choices = Choices(folders(None))
    options = {group: choices.options(group) for group in choices.defaults()}
    known = {*choices.common(), *options} | {
        key for group, names in options.items() for name in names for key in choices.keys(group, name)
    }
    for ours in KEYS.values():
        key, _, value = ours.partition("=")
        assert key in known
        assert not value or value in options.get(key, [value])
    assert not known & KEYS.keys()
    for group, table in OPTIONS.items():
        assert set(table.values()) <= set(options[group])
        assert not set(options[group]) & table.keys()
