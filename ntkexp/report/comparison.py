"""Several runs side by side: one table of all, groups of runs that chose the same parts, and pairs of runs."""

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
    """Tabulate a row per run: its name, where its configuration differs from the others', and each machine's relative
    error.
    """
    configs = [flatten_config(run.config) for run in runs]
    keys = differing(configs)
    rows = []
    for run, config in zip(runs, configs, strict=True):
        split = main_split(run.ladder)  # by which the run is judged
        here = [row for row in run.ladder if row.split == split and row.relative_error is not None]
        row = {"run": run.name} | {key: config.get(key) for key in keys} | {"split": split}
        rows.append(row | {each.machine: each.relative_error for each in here})
    table = pd.DataFrame(rows, columns=list(dict.fromkeys(name for row in rows for name in row)))
    return table.assign(outcome=[run.outcome for run in runs])


CHOICES = ("data", "model", "optimizer", "loss")
"""The parts of an experiment by whose options runs are grouped."""
FOREMOST = ("model.", "steps", "seed")
"""The settings that are named before others."""
LONGEST = 60  # letters of what sets a run apart


@dataclass(frozen=True)
class RunGroup:
    """Runs that chose the same parts: which, as far as others chose otherwise, and a row for each run, errors first."""

    title: str
    runs: tuple[Run, ...]
    table: pd.DataFrame


def grouped(runs: Sequence[Run]) -> list[RunGroup]:
    """Group runs by their parts, in the order in which these first stand; runs that are alone in that make the last
    group."""
    configs = {run.path: flatten_config(run.config) for run in runs}
    chosen = [key for key in differing(list(configs.values())) if key in CHOICES]
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(configs[run.path].get(key) for key in chosen), []).append(run)
    alone = [run for group in groups.values() if len(group) == 1 for run in group]
    found = []
    for parts, group in groups.items():
        if len(group) > 1:
            found.append(
                (" ".join(f"{key}={part}" for key, part in zip(chosen, parts, strict=True)), group)
            )
    if alone:
        found.append(("unlike any other" if found else "", alone))
    return [RunGroup(title, tuple(group), errors_first(group)) for title, group in found]


def errors_first(runs: Sequence[Run]) -> pd.DataFrame:
    """Tabulate what sets each run apart from the others, in a few letters, its relative errors, and its outcome."""
    configs = [flatten_config(run.config) for run in runs]
    keys = sorted(
        differing(configs), key=lambda key: (key not in CHOICES, not key.startswith(FOREMOST))
    )
    last = Counter(key.rpartition(".")[2] for key in keys)
    names = {key: end if last[end := key.rpartition(".")[2]] == 1 else key for key in keys}
    rows = []
    for run, config in zip(runs, configs, strict=True):
        words = " ".join(
            f"{names[key]}={config[key]}" for key in keys if config.get(key) is not None
        )
        split = main_split(run.ladder)
        errors = {row.machine: row.relative_error for row in run.ladder if row.split == split}
        rows.append(
            {"run": textwrap.shorten(words, LONGEST, placeholder=" …") or run.name, "split": split}
            | errors
        )
    table = pd.DataFrame(rows).dropna(axis=1, how="all")
    longest = max(
        runs, key=lambda run: len(run.ladder)
    )  # in whose order machines stand, before those of others
    machines = dict.fromkeys(row.machine for run in (longest, *runs) for row in run.ladder)
    chosen = ["run", *(name for name in machines if name in table), "split"]
    return table[chosen].assign(outcome=[run.outcome for run in runs])


def compare_configs(first: Run, second: Run) -> pd.DataFrame:
    """Tabulate a row for each key whose value differs; a key that one of them lacks has none there."""
    one, other = flatten_config(first.config), flatten_config(second.config)
    rows = [(key, one.get(key), other.get(key)) for key in differing([one, other])]
    return pd.DataFrame(rows, columns=["key", "first", "second"], dtype=object)


def compare_results(first: Run, second: Run) -> pd.DataFrame:
    """Tabulate a row for each number that both yield, with their ratio."""
    one, other = quantities(first), quantities(second)
    rows = [
        (name, one[name], other[name], other[name] / one[name] if one[name] else float("nan"))
        for name in one
        if name in other
    ]
    return pd.DataFrame(rows, columns=["quantity", "first", "second", "second/first"])


def numbers_of_one_alone(first: Run, second: Run) -> tuple[list[str], list[str]]:
    """Return the names of numbers that only one of two runs has: the first's, the second's."""
    one, other = quantities(first), quantities(second)
    return [name for name in one if name not in other], [name for name in other if name not in one]
