"""Compare runs: a table of all runs, groups of runs with the same components,
and pairs of runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import pandas as pd

from ntkexp.mistake import Mistake
from ntkexp.report.analysis.quantities import quantities
from ntkexp.report.inventory import differing, flatten_config
from ntkexp.report.run import Run
from ntkexp.report.sentence import main_split
from ntkexp.text import counted


def combined(runs: Sequence[Run]) -> pd.DataFrame:
    """Return a row for each run: name, settings that differ, relative errors,
    outcome."""
    configs = [flatten_config(run.config) for run in runs]
    keys = differing(configs)
    rows = []
    for run, config in zip(runs, configs, strict=True):
        split = main_split(run.ladder)
        errors = {
            row.machine: row.relative_error
            for row in run.ladder
            if row.split == split and row.relative_error is not None
        }
        settings = {key: config.get(key) for key in keys}
        rows.append({"run": run.name, **settings, "split": split, **errors})
    return pd.DataFrame(rows).assign(outcome=[run.outcome for run in runs])


GROUPING_KEYS = ("data", "model", "optimizer", "loss")
"""Components of an experiment. Runs with the same components form a group."""
FIRST_KEYS = ("model.", "steps", "seed")
"""Settings that are listed directly after the components."""

Settings: TypeAlias = tuple[tuple[str, str], ...]
"""Keys of the configuration with their values, as text."""


@dataclass(frozen=True)
class RunGroup:
    """Runs with the same components (data, model, optimizer, loss).

    `settings` are equal within the group, but differ between groups. `by_run` holds
    each run's values of the settings that differ within the group. If the runs have no
    common components, `components` is empty, and `title` describes the group."""

    title: str
    components: Settings
    runs: tuple[Run, ...]
    settings: Settings
    by_run: tuple[Settings, ...]


def grouped(runs: Sequence[Run]) -> list[RunGroup]:
    """Group runs by their components, in order of first appearance.

    All runs with components that no other run has form one group. Followed loops have
    no components, so they form one group, the last."""
    loops = [run for run in runs if is_followed(run)]
    experiments = [run for run in runs if not is_followed(run)]
    by_components: dict[tuple[object, ...], list[Run]] = {}
    for run in experiments:
        config = flatten_config(run.config)
        choice = tuple(config.get(key) for key in GROUPING_KEYS)
        by_components.setdefault(choice, []).append(run)
    several = [group for group in by_components.values() if len(group) > 1]
    alone = [group[0] for group in by_components.values() if len(group) == 1]

    between = common_differing(experiments)
    groups = list[RunGroup]()
    for group in several:
        within = common_differing(group)
        config = flatten_config(group[0].config)
        components = tuple(
            (key, str(config[key])) for key in GROUPING_KEYS if key in config
        )
        common = [
            key for key in between if key not in within and key not in GROUPING_KEYS
        ]
        settings = tuple((key, str(config[key])) for key in common)
        by_run = settings_of(group, within)
        groups.append(RunGroup("", components, tuple(group), settings, by_run))
    if alone:
        title = "unlike any other" if several else "runs with different components"
        within = common_differing(alone)
        groups.append(RunGroup(title, (), tuple(alone), (), settings_of(alone, within)))
    if loops:
        within = [key for key in common_differing(loops) if key in LOOP_KEYS]
        by_run = settings_of(loops, within)
        groups.append(RunGroup("followed loops", (), tuple(loops), (), by_run))
    return groups


def common_differing(runs: Sequence[Run]) -> list[str]:
    """Return the settings that all runs have, and that differ between them.
    Components come first.

    Settings that only some runs have are omitted, because they follow from the
    components.
    """
    configs = [flatten_config(run.config) for run in runs]
    keys = [
        key for key in differing(configs) if all(key in config for config in configs)
    ]
    return sorted(
        keys, key=lambda key: (key not in GROUPING_KEYS, not key.startswith(FIRST_KEYS))
    )


def settings_of(runs: Sequence[Run], keys: Sequence[str]) -> tuple[Settings, ...]:
    configs = [flatten_config(run.config) for run in runs]
    return tuple(tuple((key, str(config[key])) for key in keys) for config in configs)


# --- Followed loops: their configuration describes the loop instead of an experiment.


LOOP_KEYS = ("follow.parameters", "follow.processes", "follow.output")


def is_followed(run: Run) -> bool:
    return "follow" in run.config


def describe_loop(run: Run) -> str:
    """Describe a followed loop by its optimizers and the number
    of its training examples."""
    parts = ["followed loop", *map(str, run.config["follow"].get("optimizers", ()))]
    with suppress(Mistake, OSError, KeyError):  # contributions are missing or damaged
        parts.append(counted(int(run.contributions.sizes["example"]), "example"))
    return ", ".join(parts)


def compare_configs(first: Run, second: Run) -> pd.DataFrame:
    """Return a row for each key that has different values in the two configurations.

    A missing value is None.
    """
    configs = [flatten_config(first.config), flatten_config(second.config)]
    rows = [
        (key, *(config.get(key) for config in configs)) for key in differing(configs)
    ]
    return pd.DataFrame(rows, columns=["key", "first", "second"], dtype=object)


def compare_results(first: Run, second: Run) -> pd.DataFrame:
    """Return a row for each quantity that both runs have:
    its two values and their ratio."""
    first_numbers = quantities(first)
    second_numbers = quantities(second)
    rows = []
    for name, number in first_numbers.items():
        if name in second_numbers:
            ratio = second_numbers[name] / number if number else float("nan")
            rows.append((name, number, second_numbers[name], ratio))
    return pd.DataFrame(rows, columns=["quantity", "first", "second", "second/first"])


def numbers_of_one_alone(first: Run, second: Run) -> tuple[list[str], list[str]]:
    """Return the names of the quantities that only the first run has, and the names of
    the quantities that only the second run has."""
    first_names = list(quantities(first))
    second_names = list(quantities(second))
    return (
        [name for name in first_names if name not in second_names],
        [name for name in second_names if name not in first_names],
    )
