"""The folder of another author: a Python file for each component, and YAML files laid out like configs/."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ntkexp.config.choices import Choices, config_folders
from ntkexp.config.compose import Composer, composer
from ntkexp.experiment.experiment import Experiment

PARTS = Path(__file__).with_name("parts")
ADDED = sorted((file.parent.name, file.stem) for file in PARTS.glob("*/*.yaml"))
"""The group and the name of each part that is chosen in YAML."""

TINY = (
    *("data=corners", "model.width=8", "steps=5", "path.error_samples=0", "path.rule=[thirds,left]"),
    "ladder.machine=[secant,left,frozen_start,frozen_middle,linearised]",
)
LAYERS = ("model=layers", "model.spec=[{layer: Dense, features: 8}, {layer: Parabola}, {layer: Dense, features: 1}]")


@dataclass(frozen=True)
class Outside:
    """The folder, and the settings that use it."""

    folder: Path

    @property
    def configs(self) -> Path:
        """The YAML files."""
        return self.folder / "configs"

    @property
    def trust(self) -> tuple[str, ...]:
        """The Python files, as arguments of --trust."""
        return tuple(map(str, sorted(self.folder.glob("*.py"))))

    @property
    def choices(self) -> Choices:
        """The choices with these parts."""
        return Choices(config_folders(self.configs))

    @cached_property
    def composer(self) -> Composer:
        """The composer that knows these parts."""
        return composer(self.configs, self.trust)

    def experiment(self, *overrides: str) -> Experiment:
        """Compose a tiny experiment. Of overrides with the same key, the last counts."""
        return self.composer.resolve([*TINY, *overrides]).experiment()


def written(folder: Path) -> Outside:
    """Copy the components and YAML files into a folder."""
    for file in PARTS.glob("*/[!_]*.py"):
        if file.parent.name not in {"figures", "together"}:
            shutil.copy(file, folder)
    for group, name in ADDED:
        place = folder / "configs" / group
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(PARTS / group / f"{name}.yaml", place)
    return Outside(folder)
