"""One training of the attribution bench: who is left out of it, what that changes, and what is handed to scores.

A network learns two digits. Whoever is left out, the same start and order of batches is trained again, and means are
over what is left of a batch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from time import process_time
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.config.compose import compose
from ntkexp.mistake import Mistake
from ntkexp.removal.again import again
from ntkexp.removal.rerun import Rerun
from ntkexp.removal.train import retrain, trained
from ntkexp.run.loop import go
from ntkexp.run.setting import Setting, prepare
from ntkexp.run.state import begin
from ntkexp.stream import stream
from tests.bench.attribution_scores import damping_of, influence, last_product, tracin
from tests.bench.backward import Deaf

GROUPS = 32  # of the larger removals
DAMPING = 0.1  # of influence functions, in mean eigenvalues; .01 did worse
MODELS = 5  # that TRAK averages over
DIMENSION = 32  # that it projects to; 8 and 16 do a little better, 64 does worse


class Size(NamedTuple):
    """How much is trained and read, and from how many seeds."""

    train: int
    read: int
    steps: int
    seeds: int


@dataclass(frozen=True)
class Case:
    """A training, and what is read of it."""

    words: tuple[str, ...]
    size: Size
    seed: int

    def setting(self, *more: str) -> Setting:
        """The training, ready to begin; effects are those of the points that are read, and of no others."""
        size = self.size
        sizes = (f"data.train={size.train}", f"data.probe={size.read}", "data.test=0")
        path = (f"path.attributed={size.read}", "path.probes=[probe]", "path.rule=[secant]", "path.error_samples=0")
        rest = (f"steps={size.steps}", f"seed={self.seed}", f"threads={torch.get_num_threads()}", "ladder.machine=[]")
        words = ("data=digits", "optimizer.batch=16", *sizes, *path, *rest, *self.words, *more)
        setting = prepare(compose(words))
        if setting.sweep is None:
            return setting
        read = size.train + torch.arange(size.read)
        return replace(setting, sweep=replace(setting.sweep, points=read, retrains=False))  # retrained it is anyway

    @cached_property
    def plain(self) -> Setting:
        """The training without effects."""
        return self.setting()

    @cached_property
    def rerun(self) -> Rerun:
        """What trains again."""
        return rerun_of(self.plain)

    @cached_property
    def read(self) -> Float[Tensor, "point *shape"]:
        """The points whose outputs are predicted."""
        return self.plain.problem.inputs[self.size.train :]

    def contributions(self) -> Float[Tensor, "point train"]:
        """What examples added by exact secants, taken off."""
        with tempfile.TemporaryDirectory() as folder:
            state = begin(self.plain, Deaf(folder).trajectory)
            go(state, Deaf(folder))
            for _ in state.steps_back():
                pass
            return -state.accumulator.integrals["secant"].parts[1][self.size.train :, 0]

    def effects(self, kind: str) -> Float[Tensor, "point train"]:
        """What the sweep back says; the path is not integrated."""
        with tempfile.TemporaryDirectory() as folder:
            state = begin(self.setting(f"path.effects={kind}", "path.rule=[left]"), Deaf(folder).trajectory)
            go(state, Deaf(folder))
            if state.effects is None:
                raise Mistake("no effects were asked for")
            state.effects.recording.close(state.step, state.weights)  # which integrating the path would have done
            for _ in state.sweeps_back():
                pass
            return state.effects.effects[:, 0]

    @property
    def scores(self) -> dict[str, Callable[[], Float[Tensor, "point train"]]]:
        """Every score of this project's, by its name."""
        given = (self.rerun, self.read)
        return {
            "effect": partial(self.effects, "true"),
            "one step": partial(self.effects, "one_step"),
            "contrib.": self.contributions,
            "TracIn": partial(tracin, *given),
            "last": partial(last_product, *given),
            "infl.": partial(influence, *given, DAMPING),
        }

    def handed(self) -> dict[str, Any]:
        """What other programs need: network, weights along the way and at the end, and data; with seconds for that."""
        rerun, start = self.rerun, process_time()
        steps = [taken.found["weights"][0] for taken in retrain(rerun, rerun.everyone[None])]
        seconds = process_time() - start
        same = f"data.seed={self.seed}"  # the data of this seed, from other starts and in other orders
        others = [rerun_of(self.setting(same, f"seed={self.seed + 1000 * k}")) for k in range(1, MODELS)]
        ends = [trained(each, each.everyone[None])[0] for each in (rerun, *others)]
        return {
            "network": self.plain.problem.module,
            "checkpoints": [rerun.flat.weights(each) for each in steps],
            "sizes": [rerun.size(step) for step in range(rerun.length)],
            "ends": [rerun.flat.weights(end) for end in ends],
            "inputs": rerun.inputs,
            "targets": rerun.targets,
            "read": self.read,
            "damping": damping_of(rerun, ends[0], DAMPING),
            "dimension": DIMENSION,
            "threads": torch.get_num_threads(),
            "seconds": seconds,
        }

    def groups(self) -> dict[str, Float[Tensor, "group train"]]:
        """Who leaves: 1 for those, 0 for the others."""
        train, generator = self.size.train, stream("left out", self.seed)
        drawn = torch.rand(GROUPS, train, generator=generator, dtype=torch.float64).argsort(1).argsort(1)
        shares = {"5 %": max(1, train // 20), "50 %": train // 2}
        return {"one": torch.eye(train).double()} | {name: (drawn < many).double() for name, many in shares.items()}

    def changes(self, left: Float[Tensor, "group train"]) -> Float[Tensor, "group point"]:
        """What the outputs change by when groups are left out."""
        everyone = self.rerun.everyone
        ends = trained(self.rerun, torch.cat([everyone[None], everyone - left]))
        with torch.no_grad():
            outputs = torch.stack([self.rerun.outputs(end, self.read)[:, 0] for end in ends])
        return outputs[1:] - outputs[0]


def rerun_of(setting: Setting) -> Rerun:
    """What trains a setting again."""
    return again(setting.experiment, setting.problem, setting.descent.step_size, setting.experiment.steps)
