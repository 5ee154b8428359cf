"""Every mistake of a user is one line on stderr, which names the key and the allowed values, and exit status 2."""

from __future__ import annotations

import errno
import io
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.cli.conftest import Command, check

MISTAKES = [
    # unknown keys, with the nearest one
    ("model.widht=64", "did you mean 'model.width'?"),
    ("width=64", "did you mean 'model.width'?"),
    ("modl=mlp", "did you mean 'model'?"),
    ("optimizer.width=3", "did you mean 'model.width'?"),
    ("rule=secant", "did you mean 'path.rule'?"),
    ("optimizer.batch=8", "did you mean 'optimizer=sgd optimizer.batch=…'?"),
    ("batch=8", "optimizer=sgd"),
    ("model.zebra=1", "its keys are model.width, model.depth, model.activation"),
    # names in other libraries
    ("relu=1", "did you mean 'model.activation=relu'?"),
    ("optimizer.LR=0.1", "did you mean 'optimizer.step_size'?"),
    ("model=MLP", "did you mean 'mlp'?"),
    ("loss=BCE", "did you mean 'logistic'?"),
    ("data=", "one of arrays"),
    ("hydra/launcher=joblib", "settings of Hydra"),
    ("lr=0.1", "did you mean 'optimizer.step_size'?"),
    ("batch_size=8", "did you mean 'optimizer=sgd optimizer.batch=…'?"),
    ("momentum=0.9", "did you mean 'optimizer=momentum optimizer.momentum=…'?"),
    ("data.hidden=8", "did you mean 'data=teacher data.hidden=…'?"),
    ("n_train=8", "did you mean 'data.train'?"),
    ("loss=mse", "did you mean 'squared'?"),
    ("optimizer=sgd_momentum", "did you mean 'momentum'?"),
    ("model.activation=ReLU", "did you mean 'relu'?"),
    ("+zebra=1", "zebra: there is no such key"),
    ("path={quadrature_point: 3}", "did you mean 'path.quadrature_points'?"),
    # unknown options, with the list
    ("loss=sqared", "choose from cross_entropy, hinge, logistic, squared; did you mean 'squared'?"),
    ("path.rule=[secnat]", "choose from gauss, left, secant; did you mean 'secant'?"),
    ("path.queries=[tran]", "did you mean 'train'?"),
    ("dtype=flaot32", "'float64' or 'float32'; did you mean 'float32'?"),
    ("schedule={a: 1}", "choose from constant"),
    # wrong types
    ("model.width=wide", "model.width=wide: it takes a whole number ≥ 1"),
    ("model.width=true", "a whole number"),
    ("model.width=null", "a whole number"),
    ("init.antisymmetric=perhaps", "true or false"),
    ("path.rule=[[secant]]", "a list"),
    # out of range
    ("model.width=0", "≥ 1"),
    ("seed=-1", "≥ 0"),
    ("optimizer.step_size=inf", "a number > 0, or null"),
    ("path.schedule=0", "'log' or 'adaptive', or a whole number ≥ 1 and ≤ 1000000000000, or a list, each a whole"),
    ("schedule=list schedule.factors=[]", "at least 1"),
    # no value
    ("model.width=", "write model.width=VALUE"),
    ("model.width=???", "write model.width=VALUE"),
    ("model", "mlp"),
    ("data=table", "data.path=VALUE"),
    # several values
    ("model.width=64,128", "write model.width=64"),
    ("path.rule=secant,left", "write a list as path.rule=[secant,left]"),
    # not readable
    ("", "KEY=VALUE"),
    ("3x=3", "'3x' is not a key"),
    ("model.width='64", "cannot be read"),
    ("a b=3", "'a b' is not a key"),
    ("~schedule", "keys cannot be removed"),
    ("a\nb=3", r"a\nb"),
    # settings of Hydra
    ("hydra.run.dir=x", "settings of Hydra"),
    ("+hydra.job.chdir=true", "--out says where runs go"),
    # references
    ("model.width=${nope}", "'nope' not found"),
    ("model.width=${model.width}", "ecursive"),
    ("model.width=${oc.env:NTKEXP_NOPE}", "NTKEXP_NOPE"),
    ("path.casts=${oc.deprecated:seed}", "path.casts=0: it takes 'keep' or 'ignore'"),
    # targets
    ("model._target_=os.system", "lies outside ntkexp"),
    ("model._target_=ntkexp.model.MPL", "did you mean 'MLP'?"),
    ("model._target_=ntkexp.model.networks.MLP", "not by their file; did you mean 'ntkexp.model.MLP'?"),
    ("model._target_=ntkexp.loss.Squared", "such as ntkexp.model."),
    ("model._target_=ntkexp.model.AbstractArchitecture", "that can be built"),
    ("model._target_=nonsense", "package.module.Class"),
    ("_target_=3", "there is no such key"),
    # options of the command
    ("--trust=nope.py", "nope.py: there is no such file"),
    ("--trust=ntkexp_nope", "--trust=ntkexp_nope: there is no such package"),
    ("--trust=..", "--trust=..: there is no such package"),
    ("--config-dir=confgs", "did you mean 'configs'?"),
    ("--config-dir=pyproject.toml", "--config-dir=pyproject.toml is a file"),
    ("--config-dir=ntkexp", "holds no YAML file"),
    ("--qiet", "--quiet"),
    ("--out", "--out"),
]


@pytest.mark.sample(20)
@pytest.mark.parametrize(("given", "advice"), MISTAKES, ids=[repr(given) for given, _ in MISTAKES])
def test_a_wrong_setting_is_one_line(given: str, advice: str, command: Command, root: None) -> None:
    check(command("train", *(given.split(" ") if given.startswith("schedule=list") else [given])), advice)


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.chdir(request.config.rootpath)


COMMANDS: list[tuple[str, str]] = [
    ("tain", "'train'"),
    ("config --nope", "--help"),
    ("config --plan model=cnn", "--plan was removed; `ntkexp sweep --dry-run seed=0,1` shows"),
    ("train path.queries=[query] data.query=0", "the data has no points there; raise data.query"),
    ("resume", "RUN"),
    ("report --out nowhere", "nothing is left to report: nowhere holds no run"),
    ("report --format=xml x", "text"),
    ("report nowhere elsewhere", "nothing is left to report: nowhere does not exist; elsewhere"),
    ("explain", "missing argument 'RUN'; `ntkexp explain --help` lists all options"),
    ("explain {run} --query=99", "points 0 to 23"),
    ("explain {run} --split=quer", "'query'"),
    ("explain {run} --query=1 --worst=2", "one of the two"),
    ("explain {run} --query=1 --picture=why.pdf", ".svg or .png"),
    ("explain {run} --page --json", "--page"),
    ("validate {run} --leave-out=100%", "--leave-out=100%: it takes a share below 100 %"),
    ("validate {run} --top=200%", "--top=200%: it takes a share below 100 %"),
    ("explain {run} --probe=0", "ntkexp: --probe is called --query now"),
    ("claims --attempts", "--attempts goes with list"),
    ("claims --reason=x", "--reason goes with register"),
    ("claims register", "register: name the claim, or several"),
    ("validate {run} --scores=pyproject.toml", "scores=pyproject.toml is not an array of NumPy (ValueError)"),
    ("validate {run} --scores={run}/data.npz", "data.npz holds several arrays; numpy.save writes one"),
    ("compare nope nope", "nope does not exist; two finished runs or two sweeps are compared, each by"),
    ("runs --out={outputs} model.widht=3", "'model.width'"),
    ("sweep", "name one of activation, "),
    ("sweep widht", "did you mean 'width'?"),
    ("sweep model.width=64..8", "is empty; write it as 8..64"),
    ("sweep width --workers=0", "--workers"),
    ("sweep seed=0..100000000000", "seed: from 0 to 100000000000 there would be 100000000001 values"),
    ("sweep model.width=1..9999 data.train=1..9999", "are 99980001 runs; 100000 are the most"),
    ("sweep width --engine=lokal", "did you mean 'local'?"),
    ("sweep width --out=pyproject.toml", "a folder that can be written to"),
    ("kernel predict", "`ntkexp kernel predict --help`"),
    ("kernel predict nowhere.zarr", "nowhere.zarr is not a kernel file: it does not exist"),
    ("kernel predict pyproject.toml", "pyproject.toml is not a kernel file: it is a file"),
    ("kernel tangent model.widht=3", "did you mean 'model.width'?"),
    ("kernel tangent --seeds=-1", "it takes whole numbers ≥ 0"),
    ("kernel tangent --outputs=most", "it takes all, trace, or numbers"),
    ("kernel tangent --outputs=7", "numbered from 0 to 0"),
    ("kernel tangent --run=ntkexp", "it has no config.json"),
    ("kernel tangent --out=pyproject.toml/k.zarr", "cannot be written"),
    *(
        (f"{words} --engine={engine}", advice)
        for words in ("kernel limit", "kernel tangent", "kernel study images", "sweep width")
        for engine, advice in {
            "dusk:x": "did you mean 'dask'",
            "local:3": "write --engine=local",
            "dask": "names no cluster",
            "dask:nowhere.json": "there is no such file",
            "dask:tcp://127.0.0.1:1,timout=3": "cannot be read",
            "dask:tcp://127.0.0.1:1,timeout=soon": "cannot be read",
            "slurm:partitoin=x": "did you mean 'partition'",
            "slurm:cluster=local,cpus=two": "cpus=two is not a number",
            "slurm:cluster=lokal": "did you mean 'local'",
        }.items()
    ),
]


@pytest.mark.sample(14)
@pytest.mark.parametrize(("words", "advice"), COMMANDS, ids=[words for words, _ in COMMANDS])
def test_a_wrong_command_is_one_line(words: str, advice: str, finished: Path, command: Command, root: None) -> None:
    given = [word.format(run=finished, outputs=finished.parents[1]) for word in words.split(" ")]
    check(command(*given), advice)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("width: [1\n", "broken.yaml, line 2 cannot be read as YAML"),
        ("width: 1\nwidth: 2\n_target_: ntkexp.model.MLP", "width"),
        ("- a\n- b\n", "broken.yaml"),
        ("width: 3\n", "_target_"),
        ("_target_: ntkexp.model.MLP\nwidht: 3\n", "did you mean 'model.width'?"),
        ("_target_: ntkexp.model.MLP\nwidth: ???\n", "model.width has no default"),
        ("_target_: ntkexp.model.MLP\nwidth: ${nope}\n", "model.width"),
        ("_target_: [1]\n", "package.module.Class"),
        ("defaults: [nope]\n_target_: ntkexp.model.MLP\n", "nope"),
        (b"_target_: \xff\n", "broken.yaml"),
    ],
    ids=repr,
)
def test_faults_in_a_users_file(text: str | bytes, advice: str, command: Command, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "broken.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    check(command("config", "model=broken", f"--config-dir={tmp_path}"), advice)


ENVIRONMENT = "${oc.env:NTKEXP_PASSWORD}"


@pytest.mark.usefixtures("_forgetful")
@pytest.mark.parametrize(
    "text",
    [
        f"_target_: ntkexp.model.MLP\nwidth: {ENVIRONMENT}\n",
        f"_target_: ntkexp.model.{ENVIRONMENT}\n",
        f"_target_: ntkexp.model.MLP\nactivation: {ENVIRONMENT}\n",
        f"_target_: ntkexp.model.MLP\nwidth: '${{{ENVIRONMENT}}}'\n",
        f"_target_: ntkexp.model.MLP\nwidth: '${{oc.env:{ENVIRONMENT}}}'\n",
        f"_target_: ntkexp.model.MLP\nwidth: '${{oc.create:{ENVIRONMENT}}}'\n",
        f"_target_: ntkexp.model.Module\npath: {ENVIRONMENT}.py\n",
    ],
)
def test_no_message_shows_what_came_from_the_environment(
    text: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NTKEXP_PASSWORD", "hunter2\u202e$")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "theirs.yaml").write_text(text)
    words = ("model=theirs", f"--config-dir={tmp_path}", f"--out={tmp_path}/o", "--trust=json")
    ended = command("train", *words)
    check(ended, "NTKEXP_PASSWORD")
    assert "hunter" not in ended.err


WIDTH = "${oc.env:NTKEXP_WIDTH}"
REFERENCES = {
    "model/theirs.yaml": f"_target_: ntkexp.model.MLP\nwidth: {WIDTH}\n",
    "data/theirs.yaml": f"_target_: ntkexp.data.Digits\ntrain: ${{oc.decode:{WIDTH}}}\n",
    "loss/theirs.yaml": f"_target_: ntkexp.loss.Squared\nreduction: ${{oc.env:NTKEXP_NOPE, {WIDTH}}}\n",
    "sweep/theirs.yaml": f"base: ['steps={WIDTH}']\naxes: {{model.width: [8, 9]}}\n",
}


@pytest.mark.usefixtures("_forgetful")
@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("trusted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_yaml_reads_the_environment_only_beside_trusted_code(
    name: str, trusted: bool, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NTKEXP_WIDTH", "31")
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(REFERENCES[name])
    words = ["sweep", "theirs", "--dry-run"] if file.parent.name == "sweep" else ["config"]
    chosen = [] if words[0] == "sweep" else [f"{file.parent.name}=theirs"]
    status, out, err = command(*words, *chosen, f"--config-dir={tmp_path}", *(["--trust=json"] if trusted else []))
    assert ("environment variables are read only" in err) != trusted
    if not trusted:
        assert (status, err.count("\n")) == (2, 1), err
        assert "31" not in (out + err).replace(str(tmp_path), "")


# A file or folder without permission is one line and status 2, for every command.


DENIED = (
    ("train", "--quiet", "--out={place}"),
    ("train", "--quiet", "--config-dir={place}"),
    ("train", "--quiet", "data=table", "data.target=y", "data.path={place}/x.csv"),
    ("sweep", "model.width=8,9", "--quiet", "--out={place}"),
    ("config", "--config-dir={place}"),
    ("resume", "{place}"),
    ("report", "--out={place}"),
    ("report", "{place}"),
    ("explain", "{place}"),
    ("compare", "{place}", "{place}"),
    ("runs", "--out={place}"),
    ("kernel", "limit", "--quiet", "--out={place}/k.zarr", "data.train=4", "data.query=2", "data.test=2"),
    ("kernel", "tangent", "--quiet", "--run={place}"),
    ("kernel", "predict", "--quiet", "{place}/k.zarr"),
    ("kernel", "ensemble", "--quiet", "--out={place}"),
    ("kernel", "study", "tables", "--quiet", "--out={place}"),
)


@pytest.fixture
def denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that denies access, also to root."""
    place = tmp_path / "denied"

    def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
        def act(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            if isinstance(path, str | os.PathLike) and Path(path).is_relative_to(place):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *arguments, **options)

        return act

    for module, name in ((os, "stat"), (os, "scandir"), (os, "listdir"), (os, "mkdir"), (os, "open"), (io, "open")):
        monkeypatch.setattr(module, name, guarded(getattr(module, name)))
    return place


@pytest.mark.sample(8)
@pytest.mark.parametrize("words", DENIED, ids=" ".join)
def test_denied_access_is_one_line(words: tuple[str, ...], denied: Path, command: Command) -> None:
    ended = command(*(word.format(place=denied) for word in words))
    check(ended, str(denied))
    assert "ermission denied" in ended.err or "cannot be" in ended.err, ended.err


NOWHERE = ("/proc/x", "/proc/x/y", "/proc", "/dev/null/x", "a" * 300, "d/" * 2000 + "x")
"""Paths where no file can be created."""

FAST = ("/proc/x", "d/" * 2000 + "x")

WRITING = (
    ("train", "--quiet", "--out={place}"),
    ("sweep", "--quiet", "model.width=8,9", "--out={place}"),
    ("report", "{run}", "--out={place}"),
    ("report", "{run}", "--format=csv", "--out={place}/a.csv"),
    ("explain", "{run}", "--picture={place}/x.svg"),
    ("kernel", "limit", "--quiet", "--out={place}/k.zarr", "data.train=4", "data.query=2", "data.test=2"),
    ("kernel", "tangent", "--quiet", "--run={run}", "--out={place}/k.zarr"),
)


@pytest.mark.sample(6)
@pytest.mark.parametrize("words", WRITING, ids=" ".join)
@pytest.mark.parametrize(
    "place", [pytest.param(place, id=place[:10], marks=() if place in FAST else pytest.mark.slow) for place in NOWHERE]
)
def test_a_path_where_no_file_can_be_is_one_line(
    words: tuple[str, ...],
    place: str,
    finished: Path,
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = command(*(word.format(place=place, run=finished) for word in words))
    assert (status, err.count("\n")) == (2, 1), err
    assert err.startswith("ntkexp: ")


@pytest.mark.parametrize("place", ["", "/", "."])
def test_a_kernel_file_replaces_no_folder(
    place: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = command("kernel", "limit", "--quiet", f"--out={place}", "data.train=4", "data.query=2")
    check(ended, "choose another place with --out")


# A pipe without a writer, or an endless device, is refused before it is opened.


READ = (  # every option and key that reads a file, with the name of the file
    ("t.csv", "config", "data=table", "data.target=y", "data.path={file}", "--cost"),
    ("t.csv", "train", "--out={place}/o", "data=table", "data.target=y", "data.path={file}"),
    ("t.parquet", "train", "--out={place}/o", "data=table", "data.target=y", "data.path={file}"),
    ("t.txt", "train", "--out={place}/o", "model=transformer", "model.causal=true", "data=text", "data.path={file}"),
    ("train-images-idx3-ubyte", "train", "--out={place}/o", "data=mnist", "data.path={place}"),
    ("data_batch_1", "train", "--out={place}/o", "data=cifar10", "data.path={place}"),
    ("n.py", "train", "--out={place}/o", "--trust={file}"),
    ("n.py", "train", "--out={place}/o", "model=module", "model.path={file}"),
    ("config.yaml", "config", "--config-dir={place}"),
    ("model/m.yaml", "config", "--config-dir={place}", "model=m"),
    ("sweep/m.yaml", "sweep", "m", "--out={place}/o", "--config-dir={place}"),
    ("claim/m.yaml", "claims", "m", "--out={place}/o", "--config-dir={place}"),
    ("study/m.yaml", "kernel", "study", "m", "--out={place}/o", "--config-dir={place}"),
    ("s.json", "sweep", "width", "--out={place}/o", "--engine=dask:{file}"),
    ("k.zarr", "kernel", "predict", "{file}"),
    ("r", "explain", "{file}"),
    ("r", "resume", "{file}"),
    ("r", "report", "{file}"),
    ("r", "compare", "{file}", "{file}"),
    ("r", "kernel", "tangent", "--run={file}"),
    ("r/config.json", "resume", "{place}/r"),
    ("r/DONE.json", "explain", "{place}/r"),
    ("r", "attribute", "{file}", "--model={file}:f"),
)


@pytest.fixture
def _impatient() -> Iterator[None]:
    """Fail after 30 s. Opening a pipe would wait for ever."""

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it waits for ever")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.sample(10)
@pytest.mark.parametrize("words", READ, ids=" ".join)
def test_a_pipe_without_a_writer_is_one_line(words: tuple[str, ...], tmp_path: Path, command: Command) -> None:
    file = tmp_path / words[0]
    file.parent.mkdir(exist_ok=True)
    os.mkfifo(file)
    (tmp_path / "other.yaml").write_text("a: 1\n")
    ended = command(*(word.format(file=file, place=tmp_path) for word in words[1:]))
    check(ended._replace(out=""))


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom", "/dev/tty", "/proc/kmsg"])
def test_an_endless_device_is_one_line(device: str, tmp_path: Path, command: Command) -> None:
    (tmp_path / "t.csv").symlink_to(device)
    given = f"data.path={tmp_path}/t.csv"
    check(command("train", f"--out={tmp_path}", "data=table", "data.target=y", given), "t.csv")


# An exception in code of the user is one line with its place. A bug of the package keeps its traceback.


OWN_CODE = {
    "a loss": (
        "loss._target_=CLASS",
        "from ntkexp.loss import Squared\nclass Own(Squared):\n    def value(self, outputs, targets):\n",
        "value",
        "RuntimeError",
    ),
    "an activation": (
        "model.activation={_target_: CLASS}",
        "from ntkexp.layer import AbstractPointwise\nclass Own(AbstractPointwise):\n    def apply(self, outputs):\n",
        "apply",
        "RuntimeError",
    ),
    "a network": (
        "model._target_=CLASS",
        "from ntkexp.model import MLP\nclass Own(MLP):\n    def layers(self, init, shape, outputs):\n",
        "layers",
        "AttributeError",
    ),
    "a source of data": (
        "data._target_=CLASS",
        "from ntkexp.data import Digits\nclass Own(Digits):\n    def examples(self, outputs):\n",
        "examples",
        "AttributeError",
    ),
}
"""The word of the command, the beginning of a file, its function, and the exception of `outputs.mm` there."""
TINY = ("data.train=6", "data.query=4", "data.test=4", "model.width=4", "steps=2", "--quiet")


def write_own(folder: Path, case: str, line: str) -> tuple[Path, list[str]]:
    """Write a file whose function ends with this line, and return the words that choose its class."""
    chosen, beginning, *_ = OWN_CODE[case]
    file = folder / f"{folder.name}.py"  # a process imports only one file of a name
    file.write_text(f"{beginning}        {line}\n")
    return file, [chosen.replace("CLASS", f"{file.stem}.Own"), f"--trust={file}", f"--out={folder}/o", *TINY]


@pytest.mark.parametrize("case", OWN_CODE)
def test_an_exception_in_code_of_the_user_is_one_line(case: str, command: Command, tmp_path: Path) -> None:
    """Also if torch raises it, and if the package records the operation."""
    file, words = write_own(tmp_path, case, "return outputs.mm(outputs.new_ones(31, 31))")
    *_, function, kind = OWN_CODE[case]
    check(command("train", *words), f"ntkexp: {file}, line 4, in {function}: {kind}: ", "PYTHONDEVMODE=1")


@pytest.mark.parametrize("trusted", ["file", "package", "module"])
def test_trusted_code_among_installed_packages_is_code_of_the_user(
    trusted: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    name = f"installed_{trusted}"
    package = folder / name if trusted == "package" else folder
    package.mkdir(parents=True)
    file = package / ("__init__.py" if trusted == "package" else f"{name}.py")
    file.write_text(f"{OWN_CODE['a loss'][1]}        1 / 0\n")
    monkeypatch.syspath_prepend(folder)
    trust = str(file) if trusted == "file" else name
    ended = command("train", f"loss._target_={name}.Own", f"--trust={trust}", f"--out={tmp_path}/o", *TINY)
    check(ended, f"ntkexp: {file}, line 4, in value: ZeroDivisionError: ", "PYTHONDEVMODE=1")


def test_a_bug_keeps_its_traceback_below_code_of_the_user(command: Command, tmp_path: Path) -> None:
    _, words = write_own(tmp_path, "a loss", "import ntkexp.text; return ntkexp.text.short('no number')")
    with pytest.raises(TypeError):
        command("train", *words)
