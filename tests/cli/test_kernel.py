"""The commands of `ntkexp kernel`."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import torch

from ntkexp.cli.main import run
from ntkexp.config.choices import Choices, config_folders
from ntkexp.config.compose import compose, composer
from ntkexp.engine import base
from ntkexp.engine.base import choose
from ntkexp.experiment.identity import canonical, identity
from ntkexp.experiment.problem import draw_network
from ntkexp.kernel_file.fill import time_pair
from ntkexp.kernel_file.kernel import EmpiricalKernel
from ntkexp.kernel_file.predict import Entries, read_study
from ntkexp.library import tangent_kernel
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractLayered
from ntkexp.model.functional import weights_of
from ntkexp.records.atomic import to_text
from ntkexp.records.folder import RunFolder
from ntkexp.records.kernel_file import open_matrix
from tests.cli.conftest import Command, check
from tests.kernel_file.subjects import Here

SMALL = ("model.width=8", "data.train=40", "data.query=10", "data.test=10")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kernels") / "k.zarr"
    assert run(["kernel", "tangent", *SMALL, "--seeds=0..1", f"--out={path}", "--quiet"]) == 0
    return path


def test_a_tangent_kernel_is_the_mean_over_seeds(file: Path) -> None:
    experiment = compose(SMALL)
    data = experiment.data.split()
    inputs = torch.cat([data.train.inputs, data.query.inputs, data.test.inputs])
    kernels = [
        tangent_kernel(draw_network(experiment.model_copy(update={"seed": seed}), data, 1), inputs, data.train.inputs)
        for seed in (0, 1)
    ]
    found = torch.as_tensor(open_matrix(file).array("ntk"))
    torch.testing.assert_close(found, (kernels[0] + kernels[1]) / 2, rtol=1e-13, atol=1e-13)


@pytest.mark.slow
def test_some_outputs_and_their_trace_are_parts_of_the_whole(command: Command, tmp_path: Path) -> None:
    of = ("model.width=8", "data.classes=[1,3,8]", "data.train=12", "data.query=4", "data.test=4")
    for name in ("all", "2,0", "trace", "1", "1,0,2"):
        path = str(tmp_path / f"{name}.zarr")
        assert command("kernel", "tangent", *of, f"--outputs={name}", f"--out={path}", "--quiet").status == 0
    whole, some, trace = (
        torch.as_tensor(open_matrix(tmp_path / f"{name}.zarr").array("ntk")) for name in ("all", "2,0", "trace")
    )
    chosen = [2, 0]
    torch.testing.assert_close(some, whole[:, chosen][..., chosen], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(trace[:, 0, :, 0], torch.einsum("qcnc->qn", whole), rtol=1e-13, atol=1e-13)
    for name in ("2,0", "1", "1,0,2"):
        check(command("kernel", "predict", str(tmp_path / f"{name}.zarr")), "compute it with --outputs=all")
    assert command("kernel", "predict", str(tmp_path / "trace.zarr"), "--quiet").status == 0
    mean = torch.einsum("qcnc->qn", whole)[:12] / 3
    torch.testing.assert_close(
        Entries(open_matrix(tmp_path / "trace.zarr")).train_matrix("ntk"), mean, rtol=1e-13, atol=1e-13
    )


def test_predictions_are_written_and_shown(file: Path, command: Command, tmp_path: Path) -> None:
    ended = command("kernel", "predict", str(file), "--ridge=0.1", f"--out={tmp_path}")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.splitlines()[0].split()[:4] == ["kernel", "trained", "ridge", "split"]
    with (tmp_path / "k.scores.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["split"] for row in rows] == ["train", "query", "test"]
    with (tmp_path / "k.predictions.csv").open(encoding="utf-8") as stream:
        points = list(csv.DictReader(stream))
    right = [(float(point["output_0"]) > 0) == (point["label"] == "1") for point in points if point["split"] == "test"]
    assert float(rows[2]["accuracy"]) == sum(right) / len(right)


def test_steps_that_diverge_are_reported(file: Path, command: Command, tmp_path: Path) -> None:
    """Twice the largest stable step size causes a warning, and half of it does not."""
    steps = ("kernel", "predict", str(file), "--steps=50", "--quiet", f"--out={tmp_path}")
    said = command(*steps, "--step-size=1e6").err
    reported = re.findall(r"ntkexp: (\w+): gradient descent diverges with steps of 1\.0e6; take .* below (\S+),", said)
    assert len(reported) == len(said.splitlines()) > 0
    stable = min(float(largest) for _, largest in reported)
    assert command(*steps, f"--step-size={stable / 2}").err == ""
    assert "diverges" in command(*steps, f"--step-size={stable * 2}").err


def test_as_json(file: Path, command: Command, tmp_path: Path) -> None:
    ended = command("kernel", "predict", str(file), "--ridge=best", "--time=5", "--json", f"--out={tmp_path}")
    scores = json.loads(ended.out)["scores"]
    assert [score["split"] for score in scores] == ["train", "query", "test", "left out"]


def test_the_kernel_of_a_run(command: Command, tmp_path: Path) -> None:
    experiment = compose(SMALL)
    data = experiment.data.split()
    module = draw_network(experiment, data, 1)
    end = {name: weight + 0.1 for name, weight in weights_of(module).items()}
    torch.save({"start": weights_of(module), "end": end}, tmp_path / "weights.pt")
    (tmp_path / "config.json").write_text(to_text(canonical(experiment)), encoding="utf-8")
    RunFolder(tmp_path).finish(["config.json"], "weights.pt", identity=identity(experiment))
    out = tmp_path / "end.zarr"
    assert command("kernel", "tangent", f"--run={tmp_path}", f"--out={out}", "--quiet").status == 0
    expected = tangent_kernel(module, data.train.inputs, weights=end)
    found = torch.as_tensor(open_matrix(out).array("ntk", slice(0, 40)))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_file_of_other_data_is_refused(file: Path, command: Command) -> None:
    check(command("kernel", "predict", str(file), "data=wine"), "was computed for other data than data=wine")
    assert command("kernel", "predict", str(file), *SMALL, "--ridge=1", "--quiet").status == 0
    check(
        command("kernel", "tangent", "data=wine", f"--out={file}"),
        "is of other data; choose another place, or compute it again with --f",
    )


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (["--ridge=-1"], "--ridge=-1: it takes a number ≥ 0, or best"),
        (["--ridge=nan"], "--ridge=nan: it takes a number ≥ 0, or best"),
        (["--ridge=much"], "--ridge=much: it takes a number ≥ 0, or best"),
        (["--time=-1"], "--time=-1: it takes a number ≥ 0, or inf"),
        (["--time=1", "--steps=3"], "give one of the two"),
        (["--steps=3"], "--steps=3 goes with --step-size=…"),
        (["--folds=1"], "it takes a number of folds ≥ 2, or 0"),
        (["--solver=lu"], "cholesky"),
        (["--solver=cg", "--time=1"], "--solver=cg supports only t=∞ at one ridge"),
        (["--memory-gb=0"], "--memory-gb=0.0: it takes a number > 0"),
        (["--memory-gb=1e-9", "--time=1"], "raise it, or ask for t=∞ at one ridge"),
        (["data.tran=3"], "did you mean 'data.train'?"),
        (["--rigde=1"], "--ridge"),
    ],
    ids=" ".join,
)
def test_a_wrong_option_of_predict_is_one_line(given: list[str], advice: str, file: Path, command: Command) -> None:
    check(command("kernel", "predict", str(file), *given), advice)


def test_an_ensemble_is_drawn_and_compared(command: Command, tmp_path: Path) -> None:
    settings = ("data.train=4", "data.test=10", "model.width=8", "steps=3")
    ended = command("kernel", "ensemble", *settings, "--networks=3", f"--out={tmp_path}")
    assert ended.status == 0
    assert "networks: 6 steps\n" in ended.err  # three networks, trained twice
    assert sum(line.startswith("readout") for line in ended.out.splitlines()) == 2
    assert "\n3 networks of width 8 after 3 steps: where all layers learn, they " in ended.out
    assert {path.suffix for path in tmp_path.glob("ensemble-mlp-w8-n3-s0*")} == {".svg", ".png", ".csv"}


def test_ensembles_of_other_settings_have_other_files(command: Command, tmp_path: Path) -> None:
    """A command that is killed between its files leaves none of them beside files of other settings."""
    given = ("kernel", "ensemble", "data.train=4", "data.test=5", "model.width=4", "--networks=2", f"--out={tmp_path}")
    files = [set(json.loads(command(*given, f"steps={steps}", "--json").out)["files"]) for steps in (1, 2, 1)]
    assert files[0] == files[2]
    assert not files[0] & files[1]


def test_an_ensemble_of_what_has_no_limit_is_refused(command: Command, tmp_path: Path) -> None:
    check(command("kernel", "ensemble", "model=rbf_network", "--quiet", f"--out={tmp_path}"), "no known limit")


STUDY = "base: [data=wine, data.train=40, data.query=0]\nkernels: {A: [model=mlp], B: [model=uci_ntk]}\n"


def write_study(folder: Path, text: str) -> None:
    (folder / "study").mkdir(exist_ok=True)
    (folder / "study" / "small.yaml").write_text(text, encoding="utf-8")


@pytest.mark.slow
def test_a_study_is_one_table(command: Command, tmp_path: Path) -> None:
    write_study(tmp_path, f"{STUDY}published: {{B: 99}}\npublished_with: moons\n")
    given = ("kernel", "study", "small", f"--config-dir={tmp_path}", f"--out={tmp_path / 'out'}", "--ridge=0.1")
    rows = json.loads(command(*given, "--quiet", "--json").out)["study"]
    found = [(row["name"], row["kernel"], row["published"]) for row in rows]
    assert found == [("A", "ntk", None), ("A", "nngp", None), ("B", "ntk", 99.0), ("B", "nngp", None)]
    lines = command(*given).out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["A", "A", "B", "B"]
    assert lines[0].endswith("published, moons")
    assert lines[3].endswith("99.0 %")
    write_study(tmp_path, "kernels: {}")
    check(command(*given), "kernels")


def test_every_study_is_made_of_experiments() -> None:
    choices, composing = Choices(config_folders(None)), composer()
    for name in choices.options("study"):
        found = read_study(name, choices)
        assert found.published.keys() <= found.kernels.keys()
        assert bool(found.published) == bool(found.published_with)
        for overrides in found.overrides([]).values():
            assert isinstance(composing.resolve(overrides).experiment().model, AbstractLayered)


# Kernels by engines.


@pytest.mark.parametrize("kind", ["limit", "tangent"])
def test_a_dry_run_estimates_the_time_and_starts_nothing(command: Command, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "k.zarr"
    asked = ("kernel", kind, *SMALL, f"--out={path}", "--workers=3", "--dry-run")
    ended = command(*asked)
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith(f"{path}: 3 tiles, about ")
    told = json.loads(command(*asked, "--json").out)
    assert (told["file"], told["tiles"], told["workers"]) == (str(path), 3, 3)
    assert told["elapsed"] == max(told["seconds"] / 3, told["seconds"] / told["tiles"])
    assert not path.exists()


def test_a_job_without_time_for_a_tile_is_refused() -> None:
    engine = choose("slurm:cluster=local", None)
    engine.refuse_longer(3600.0)
    with pytest.raises(
        Mistake,
        match=r"a job ends after time=60 minutes, but first saves its work after about .*; write, for example, time=",
    ):
        engine.refuse_longer(3601.0)


@pytest.mark.slow
def test_a_timed_part_leaves_no_error_bars() -> None:
    experiment = compose([*SMALL, "kernel.sketch=500"])
    kernel = EmpiricalKernel(experiment, experiment.draw(), 1, seeds=(0,))
    assert time_pair(kernel) > 0
    assert kernel.errors == []


def test_an_error_of_a_worker_is_one_line(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "choose", lambda given, workers: Here(2, threads=1000))
    asked = ("kernel", "limit", *SMALL, "model=cnn", f"--out={tmp_path / 'k.zarr'}", "--engine=dask:here")
    ended = command(*asked, "memory_gb=1e-3", "--quiet")  # shared by 1000 threads
    check(ended, "GB of one pair of these examples; raise it", status=1)
    assert command(*asked, "--quiet") == (0, "", "")


@pytest.mark.slow
def test_a_study_is_the_same_with_workers(command: Command, tmp_path: Path) -> None:
    write_study(tmp_path, STUDY)
    asked = ("kernel", "study", "small", f"--config-dir={tmp_path}", "--quiet")
    tables = []
    for workers in ("1", "2"):
        assert command(*asked, f"--out={tmp_path / workers}", f"--workers={workers}") == (0, "", "")
        tables.append((tmp_path / workers / "small.study.csv").read_text("utf-8"))
    assert tables[0] == tables[1]
