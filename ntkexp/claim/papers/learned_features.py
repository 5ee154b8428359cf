"""Features that a network learns: the gradients of its outputs by its weights.

NearestExamples    compare the nearest training examples in several spaces
AlignedLayers      measure the alignment of each layer's kernel with the labels
MeansByLevel       draw the means of both
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product

import pandas as pd
import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn
from torch.func import jacrev, vmap

from ntkexp.claim.judged import AbstractPicture, Figure, JudgedClaim
from ntkexp.claim.look import MAIN
from ntkexp.claim.papers.lazy_and_rich import (
    FollowedMode,
    LearningStep,
    ScaledDescent,
    ScaledFunction,
    refuse_unclassified,
)
from ntkexp.claim.quantity import example_ids
from ntkexp.claim.trial import NetworkTrial, Rows
from ntkexp.component import Count
from ntkexp.data.base import Data, Split
from ntkexp.library import tangent_kernel
from ntkexp.loss import centred_one_hot
from ntkexp.mistake import Mistake
from ntkexp.model.functional import function_of, weights_of
from ntkexp.path.components import components_of
from ntkexp.shapes import Weights
from ntkexp.statistics import alignment
from ntkexp.stream import stream
from ntkexp.text import short


class LearningNetwork:
    """The function f = α (g(θ) − g(θ₀)) of a module g with an output for each class."""

    def __init__(self, module: nn.Module, alpha: float) -> None:
        self.module = module
        self.start = weights_of(module)
        self.scaled = ScaledFunction(function_of(module), self.start, alpha)

    def outputs(self, weights: Weights, x: Tensor) -> Float[Tensor, "point out"]:
        return self.scaled.outputs(weights, x).detach()

    def kernel(
        self, weights: Weights, x1: Tensor, x2: Tensor
    ) -> Float[Tensor, "point train"]:
        """Return the tangent kernel of g, summed over its outputs. The kernel of f is
        α² times this kernel."""
        kernel = tangent_kernel(self.module, x1, x2, weights=weights, outputs="trace")
        return kernel[:, 0, :, 0]

    def jacobians(
        self, weights: Weights, x: Tensor
    ) -> dict[str, Float[Tensor, "point out weight"]]:
        """Return the Jacobian of g at each point, by layer. A layer is a module with
        weights of its own. Layers have the order of the module's parameters."""

        def outputs(at: Weights, point: Tensor) -> Float[Tensor, " out"]:
            return self.scaled.function(at, point[None])[0]

        by_parameter = vmap(jacrev(outputs), (None, 0))(weights, x)
        layers = components_of("module", weights)
        return {
            layer: torch.cat(
                [by_parameter[name].flatten(2) for name in weights if name in names], 2
            )
            for layer, names in layers.items()
        }


class LearnedClasses(NetworkTrial):
    """A network that learns classes, for `NearestExamples` and `AlignedLayers`.

    The network f = α (g(θ) − g(θ₀)) has an output for each class. It learns by
    full-batch gradient descent (`ScaledDescent`), with the loss ½‖f − y‖² and targets y
    one-hot minus 1/C, until the mean loss has fallen to the fraction `until` of its
    initial value. A small α makes training rich, a large α lazy."""

    alpha: float = Field(0.1, gt=0)
    steps: Count = 8000
    until: float = Field(0.1, gt=0, lt=1)
    fraction: float = Field(0.4, gt=0, lt=1)
    stride: float = Field(0.02, gt=0)

    def network(self, data: Data, seed: int) -> LearningNetwork:
        shape = tuple(data.train.inputs.shape[1:])
        module = self.model.module(
            self.init, shape, len(data.classes), stream("weights", seed)
        )
        return LearningNetwork(module.eval(), self.alpha)

    def learn(
        self,
        network: LearningNetwork,
        x: Float[Tensor, " train *shape"],
        y: Float[Tensor, "train out"],
    ) -> Iterator[LearningStep]:
        """Yield training steps, and one more step after them. The training ends at the
        weights before the last step that is yielded. It has at most `steps` steps."""
        followed = FollowedMode(network.scaled.function, x, y)
        descent = ScaledDescent(
            network.scaled, x, y, followed.largest, self.fraction, self.stride
        )
        for step in descent.path(network.start, self.steps + 1):
            yield step
            if self.has_learned(step, y):
                return

    def has_learned(self, step: LearningStep, y: Float[Tensor, "train out"]) -> bool:
        """Return whether ‖f − y‖² ≤ until · ‖y‖² before the step."""
        return bool(step.residual.square().sum() <= self.until * y.square().sum())


SPACES = ("path", "end", "start", "angle", "distance")


class NearestExamples(LearnedClasses):
    """The class of the training example that is nearest to a query, in several spaces.

    A network learns classes (see `LearnedClasses`). Each test example is a query x. It
    has a row for each `space`, where the nearest training example x′ has the largest
    similarity:

        path        cosine of the path kernel 𝒦 = ∫ Θ_t dt over the training time t = Σ η
        end         cosine of Θ_T
        start       cosine of Θ_0
        angle       cosine of the inputs
        distance    −‖x − x′‖

        Θ(x, x′) = Σ_c ∇f_c(x)·∇f_c(x′)        cosine of K: K(x, x′)/√(K(x, x) K(x′, x′))

        same_class         1 if x and x′ have the same class, else 0
        same_prediction    1 if the network gives x the class that x′ had in training, else 0

    The integral over t follows the trapezoidal rule over every `every`-th step and the
    end. If `permuted` is true, the network learns the same labels in a random order;
    `same_class` still compares the true classes. If the network does not learn within
    `steps`, the numbers are NaN.

    P. Domingos, "Every model learned by gradient descent is approximately a kernel
    machine" (2020), arXiv:2012.00152."""

    every: Count = 25
    permuted: bool = False

    def rows(self, seed: int) -> Rows:
        data = self.data.split(seed)
        refuse_unclassified(data, least=2)
        labels = self.learned_labels(data.train, seed)
        y = centred_one_hot(labels, len(data.classes))
        network = self.network(data, seed)
        times, points = self.path(network, data.train.inputs, y)

        ids = example_ids(data.test.shown.numpy())
        if not self.has_learned(points[-1], y):
            unknown = dict.fromkeys(("same_class", "same_prediction"), math.nan)
            for space, example in product(SPACES, ids):
                yield {"space": space, "example": example, **unknown}
            return
        predicted = network.outputs(points[-1].before, data.test.inputs).argmax(1)
        kernels = self.kernels(network, times, points, data)
        for space, nearest in nearest_examples(kernels, data).items():
            same_class = data.train.target[nearest] == data.test.target
            same_prediction = labels[nearest] == predicted
            for query, example in enumerate(ids):
                yield {
                    "space": space,
                    "example": example,
                    "same_class": float(same_class[query]),
                    "same_prediction": float(same_prediction[query]),
                }

    def learned_labels(self, train: Split, seed: int) -> Int[Tensor, " train"]:
        """Return the labels that the network learns: the true labels, or the same
        labels in a random order."""
        if not self.permuted:
            return train.target
        order = torch.randperm(
            len(train.target), generator=stream("permuted labels", seed)
        )
        return train.target[order]

    def path(
        self,
        network: LearningNetwork,
        x: Float[Tensor, " train *shape"],
        y: Float[Tensor, "train out"],
    ) -> tuple[Float[Tensor, " point"], list[LearningStep]]:
        """Train. Return every `every`-th step and the last step of `learn`, and the
        training time Σ η before each of them."""
        time = 0.0
        times = []
        points = []
        for number, step in enumerate(self.learn(network, x, y)):
            if number % self.every == 0:
                times.append(time)
                points.append(step)
            time += step.size
        if points[-1] is not step:
            times.append(time - step.size)
            points.append(step)
        return torch.tensor(times, dtype=y.dtype), points

    def kernels(
        self,
        network: LearningNetwork,
        times: Float[Tensor, " point"],
        points: list[LearningStep],
        data: Data,
    ) -> Mapping[str, Float[Tensor, "both train"]]:
        """Return the path kernel, and the tangent kernels Θ_T and Θ_0, of all examples
        with the training examples."""
        x = data.train.inputs
        both = torch.cat([data.test.inputs, x])
        kernels = torch.stack([network.kernel(step.before, both, x) for step in points])
        path = torch.trapezoid(kernels, times, dim=0)
        return {"path": path, "end": kernels[-1], "start": kernels[0]}


def nearest_examples(
    kernels: Mapping[str, Float[Tensor, "both train"]], data: Data
) -> Mapping[str, Int[Tensor, " query"]]:
    """Return the index of the nearest training example of each query, for each of
    `SPACES`."""
    x = data.train.inputs.flatten(1)
    queries = data.test.inputs.flatten(1)
    similarities = {name: cosines(kernel) for name, kernel in kernels.items()}
    similarities["angle"] = cosines(torch.cat([queries, x]) @ x.t())
    exact = "donot_use_mm_for_euclid_dist"
    similarities["distance"] = -torch.cdist(queries, x, compute_mode=exact)
    return {space: similarities[space].argmax(1) for space in SPACES}


def cosines(
    kernel: Float[Tensor, "both train"],
) -> Float[Tensor, "query train"]:
    """Return K(x, x′)/√K(x′, x′) for queries x and training examples x′. This is the
    cosine of K times √K(x, x), a factor that does not change which x′ is nearest.

    The last rows of the kernel are the training examples.

    >>> cosines(torch.tensor([[2.0, 3.0], [1.0, 0.0], [0.0, 9.0]])).tolist()
    [[2.0, 1.0]]
    """
    train = kernel.shape[1]
    diagonal = kernel[-train:].diagonal()
    return kernel[:-train] / diagonal.sqrt()


class AlignedLayers(LearnedClasses):
    """The alignment of each layer's kernel with the labels, before and after training.

    A network learns classes (see `LearnedClasses`). There is a row for each `layer`,
    counted from 1 at the input, and for each `moment`, `start` and `end`. The column
    `place` is `outer` for the first and the last layer, and `hidden` for the others.

        alignment    yᵀK y/(‖K‖ ‖y‖²),  K = J Jᵀ
        J            the Jacobian of the outputs by the weights of the layer, with a row for each
                     training example and output, minus its mean over examples
        y            the one-hot labels, minus their mean over examples

    For one output, this is the centred alignment (CKA) of the layer's tangent kernel
    with the labels' kernel. If the network does not learn within `steps`, the numbers
    are NaN.

    A. Baratin et al., "Implicit regularization via neural feature alignment" (2021),
    arXiv:2008.00938."""

    def rows(self, seed: int) -> Rows:
        data = self.data.split(seed)
        if len(data.classes) < 2:
            raise Mistake("trial.data: choose data of classes, such as data=digits")
        x = data.train.inputs
        y = centred_one_hot(data.train.target, len(data.classes))
        network = self.network(data, seed)
        *_, last = self.learn(network, x, y)
        for moment, weights in (("start", network.start), ("end", last.before)):
            jacobians = network.jacobians(weights, x)
            if len(jacobians) < 3:
                raise Mistake(
                    f"trial.model has {len(jacobians)} layers with weights; "
                    "choose one with hidden weights, such as depth: 2"
                )
            for number, jacobian in enumerate(jacobians.values(), 1):
                is_outer = number in {1, len(jacobians)}
                value = jacobian_alignment(jacobian, y - y.mean(0))
                yield {
                    "layer": number,
                    "place": "outer" if is_outer else "hidden",
                    "moment": moment,
                    "alignment": value if self.has_learned(last, y) else math.nan,
                }


def jacobian_alignment(
    jacobian: Float[Tensor, "train out weight"], y: Float[Tensor, "train out"]
) -> float:
    """Return yᵀK y/(‖K‖ ‖y‖²) for K = J Jᵀ, with the Jacobian J minus its mean over
    examples.

    >>> jacobian = torch.tensor([[[4.0]], [[2.0]]])
    >>> jacobian_alignment(jacobian, torch.tensor([[0.5], [-0.5]]))
    1.0
    """
    centred = (jacobian - jacobian.mean(0)).flatten(0, 1)
    target = y.flatten()
    return alignment(centred @ centred.t(), torch.outer(target, target))


class MeansByLevel(AbstractPicture):
    """Means of judged numbers from 0 to 1, by the levels of a column `along`.

    Each look of `panels` has a panel with this title. `levels` maps the levels to their
    labels. If `by` names a column, each of its values in `lines` has a line with this
    name."""

    has_judged_rows_only = True

    title: str = Field(min_length=1)
    panels: dict[str, str] = Field(min_length=1)
    along: str
    levels: dict[str, str] = Field(min_length=2)
    by: str = ""
    lines: dict[str, str] = Field(default_factory=dict)
    xlabel: str
    ylabel: str

    def figure(self, judged: JudgedClaim) -> Figure:
        from ntkexp.claim.paper_figures import draw_means_by_level  # noqa: PLC0415  loads matplotlib

        panels = {
            title: self.seeds_by_level(judged.tables[look])
            for look, title in self.panels.items()
        }
        answers = []
        for line, of_levels in panels[self.panels[MAIN]].items():
            means = [
                f"{short(sum(figures) / len(figures))} ({level})"
                for level, figures in of_levels.items()
            ]
            answers.append(f"{line or self.panels[MAIN]}: {', '.join(means)}")
        return draw_means_by_level(
            panels, (self.xlabel, self.ylabel), self.title, "; ".join(answers)
        )

    def seeds_by_level(self, table: pd.DataFrame) -> dict[str, dict[str, list[float]]]:
        """Return the mean of each seed, by the names of lines and levels."""
        groups = {"": table}
        if self.by:
            groups = {
                name: table[table[self.by] == value]
                for value, name in self.lines.items()
            }
        return {
            name: {
                label: seed_means(rows[rows[self.along].astype(str) == level])
                for level, label in self.levels.items()
            }
            for name, rows in groups.items()
        }

    def here(self, judged: JudgedClaim) -> str:
        return "dots are means over seeds, with 95 % intervals."


def seed_means(rows: pd.DataFrame) -> list[float]:
    """Return the mean value of each seed."""
    means: list[float] = (
        rows["value"].astype(float).groupby(rows["seed"]).mean().tolist()
    )
    return means
