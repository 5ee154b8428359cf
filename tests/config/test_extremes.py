"""Numbers beyond reason are refused in one line before memory is allocated, and no text of a configuration is code."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from resource import RUSAGE_SELF, getrusage
from typing import Any, get_args, get_origin

import pytest
import torch
from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

import ntkexp
from ntkexp.capacity import MemoryBudget
from ntkexp.component import Component
from ntkexp.config.build import build
from ntkexp.config.choices import shipped
from ntkexp.config.compose import compose
from ntkexp.config.field_types import flat, plain_types
from ntkexp.config.plain_yaml import read_yaml, refuse_reference_growth
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import identity
from ntkexp.experiment.problem import draw_network
from ntkexp.kernel.record.taping import MemoryLimit
from ntkexp.mistake import Mistake
from ntkexp.path.budget import refuse_endless
from ntkexp.run.setting import prepare
from tests.cli.conftest import Command, command
from tests.config.components import REQUIRED, choices, configured
from tests.kernel.oracle import refused

__all__ = ["command"]

MEMBERS = ("classes", "options")  # compared with what there is
SMALL = ("data.train=12", "data.query=6", "data.test=6", "threads=1", "path.count=3")


def components() -> Iterator[type[Component]]:
    for module in walk_packages(ntkexp.__path__, "ntkexp."):
        if module.name.split(".")[1] in {"data", "model", "init", "loss", "optimizer", "schedule", "path", "layer"}:
            import_module(module.name)
    import_module("ntkexp.experiment.experiment")
    left = [Component]
    while left:
        for kind in left.pop().__subclasses__():
            left.append(kind)
            if kind.__module__.startswith("ntkexp."):
                yield kind


def whole_numbers(field: FieldInfo) -> Iterator[list[object]]:
    """The limits of every whole number that a field can hold."""

    def within(kind: object, limits: list[object]) -> Iterator[list[object]]:
        if kind is int:
            yield limits
        elif get_origin(kind) is not None:
            metadata = list(getattr(kind, "__metadata__", ()))
            for part in get_args(kind)[:1] if metadata else get_args(kind):
                yield from within(part, [*limits, *metadata])

    return within(field.annotation, list(field.metadata))


def test_every_whole_number_has_two_ends() -> None:
    found = {
        f"{kind.__name__}.{name}": {type(limit) for limit in flat(limits)}
        for kind in components()
        for name, field in kind.model_fields.items()
        if name not in MEMBERS
        for limits in whole_numbers(field)
    }
    assert {name for name, limits in found.items() if not (limits & {Ge, Gt} and limits & {Le, Lt})} == set()
    assert len(found) > 50


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("model.width=100000000000", "model.width=100000000000: it takes a whole number ≥ 1 and ≤ "),
        ("model.width=10000000", "GB of the network with an array of [10000000, 64]; raise"),
        ("model.depth=100000", "≤ 1000"),
        ("data=sphere data.train=100000", "GB of this run of 100012 points, 100000 of them"),
        (
            "data=sphere data.dimension=10000000 data.query=100000",
            "the data with an array of [100018, 10000000]; raise",
        ),
        ("data=text data.path=x data.context=100000000000000000000", "data.context=1"),
        ("path.substeps=1000000000", "path.substeps=1000000000: it takes"),
        ("path.quadrature_points=5000", "path.quadrature_points=5000: it takes"),
        ("path.romberg=200", "path.romberg=200: it takes"),
        ("steps=1000000000000000000000000 path.schedule=5", "steps=1000000000000000000000000: it takes"),
        (
            "steps=1000000000000 path.schedule=5",
            "path.schedule=5: over steps=1000000000000 these are 200000000001 kernels",
        ),
        ("steps=1000000000000 model.width=8", "years on one core, more than 10 years; lower steps"),
        ("model=resnet model.stages=1000", "model.stages=1000: it takes"),
        ("model=resnet model.stages=16 model.width=1024", "lower one of the two"),
        ("model=cnn model.stride=1000000000000000000000", "model.stride=1000000000000000000000: it takes"),
        ("threads=1000000", "≤ 1024"),
    ],
    ids=lambda text: text[:60],
)
def test_beyond_reason(words: str, advice: str, command: Command, tmp_path: Path) -> None:
    status, out, err = command("train", *SMALL, *words.split(), f"--out={tmp_path}", "--quiet")
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert advice in err


def test_what_is_made_of_nothing_is_counted_together() -> None:
    with MemoryLimit(MemoryBudget.of_gb(1e-3), "the data", "data.train"):
        torch.zeros(500, 100)  # 4 bytes each, the default
        torch.randn(50_000, dtype=torch.float64).exp()  # as large as the counted numbers
        with refused(r"the 0\.00101 GB of the data with an array of \[100001\]; raise"):
            torch.empty(100_001)


def test_the_copies_that_will_be_held_count_as_well() -> None:
    with MemoryLimit(MemoryBudget.of_gb(1e-3), "the network", "model.width", copies=5) as limit:
        torch.zeros(40_000)
        with pytest.raises(
            Mistake, match=r"the 0\.00101 GB of the network with an array of \[10001\]; raise it, or lower model\.width"
        ):
            torch.zeros(10_001)
    assert limit.taken == 5 * 4 * 50_001


def test_what_a_run_cannot_hold_is_refused_before_much_of_it_is_drawn() -> None:
    experiment = compose(["model.width=2048", "model.depth=50", "memory_gb=0.9", *SMALL])
    before = getrusage(RUSAGE_SELF).ru_maxrss
    with refused(r"GB of the network with an array of .*; raise it, or lower"):
        prepare(experiment)
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 0.4e6  # KB: of the 1.6 GB that the weights alone would be


NO_DEVICE = r"device=.*: it takes cpu, cuda, cuda:1, mps, xpu or another device that torch"
NO_DOUBLE = r"device=mps.*: it has no float64 numbers; add dtype=float32, or use device=cpu$"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, NO_DEVICE) for name in ("gpu", "{a:{b:[1,2]}}", "cuda:-1", "cuda:300", "cpu:0", "''")),
        *((name, NO_DOUBLE) for name in ("mps", "mps:0")),
    ],
)
def test_a_name_that_is_no_device_or_has_no_double_precision_is_refused(name: str, words: str) -> None:
    with refused(words):
        compose([f"device={name}"])


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:1", "mps", "xpu", "xpu:3", "hpu"])
def test_any_device_of_torch_may_be_named(name: str) -> None:
    asked = compose([f"device={name}", "dtype=float32"])
    assert asked.device == name
    assert identity(asked) == identity(compose(["dtype=float32"]))


@pytest.mark.parametrize(
    "words", [("train", "meta"), ("train", "hpu"), ("train", "xpu:120"), ("kernel tangent", "cuda:99")]
)
def test_a_device_that_does_not_exist_is_missed_before_a_network_is_drawn(
    words: tuple[str, str], command: Command
) -> None:
    verb, name = words
    found = command(*verb.split(), f"device={name}", *SMALL)
    assert (found.status, found.err.count("\n")) == (2, 1)
    assert found.err.startswith(f"ntkexp: device={name}: this machine has cpu")


def test_years_on_a_processor_are_months_on_a_thousand() -> None:
    refuse_endless(1e11, 1, "cuda:0")
    with refused(r"steps=7: this would take about 3\.2e\+03 years on one core"):
        refuse_endless(1e11, 7, "cpu")


DOUBLED = {
    "texts": "${model.a%d}${model.a%d}",
    "lists": "['${model.a%d}', '${model.a%d}']",
    "steps up": "${.a%d}${.a%d}",
    "by a function": "${oc.select:.a%d}${oc.select:model.a%d}",
}


@pytest.mark.parametrize("pair", DOUBLED.values(), ids=DOUBLED)
def test_references_that_double_again_and_again_are_counted_and_not_followed(pair: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    lines = [f"a{k}: {pair % (k - 1, k - 1)}\n" for k in range(1, 60)]
    (tmp_path / "model" / "mine.yaml").write_text(f"_target_: ntkexp.model.networks.MLP\na0: x\n{''.join(lines)}")
    with refused(r"copy more than 1000 entries"):
        compose(["model=mine"], tmp_path)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a": "${a}"}, ""),  # following a circle finds it
        ({"a": "${b}${b}", "b": ["${a}"]}, ""),
        ({"a": ["x"] * 300, "b": ["${a}"] * 3}, ""),
        ({"a": ["x"] * 300, "b": ["${a}"] * 4}, "b.3: .* up to here copy more than 1000"),
        ({"a": ["x"] * 1000, "b": "${a}"}, "b: .* copy more than 1000"),
        ({"a": "x" * 500_000, "b": "${a}${a}${a}"}, "b: .* copy more than 1000"),
        ({f"a{k}": f"${{a{k + 1}}}" for k in range(40)}, ""),
        ({f"a{k}": f"${{a{k + 1}}}" for k in range(52)}, "are nested more than 50 deep"),
        ({f"a{k}": f"${{a{k - 1}}}" for k in range(52)}, "copy more than 1000"),
        ({"a": {"b": {f"c{k}": f"${{{'a' if k % 2 else '.'}.x{k}}}" for k in range(9)}}}, ""),
        ({f"a{k}": f"${{a${{z}}}}${{a{k - 1}}}" for k in range(40)}, "copy more than 1000"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_references_are_counted_with_what_they_stand_for(tree: dict[str, object], words: str) -> None:
    with refused(words) if words else nullcontext():
        refuse_reference_growth(tree)


def test_an_override_that_would_be_read_for_minutes() -> None:
    with refused(r"path\.schedule is given 28002 characters, and an override takes up to 5000"):
        compose([f"path.schedule=[{'1,' * 14_000}]"])


# No code runs that a configuration, a run's folder or a file of data names, unless `--trust` admits it.
#
# Every text that a component of any YAML takes is tried with everything that could be code, and nothing leaves a mark.


GROUPS = ("data", "model", "init", "loss", "optimizer", "schedule")
SMALLEST = ("data.train=4", "data.query=1", "data.test=1", "model.width=2")
NEEDED = {"path": "nowhere", "target": "y"}
"""For what a YAML leaves to the user."""


@dataclass(frozen=True)
class Trap:
    """A folder with code in every form. If it runs, it leaves a mark."""

    folder: Path

    @property
    def mark(self) -> Path:
        return self.folder / "mark"

    @property
    def shell(self) -> str:
        return f"touch {self.mark}"

    def __reduce__(self) -> tuple[Any, ...]:
        import os  # noqa: PLC0415  the name that a pickle looks up

        return os.system, (self.shell,)

    def lay(self) -> None:
        code = f"import pathlib\n\npathlib.Path({str(self.mark)!r}).touch()\n\n\nclass Net: pass\n\n\nbuild = Net\n"
        for name in ("leaves_a_mark.py", "table.csv", "table.parquet", "data_batch_1", "conftest.py", "__init__.py"):
            (self.folder / name).write_text(code)
        for name in ("model.bin", "table.pkl", "data_batch_2"):
            (self.folder / name).write_bytes(pickle.dumps(self))
        (self.folder / "config.json").write_text(
            '{"model_type": "own", "auto_map": {"AutoModel": "leaves_a_mark.Net"}}'
        )

    def texts(self) -> tuple[str, ...]:
        """Texts that could load the code."""
        names = ("leaves_a_mark", "leaves_a_mark.Net", "leaves_a_mark:build", "os.system", "ntkexp.__main__.main")
        files = ("", "leaves_a_mark.py", "leaves_a_mark.py:build", "table.csv", "table.parquet", "table.pkl")
        addresses = (f"file://{self.folder}/leaves_a_mark.py", "pkg://leaves_a_mark", f"local-dir:{self.folder}")
        spelled = (f"!!python/object/apply:os.system ['{self.shell}']", "${oc.env:HOME}", "${hydra:runtime.cwd}")
        python = ("__import__('leaves_a_mark')", "{{ cycler.__init__.__globals__.os.system('x') }}", f"$({self.shell})")
        return (*names, *(str(self.folder / file) for file in files), *addresses, *spelled, *python)

    def trees(self) -> tuple[dict[str, Any], ...]:
        """Mappings that could load the code."""
        targets = ("leaves_a_mark.Net", "os.system", "subprocess.run", "hydra.utils.call", "ntkexp.cli.main.main")
        return (
            *({"_target_": target, "command": self.shell, "args": self.shell} for target in targets),
            {"_target_": "builtins.eval", "_args_": ["__import__('leaves_a_mark')"]},
            {"trust_remote_code": True, "auto_map": "leaves_a_mark.Net", "checkpoint_path": str(self.folder)},
        )


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trap]:
    """A folder full of code, where the program is started and where Python looks for modules."""
    found = Trap(tmp_path)
    found.lay()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield found
    sys.modules.pop("leaves_a_mark", None)  # or another test's import of it would run nothing


@cache
def usual() -> Experiment:
    """The default experiment, small."""
    return compose(SMALLEST)


def option(group: str, name: str) -> Component:
    """The component of an option, with what its file leaves open."""
    open_keys = {key for key, value in read_yaml(shipped() / group / f"{name}.yaml").items() if value == "???"}
    return configured(group, name, **{key: NEEDED[key] for key in open_keys - REQUIRED.get(name, {}).keys()})


OPTIONS = [
    pytest.param(group, name, marks=[pytest.mark.slow] if name in {"huggingface", "timm"} else [])
    for group in GROUPS
    for name in choices(group)
]


def places(component: Component, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Yield the places of texts, mappings, and every `_target_`."""
    yield (*path, "_target_")
    for name, field in type(component).model_fields.items():
        value = getattr(component, name)
        if any(kind in {str, Path} or isinstance(kind, str) for kind in plain_types(field.annotation)):
            yield (*path, name)
        for position, part in enumerate(value if isinstance(value, tuple) else ()):
            if isinstance(part, Component):
                yield from places(part, (*path, name, position))
        if isinstance(value, Component):
            yield (*path, name)
            yield from places(value, (*path, name))


def changed(fields: dict[str, Any], path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """A copy with another value at one place."""
    found = deepcopy(fields)
    node: Any = found
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return found


def tried(fields: dict[str, Any]) -> None:
    """As far as it goes: built, its data read and its network made."""
    try:
        experiment = build(fields).model_copy(
            update={"device": "cpu"}
        )  # which `fix_circumstances` looks at before anything else
        draw_network(experiment, experiment.data.split(0), 1)
    except Mistake:
        return


@pytest.mark.sample(20)
@pytest.mark.parametrize(("group", "name"), OPTIONS, ids=str)
def test_no_text_of_a_component_is_code(group: str, name: str, trap: Trap) -> None:
    component = option(group, name)
    fields = usual().model_copy(update={group: component}).fields()
    for path in places(component, (group,)):
        for payload in (*trap.texts(), *trap.trees()):
            tried(changed(fields, path, payload))
            assert not trap.mark.exists(), f"{path}: {payload}"


def test_no_text_that_belongs_to_no_group_is_code(trap: Trap) -> None:
    fields = usual().fields()
    for path in places(usual(), ()):
        if path[0] not in GROUPS:
            for payload in (*trap.texts(), *trap.trees()):
                with suppress(Mistake):
                    build(changed(fields, path, payload))
                assert not trap.mark.exists(), f"{path}: {payload}"


def test_the_trap_springs(trap: Trap) -> None:
    """Else nothing would be shown."""
    compose([*SMALLEST, "model=module", "model.path=leaves_a_mark.py:build"], trust=["leaves_a_mark.py"])
    assert trap.mark.exists()
    trap.mark.unlink()
    pickle.loads((trap.folder / "table.pkl").read_bytes())
    assert trap.mark.exists()


# Every YAML states the default of every field.


EVERY = [(folder, name) for folder in ("init", "loss", "model", "optimizer", "schedule") for name in choices(folder)]


@pytest.mark.parametrize(("folder", "name"), EVERY)
def test_a_yaml_states_the_defaults_of_the_class(folder: str, name: str) -> None:
    made = configured(folder, name)
    fields = type(made).model_fields.items()
    defaults = {key: field.get_default(call_default_factory=True) for key, field in fields if not field.is_required()}
    assert {key: getattr(made, key) for key in defaults} == defaults


# On a GPU, a run may use most of the GPU's memory, unless memory_gb is given.


CARDS = {None: 80e9, 1: 16e9}  # the current one, and another


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, simulated through torch's answers."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1e9, CARDS[device]))


@pytest.mark.usefixtures("cards")
@pytest.mark.parametrize(
    ("words", "room"),
    [(("device=cuda",), 64.0), (("device=cuda:1",), 12.8), (("device=cuda", "memory_gb=3"), 3.0), ((), 4.0)],
)
def test_a_run_may_use_most_of_its_card(words: tuple[str, ...], room: float) -> None:
    asked = compose(words)
    assert asked.budget.bytes / 1e9 == pytest.approx(room, rel=1e-12)
    assert identity(asked) == identity(compose([]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_where_there_is_no_card_it_is_as_on_the_processor() -> None:
    assert compose(["device=cuda"]).budget.bytes == 4e9
