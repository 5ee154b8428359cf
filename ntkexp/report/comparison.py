"""Compare runs: a table of all runs, groups of runs with the same components, and pairs of runs."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from ntkexp.report.analysis.quantities import quantities
from ntkexp.report.inventory import differing, flatten_config
from ntkexp.report.run import Run
from ntkexp.report.sentence import main_split


def combined(runs: Sequence[Run]) -> pd.DataFrame:
    """Return a row for each run: name, settings that differ, relative errors, outcome."""
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
    table = pd.DataFrame(rows, columns=list(dict.fromkeys(name for row in rows for name in row)))
    return table.assign(outcome=[run.outcome for run in runs])


GROUPING_KEYS = ("data", "model", "optimizer", "loss")
"""Components of an experiment. Runs with the same components form a group."""
FIRST_KEYS = ("model.", "steps", "seed")
"""Settings that a table lists directly after the components."""
MAX_SETTINGS_LETTERS = 60  # length of the text that lists the settings of a run


@dataclass(frozen=True)
class RunGroup:
    """Runs with the same components (data, model, optimizer, loss).

    `table` has a row for each run; `title` names the components.
    """

    title: str
    runs: tuple[Run, ...]
    table: pd.DataFrame


def grouped(runs: Sequence[Run]) -> list[RunGroup]:
    """Group runs by their components, in order of first appearance.

    Runs whose components no other run has are collected in the last group.
    """
    configs = {run.path: flatten_config(run.config) for run in runs}
    keys = [key for key in differing(list(configs.values())) if key in GROUPING_KEYS]
    by_components: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        components = tuple(configs[run.path].get(key) for key in keys)
        by_components.setdefault(components, []).append(run)
    groups = list[RunGroup]()
    alone = list[Run]()
    for components, group in by_components.items():
        if len(group) == 1:
            alone += group
            continue
        title = " ".join(f"{key}={part}" for key, part in zip(keys, components, strict=True))
        groups.append(RunGroup(title, tuple(group), errors_first(group)))
    if alone:
        title = "unlike any other" if groups else ""
        groups.append(RunGroup(title, tuple(alone), errors_first(alone)))
    return groups


def errors_first(runs: Sequence[Run]) -> pd.DataFrame:
    """Return a row for each run: distinguishing settings, relative errors and outcome."""
    configs = [flatten_config(run.config) for run in runs]
    keys = sorted(
        differing(configs),
        key=lambda key: (key not in GROUPING_KEYS, not key.startswith(FIRST_KEYS)),
    )
    # shorten `model.width` to `width` if no other key ends in `width`
    last_parts = {key: key.rpartition(".")[2] for key in keys}
    counts = Counter(last_parts.values())
    names = {key: last if counts[last] == 1 else key for key, last in last_parts.items()}
    rows = []
    for run, config in zip(runs, configs, strict=True):
        settings = [f"{names[key]}={config[key]}" for key in keys if config.get(key) is not None]
        words = textwrap.shorten(" ".join(settings), MAX_SETTINGS_LETTERS, placeholder=" …")
        split = main_split(run.ladder)
        errors = {row.machine: row.relative_error for row in run.ladder if row.split == split}
        rows.append({"run": words or run.name, "split": split} | errors)
    table = pd.DataFrame(rows).dropna(axis=1, how="all")
    # order the kernel machines as in the longest comparison
    longest = max(runs, key=lambda run: len(run.ladder))
    machines = dict.fromkeys(row.machine for run in (longest, *runs) for row in run.ladder)
    columns = ["run", *(name for name in machines if name in table), "split"]
    return table[columns].assign(outcome=[run.outcome for run in runs])


def compare_configs(first: Run, second: Run) -> pd.DataFrame:
    """Return a row for each key of the configurations whose value differs.

    A missing value is None.
    """
    configs = [flatten_config(first.config), flatten_config(second.config)]
    rows = [(key, *(config.get(key) for config in configs)) for key in differing(configs)]
    return pd.DataFrame(rows, columns=["key", "first", "second"], dtype=object)


def compare_results(first: Run, second: Run) -> pd.DataFrame:
    """Return a row for each quantity that both runs have: its two values and their ratio."""
    first_numbers = quantities(first)
    second_numbers = quantities(second)
    rows = []
    for name, number in first_numbers.items():
        if name in second_numbers:
            ratio = second_numbers[name] / number if number else float("nan")
            rows.append((name, number, second_numbers[name], ratio))
    return pd.DataFrame(rows, columns=["quantity", "first", "second", "second/first"])


def numbers_of_one_alone(first: Run, second: Run) -> tuple[list[str], list[str]]:
    """Return the names of quantities that only the first run has, and the names that only the
    second has.
    """
    first_names = list(quantities(first))
    second_names = list(quantities(second))
    return (
        [name for name in first_names if name not in second_names],
        [name for name in second_names if name not in first_names],
    )
