"""A command builds the experiment that it describes, and a configuration that is shown or saved builds it again."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import pytest

from ntkexp.component import Component
from ntkexp.config.build import Builder, build, component_class, config_keys
from ntkexp.config.choices import NO_CHOICES, Choices, config_folders, shipped, tree
from ntkexp.config.compose import compose, resolve
from ntkexp.config.field_types import KEYS, OPTIONS, component_bases, is_list
from ntkexp.config.plain_yaml import parsed, read_yaml
from ntkexp.experiment import identity as module
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import folder_name, identity
from ntkexp.mistake import Mistake
from ntkexp.records import folder
from tests.kernel.oracle import refused

FILES = sorted(file for file in shipped().glob("*/*.yaml") if file.parent.name not in NO_CHOICES)
PLACES = dict(config_keys(resolve([]).tree, Experiment, Builder()))
COMMANDS: tuple[list[str], ...] = (
    [],
    ["model.width=64", "path.rule=[gauss]", "seed=3"],
    ["optimizer=sgd", "optimizer.batch=8", "loss=cross_entropy", "schedule=list", "schedule.factors=[1,0.5]"],
    ["init=mean_field", "init.alpha=1e-3", "path.schedule=[0,2,5]", "stop_at_loss=1e-6"],
    ["data=table", "data.path=~/a b.csv", "data.target=7", "data.missing=drop"],
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_every_file_names_a_component_and_all_of_its_keys(file: Path) -> None:
    tree = read_yaml(file)
    kind = component_class(tree.pop("_target_"), Component, "")
    assert set(tree) == set(kind.model_fields)


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_every_option_is_of_its_groups_kind(file: Path) -> None:
    place = next(field for key, field in PLACES.items() if key.split(".")[-1] == file.parent.name)
    assert issubclass(component_class(read_yaml(file)["_target_"], Component, ""), component_bases(place.annotation))


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
    assert "    width: 9  # mine" in tree(Choices(config_folders(tmp_path)))
    assert compose([]).model.width == 512


def test_the_tree_has_every_option_and_every_key() -> None:
    choices = Choices(config_folders(None))
    text = tree(choices)
    for group in choices.groups():
        for option in choices.options(group):
            place = next(key for key in PLACES if key.split(".")[-1] == group)
            asked = f"{place}=[{option}]" if is_list(PLACES[place].annotation) else f"{place}={option}"
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
    with refused("imported only if you trust it"):
        compose(by_file)
    assert compose(by_file, trust=["trusted_net.py"]).fields()["model"]["more"] == 2
    assert compose(by_package, trust=["trusted_pack"]).fields()["model"]["more"] == 3
    with refused("lies outside"):
        compose(by_file, trust=["trusted_pack"])


def test_a_component_written_out_has_keys_of_its_own() -> None:
    leaky = "model.activation={_target_: ntkexp.layer.LeakyReLU}"
    assert compose([leaky, "model.activation.slope=0.3"]).fields()["model"]["activation"]["slope"] == 0.3


def test_a_fault_in_a_trusted_file_is_said_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "faulty_net.py").write_text("\n\n1 / 0\n")
    with refused(r"faulty_net.py, line 3: ZeroDivisionError: division by zero"):
        compose([], trust=[str(tmp_path / "faulty_net.py")])


def test_a_fault_in_a_trusted_package_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "faulty_pack").mkdir()
    (tmp_path / "faulty_pack" / "net.py").write_text("1 / 0\n")
    with refused(r"faulty_pack\.net cannot be imported: ZeroDivisionError"):
        compose(["model._target_=faulty_pack.net.Net"], trust=["faulty_pack"])


def test_every_alias_is_of_something_that_there_is_and_is_no_key_itself() -> None:
    choices = Choices(config_folders(None))
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


# YAML from any source is plain data or refused in one line, without a crash, a hang, or code that runs.


LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, after in zip("abcdefghi", "bcdefghij", strict=True)
)
CHAIN = "k0: &k0 [x]\n" + "".join(f"k{k}: &k{k} [*k{k - 1}]\n" for k in range(1, 1000))
BROKEN = {
    "a number of 5,000 digits": ("x: " + "9" * 5000, "line 1 .* is not a valid int"),
    "anchors that explode": (LAUGHS, "line 6 .* its anchors and .{4} expand to more than 100000 entries"),
    "anchors in a chain": (CHAIN, "line 49 .* its anchors and .{4} expand to more than 50 levels"),
    "an anchor in itself": ("a: &a [*a]", "its anchors and .{4} expand to more than"),
    "an anchor that is merged with itself": (
        "a: &a\n  <<: *a",
        "its anchors and .{4} expand to more than|unhashable|merg",
    ),
    "a book of references": ("\nx: " + "a" * 10_000 + "${x}", "line 2 .* expand to more than 100000 entries"),
    "many references": ("x:\n" + "- ${x}\n" * 3_000, "line 2 .* expand to more than 100000 entries"),
    "very deep lists": ("x: " + "[" * 3000, "more than 50 lists and mappings are nested"),
    "very deep mappings": ("\n".join(" " * k + "a:" for k in range(200)), "more than 50 lists and mappings"),
    "an object of Python's": ("x: !!python/object/apply:os.system [exit]", "os.system is not supported"),
    "a set": ("axes: {model.width: !!set {8, 9}}", "line 1 .*!!set is not supported; write it as"),
    "bytes": ("x: !!binary aGk=", "!!binary is not supported"),
    "pairs": ("x: !!omap [a: 1]", "!!omap is not supported"),
    "a date that is asked for": ("x: [!!timestamp 2020-01-02]", "!!timestamp is not supported"),
    "a tag of somebody's": ("x: !mine 1", "!mine is not supported"),
    "no whole number": ("\nx: !!int 1x", "line 2 .*'1x' is not a valid int"),
    "no truth value": ("x: !!bool maybe", "'maybe' is not a valid bool"),
    "half a character": ('x: "\\ud800"', "is not a valid str"),
    "a character that no text has": ("x: \0", "it is not plain text"),
    "a list as a key": ("? [a]\n: b", "found unhashable key"),
}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder for --config-dir."""
    (tmp_path / "model").mkdir()
    return tmp_path


@pytest.mark.parametrize(("text", "words"), BROKEN.values(), ids=BROKEN)
def test_yaml_that_is_not_plain_data_is_refused(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(text.encode())
    with refused(words):
        read_yaml(file)


def test_dates_are_text_as_they_are_to_hydra() -> None:
    assert parsed("{a: 2020-13-45, b: 2020-01-02}") == {"a": "2020-13-45", "b": "2020-01-02"}


@pytest.mark.parametrize("value", ["2020-13-45", "2020-01-02", "${", "{a: {null: 1}}"])
def test_a_value_of_another_kind_is_refused(value: str, written: Path) -> None:
    (written / "model" / "mine.yaml").write_text(f"_target_: ntkexp.model.MLP\nwidth: {value}\n")
    with refused(r"model\.width=.*it takes a whole number|: \S.*width"):
        compose(["model=mine"], written)


@pytest.mark.parametrize("value", ["[" * 2000, "&a [*a]", "9" * 5000])
def test_files_that_others_name_are_read_as_carefully(value: str, written: Path) -> None:
    (written / "model" / "mine.yaml").write_text("defaults: [nest, _self_]\n_target_: ntkexp.model.MLP\n")
    (written / "model" / "nest.yaml").write_text(f"width: {value}\n")
    with refused(r"nest\.yaml, line 1 cannot be read as YAML"):
        compose(["model=mine"], written)


def test_hydra_imports_nothing_that_a_file_names(
    written: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path_factory.mktemp("packages")
    (place / "leaves_a_mark.py").write_text(f"open({str(place / 'mark')!r}, 'w')\n")
    monkeypatch.syspath_prepend(place)
    shipped = (Path(__file__).parents[2] / "configs" / "config.yaml").read_text()
    (written / "config.yaml").write_text(f"{shipped}\nhydra:\n  searchpath: [pkg://leaves_a_mark]\n")
    with refused(r"config\.yaml: settings of Hydra have no effect here"):
        compose([], written)
    assert not (place / "mark").exists()


@pytest.mark.parametrize("defaults", ["3", "[base]", "[{model: [mlp, cnn]}]", "[{model: null}]", "[[mlp]]"])
def test_a_list_of_defaults_is_a_list_of_options(defaults: str, written: Path) -> None:
    (written / "config.yaml").write_text(f"defaults: {defaults}\n")
    with refused(r"config\.yaml: 'defaults' takes a list"):
        compose([], written)


@pytest.mark.parametrize(
    ("defaults", "sizes"),
    [
        ("[]", (3, 2)),
        ("[wide]", (3, 5)),
        ("[wide, _self_]", (3, 5)),
        ("[_self_, wide]", (9, 5)),
        ("[wide, deep]", (3, 7)),
    ],
)
def test_an_option_is_merged_with_its_defaults_in_their_order(
    defaults: str, sizes: tuple[int, int], written: Path
) -> None:
    (written / "model" / "wide.yaml").write_text("width: 9\ndepth: 5\n")
    (written / "model" / "deep.yaml").write_text("depth: 7\n")
    (written / "model" / "mine.yaml").write_text(f"defaults: {defaults}\n_target_: ntkexp.model.MLP\nwidth: 3\n")
    model = compose(["model=mine"], written).fields()["model"]
    assert (model["width"], model["depth"]) == sizes


@pytest.mark.parametrize(
    ("defaults", "width"), [("{model: mlp}", 9), ("{model: mlp}, _self_", 9), ("_self_, {model: mlp}", 512)]
)
def test_keys_of_the_root_are_where_self_is(defaults: str, width: int, written: Path) -> None:
    shipped = (Path(__file__).parents[2] / "configs" / "config.yaml").read_text()
    _, rest = shipped.split("  - _self_\n")
    others = "{data: digits}, {init: ntk}, {loss: squared}, {optimizer: gd}, {schedule: constant}"
    (written / "config.yaml").write_text(f"defaults: [{others}, {defaults}]\n{rest}\nmodel: {{width: 9}}\n")
    assert compose([], written).fields()["model"]["width"] == width


def test_an_option_of_a_group_without_default_is_merged_last(written: Path) -> None:
    shipped = (Path(__file__).parents[2] / "configs" / "config.yaml").read_text()
    inline = "model: {_target_: ntkexp.model.MLP, width: 9}\n"
    (written / "config.yaml").write_text(shipped.replace("  - model: mlp\n", "") + inline)
    assert compose([], written).fields()["model"]["width"] == 9
    assert compose(["model=mlp"], written).fields()["model"]["width"] == 512


def test_options_whose_defaults_lead_back_are_one_line(written: Path) -> None:
    for one, other in (("a", "b"), ("b", "a")):
        (written / "model" / f"{one}.yaml").write_text(f"defaults: [{other}]\n")
    with refused(r"a\.yaml: its 'defaults' include the file itself"):
        compose(["model=a"], written)


PIECES = [*"[]{},'\"|#?%@1-.~=a\t\0é\u2028\n", "b:", ": ", "- ", "  ", "&x ", "*x", "!!int ", "!!", "!x ", "<<: "]
PIECES += ["0x", "e9", "---", "...", "2020-13-45"]


def test_whatever_is_written_is_data_or_one_line(tmp_path: Path) -> None:
    chance, file = random.Random(0), tmp_path / "a.yaml"
    refused = 0
    for _ in range(400):
        file.write_text("".join(chance.choices(PIECES, k=chance.randrange(1, 25))), encoding="utf-8", newline="")
        try:
            assert isinstance(read_yaml(file), dict)
        except Mistake:  # in one line, as every Mistake
            refused += 1
    assert 100 < refused < 400


# Two commands share an identity exactly if they compute the same thing.


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
    with refused("there is no such file"):
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
