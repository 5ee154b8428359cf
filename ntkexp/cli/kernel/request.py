"""What the commands that compute kernel files have in common, by the names of their options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ntkexp.cli.train import limit_threads

if TYPE_CHECKING:
    from ntkexp.engine.base import AbstractEngine
    from ntkexp.experiment.experiment import Experiment


@dataclass(frozen=True, kw_only=True)
class FillRequest:
    """Which data and network are meant, where the file lies, and who computes it."""

    overrides: Sequence[str]
    out: Path | None
    workers: int | None
    engine: str
    dry_run: bool = False
    force: bool = False
    quiet: bool
    as_json: bool
    trust: Sequence[str]
    config_dir: Path | None

    def choose_engine(self) -> AbstractEngine:
        """Open the engine: one that cannot be had is refused before anything is computed."""
        from ntkexp.engine.choose import choose

        return choose(self.engine, self.workers)

    def compose(self) -> Experiment:
        """Compose the experiment whose data and network are meant; tiles have one thread if it does not say more."""
        limit_threads(self.overrides)
        from ntkexp.config.compose import compose
        from ntkexp.run.environment import fix_circumstances

        experiment = compose(self.overrides, self.config_dir, self.trust)
        fix_circumstances(experiment, experiment.threads or 1)
        return experiment
