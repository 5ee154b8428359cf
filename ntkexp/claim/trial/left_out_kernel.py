"""How much the path kernel depends on the data: training is repeated without one example, and without half of them.

    change = ‖𝒦′ − 𝒦‖/‖𝒦‖,    𝒦(x, x′) = mean over steps s of K_s(x, x′)

between points that were in no training set, by the kernels at the beginnings of every `every`-th step. `left_out` is
`one`, averaged over several examples, or `half`, over several halves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.claim.trial.retraining import Retraining, groups_of, retraining
from ntkexp.component import Count
from ntkexp.library import tangent_kernel
from ntkexp.records.sweep import Level
from ntkexp.removal.film import WEIGHTS
from ntkexp.removal.train import retrain


class LeftOutKernel(AbstractTrial):
    """A training, in the words of `ntkexp train`, is repeated so often without one example and without half."""

    base: tuple[str, ...]
    times: Count = 6
    every: Count = 5

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        found = retraining([*self.base, "path.rule=[left]", "path.error_samples=0", "ladder.machine=[]"], seed)
        times = min(self.times, found.train)
        everyone = torch.ones(1, found.train, dtype=torch.float64)
        ones = everyone - torch.eye(found.train, dtype=torch.float64)[:times]
        halves = groups_of(found.train // 2, times, found.train, seed)
        kernels = self.path_kernels(found, torch.cat([everyone, ones, halves]))
        change = (kernels - kernels[0]).flatten(1).norm(dim=1) / kernels[0].norm()
        one, half = change[1 : 1 + times].mean(), change[1 + times :].mean()
        return [{"left_out": "one", "change": one.item()}, {"left_out": "half", "change": half.item()}]

    def path_kernels(self, found: Retraining, weight: Float[Tensor, "run train"]) -> Float[Tensor, "run point point_"]:
        """𝒦 of trainings with these weights of the examples."""
        module, flat = found.setting.problem.module, found.rerun.flat
        totals = [torch.zeros(()) for _ in weight]
        taken = [step for step in retrain(found.rerun, weight) if step.step % self.every == 0]
        for step in taken:
            for run, vector in enumerate(step.found[WEIGHTS]):
                here = tangent_kernel(module, found.others, weights=flat.weights(vector))[:, 0, :, 0]
                totals[run] = totals[run] + here / len(taken)
        return torch.stack(totals)
