"""The end of training: the minimum that is reached, closed forms of training,
and its cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn
from torch.func import grad, hessian, vmap

from ntkexp.claim.papers.lazy_and_rich import (
    LearnedTask,
    ScaledNetwork,
    principal_maps,
    share_right,
    task_of,
)
from ntkexp.claim.papers.wide_networks import network_of_width
from ntkexp.claim.trial import AbstractTrial, NetworkTrial, Rows
from ntkexp.component import Count
from ntkexp.data.base import AbstractSource, Data
from ntkexp.effects.curvature import load_forward_mode
from ntkexp.effects.trajectory import flat_like
from ntkexp.limit.infinite_kernel import infinite_kernel
from ntkexp.loss import centred_one_hot
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractLayered, LearningTask
from ntkexp.shapes import Weights
from ntkexp.stream import stream


class EndOfTraining(NetworkTrial):
    """The end point of gradient descent, by width.

    A network f = α (g(θ) − g(θ_0)) learns two classes with loss L, the mean of ½(f −
    y)², until L has fallen to the fraction `until` of its initial value. A large α
    makes training lazy.

        gradient      ‖∇L(θ_T)‖/‖∇L(θ_0)‖
        curvature     λ_min/λ_max of the Hessian of L at θ_T, negative at a saddle point
        moved         ‖θ_T − θ_0‖/‖θ_T‖
        miss          ‖θ_T − θ_0 − Σᵢ sᵢ‖/‖θ_T − θ_0‖, where sᵢ = −Σ_t η_t ∇ℓᵢ(θ_t) is the change
                      of the weights that example i caused
        norm          ‖θ_T − θ_0‖²/(f_T(X)ᵀ K_0⁻¹ f_T(X)), 1 if the weights changed as little as the
                      linearised network allows for the same f_T(X)

    If the network does not learn its examples within `steps`, the numbers are NaN. The
    Hessian is computed only if `curvature` is true."""

    widths: tuple[Count, ...] = Field((64,), min_length=1)
    alpha: float = Field(1.0, gt=0)
    steps: Count = 4000
    until: float = Field(1e-4, gt=0)
    fraction: float = Field(0.4, gt=0, lt=1)
    curvature: bool = False

    def rows(self, seed: int) -> Rows:
        return [{"width": width, **self.row(seed, width)} for width in self.widths]

    def row(self, seed: int, width: int) -> Mapping[str, float]:
        data = self.data.split(seed)
        if len(data.classes) != 2:
            raise Mistake("trial.data: choose data of two classes, such as data=digits")
        shape = LearningTask(tuple(data.train.inputs.shape[1:]), 1)
        generator = stream("weights", seed, width)
        module = network_of_width(width, self.model, self.init, shape, generator)
        learner = Learner(ScaledNetwork(module, self.alpha), task_of(data.train))
        end, sums = self.train(learner)
        if not float(learner.loss(end)) <= self.until * float(
            learner.loss(learner.start)
        ):
            return dict.fromkeys(
                ("gradient", "curvature", "moved", "miss", "norm"), float("nan")
            )

        # θ_T − θ_0, compared with the change of least norm that gives f_T(X)
        # at first order
        last = learner.vector(end)
        change = last - learner.vector(learner.start)
        numbers = {
            "gradient": learner.slope(end) / learner.slope(learner.start),
            "moved": float(change.norm() / last.norm()),
            "miss": float((change - learner.vector(sums)).norm() / change.norm()),
            "norm": float(change.square().sum() / learner.least_change(end)),
        }
        if not self.curvature:
            return numbers

        # Compute λ_min/λ_max of the Hessian of L
        def loss(vector: Tensor) -> Tensor:
            return learner.loss(flat_like(end).weights(vector))

        load_forward_mode()
        values = torch.linalg.eigvalsh(hessian(loss)(last))
        return {**numbers, "curvature": float(values[0] / values[-1])}

    def train(self, learner: Learner) -> tuple[Weights, Weights]:
        """Train. Return the final weights θ_T, and Σᵢ sᵢ, the sum of the changes that
        single examples caused."""
        x = learner.task.inputs
        y = learner.task.targets
        gradients = vmap(grad(learner.loss_of_one), (None, 0, 0))
        end = learner.start
        added = {
            name: weight.new_zeros(len(x), *weight.shape)
            for name, weight in end.items()
        }
        until = self.until * float(learner.loss(end).detach())
        for step in learner.network.learn(
            learner.task, self.steps, self.fraction, until
        ):
            # sᵢ ← sᵢ − η ∇ℓᵢ
            size = step.size / (self.alpha**2 * len(x))
            for name, gradient in gradients(step.before, x, y).items():
                added[name] -= size * gradient
            end = step.after
        return end, {name: changes.sum(0) for name, changes in added.items()}


@dataclass(frozen=True)
class Learner:
    """A network f and its task, with the mean of ½(f − y)² as loss."""

    network: ScaledNetwork
    task: LearnedTask

    @property
    def start(self) -> Weights:
        return self.network.start

    def vector(self, weights: Weights) -> Float[Tensor, " weight"]:
        return flat_like(self.start).vector(weights).detach()

    def loss(self, weights: Weights) -> Tensor:
        """Return the loss, the mean of ½(f − y)² over the training examples."""
        missed = self.network.outputs(weights, self.task.inputs) - self.task.targets
        return missed.square().mean() / 2

    def loss_of_one(self, weights: Weights, point: Tensor, target: Tensor) -> Tensor:
        missed = self.network.outputs(weights, point[None]) - target
        return missed.square().sum() / 2

    def slope(self, weights: Weights) -> float:
        """Return the norm of the loss gradient."""
        return float(self.vector(grad(self.loss)(weights)).norm())

    def least_change(self, weights: Weights) -> Tensor:
        """Return f(X)ᵀ K_0⁻¹ f(X) at the training examples X. K_0 is the tangent kernel
        of f at initialisation."""
        x = self.task.inputs
        outputs = self.network.outputs(weights, x).detach() / self.network.scaled.alpha
        kernel = self.network.kernel(self.start, x, x)
        least: Tensor = outputs @ torch.linalg.solve(kernel, outputs)
        return least


class LinearModes(AbstractTrial):
    """The modes of a deep linear network during training,
    compared with their closed form.

    A linear network W₂W₁ learns classes y from whitened inputs x, with small steps. Its modes are
    the singular vectors u_k, v_k of the correlation Σ of y with x, and a_k is the strength of mode
    k:

        Σ = E y xᵀ = Σ_k s_k u_k v_kᵀ,    a_k = u_kᵀ W₂W₁ v_k
        a_k(t) = s_k/(1 + (s_k/a_k(0) − 1) e^(−2 s_k t))

        miss    √(mean_t (a_k(t) − closed form)²)/s_k, averaged over modes k

    Time t = 0 is the moment when a_k first exceeds `from_` · s_k, and the comparison
    starts there. Initial weights are Gaussian, with standard deviation `small`/√width
    if the column `start` is `small`, and `large`/√width if it is `large`.

    A. Saxe, J. McClelland & S. Ganguli, "Exact solutions to the nonlinear dynamics of
    learning in deep linear neural networks" (2013), arXiv:1312.6120."""

    data: AbstractSource
    width: Count = 64
    small: float = Field(0.01, gt=0)
    large: float = Field(1.0, gt=0)
    from_: float = Field(0.05, gt=0, lt=1)
    step_size: float = Field(0.02, gt=0)
    time: float = Field(60.0, gt=0)

    def rows(self, seed: int) -> Rows:
        data = self.data.split(seed)
        _, white = principal_maps(data.train.inputs.flatten(1))
        x = data.train.inputs.flatten(1) @ white
        y = centred_one_hot(data.train.target, len(data.classes))
        u, s, v = torch.linalg.svd(y.t() @ x / len(x), full_matrices=False)
        # Centred targets of C classes have rank C − 1, and so C − 1 modes.
        u = u[:, : y.shape[1] - 1]
        s = s[:-1]
        v = v[: y.shape[1] - 1]
        modes = (u, s, v)
        return [
            {"start": "small", "miss": self.miss(self.small, modes, seed)},
            {"start": "large", "miss": self.miss(self.large, modes, seed)},
        ]

    def miss(
        self, scale: float, modes: tuple[Tensor, Tensor, Tensor], seed: int
    ) -> float:
        u, s, v = modes
        generator = stream("weights", seed)

        def drawn(rows: int, columns: int) -> Tensor:
            normal = torch.randn(rows, columns, generator=generator, dtype=s.dtype)
            weights: Tensor = normal * scale / self.width**0.5
            return weights

        def strengths(first: Tensor, second: Tensor) -> Float[Tensor, " mode"]:
            # a_k = u_kᵀ W₂W₁ v_k
            products: Tensor = torch.einsum("ck,ch,hr,kr->k", u, second, first, v)
            return products

        # Gradient descent on E ½‖W₂W₁x − y‖² with E xxᵀ = 1:
        # W₁ ← W₁ + η W₂ᵀ(Σ − W₂W₁),  W₂ ← W₂ + η (Σ − W₂W₁)W₁ᵀ
        first = drawn(self.width, v.shape[1])
        second = drawn(len(u), self.width)
        target = u @ (s[:, None] * v)
        courses = [strengths(first, second)]
        for _ in range(round(self.time / self.step_size)):
            missing = target - second @ first
            first_step = self.step_size * second.t() @ missing
            second_step = self.step_size * missing @ first.t()
            first = first + first_step
            second = second + second_step
            courses.append(strengths(first, second))
        deviations = map(self.deviation, torch.stack(courses, 1), s)
        return sum(deviations) / len(s)

    def deviation(self, course: Float[Tensor, " step"], size: Tensor) -> float:
        """Return the relative rms deviation of one mode from its closed form.

        Return NaN if the mode never exceeds `from_` times its final strength `size`.
        """
        passed = torch.nonzero(course >= self.from_ * size).flatten()
        if not len(passed):
            return float("nan")
        a = course[int(passed[0]) :]
        t = self.step_size * torch.arange(len(a), dtype=a.dtype)
        # s/(1 + (s/a(0) − 1) e^(−2 s t))
        closed_form = size / (1 + (size / a[0] - 1) * torch.exp(-2 * size * t))
        mean_square = (a - closed_form).square().mean()
        return float(mean_square.sqrt() / size)


class Operations(NetworkTrial):
    """The cost of kernel regression at infinite width, relative to training a network.

        operations    number of operations of regression / number of operations of training
        censored      1 if the network was not accurate enough after `steps` steps; the true ratio
                      then lies below `operations`
        reached       the best accuracy of the network minus the accuracy of the kernel

    The network is trained by full-batch Adam until its accuracy is at least the
    accuracy of the kernel minus `allowed`. An operation is a multiplication. Layers are
    assumed to use each weight once per example. n is the number of training examples.

        training      3 per weight, example and step; 1 per weight and test example
        regression    inputs + `each` · layers per pair of examples; n³/3 to solve;
                      1 per coefficient and test example
    """

    model: AbstractLayered
    width: Count = 256
    steps: Count = 2000
    each: Count = 40
    step_size: float = Field(0.1, gt=0)
    allowed: float = Field(0.05, ge=0, lt=1)

    def rows(self, seed: int) -> Rows:
        data = self.data.split(seed)
        x = data.train.inputs
        new = data.test.inputs
        classes = len(data.classes)
        y = centred_one_hot(data.train.target, classes)
        task = LearningTask(tuple(x.shape[1:]), classes)
        accuracy, by_kernel = self.regression(data, y)

        # Train the network until it is accurate enough.
        module = network_of_width(
            self.width, self.model, self.init, task, stream("weights", seed)
        )
        right = 0.0
        for taken, outputs in enumerate(self.course(module, x, y, new)):  # noqa: B007  used after the loop
            right = max(right, share_right(outputs, data.test.target))
            if right >= accuracy - self.allowed:
                break
        weights = sum(weight.numel() for weight in module.parameters())
        by_training = weights * (3 * len(x) * taken + len(new))
        return [
            {
                "operations": by_kernel / by_training,
                "reached": right - accuracy,
                "steps": taken,
                # also if the accuracy of regression is NaN
                "censored": int(not right >= accuracy - self.allowed),
            }
        ]

    def regression(self, data: Data, y: Tensor) -> tuple[float, float]:
        """Return the accuracy of regression with the kernel at infinite width, and its
        number of operations."""
        x = data.train.inputs
        new = data.test.inputs
        layers = self.model.layers(self.init, tuple(x.shape[1:]), 1)
        among = infinite_kernel(layers, x, threads=1)[1]
        across = infinite_kernel(layers, new, x, threads=1)[1]
        ridge = 1e-6 * among.diagonal().mean() * torch.eye(len(x), dtype=among.dtype)
        outputs = across @ torch.linalg.solve(among + ridge, y)

        n = len(x)
        pairs = n * (n + 1) / 2 + len(new) * n
        to_compute = pairs * (x[0].numel() + self.each * len(layers))
        to_solve = n**3 / 3
        operations = to_compute + to_solve + len(new) * n * y.shape[1]
        return share_right(outputs, data.test.target), operations

    def course(
        self, module: nn.Module, x: Tensor, y: Tensor, new: Tensor
    ) -> Iterator[Float[Tensor, "new class"]]:
        """Yield the outputs at test examples before training and after every step."""
        optimizer = torch.optim.Adam(module.parameters(), lr=self.step_size)
        for _ in range(self.steps + 1):
            with torch.no_grad():
                outputs = module(new)
            # not inside `no_grad`, which would also apply to the caller's code
            yield outputs
            optimizer.zero_grad()
            torch.autograd.backward((module(x) - y).square().sum() / (2 * len(x)))
            optimizer.step()
