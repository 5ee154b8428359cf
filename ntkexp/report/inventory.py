"""Lists of run folders: their states, filters,
and configuration keys that differ between runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ntkexp.mistake import Mistake, first_line, nearest, refuse_special
from ntkexp.naming import option_name
from ntkexp.records.atomic import acquire
from ntkexp.records.folder import (
    CIRCUMSTANCES,
    CONFIG,
    DONE,
    LOCK,
    MAX_READ_FOR_STATE,
    RunFolder,
    State,
    is_run_folder,
    refuse_other_version,
)

# --- Configurations with dotted keys, such as `model.width`.


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested configuration to dotted keys.

    The name of a component replaces its `_target_`. The settings of a component in a
    list have its number in the list as a part of their keys. The keys in
    `CIRCUMSTANCES` are dropped, because they do not change results.

    >>> flatten_config({"model": {"_target_": "ntkexp.model.MLP", "width": 8}, "seed": 0, "threads": 2})
    {'model': 'mlp', 'model.width': 8, 'seed': 0}
    >>> layers = [{"_target_": "ntkexp.layer.ReLU"}, {"_target_": "ntkexp.layer.Dense", "b_std": 1.0}]
    >>> flatten_config({"spec": layers})
    {'spec': '[relu,dense]', 'spec.1.b_std': 1.0}
    """
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            leaves |= flatten_config(value, f"{prefix}{key}.")
        elif key == "_target_":
            leaves |= {prefix.rstrip("."): option_name(str(value))} if prefix else {}
        elif isinstance(value, list):
            leaves[prefix + key] = list_in_words(value)
            leaves |= settings_of_items(value, prefix + key)
        elif prefix or key not in CIRCUMSTANCES:
            leaves[prefix + key] = value
    return leaves


def settings_of_items(items: list[Any], key: str) -> dict[str, Any]:
    """Return the settings of the components in a list,
    but not the names of these components."""
    leaves: dict[str, Any] = {}
    for number, item in enumerate(items):
        if isinstance(item, Mapping):
            name = f"{key}.{number}"
            settings = flatten_config(item, f"{name}.")
            settings.pop(name, None)
            leaves |= settings
    return leaves


def list_in_words(items: list[Any]) -> str:
    words = [
        option_name(str(item.get("_target_")))
        if isinstance(item, Mapping)
        else str(item)
        for item in items
    ]
    return f"[{','.join(words)}]"


def differing(configs: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the keys whose values differ, in order of first appearance.

    A missing key counts as None.

    >>> differing([{"width": 8, "depth": 2}, {"width": 9, "depth": 2, "seed": 0}])
    ['width', 'seed']
    """
    keys = dict.fromkeys(key for config in configs for key in config)
    return [
        key for key in keys if len({str(config.get(key)) for config in configs}) > 1
    ]


# --- Run folders and filters.
#
#     KEY=VALUE   KEY is a key of the configuration, `run` (the name of the folder), or `state`:
#                 done, running, damaged, interrupted, or dead (it cannot be resumed)


@dataclass(frozen=True)
class ListedRun:
    """A run folder with its state and outcome."""

    path: Path
    state: str
    config: Mapping[str, object]
    outcome: str

    @property
    def facts(self) -> dict[str, str]:
        """The values of all keys that filters can use."""
        config = {key: str(value) for key, value in self.config.items()}
        return config | {"state": self.state, "run": self.path.name}


def list_runs(folder: Path) -> list[ListedRun]:
    runs = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not is_run_folder(path):
            continue
        run = RunFolder(path)
        state: State = "damaged"
        try:
            # check only small files, because there may be ten thousand runs
            defect = run.find_defect(MAX_READ_FOR_STATE, check_sizes=False)
            state = run.state_by(defect)
            if defect is not None and run.seal_file:
                run.check(CONFIG)
            refuse_other_version(path)
            outcome = outcome_in_words(run, state, defect)
            runs.append(ListedRun(path, state, flatten_config(run.config), outcome))
        except Mistake as mistake:
            runs.append(ListedRun(path, state, {}, str(mistake)))
        except Exception as error:
            # a broken folder must not prevent the others from being listed
            reason = (
                f"{path} cannot be read ({type(error).__name__}: {first_line(error)})"
            )
            runs.append(ListedRun(path, state, {}, reason))
    return runs


def outcome_in_words(folder: RunFolder, state: State, defect: str | None) -> str:
    """Return the outcome of a finished run, the error of a failed run,
    or else the latest step."""
    path = folder.path
    try:
        if (path / DONE).is_file():
            return defect or str(folder.sealed_facts.get("outcome", ""))
        error = path / "error.txt"
        stop = ""
        if state in {"interrupted", "dead"} and error.is_file():
            refuse_special(error, str(error), MAX_READ_FOR_STATE)
            text = error.read_text(encoding="utf-8", errors="replace").strip()
            reason = text.rpartition("\n")[2]
            if reason != "KeyboardInterrupt":
                return reason
            stop = "interrupted by Ctrl-C or SIGTERM at "
        reached = folder.progress
        return f"{stop}step {reached['step']} of {reached['steps']}"
    except (Mistake, OSError, KeyError):
        return defect or ""


def filter_runs(runs: Sequence[ListedRun], filters: Sequence[str]) -> list[ListedRun]:
    """Return the runs that pass every filter.
    Raise if no run has the key of a filter."""
    pairs = [text.partition("=") for text in filters]
    keys = {key for one in runs for key in one.facts} | {"state", "run"}
    for text, (key, sign, _) in zip(filters, pairs, strict=True):
        if not sign:
            raise Mistake(
                f"'{text}' is no filter: it takes KEY=VALUE, such as model.width=64 or state=done"
            )
        if key not in keys and runs:
            raise Mistake(f"'{text}': no run has the key {key}{nearest(key, keys)}")
    return [
        one
        for one in runs
        if all(matches(one.facts.get(key), value) for key, _, value in pairs)
    ]


def matches(value: str | None, pattern: str) -> bool:
    """Return True if a value equals a pattern, as case-insensitive text or as a number.
    The pattern null equals None, as on the command line.

    >>> matches("0.5", ".50"), matches("True", "true"), matches("relu", "tanh"), matches(None, "1")
    (True, True, False, False)
    >>> matches("None", "null"), matches("0.5", "null")
    (True, False)
    """
    if pattern.lower() == "null":
        pattern = "None"
    if value is None or value.lower() == pattern.lower():
        return value is not None
    try:
        return float(value) == float(pattern)
    except ValueError:
        return False


def delete(run: ListedRun) -> None:
    """Delete a run folder. Raise if it is not a run folder,
    or if a process is writing to it."""
    if not is_run_folder(run.path) or run.path.is_symlink():
        raise Mistake(f"{run.path} is not a run folder; nothing was deleted there")
    if not RunFolder(run.path).is_ours:
        raise Mistake(
            f"{run.path} has no file that shows that a run wrote it, so it is not deleted; remove it yourself"
        )
    try:
        descriptor = acquire(run.path / LOCK)
    except BlockingIOError:
        raise Mistake(
            f"{run.path} is being written; stop the run before deleting it"
        ) from None
    try:
        RunFolder(run.path).clear()
        (run.path / LOCK).unlink()
        run.path.rmdir()
    finally:
        os.close(descriptor)
