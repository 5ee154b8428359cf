"""Every YAML builds a component of its choice, and states every field and its default."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from ntkexp.component import Component
from ntkexp.init import AbstractInit
from ntkexp.loss import AbstractLoss
from ntkexp.model.base import AbstractArchitecture
from ntkexp.optimizer.base import AbstractOptimizer
from ntkexp.schedule import AbstractSchedule
from tests.config.components import CONFIGS, choices, configured

KINDS: dict[str, type[Component]] = {
    "init": AbstractInit,
    "loss": AbstractLoss,
    "model": AbstractArchitecture,
    "optimizer": AbstractOptimizer,
    "schedule": AbstractSchedule,
}
EVERY = [(folder, name) for folder in KINDS for name in choices(folder)]


@pytest.mark.parametrize(("folder", "name"), EVERY)
def test_a_yaml_states_every_field(folder: str, name: str) -> None:
    made = configured(folder, name)
    assert isinstance(made, KINDS[folder])
    stated = OmegaConf.to_container(OmegaConf.load(CONFIGS / folder / f"{name}.yaml"))
    assert isinstance(stated, dict)
    assert stated.keys() == made.fields().keys()


@pytest.mark.parametrize(("folder", "name"), EVERY)
def test_the_yaml_and_the_class_have_the_same_defaults(folder: str, name: str) -> None:
    made = configured(folder, name)
    defaults = {
        key: field.get_default(call_default_factory=True)
        for key, field in type(made).model_fields.items()
        if not field.is_required()
    }
    assert {key: getattr(made, key) for key in defaults} == defaults
