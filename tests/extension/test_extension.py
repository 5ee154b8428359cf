"""A picture is one file in its folder, which here has a second place outside the package; a command is one function."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import ntkexp
from ntkexp.config.choices import complete, tree
from ntkexp.config.plain_yaml import read_yaml
from ntkexp.layer.affine import Conv, Dense
from ntkexp.layer.linear import Flatten
from ntkexp.layer.pointwise import ReLU
from ntkexp.layer.spec import layer_classes
from ntkexp.limit.fused.program import program
from ntkexp.mistake import Mistake
from ntkexp.naming import option_name
from ntkexp.records.results import Result
from ntkexp.records.sweep import read_sweep
from ntkexp.report.analysis.tables import analyse
from ntkexp.report.inventory import flatten_config
from ntkexp.report.loaded_run import load_run
from ntkexp.report.plots import figures, together
from ntkexp.report.plots.run_plots import exhibition
from ntkexp.report.plots.style import BLACK, COLOUR, GREY, colour
from ntkexp.report.run import load_tables
from ntkexp.run.loop import run
from ntkexp.run.setting import prepare
from tests import test_losses as of_losses, test_optimizers as of_optimizers
from tests.config import components
from tests.docs import reference
from tests.extension.outside import ADDED, PARTS, Outside
from tests.kernel.oracle import agree
from tests.report.drawn import save
from tests.report.synthetic import digits, write_run, write_sweep
from tests.run.small import Memory, Ran, execute_in
from tests.run.test_exactness import exact


@pytest.fixture
def extended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders, each with a file more."""
    for package in (figures, together):
        extend(package, monkeypatch)


def extend(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a package a second folder, and forget its imports after the test."""
    place = PARTS / package.__name__.rpartition(".")[2]
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(place)])
    for file in place.glob("[!_]*.py"):
        name = f"{package.__name__}.{file.stem}"
        monkeypatch.setitem(sys.modules, name, sys)
        del sys.modules[name]


@pytest.mark.usefixtures("extended")
def test_a_new_picture_is_drawn_with_its_numbers(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", digits(steps=20, counts=(12, 8, 8), snapshots=(0, 20)))
    names = {file.name for file in save(load_run(path), tmp_path / "plots")}
    assert names > {"gap.svg", "gap.csv"}


@pytest.mark.usefixtures("extended")
def test_a_new_picture_of_sweeps_is_among_theirs(tmp_path: Path) -> None:
    sweep = read_sweep(write_sweep(tmp_path, axes={"model.width": (8, 16)}, seeds=(0,)))
    runs = {place.folder: load_tables(place.folder) for place in sweep.runs}
    assert "spread" in [picture.name for picture in exhibition(analyse(sweep, runs), runs)]


# The name of a new part is known in lists, in the shell, in the reference, and by the tests of its kind.


LISTS = {"rule": "path.rule", "machine": "ladder.machine"}


@pytest.fixture
def known(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> Outside:
    """The folder, where tests look as well."""
    outside.composer.resolve([])
    monkeypatch.setattr(components, "FOLDERS", [outside.configs, components.CONFIGS])
    monkeypatch.setattr(reference, "CHOICES", outside.choices)
    return outside


@pytest.mark.parametrize(("group", "name"), ADDED)
def test_a_part_is_offered_shown_described_and_called_by_its_name(known: Outside, group: str, name: str) -> None:
    key = LISTS.get(group, group)
    begun = f"{key}=[{name}" if group in LISTS else f"{key}={name}"
    assert begun in {word.rstrip("],") for word in complete([], begun[:-1], known.choices)}
    asked = f"{key}=[{name}]" if group in LISTS else begun
    assert asked in tree(known.choices)
    assert f"## {asked}\n\n{reference.described(reference.component(told(known, group, name)))}" in (
        reference.page_of(group)
    )
    assert option_name(str(told(known, group, name)["_target_"])) == name


def told(known: Outside, group: str, name: str) -> dict[str, object]:
    """Return the YAML of a part."""
    return read_yaml(known.choices.file(group, name))


@pytest.mark.parametrize(("group", "name"), ADDED)
def test_a_misspelt_part_is_answered_with_its_name(known: Outside, group: str, name: str) -> None:
    wrong = f"{LISTS[group]}=[{name}x]" if group in LISTS else f"{group}={name}x"
    with pytest.raises(Mistake, match=rf"choose from .*\b{name}\b.*did you mean '{name}'"):
        known.experiment(wrong)


@pytest.mark.parametrize(("group", "name"), ADDED)
def test_the_grids_of_tests_take_it_up(known: Outside, group: str, name: str) -> None:
    assert name in components.choices(group)
    made = components.configured(group, name)
    assert set(told(known, group, name)) == made.fields().keys()


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("name", ["doubled", "log_cosh"])
def test_a_new_loss_obeys_the_laws_of_losses(name: str) -> None:
    of_losses.test_the_output_gradient_is_the_derivative_of_the_value(name)
    of_losses.test_a_loss_is_quadratic_if_its_output_gradient_is_what_misses(name)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("name", ["in_turn", "averaged"])
def test_a_new_optimizer_obeys_the_laws_of_optimizers(name: str) -> None:
    of_optimizers.test_a_step_without_a_gradient_stays(name)
    of_optimizers.test_a_step_leaves_its_arguments_alone_and_goes_downhill(name)


# A new layer at infinite width: by its own formula, by the engine that knows it, and not where two share a name.


EPS = torch.finfo(torch.float64).eps
SPEC: list[dict[str, object]] = [
    {"layer": "Dense", "features": 8},
    {"layer": "Parabola"},
    {"layer": "Dense", "features": 1},
]
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_its_kernel_is_that_of_its_formula(outside: Outside) -> None:
    """K = q₁q₂ + 2c² and Θ = K + 4c², where c is also the Θ before it."""
    outside.composer.resolve([])
    c = X @ X.t() / 3
    nngp, ntk = ntkexp.infinite_kernel(SPEC, X)
    expected = torch.outer(c.diag(), c.diag()) + 2 * c * c
    agree(nngp, expected, 10 * EPS, expected.max())
    agree(ntk, expected + 4 * c * c, 10 * EPS, expected.max())


@pytest.mark.parametrize("name", ["Parabola", "Lifted"])
def test_the_fused_engine_says_that_it_does_not_know_it(outside: Outside, name: str) -> None:
    """Neither a layer that says no form, nor one that would inherit the form of a formula that it replaced."""
    outside.composer.resolve([])
    spec: list[dict[str, object]] = [SPEC[0], {"layer": name}, SPEC[2]]
    with pytest.raises(Mistake, match=f"engine=fused: {name} has no fused form; choose torch"):
        ntkexp.infinite_kernel(spec, X, engine="fused")


@pytest.mark.parametrize("shape", [(3,), (2, 4, 5)], ids=["vectors", "images"])
def test_the_fused_form_that_it_says_is_used(outside: Outside, shape: tuple[int, ...]) -> None:
    """torch computes only the mean over the last pixels."""
    outside.composer.resolve([])
    weights, end = (Conv(features=2), (Flatten(),)) if len(shape) > 1 else (Dense(features=2), ())
    layers = (*(weights, layer_classes()["Shrunk"](), ReLU()) * 2, *end, Dense(features=1))
    known = program(layers, shape)
    assert known is not None
    assert known.rest == layers[-1:] * len(end)
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fused, expected = (ntkexp.infinite_kernel(layers, x, engine=engine) for engine in ("fused", "torch"))
    for one, other in zip(fused, expected, strict=True):
        agree(one, other, 100 * EPS, other.max())


def test_a_layer_with_the_name_of_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = type("Relu", (), {"__module__": "theirs"})
    monkeypatch.setattr("ntkexp.layer.spec.subclasses", lambda kind: iter([ReLU, theirs]))
    with pytest.raises(
        Mistake, match=r"theirs\.Relu: there is a layer of this name, ntkexp\.layer\.ReLU; give the class"
    ):
        layer_classes()


# A reader of a run with new parts needs neither the parts nor torch.


LOOK = "import sys; from ntkexp.cli.main import run; print(run(sys.argv[1:]), 'torch' in sys.modules)"


def test_a_machine_and_a_rule_have_colours_of_their_own() -> None:
    found = {colour(name) for name in ("thirds", "frozen_middle", "my_machine")}
    assert len(found) == 3
    assert not found & {*COLOUR.values(), BLACK, GREY}


@pytest.mark.slow
def test_its_pictures_and_its_page_tell_of_them_without_torch(outside: Outside, tmp_path: Path) -> None:
    chosen = outside.experiment("loss=doubled", "optimizer=averaged", "steps=2")
    folder = execute_in(tmp_path, chosen, [], pictures=True)
    drawn = (folder / "plots" / "ladder.svg").read_text()
    assert all(colour(name) in drawn for name in ("thirds", "frozen_middle"))
    assert {"contributions.svg", "path_kernel.svg"} <= {file.name for file in (folder / "plots").iterdir()}
    asked = [sys.executable, "-c", LOOK, "report", "--out", str(tmp_path)]
    ended = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout.splitlines()[-1] == "0 False"
    page = (tmp_path / "report" / "index.html").read_text()
    assert all(name in page for name in ("thirds", "frozen middle"))
    config = flatten_config(load_tables(folder).config)
    assert (config["data"], config["loss"], config["optimizer"]) == ("corners", "doubled", "averaged")


# Every part in training: the secant closes to rounding, and the table has a row for the new part.


def ran(outside: Outside, *overrides: str) -> Ran:
    setting, memory = prepare(outside.experiment(*overrides)), Memory()
    return Ran(setting, run(setting, memory), memory)


@pytest.mark.sample(2)
@pytest.mark.parametrize("loss", ["doubled", "log_cosh"])
@pytest.mark.parametrize("optimizer", ["in_turn", "averaged"])
def test_new_losses_and_optimizers_close_by_a_new_rule(outside: Outside, loss: str, optimizer: str) -> None:
    found = ran(outside, f"loss={loss}", f"optimizer={optimizer}")
    assert {row.split for row in found.rows("thirds")} == {"train", "query", "test"}
    for row in found.rows("thirds"):
        assert exact(row)
        assert row.detail == "thirds"


def test_a_rule_that_closes_is_not_the_secant(outside: Outside) -> None:
    """Their sums agree, and their parts do not: the step is cut elsewhere."""
    found = ran(outside, "path.rule=[thirds,secant]", "model.activation=tanh")
    (one, other), change = map(found.contributions, ("thirds", "secant")), found.change.norm()
    assert (one - other).norm() > 1e-6 * change
    assert (one - other).sum(2).norm() < 1e3 * EPS * change


def numbers(rows: list[Result]) -> list[float]:
    return [row.relative_error for row in rows if row.relative_error is not None]


@pytest.mark.parametrize("machine", ["frozen_start", "frozen_middle", "linearised"])
def test_a_new_quadratic_loss_has_closed_forms(outside: Outside, machine: str) -> None:
    """ℓ = ‖f − y‖² at a step η is ½‖f − y‖² at 2η, in training and in every machine."""
    doubled = ran(outside, "loss=doubled", "optimizer.step_size=0.05")
    squared = ran(outside, "loss=squared", "optimizer.step_size=0.1")
    assert [row.detail.startswith("flow") for row in doubled.rows("frozen_middle")] == [True] * 3
    found, expected = numbers(doubled.rows(machine)), numbers(squared.rows(machine))
    assert len(found) == 3
    assert found == pytest.approx(expected, rel=1e-9)  # eigenvalues of the kernels, amplified by the residual


def test_a_new_layer_is_trained_and_has_a_limit(outside: Outside) -> None:
    layers = "[{layer: Dense, features: 8}, {layer: Parabola}, {layer: Dense, features: 1}]"
    found = ran(outside, "model=layers", f"model.spec={layers}", "ladder.machine=[frozen_limit]")
    assert all(map(exact, found.rows("thirds")))
    assert len(numbers(found.rows("frozen_limit"))) == 3


def test_a_pointwise_layer_is_an_activation(outside: Outside) -> None:
    assert type(outside.experiment("model.activation=parabola").model).__name__ == "MLP"
    with pytest.raises(Mistake, match=r"there is no activation 'parabla'; choose from abs, .*did you mean 'parabola'"):
        outside.experiment("model.activation=parabla")
