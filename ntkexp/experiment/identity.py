"""The identity of an experiment: a digest of everything that affects its results.

Commands that compute the same results have the same identity, and share a run folder.

identity = sha256(canonical JSON of the validated fields without the circumstances,
                  sha256 of every file that a component reads, sha256 of the source file
                  of every component from outside this package, results_version)
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from ntkexp.component import Component
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.parent import ParentRun
from ntkexp.mistake import Mistake, refuse_special
from ntkexp.path.settings import Kernel
from ntkexp.records.folder import CIRCUMSTANCES, results_version


def canonical(experiment: Experiment) -> dict[str, Any]:
    """Return the experiment as plain data. `ntkexp.config.build.build` is the
    inverse."""
    return experiment.fields()


def identity(experiment: Experiment) -> str:
    """Return the identity of an experiment: 64 hexadecimal digits."""
    fields = {
        name: value
        for name, value in canonical(experiment).items()
        if name not in CIRCUMSTANCES
    }
    # omit fields that were added later if they have their default values, so that old
    # identities stay valid
    if experiment.kernel == Kernel():
        del fields["kernel"]
    if experiment.path.kernels == "all":
        del fields["path"]["kernels"]
    if experiment.path.explains_outputs:
        del fields["path"]["measure"]
    if experiment.path.by is None:
        del fields["path"]["by"]
    if experiment.init.parent is not None:
        fields["init"]["parent"] = ParentRun.of(experiment.init.parent).identity
    if not experiment.path.record:
        del fields["path"]["record"]
    if not experiment.diagnostics:
        del fields["diagnostics"]
    if not experiment.path.effects:
        del fields["path"]["effects"], fields["path"]["mean"]
    content = {
        "experiment": fields,
        "files": [digest(file) for file in files_of(experiment)],
        "results_version": results_version,
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return sha256(text.encode()).hexdigest()


def folder_name(experiment: Experiment) -> str:
    """Return the name of the run folder: model, width,
    seed and 12 digits of the identity."""
    model = experiment.model
    return (
        f"{model.option}-w{model.width}-s{experiment.seed}-{identity(experiment)[:12]}"
    )


def components(value: object) -> Iterator[Component]:
    """Yield every component in a value, beginning with the value itself."""
    if isinstance(value, Component):
        yield value
        for name in type(value).model_fields:
            yield from components(getattr(value, name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from components(item)


def files_of(value: object) -> list[Path]:
    """Return the files that the components in a value depend on.

    These are the files that components read, and the source files of components from
    outside this package. The source files of this package are not included, because
    `results_version` changes with them."""
    files: list[Path] = []
    for component in components(value):
        files += component.files()
        if type(component).__module__.split(".")[0] != "ntkexp":
            files.append(Path(inspect.getfile(type(component))))
    return files


def code_files(experiment: Experiment) -> list[Path]:
    """Return the user's files that define the network."""
    return files_of((experiment.model, experiment.init))


def code_digests(experiment: Experiment) -> list[str]:
    """Return the digests of `code_files`."""
    return [digest(file) for file in code_files(experiment)]


def digest(file: Path) -> str:
    """Return the SHA-256 of a file's contents. Raise if the file cannot be read."""
    try:
        refuse_special(file, str(file), sys.maxsize)
        state = file.stat()
        return cached_digest(file, (state.st_ino, state.st_size, state.st_mtime_ns))
    except OSError as error:
        raise Mistake(
            f"{file} belongs to the experiment and cannot be read: {error.strerror}"
        ) from None


@cache  # the runs of a sweep share their data files
def cached_digest(file: Path, state: tuple[int, int, int]) -> str:
    """Return the digest of the first `state[1]` bytes of a file."""
    content = sha256()
    with file.open("rb") as stream:
        remaining = state[1]
        while block := stream.read(min(remaining, 1 << 20)):
            content.update(block)
            remaining -= len(block)
    return content.hexdigest()
