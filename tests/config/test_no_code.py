"""No code runs that a configuration, a run's folder or a file of data names, unless `--trust` admits it.

Every text that a component of any YAML takes is tried with everything that could be code, and nothing leaves a mark.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ntkexp.component import Component
from ntkexp.config.build import build
from ntkexp.config.choices import shipped
from ntkexp.config.compose import compose
from ntkexp.config.field_types import kinds
from ntkexp.config.plain_yaml import read
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.problem import draw_network
from ntkexp.mistake import Mistake
from tests.config.components import REQUIRED, choices, configured

GROUPS = ("data", "model", "init", "loss", "optimizer", "schedule")
SMALL = ("data.train=4", "data.probe=1", "data.test=1", "model.width=2")
NEEDED = {"path": "nowhere", "target": "y"}
"""For what a YAML leaves to the user."""


@dataclass(frozen=True)
class Trap:
    """A folder with code in every form, each of which leaves a mark."""

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
        """Whatever a text could make of it."""
        names = ("leaves_a_mark", "leaves_a_mark.Net", "leaves_a_mark:build", "os.system", "ntkexp.__main__.main")
        files = ("", "leaves_a_mark.py", "leaves_a_mark.py:build", "table.csv", "table.parquet", "table.pkl")
        addresses = (f"file://{self.folder}/leaves_a_mark.py", "pkg://leaves_a_mark", f"local-dir:{self.folder}")
        spelled = (f"!!python/object/apply:os.system ['{self.shell}']", "${oc.env:HOME}", "${hydra:runtime.cwd}")
        python = ("__import__('leaves_a_mark')", "{{ cycler.__init__.__globals__.os.system('x') }}", f"$({self.shell})")
        return (*names, *(str(self.folder / file) for file in files), *addresses, *spelled, *python)

    def trees(self) -> tuple[dict[str, Any], ...]:
        """Whatever a mapping could."""
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
    return compose(SMALL)


def option(group: str, name: str) -> Component:
    """The component of an option, with what its file leaves open."""
    open_keys = {key for key, value in read(shipped() / group / f"{name}.yaml").items() if value == "???"}
    return configured(group, name, **{key: NEEDED[key] for key in open_keys - REQUIRED.get(name, {}).keys()})


OPTIONS = [
    pytest.param(group, name, marks=[pytest.mark.slow] if name in {"huggingface", "timm"} else [])
    for group in GROUPS
    for name in choices(group)
]


def places(component: Component, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Where a text or a mapping may stand, and every `_target_`."""
    yield (*path, "_target_")
    for name, field in type(component).model_fields.items():
        value = getattr(component, name)
        if any(kind in {str, Path} or isinstance(kind, str) for kind in kinds(field.annotation)):
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
    compose([*SMALL, "model=module", "model.path=leaves_a_mark.py:build"], trust=["leaves_a_mark.py"])
    assert trap.mark.exists()
    trap.mark.unlink()
    pickle.loads((trap.folder / "table.pkl").read_bytes())
    assert trap.mark.exists()
