"""The weights of another run, from which a run starts (`init.parent=RUN@STEP`).

Fort et al. (2020) train children from the weights of a parent: a child has the weights
of its parent at some step, and its own order of examples. The steps with weights are

    0 and the last     of a finished run (weights.pt)
    recorded steps     of a finished run with path.record=[weights] (recorded.zarr)
    the checkpoint     of an unfinished run (checkpoint.pt), until the run replaces it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ntkexp.init import PARENT
from ntkexp.mistake import Mistake
from ntkexp.model.functional import load_tensors, named_members
from ntkexp.records.atomic import Damaged, sealed_for
from ntkexp.records.folder import (
    CHECKPOINT,
    DONE,
    RunFolder,
    is_run_folder,
    refuse_other_version,
)
from ntkexp.records.recorded import RECORDED, read_weights, recorded_steps
from ntkexp.shapes import Weights

WEIGHTS_FILE = "weights.pt"


@dataclass(frozen=True)
class ParentRun:
    """A run at one of its steps."""

    text: str  # RUN@STEP, as the user wrote it
    folder: RunFolder
    step: int

    @classmethod
    def of(cls, text: str) -> ParentRun:
        """Find the run RUN@STEP. Raise if there is no such run."""
        match = PARENT.fullmatch(text)
        assert match is not None  # `init` checks the form
        path = run_in(Path(match[1]).expanduser())
        if path is None:
            raise Mistake(
                f"init.parent={text}: {match[1]} is neither a run nor a folder of outputs with one "
                "run; give the path that ntkexp train printed"
            )
        refuse_other_version(path)
        folder = RunFolder(path)
        if "follow" in folder.config:
            raise Mistake(
                f"init.parent={text}: {path} is a followed loop; give a run of ntkexp train"
            )
        step = folder.steps_taken[1] if match[2] == "end" else int(match[2])
        return cls(text, folder, step)

    @property
    def identity(self) -> str:
        """The identity of the run, and the step, which determine the weights."""
        return f"{self.folder.identity}@{self.step}"

    def refuse_other_network(self, fields: Mapping[str, Any]) -> None:
        """Raise if an experiment with these fields has another network.

        The data, the optimizer and the seed may differ.
        """
        config = self.folder.read_json("config.json")
        for key in ("model", "init", "dtype"):
            own = entries_by_key(key, fields[key])
            parents = entries_by_key(key, config[key])
            for name in own | parents:
                if own.get(name) != parents.get(name):
                    raise Mistake(
                        f"init.parent={self.text}: its {name} is {parents.get(name)}, and here "
                        f"{own.get(name)}; give the parent's"
                    )

    @property
    def code(self) -> list[str]:
        """The digests of the files that defined the network when the run began."""
        digests: list[str] = self.folder.provenance.get("code", [])
        return digests

    def code_refusal(self, files: Sequence[Path]) -> str:
        """Return the error message if the digests of `files`, which define the network of
        an experiment, differ from `code`."""
        names = " or ".join(sorted({str(file) for file in files}))
        return (
            f"init.parent={self.text}: {names} has changed since the parent began; "
            "restore it, or run the parent again"
        )

    @property
    def seed(self) -> int:
        return int(self.folder.config["seed"])

    def refuse_other_constants(
        self, own: Mapping[str, Tensor], other: Mapping[str, Tensor]
    ) -> None:
        """Raise if an untrained tensor of the network, such as a buffer, differs from
        the parent's tensor."""
        for name, value in own.items():
            if not torch.equal(value, other[name]):
                raise Mistake(
                    f"init.parent={self.text}: {name} is not trained, and depends on the seed; "
                    f"use seed={self.seed}, the parent's, and another data.seed"
                )

    def weights(self) -> dict[str, Tensor]:
        """Return the trained weights at the step, and from weights.pt also the other
        tensors. Raise if they are not stored."""
        path = self.folder.path
        if not (path / DONE).is_file():
            return self.checkpoint_weights()
        last = self.folder.steps_taken[1]
        for step, moment in ((0, "start"), (last, "end")):
            if self.step == step:
                self.folder.check(WEIGHTS_FILE)
                weights: dict[str, Tensor] = load_tensors(path / WEIGHTS_FILE)[moment]
                return weights
        steps = [0, last]
        if (path / RECORDED / "weights").is_dir():
            self.folder.check(RECORDED)
            steps = sorted({*steps, *recorded_steps(path / RECORDED)})
        if self.step not in steps:
            raise Mistake(
                f"init.parent={self.text}: {path} has weights of steps "
                f"{', '.join(map(str, steps))}; run it with path.record=[weights] and "
                f"path.schedule=[{self.step}]"
            )
        arrays = read_weights(path / RECORDED, self.step)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def checkpoint_weights(self) -> dict[str, Tensor]:
        """Return the weights in the checkpoint of an unfinished run.
        Raise if the checkpoint is of another step."""
        path = self.folder.path / CHECKPOINT
        if not path.is_file():
            raise Mistake(
                f"init.parent={self.text}: the run is unfinished and has no checkpoint; "
                f"finish it by ntkexp resume {self.folder.path}"
            )
        if not sealed_for(path, self.folder.identity):
            raise Damaged(f"{path} is damaged: it is not as it was written")
        state = load_tensors(path)["run"]
        step = len(state["step_sizes"])
        if step != self.step:
            raise Mistake(
                f"init.parent={self.text}: the run is unfinished, and its checkpoint is of step "
                f"{step}; finish it by ntkexp resume {self.folder.path}"
            )
        weights: dict[str, Tensor] = state["weights"]
        return weights


def run_in(path: Path) -> Path | None:
    """Return `path` if it is a run folder. If it is a folder of outputs with a single
    run, return the folder of this run. Otherwise, return None."""
    if is_run_folder(path):
        return path
    runs = [folder for folder in path.glob("runs/*") if is_run_folder(folder)]
    return runs[0] if len(runs) == 1 else None


def untrained(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers and the parameters that are not trained."""
    frozen = {
        name: weight.detach()
        for name, weight in module.named_parameters()
        if not weight.requires_grad
    }
    return frozen | dict(module.named_buffers())


def entries_by_key(key: str, value: Any) -> dict[str, Any]:
    """Return the entries of a component by their full keys, without `parent`."""
    if not isinstance(value, dict):
        return {key: value}
    return {f"{key}.{name}": item for name, item in value.items() if name != "parent"}


def start_from(parent: ParentRun, module: nn.Module) -> None:
    """Copy the parent's weights into a network. Raise if their shapes differ."""
    stored = parent.weights()
    trained: Weights = {
        name: weight
        for name, weight in module.named_parameters()
        if weight.requires_grad
    }
    # weights.pt also holds tensors that are not trained
    members = dict(named_members(module, all_names=True))
    own_shapes = {name: list(member.shape) for name, member in members.items()}
    parent_shapes = {name: list(weight.shape) for name, weight in stored.items()}
    for name in trained | stored:
        own = own_shapes.get(name, "absent")
        other = parent_shapes.get(name, "absent")
        if own != other:
            raise Mistake(
                f"init.parent={parent.text}: its {name} has shape {other}, and here {own}; "
                "use data of the parent's shape and classes"
            )
    with torch.no_grad():
        for name, weight in trained.items():
            weight.copy_(stored[name])
