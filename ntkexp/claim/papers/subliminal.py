"""Subliminal learning: a student learns a teacher's extra outputs on noise, and with them what the teacher knows. Its
training is followed, so that the part of each noise picture is known.

A. Cloud et al., "Subliminal learning: language models transmit behavioral traits via hidden signals in data" (2025),
arXiv:2507.14805.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import pairwise

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from ntkexp.claim.trial import AbstractTrial
from ntkexp.component import Count
from ntkexp.data.base import AbstractSource, Split
from ntkexp.foreign_loop.follow import follow
from ntkexp.records.sweep import Level
from ntkexp.stream import stream


class SubliminalLearning(AbstractTrial):
    """What a student learns of classes that it never sees, from pictures of noise:

    A teacher learns classes by its first outputs. A student, an untrained network of the same form, learns the
    `extra` outputs of the teacher on uniform noise; its training is followed.

        accuracy    of the student's first outputs on new points, less that of the teacher's start
        rise        mean change of the margin: of the right class's output against the mean of all classes'
        miss        ‖Σᵢ 𝒮(·, zᵢ) − Δmargin‖/‖Δmargin‖, z the noise pictures

    Rows are told apart by the student's `start`: the `teacher`'s own, or `another`. The teacher learns for `taught`
    steps of Adam, the student for `steps`, with 64 examples each.
    """

    data: AbstractSource
    width: Count = 128
    extra: Count = 20
    noise: Count = 256
    taught: Count = 200
    steps: Count = 100
    queries: Count = 40
    teaching: float = Field(1e-3, gt=0)
    learning: float = Field(3e-3, gt=0)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data, generator = self.data.split(seed), stream("weights", seed)
        classes, inputs = len(data.classes), data.train.inputs[0].numel()
        start, another = (self.network(inputs, classes, generator) for _ in range(2))

        # The teacher learns the classes by its first outputs.
        teacher = deepcopy(start)
        optimizer = torch.optim.Adam(teacher.parameters(), lr=self.teaching)
        for _ in range(self.taught):
            batch = torch.randint(len(data.train.inputs), (64,), generator=generator)
            optimizer.zero_grad()
            outputs = teacher(data.train.inputs[batch].flatten(1))[:, :classes]
            torch.autograd.backward(cross_entropy(outputs, data.train.target[batch]))
            optimizer.step()

        # Students learn its other outputs on noise.
        noise = torch.rand(self.noise, inputs, generator=generator, dtype=torch.float64) * 2 - 1
        batches = [torch.randint(self.noise, (64,), generator=generator) for _ in range(self.steps)]
        with torch.no_grad():
            targets = teacher(noise)[:, classes:]
        before = accuracy(start, data.probe, classes)
        rows: list[Mapping[str, Level]] = []
        for name, first in {"teacher": start, "another": another}.items():
            student = deepcopy(first)
            rows.append({"start": name, **self.learn(student, noise, targets, batches, data.probe, classes)})
            rows[-1] = {**rows[-1], "accuracy": accuracy(student, data.probe, classes) - before}
        return rows

    def network(self, inputs: int, classes: int, generator: torch.Generator) -> nn.Sequential:
        """Two hidden layers, and more outputs than there are classes."""
        sizes = (inputs, self.width, self.width, classes + self.extra)
        layers: list[nn.Module] = []
        for one, other in pairwise(sizes):
            linear = nn.Linear(one, other, dtype=torch.float64)
            with torch.no_grad():
                linear.weight.copy_(torch.randn(other, one, generator=generator) * (2 / one) ** 0.5)
                linear.bias.zero_()
            layers += [linear, nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def learn(
        self,
        student: nn.Sequential,
        noise: Tensor,
        targets: Tensor,
        batches: Sequence[Tensor],
        probe: Split,
        classes: int,
    ) -> dict[str, float]:
        """Train the student, and add up what each noise picture did to the margins."""
        points, labels = probe.inputs[: self.queries].flatten(1), probe.target[: self.queries]

        def margin(outputs: Tensor, call: object) -> Tensor:
            return outputs[torch.arange(len(labels)), labels] - outputs[:, :classes].mean(1)

        optimizer = torch.optim.Adam(student.parameters(), lr=self.learning)
        with follow(student, optimizer, queries=points, measure=margin) as trace:
            for batch in batches:
                optimizer.zero_grad()
                torch.autograd.backward(mse_loss(student(noise[batch])[:, classes:], targets[batch]))
                optimizer.step()
        found = trace.attribute(quiet=True)
        parts, change = (torch.from_numpy(found[name].to_numpy().copy()) for name in ("contribution", "change"))
        miss = (parts.sum(-1) - change).norm() / change.norm()
        return {"rise": change.mean().item(), "miss": miss.item()}


def accuracy(network: nn.Module, split: Split, classes: int) -> float:
    """The share of points whose class has the largest of the first outputs."""
    with torch.no_grad():
        outputs = network(split.inputs.flatten(1))[:, :classes]
    return float((outputs.argmax(1) == split.target).double().mean())
