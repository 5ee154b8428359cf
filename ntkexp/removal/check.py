"""The leave-out check: what effects predict is held against trainings that leave examples out.

Left out are the most influential examples (1, 10, 5 % of them) and as many random ones, some twice. Leaving out a group
is predicted to change an output by the sum of the effects of its members. Where trainings are cheaper than effects,
every example is left out by itself as well: then nothing has to be predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.record.taping import plain_kernels
from ntkexp.records.leave_out import LeaveOut, LeftOut
from ntkexp.removal.rerun import Rerun
from ntkexp.removal.train import trained
from ntkexp.stream import stream


def sizes(examples: int) -> list[int]:
    """How many examples are left out at a time: a quarter of them at most.

    >>> sizes(1000), sizes(40), sizes(2)
    ([1, 10, 50], [1, 2, 10], [])
    """
    return [size for size in sorted({1, 10, examples // 20}) if 0 < size <= examples / 4]


def groups(influence: Float[Tensor, " train"], seed: int) -> tuple[LeftOut, ...]:
    """Choose who is left out: by influence, and by chance once or twice."""
    order, count = influence.argsort(descending=True, stable=True).tolist(), len(influence)
    found = [LeftOut(influential=True, examples=tuple(order[:size])) for size in sizes(count)]
    generator = stream("removals", seed)
    for size in sizes(count):
        for _ in range(1 if size == 1 else 2):
            chance = torch.randperm(count, generator=generator)[:size].tolist()
            found.append(LeftOut(influential=False, examples=tuple(chance)))
    return tuple(found)


def changes(
    rerun: Rerun, removals: Sequence[Sequence[int]], inputs: Float[Tensor, "point *shape"]
) -> Float[Tensor, "removal point out"]:
    """How the outputs change when each of these groups is left out."""
    outputs = outputs_without(rerun, removals, inputs)
    return outputs[1:] - outputs[0]


def outputs_without(
    rerun: Rerun, removals: Sequence[Sequence[int]], inputs: Float[Tensor, "point *shape"]
) -> Float[Tensor, "training point out"]:
    """The outputs of everyone's training, and of those without each of these groups: all are trained at once."""
    weight = torch.stack([rerun.everyone, *(rerun.without(list(group)) for group in removals)])
    ends = (end for some in torch.split(weight, rerun.directions) for end in trained(rerun, some))
    with torch.no_grad(), plain_kernels():
        return torch.stack([rerun.outputs(end, inputs) for end in ends])


def leave_out(
    rerun: Rerun,
    effect: Float[Tensor, "point some train"],
    inputs: Float[Tensor, "point *shape"],
    probe: Sequence[int],
    outs: Sequence[int],
    *,
    everyone: bool,
) -> LeaveOut:
    """Hold effects on these outputs against trainings; `probe` names the points."""
    removals = groups(sizes_of(effect), rerun.seed)
    if everyone:
        alone = (LeftOut(influential=False, examples=(k,)) for k in range(rerun.examples))
        removals = (*alone, *(each for each in removals if len(each.examples) > 1))
    actual = changes(rerun, [each.examples for each in removals], inputs)[:, :, list(outs)]
    return beside(effect, removals, actual, probe)


def groups_left_out(
    effect: Float[Tensor, "point some train"],
    seed: int,
    changes: Callable[[Sequence[Sequence[int]]], Float[Tensor, "removal point some"]],
    probe: Sequence[int],
) -> LeaveOut | None:
    """Hold sums of effects against trainings without groups, if there are enough examples: each by itself is true."""
    several = [each for each in groups(sizes_of(effect), seed) if len(each.examples) > 1]
    return beside(effect, several, changes([each.examples for each in several]), probe) if several else None


def sizes_of(effect: Float[Tensor, "point some train"]) -> Float[Tensor, " train"]:
    """How large the effects of each example are, at all points and outputs together."""
    return effect.square().sum((0, 1)).sqrt()


def beside(
    effect: Float[Tensor, "point out train"],
    removals: Sequence[LeftOut],
    actual: Float[Tensor, "removal point out"],
    probe: Sequence[int],
) -> LeaveOut:
    """Put what effects foretell of each removal beside what came of it."""
    predicted = [effect[:, :, list(each.examples)].sum(2) for each in removals]
    return LeaveOut(
        removals=tuple(removals),
        probe=tuple(probe),
        predicted=torch.stack(predicted).double().cpu().numpy(),
        actual=actual.double().cpu().numpy(),
    )
