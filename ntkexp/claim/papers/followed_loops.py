"""Followed training loops: subliminal learning from noise,
and grokking by network component."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from ntkexp.claim.papers.lazy_and_rich import share_right
from ntkexp.claim.papers.needed_examples import margins_of
from ntkexp.claim.trial import AbstractTrial, Rows
from ntkexp.component import Count
from ntkexp.data.base import AbstractSource, Split
from ntkexp.foreign_loop.follow import follow
from ntkexp.foreign_loop.trace import Trace
from ntkexp.records.claim import FIXED_POOL
from ntkexp.stream import stream


class SubliminalLearning(AbstractTrial):
    """A student that learns to classify by imitating other outputs of a teacher, on
    noise.

    A teacher is trained to classify with its first outputs. The training ignores its
    last `extra` outputs. A student with the same architecture is trained
    only to match these extra outputs, on uniform noise. The student's training is
    followed (A. Cloud et al., "Subliminal learning: language models transmit behavioral
    traits via hidden signals in data", 2025, arXiv:2507.14805).

        accuracy    the student's accuracy on the query points, minus the accuracy before training
        rise        the mean change of the margin (correct output minus mean over classes)
        miss        ‖Σᵢ 𝒮(·, zᵢ) − Δmargin‖/‖Δmargin‖, with 𝒮 the contribution of noise input zᵢ

    The column `start` is `teacher` if the student starts from the initial weights of
    the teacher, and `another` if it starts from a different random draw (a control).
    The teacher takes `taught` Adam steps and the student takes `steps`, each on 64
    examples."""

    data: AbstractSource
    width: Count = 128
    extra: Count = 20
    noise: Count = 256
    taught: Count = 200
    steps: Count = 100
    queries: Count = 40
    teaching: float = Field(1e-3, gt=0)
    learning: float = Field(3e-3, gt=0)

    def rows(self, seed: int) -> Rows:
        data = self.data.split(seed)
        generator = stream("weights", seed)
        classes = len(data.classes)
        inputs = data.train.inputs[0].numel()
        start, another = (self.network(inputs, classes, generator) for _ in range(2))

        # Train the teacher's first outputs on the classes.
        teacher = deepcopy(start)
        optimizer = torch.optim.Adam(teacher.parameters(), lr=self.teaching)
        for _ in range(self.taught):
            batch = torch.randint(len(data.train.inputs), (64,), generator=generator)
            optimizer.zero_grad()
            outputs = teacher(data.train.inputs[batch].flatten(1))[:, :classes]
            torch.autograd.backward(cross_entropy(outputs, data.train.target[batch]))
            optimizer.step()

        # Train the students to match the teacher's other outputs on inputs of noise.
        uniform = torch.rand(
            self.noise, inputs, generator=generator, dtype=torch.float64
        )
        noise = uniform * 2 - 1
        batches = [
            torch.randint(self.noise, (64,), generator=generator)
            for _ in range(self.steps)
        ]
        with torch.no_grad():
            targets = teacher(noise)[:, classes:]
        before = accuracy(start, data.query, classes)
        for name, first in {"teacher": start, "another": another}.items():
            student = deepcopy(first)
            learned = self.learn(student, noise, targets, batches, data.query, classes)
            gained = accuracy(student, data.query, classes) - before
            yield {"start": name, **learned, "accuracy": gained}

    def network(
        self, inputs: int, classes: int, generator: torch.Generator
    ) -> nn.Sequential:
        """Return a network with two hidden layers and `classes + extra` outputs."""
        sizes = (inputs, self.width, self.width, classes + self.extra)
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            linear = nn.Linear(before, after, dtype=torch.float64)
            normal = torch.randn(after, before, generator=generator)
            with torch.no_grad():
                linear.weight.copy_(normal * (2 / before) ** 0.5)
                linear.bias.zero_()
            layers += [linear, nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def learn(
        self,
        student: nn.Sequential,
        noise: Tensor,
        targets: Tensor,
        batches: Sequence[Tensor],
        query: Split,
        classes: int,
    ) -> dict[str, float]:
        """Train the student, and return `rise` and `miss` of the margins
        on the query points."""
        points = query.inputs[: self.queries].flatten(1)
        labels = query.target[: self.queries]

        def margin(outputs: Tensor, call: object) -> Tensor:
            right = outputs[torch.arange(len(labels)), labels]
            return right - outputs[:, :classes].mean(1)

        optimizer = torch.optim.Adam(student.parameters(), lr=self.learning)
        with follow(student, optimizer, queries=points, measure=margin) as trace:
            for batch in batches:
                optimizer.zero_grad()
                outputs = student(noise[batch])[:, classes:]
                torch.autograd.backward(mse_loss(outputs, targets[batch]))
                optimizer.step()
        contributions = trace.attribute(quiet=True)
        change = contributions["change"]
        missed = contributions["contribution"].sum("example") - change
        miss = np.linalg.norm(missed) / np.linalg.norm(change)
        return {"rise": float(change.mean()), "miss": float(miss)}


def accuracy(network: nn.Module, split: Split, classes: int) -> float:
    """Return the accuracy of the first `classes` outputs, or NaN if one is not finite."""
    with torch.no_grad():
        outputs = network(split.inputs.flatten(1))[:, :classes]
    return share_right(outputs, split.target)


class Adder(nn.Module):
    """A network for modular addition. It adds the embeddings of both summands, and
    applies a hidden ReLU layer and a readout."""

    def __init__(
        self, modulus: int, embedding: int, width: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(modulus, embedding, dtype=torch.float64)
        self.hidden = nn.Linear(embedding, width, dtype=torch.float64)
        self.readout = nn.Linear(width, modulus, dtype=torch.float64)
        with torch.no_grad():
            self.table.weight.copy_(
                torch.randn(modulus, embedding, generator=generator)
            )
            # Uniform in ±1/√n for n inputs, as PyTorch initialises linear layers
            for layer in (self.hidden, self.readout):
                for weight in layer.parameters():
                    drawn = torch.rand(
                        weight.shape, generator=generator, dtype=torch.float64
                    )
                    weight.copy_((2 * drawn - 1) / layer.in_features**0.5)

    def forward(self, pairs: Tensor) -> Tensor:
        summed = self.table(pairs).sum(1)
        outputs: Tensor = self.readout(torch.relu(self.hidden(summed)))
        return outputs


class GrokkingByComponent(AbstractTrial):
    """The components through which a network memorises
    and then generalises modular addition.

    A network with embeddings, a hidden layer and a readout learns sums modulo `modulus`
    from four fifths of all pairs, by full-batch AdamW. Its training is followed. The
    phase `memorising` ends when all training sums are correct for the first time. The
    phase `generalising` follows.

        came        the change of the held-out sums' margins that one component caused in the phase,
                    decay included
        accuracy    the accuracy on held-out sums at the end of the phase
        miss        ‖Σ came − Δmargin‖/‖Δmargin‖, over all components and steps

    The margin is the correct output minus the mean of the other outputs. If the
    training sums are never all correct, the numbers are NaN."""

    modulus: Count = 31
    embedding: Count = 32
    width: Count = 128
    steps: Count = 350
    queries: Count = 10
    step_size: float = Field(0.01, gt=0)
    decay: float = Field(2.0, ge=0)

    @property
    def draws(self) -> str:
        pairs = self.modulus * (self.modulus + 1) // 2
        return (
            f"each drawing weights and data{FIXED_POOL}{pairs:,} sums modulo "
            f"{self.modulus}"
        )

    def rows(self, seed: int) -> Rows:
        generator = stream("weights", seed)
        # Enumerate all pairs (a, b) with a ≤ b
        pairs = torch.combinations(torch.arange(self.modulus), with_replacement=True)
        pairs = pairs[torch.randperm(len(pairs), generator=stream("order", seed))]
        sums = pairs.sum(1) % self.modulus
        learned = len(pairs) * 4 // 5
        answers = sums[learned:][: self.queries]

        def margin(outputs: Tensor, call: object) -> Tensor:
            return margins_of(outputs, answers)

        # Train, and record the accuracies on training
        # and held-out sums before each step.
        model = Adder(self.modulus, self.embedding, self.width, generator)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.step_size, weight_decay=self.decay
        )
        new_pairs = pairs[learned:][: self.queries]
        train_accuracies: list[float] = []
        new_accuracies: list[float] = []
        with follow(model, optimizer, queries=new_pairs, measure=margin) as trace:
            for _ in range(self.steps):
                with torch.no_grad():
                    outputs = model(pairs)
                train_accuracies.append(share_right(outputs[:learned], sums[:learned]))
                new_accuracies.append(share_right(outputs[learned:], sums[learned:]))
                optimizer.zero_grad()
                torch.autograd.backward(
                    cross_entropy(model(pairs[:learned]), sums[:learned])
                )
                optimizer.step()

        if 1 not in train_accuracies:
            numbers = dict.fromkeys(("accuracy", "came", "miss"), math.nan)
            return [
                {"phase": phase, "component": "all", **numbers}
                for phase in ("memorising", "generalising")
            ]
        return phase_rows(trace, train_accuracies.index(1), new_accuracies)


def phase_rows(trace: Trace, known: int, new_accuracies: Sequence[float]) -> Rows:
    """Return the rows of both phases. `known` is the first step
    with all training sums correct."""
    contributions = trace.attribute(by="module", quiet=True)
    came = contributions["by_component_step"].isel(out=0)
    change = contributions["change"].isel(out=0)
    missed = came.sum(("component", "step")) - change
    miss = float(np.linalg.norm(missed) / np.linalg.norm(change))
    phases = (
        ("memorising", slice(0, known), new_accuracies[known]),
        ("generalising", slice(known, None), new_accuracies[-1]),
    )
    for phase, steps, accurate in phases:
        parts = came.isel(step=steps).sum("step").mean("query")
        for name in parts["component"].to_numpy().tolist():
            part = float(parts.sel(component=name))
            row = {"phase": phase, "component": name, "came": part}
            yield {**row, "accuracy": accurate, "miss": miss}
