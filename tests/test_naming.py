"""A component's name and path do not depend on the file with its class."""

from __future__ import annotations

import ast
import inspect
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import ntkexp.model
from ntkexp.component import Component
from ntkexp.config.choices import NO_CHOICES, shipped
from ntkexp.config.compose import compose
from ntkexp.config.plain_yaml import read_yaml
from ntkexp.experiment import Experiment
from ntkexp.experiment.identity import folder_name, identity
from ntkexp.naming import class_path, module_of_class, option_name

FILES = sorted(file for file in shipped().glob("*/*.yaml") if file.parent.name not in NO_CHOICES)
PACKAGE = Path(ntkexp.model.__path__[0]).parent
LAZY_FOLDERS = sorted(file.parent for file in PACKAGE.rglob("__init__.py") if "classes_of" in file.read_text())
TESTED = pytest.mark.parametrize("folder", LAZY_FOLDERS, ids=lambda folder: folder.name)
NAMED_IN_CONFIGURATIONS_ALONE = PACKAGE / "claim" / "papers"  # Python code imports its classes from their files


def dotted(folder: Path) -> str:
    return ".".join(folder.relative_to(PACKAGE.parent).parts)


def imports(folder: Path) -> dict[str, str]:
    """The classes that a type checker finds in a package, each with the file of its import."""
    tree = ast.parse((folder / "__init__.py").read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    names = {alias.name: str(node.module) for node in found for alias in node.names if alias.asname == alias.name}
    return {name: module.removeprefix(f"{dotted(folder)}.") for name, module in names.items()}


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_component_is_called_as_its_yaml(file: Path) -> None:
    path = read_yaml(file)["_target_"]
    package, _, name = path.rpartition(".")
    kind = getattr(import_module(package), name)
    assert class_path(kind) == path
    assert kind.model_construct().option == option_name(path) == file.stem


def test_a_run_is_called_by_its_model() -> None:
    assert folder_name(compose(["model=uci_ntk", "model.width=8"])).startswith("uci_ntk-w8-s0-")


@TESTED
def test_a_type_checker_finds_the_components_that_python_finds(folder: Path) -> None:
    package, known = import_module(dotted(folder)), module_of_class((str(folder),))
    kinds = {name: getattr(package, name) for name in known}
    components = {name for name, kind in kinds.items() if issubclass(kind, Component)}
    if folder != NAMED_IN_CONFIGURATIONS_ALONE:
        assert components <= imports(folder).keys()
    assert imports(folder).items() <= known.items()
    assert {class_path(kinds[name]) for name in components} == {f"{dotted(folder)}.{name}" for name in components}


@TESTED
def test_no_two_classes_of_a_package_share_a_name(folder: Path) -> None:
    files = [file for file in folder.glob("*.py") if file.stem != "__init__"]
    trees = [ast.parse(file.read_text()) for file in files]
    names = [node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    assert sorted(names) == sorted(module_of_class((str(folder),)))


def moved(folder: Path) -> Experiment:
    """The usual experiment, where the file of its model has another name."""
    shutil.copytree(PACKAGE / "model", folder)
    (folder / Path(inspect.getfile(ntkexp.model.MLP)).name).rename(folder / "perceptron.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ntkexp.model, "__path__", [str(folder)])
        patch.setitem(sys.modules, "ntkexp.model.perceptron", None)  # so that it is as it was afterwards
        del sys.modules["ntkexp.model.perceptron"]
        return compose([])


def test_a_file_can_be_moved_within_its_package(tmp_path: Path) -> None:
    usual, found = compose([]), moved(tmp_path / "model")
    assert type(found.model).__module__ == "ntkexp.model.perceptron"
    assert found.fields() == usual.fields()
    assert folder_name(found) == folder_name(usual)
    assert identity(found) == identity(usual)


def test_a_name_that_no_class_has_is_answered_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"'ntkexp\.model' has no attribute 'MPL'; did you mean 'MLP'\?"):
        _ = ntkexp.model.MPL  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'MPL'"):
        from ntkexp.model import MPL  # type: ignore[attr-defined]  # noqa: F401, PLC0415


def test_a_package_imports_nothing_before_it_is_asked() -> None:
    asked = (
        f"import sys, {', '.join(map(dotted, LAZY_FOLDERS))}\nassert not {{'torch', 'pydantic'}} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", asked], check=True, timeout=60)
