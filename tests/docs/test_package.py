"""Imports are required packages, requirements are pinned and installed, and the wheel is complete."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import packages_distributions, version
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ntkexp
from ntkexp.component import Component
from ntkexp.run.environment import LIBRARIES
from tests.docs.readme import GUIDE, ROOT, TEXT
from tests.report.stand_ins import STAND_INS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
STOOD_IN = {"wandb", "mlflow"}  # extras with stand-ins, which need not be installed
ASKED = [*PROJECT["dependencies"], *(line for extra in EXTRAS.values() for line in extra)]
REQUIREMENTS = [wanted for line in ASKED if (wanted := Requirement(line)).name != PROJECT["name"]]


def versions(text: str) -> dict[str, str]:
    """Return the pinned versions of constraints.txt for this Python."""
    pins = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    needed = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in needed}


CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
PINNED = versions(CONSTRAINTS)
OF_DEV = versions(CONSTRAINTS.partition("# The extras that dev leaves out")[0])


@pytest.mark.parametrize("wanted", REQUIREMENTS, ids=lambda wanted: str(wanted.name))
def test_requirements_are_pinned(wanted: Requirement) -> None:
    assert wanted.specifier.contains(PINNED[canonicalize_name(wanted.name)])


def test_the_recipe_for_conda_has_the_same_requirements() -> None:
    recipe = (ROOT / "docs" / "conda" / "meta.yaml").read_text(encoding="utf-8")
    asked = re.findall(r"^    - (.+)$", recipe.partition("  run:\n")[2].partition("\ntest:")[0], re.MULTILINE)
    renamed = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
    wanted = [Requirement(line) for line in PROJECT["dependencies"]] + [
        Requirement(f"python{PROJECT['requires-python']}")
    ]
    ours = {renamed.get(each.name, each.name): each.specifier for each in wanted}
    assert {each.name: each.specifier for each in map(Requirement, asked)} == ours
    assert f'version = "{PROJECT["version"]}"' in recipe


def test_extras_outside_dev_have_stand_ins() -> None:
    (everything,) = (wanted for line in EXTRAS["dev"] if (wanted := Requirement(line)).name == PROJECT["name"])
    assert EXTRAS.keys() - {"dev", "docs"} - everything.extras == STOOD_IN == set(STAND_INS)


def test_the_guide_has_every_extra() -> None:
    table = GUIDE.partition("## Extras")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(EXTRAS)


def test_the_pinned_versions_are_installed() -> None:
    installed = {name: version(name).partition("+")[0] for name in OF_DEV}
    assert installed == OF_DEV


def modules_shown() -> list[str]:
    """Return the modules that users run by `python -m`, from the README and the guide."""
    return re.findall(r"python -m (tests[\w.]*)", TEXT.partition("## Contributing")[0] + GUIDE)


def wanted_by(path: Path) -> set[str]:
    """Return the names of all imports of a file."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    origins = [(str(node.module), node.names) for node in nodes if isinstance(node, ast.ImportFrom)]
    inside = {f"{module}.{alias.name}" for module, taken in origins for alias in taken}
    return names | inside | {module for module, _ in origins}


def reached(module: str) -> set[str]:
    """Return the names of all imports of a module of the tests, also through other modules of the tests."""
    found, left = set[str](), [module]
    while left:
        file = ROOT / Path(*left.pop().split("."))
        paths = [file.with_suffix(".py"), file / "__init__.py", file / "__main__.py"]
        fresh = {name for path in paths if path.is_file() for name in wanted_by(path)} - found
        found |= fresh
        left += [name for name in fresh if name.startswith("tests.")]
    return found


def test_shown_modules_exist() -> None:
    assert modules_shown()
    assert all(Path(ROOT, *name.split(".")).with_suffix(".py").is_file() for name in modules_shown())


@pytest.mark.parametrize("module", modules_shown())
def test_shown_modules_need_only_the_first_installation(module: str) -> None:
    owners, always = packages_distributions(), named(PROJECT["dependencies"])
    roots = {name.partition(".")[0] for name in reached(module)} - sys.stdlib_module_names - {"ntkexp", "tests"}
    assert roots
    assert {name for name in roots if not always & set(map(canonicalize_name, owners[name]))} == set()


def named(lines: Iterable[str]) -> set[str]:
    """Return the names of required packages."""
    return {canonicalize_name(Requirement(line).name) for line in lines}


def imported() -> set[str]:
    """Return the top-level packages that ntkexp imports."""
    nodes = [node for path in (ROOT / "ntkexp").rglob("*.py") for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"ntkexp", "_typeshed"}


@pytest.mark.slow
def test_imports_are_required() -> None:
    """Requirements of the tests alone do not count."""
    extras = [lines for name, lines in EXTRAS.items() if name != "dev"]
    always, sometimes = named(PROJECT["dependencies"]), named(chain.from_iterable(extras))
    owners = packages_distributions()
    assert {
        name for name in imported() if not (always | sometimes) & set(map(canonicalize_name, owners.get(name, [name])))
    } == set()
    assert always.issuperset(LIBRARIES)


# The wheel, installed in another folder, has its configs, its types and its command.


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel, without its requirements."""
    place = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(place), str(ROOT)], check=True)
    (wheel,) = place.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(place / "site"), str(wheel)], check=True)
    return place / "site"


def files(folder: Path) -> dict[str, bytes]:
    """Return the YAML files of a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.yaml")}


@pytest.mark.slow
def test_the_wheel_has_the_tracked_files_and_finds_its_configs(installed: Path, tmp_path: Path) -> None:
    assert files(installed / "ntkexp" / "configs") == files(ROOT / "configs")
    assert (installed / "ntkexp" / "py.typed").is_file()
    found = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    others = {name for name in found if "__pycache__" in name or name.startswith(("bin/", "ntkexp-"))}
    tracked = subprocess.run(
        ["git", "ls-files", "ntkexp", "configs"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found - others == {re.sub("^configs/", "ntkexp/configs/", name) for name in tracked.stdout.splitlines()}
    shown = subprocess.run(
        [sys.executable, "-m", "ntkexp", "config", "--tree"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "model=mlp (default)" in shown.stdout


# Classes of different packages have different names, except components, such as `ntkexp.loss.Squared`, and callbacks,
# such as `ntkexp.lightning.Follow`, which are used with the name of their package.


def modules_by_class() -> dict[str, list[str]]:
    """Return the modules of each class name."""
    found = defaultdict(list)
    files = sorted((ROOT / "ntkexp").rglob("*.py"))
    for file in (each for each in files if each.stem not in ntkexp.CALLBACKS or each.parent.name != "ntkexp"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(".".join(file.relative_to(ROOT).with_suffix("").parts))
    return found


def is_component(module: str, name: str) -> bool:
    """Return true for a component."""
    return issubclass(getattr(import_module(module), name), Component)


def test_class_names_are_unique() -> None:
    shared = {name: found for name, found in modules_by_class().items() if len({m.split(".")[1] for m in found}) > 1}
    others = {name: [m for m in found if not is_component(m, name)] for name, found in shared.items()}
    assert {name: found for name, found in others.items() if len(found) > 1} == {}


def test_no_file_of_the_repository_is_large() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sizes = {name: (ROOT / name).stat().st_size for name in listed.split("\0") if name and (ROOT / name).exists()}
    assert sizes
    assert {name: size for name, size in sizes.items() if size > 2**20} == {}
