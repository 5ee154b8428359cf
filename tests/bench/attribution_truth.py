"""The truth that scores are held against: trainings without somebody, which all scores of a case share.

    one run     the same start, order and step sizes; batches are means of whoever is left in them
    fresh       half of the examples, drawn anew for every training, each from a start and in an order of its own

Of the first is kept what changes, of the second what comes out: the outputs, and −ℓ, which is what dattri measures.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.curvature import at_once
from ntkexp.kernel.record.taping import plain_kernels
from ntkexp.optimizer.base import Memory
from ntkexp.removal.rerun import AT_ONCE, gradient, moved, trained
from ntkexp.stream import stream
from tests.bench.attribution_case import MODELS, Case

FIRST = 100 * MODELS  # of the fresh trainings, whose seeds no score has seen


def leavers(case: Case) -> dict[str, Float[Tensor, "group train"]]:
    """Who leaves the run: 1 for those, 0 for the others."""
    size, generator = case.size, stream("left out", case.seed)
    order = torch.randperm(size.train, generator=generator)[: size.alone]
    alone = torch.eye(size.train, dtype=torch.float64)[order.sort().values]
    shares = {f"{share} %": max(1, size.train * share // 100) for share in (5, 50)} if size.groups else {}
    return {"one": alone} | {name: drawn(size.groups, many, size.train, generator) for name, many in shares.items()}


def halves(case: Case) -> Float[Tensor, "training train"]:
    """Who is left out of each fresh training."""
    size = case.size
    return drawn(size.fresh, size.train // 2, size.train, stream("left out", case.seed, 1))


def drawn(groups: int, many: int, train: int, generator: torch.Generator) -> Float[Tensor, "group train"]:
    """So many groups of one size."""
    return (torch.rand(groups, train, generator=generator, dtype=torch.float64).argsort(1).argsort(1) < many).double()


def changes(case: Case) -> dict[str, Tensor]:
    """What is asked changes by so much when groups are left out of the run; and its outputs as they were, as `end`."""
    rerun, found = case.rerun, dict[str, Tensor]()
    for who, left in leavers(case).items():
        ends = trained(rerun, torch.cat([rerun.everyone[None], rerun.everyone - left]))
        with torch.no_grad():
            asked = torch.stack([case.of(end) for end in ends])
            found["end"] = rerun.outputs(ends[0], case.read)
        found[who] = asked[1:] - asked[0]
    return found


def fresh(case: Case) -> dict[str, Tensor]:
    """The outputs, and −ℓ, of trainings on halves, [training, point]."""
    ends = fresh_ends(case, 1 - halves(case))
    with torch.no_grad():
        outputs = [case.rerun.outputs(end, case.read) for end in ends]
        losses = [case.rerun.loss.value(each, case.targets) for each in outputs]
    return {"output": torch.stack(outputs)[:, :, 0], "-loss": -torch.stack(losses)}


def fresh_ends(case: Case, weight: Float[Tensor, "training train"]) -> Float[Tensor, "training weight"]:
    """Train from as many starts, each in an order of its own, with these weights of the examples."""
    rerun, others = case.rerun, [case.rerun_from(FIRST + k) for k in range(len(weight))]
    weights = torch.stack([rerun.flat.vector(other.start) for other in others])
    memory: Memory = {}
    for step in range(rerun.length):
        rows = torch.stack([other.batch(step).rows for other in others])
        left = weight.gather(1, rows)
        share = left * (rerun.scale / left.sum(1, keepdim=True).clamp(min=1.0))  # of nobody left there is no gradient
        with torch.no_grad(), plain_kernels():
            found = at_once(
                lambda one, of, these: gradient(rerun, one, of, these), weights, share, rows, together=AT_ONCE
            )
        weights, memory = moved(rerun, step, weights, found, memory)
    return weights
