"""Every mistake of a user's is one line on stderr that names the key and what is allowed, and exit status 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Command

MISTAKES = [
    # unknown keys, with the nearest one
    ("model.widht=64", "did you mean 'model.width'?"),
    ("widht=64", "did you mean 'model.width'?"),
    ("width=64", "did you mean 'model.width'?"),
    ("modl=mlp", "did you mean 'model'?"),
    ("modle.widht=3", "did you mean 'model.width'?"),
    ("optimizer.width=3", "did you mean 'model.width'?"),
    ("sede=1", "did you mean 'seed'?"),
    ("rule=secant", "did you mean 'path.rule'?"),
    ("optimizer.batch=8", "did you mean 'optimizer=sgd optimizer.batch=…'?"),
    ("batch=8", "optimizer=sgd"),
    ("model.zebra=1", "known are model.width, model.depth, model.activation"),
    ("zebra=1", "known are data, model"),
    # what others call them
    ("lr=0.1", "did you mean 'optimizer.step_size'?"),
    ("optimizer.LR=0.1", "did you mean 'optimizer.step_size'?"),
    ("batch_size=8", "did you mean 'optimizer=sgd optimizer.batch=…'?"),
    ("momentum=0.9", "did you mean 'optimizer=momentum optimizer.momentum=…'?"),
    ("epochs=8", "did you mean 'steps'?"),
    ("hidden=8", "did you mean 'model.width'?"),
    ("data.hidden=8", "did you mean 'data=teacher data.hidden=…'?"),
    ("relu=1", "did you mean 'model.activation=relu'?"),
    ("dataset=mnist", "did you mean 'data'?"),
    ("n_train=8", "did you mean 'data.train'?"),
    ("loss=mse", "did you mean 'squared'?"),
    ("loss=BCE", "did you mean 'logistic'?"),
    ("loss=ce", "did you mean 'cross_entropy'?"),
    ("model=MLP", "did you mean 'mlp'?"),
    ("optimizer=sgd_momentum", "did you mean 'momentum'?"),
    ("model.activation=ReLU", "did you mean 'relu'?"),
    ("+zebra=1", "zebra: there is no such key"),
    ("path={nods: 3}", "did you mean 'path.nodes'?"),
    # unknown options, with the list
    ("loss=sqared", "choose from cross_entropy, hinge, logistic, squared; did you mean 'squared'?"),
    ("model.activation=rellu", "did you mean 'relu'?"),
    ("path.rule=[secnat]", "choose from gauss, left, secant; did you mean 'secant'?"),
    ("path.probes=[tran]", "did you mean 'train'?"),
    ("dtype=flaot32", "'float64' or 'float32'; did you mean 'float32'?"),
    ("schedule={a: 1}", "choose from constant"),
    # wrong type
    ("model.width=wide", "model.width=wide: it takes a whole number ≥ 1"),
    ("model.width=1.5", "a whole number"),
    ("model.width=true", "a whole number"),
    ("model.width=[64]", "a whole number"),
    ("model.width=null", "a whole number"),
    ("init.antisymmetric=perhaps", "true or false"),
    ("path=3", "path=3"),
    ("path.rule=[[secant]]", "a list"),
    # out of range
    ("model.width=0", "≥ 1"),
    ("seed=-1", "≥ 0"),
    ("optimizer.stable_fraction=0", "> 0"),
    ("optimizer.step_size=inf", "a number > 0, or null"),
    ("path.schedule=0", "'log' or 'adaptive', or a whole number ≥ 1 and ≤ 1000000000000, or a list, each a whole"),
    ("schedule=list schedule.factors=[]", "at least 1"),
    # no value
    ("model.width=", "write model.width=VALUE"),
    ("model.width", "write model.width=VALUE"),
    ("model.width=???", "write model.width=VALUE"),
    ("data=", "one of breast_cancer"),
    ("model", "mlp"),
    ("data=table", "data.path=VALUE"),
    # several values
    ("model.width=64,128", "write model.width=64"),
    ("model.width=range(8,16)", "write model.width=8"),
    ("loss=squared,hinge", "write loss=squared"),
    ("path.rule=secant,left", "write a list as path.rule=[secant,left]"),
    # not readable
    ("=3", "KEY=VALUE"),
    ("", "KEY=VALUE"),
    ("3x=3", "'3x' is no key"),
    ("model.width='64", "cannot be read"),
    ("model.width={a", "cannot be read"),
    ("a b=3", "'a b' is no key"),
    ("~schedule", "nothing can be taken away"),
    ("a\nb=3", r"a\nb"),
    # Hydra's own
    ("hydra.run.dir=x", "settings of Hydra"),
    ("hydra/launcher=joblib", "settings of Hydra"),
    ("+hydra.job.chdir=true", "--out says where runs go"),
    # references
    ("model.width=${nope}", "'nope' not found"),
    ("model.width=${model.width}", "ecursive"),
    ("model.width=${oc.env:NTKEXP_NOPE}", "NTKEXP_NOPE"),
    ("path.casts=${oc.deprecated:seed}", "path.casts=0: it takes 'keep' or 'ignore'"),
    # targets
    ("model._target_=os.system", "lies outside ntkexp"),
    ("model._target_=ntkexp.model.MPL", "did you mean 'MLP'?"),
    ("model._target_=ntkexp.modle.MLP", "did you mean 'ntkexp.model'?"),
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
    ("--out=pyproject.toml", "a folder that can be written to"),
    ("--out", "--out"),
]


@pytest.mark.sample(20)
@pytest.mark.parametrize(("given", "advice"), MISTAKES, ids=[repr(given) for given, _ in MISTAKES])
def test_one_line(given: str, advice: str, command: Command, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("monkeypatch").chdir(request.config.rootpath)
    several = given.split(" ") if given.startswith("schedule=list") else [given]
    check(command("train", *several), advice)


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["tain"], "'train'"),
        (["train", "path.probes=[probe]", "data.probe=0"], "the data has no points there; raise data.probe"),
        (["report", "--out", "nowhere"], "nothing is left to report: nowhere holds no run"),
        (["resume"], "RUN"),
        (["explain"], "missing argument 'RUN'; `ntkexp explain --help` lists what there is"),
        (["kernel", "predict"], "`ntkexp kernel predict --help`"),
        (["compare", "nope", "nope"], "nope does not exist; two finished runs or two sweeps are compared, each by"),
        (["compare", "pyproject.toml", "nope"], "pyproject.toml is not a folder; two finished runs or two sweeps"),
        (["report", "--format=xml", "x"], "text"),
        (["report", "nowhere", "nowhere else"], "nothing is left to report: nowhere does not exist; nowhere else"),
        (["config", "--nope"], "--help"),
        (["sweep"], "name one of activation, "),
        (["sweep", "widht"], "did you mean 'width'?"),
        (["sweep", "model.widht=8,16"], "did you mean 'model.width'?"),
        (["sweep", "model.width=64..8"], "is empty; write it as 8..64"),
        (["sweep", "model.width=8,wide"], "model.width=wide: it takes a whole number ≥ 1"),
        (["sweep", "model=mlp,cnm"], "did you mean 'cnn'?"),
        (["sweep", "model.width=8,16", "seed=-1"], "seed=-1"),
        (["sweep", "width", "--workers=0"], "--workers"),
        (["sweep", "seed=0..100000000000"], "seed: from 0 to 100000000000 there would be 100000000001 values"),
        (["sweep", "model.width=1..9999", "data.train=1..9999"], "are 99980001 runs; 100000 are the most"),
        (["sweep", "width", "--engine=lokal"], "did you mean 'local'?"),
        (["sweep", "width", "--out=pyproject.toml"], "a folder that can be written to"),
    ],
    ids=" ".join,
)
def test_commands(arguments: list[str], advice: str, command: Command) -> None:
    check(command(*arguments), advice)


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


def check(ended: tuple[int, str, str], advice: str) -> None:
    status, out, err = ended
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("ntkexp: ")
    assert advice in err, err


ENVIRONMENT = "${oc.env:NTKEXP_PASSWORD}"


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
    hidden: dict[str, str] = {}
    for module in ("ntkexp.mistake", "ntkexp.config.compose"):
        monkeypatch.setattr(f"{module}.HIDDEN", hidden)
    monkeypatch.setenv("NTKEXP_PASSWORD", "hunter2\u202e$")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "theirs.yaml").write_text(text)
    status, out, err = command("train", "model=theirs", f"--config-dir={tmp_path}", f"--out={tmp_path}/o")
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert "hunter" not in err
    assert "NTKEXP_PASSWORD" in err
