"""The components of all YAML files of options, so that tests include new files."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from omegaconf import OmegaConf

from ntkexp.component import Component
from ntkexp.config.build import Builder
from ntkexp.config.choices import Choices

CONFIGS = Path(__file__).parents[2] / "configs"
FOLDERS = [CONFIGS]
"""Folders that are searched for options."""

OWN = Path(__file__).with_name("own_net.py")
"""A user's own module."""

REQUIRED: dict[str, dict[str, str]] = {"module": {"path": f"{OWN}:build"}}
"""Arguments that an option needs in addition to its name."""


SCALAR = {"lookup_table", "scalar_linear", "reparametrised_linear", "radial_basis"}
"""Models that are functions of one number, with `data=integers`; tests/model/test_scalar.py is theirs."""


def choices(folder: str) -> list[str]:
    return Choices(tuple(FOLDERS)).options(folder)


def networks() -> list[str]:
    """Return the models for data of any shape, or for images."""
    return sorted(set(choices("model")) - SCALAR)


def configured(folder: str, name: str, **changes: object) -> Component:
    """Return the component that a YAML file names, with some fields changed."""
    fields = OmegaConf.to_container(OmegaConf.load(Choices(tuple(FOLDERS)).file(folder, name)))
    assert isinstance(fields, dict)
    fields |= REQUIRED.get(name, {})
    module, _, qualname = str(fields.pop("_target_")).rpartition(".")
    kind: type[Component] = getattr(import_module(module), qualname)
    named = {str(key): value for key, value in fields.items()}
    given = {key: Builder().child(value, kind.model_fields.get(key), key) for key, value in named.items()}
    return kind.model_validate(given | changes)


def asked_for(folder: str, name: str) -> list[str]:
    """Return the override that chooses an option on the command line."""
    return [f"{folder}={name}", *(f"{folder}.{key}={value}" for key, value in REQUIRED.get(name, {}).items())]
