"""What training leads to: where it ends, how much of the weights came of the examples, and by which closed form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn
from torch.func import grad, hessian, vmap

from ntkexp.claim.papers.convolutional_kernels import centred
from ntkexp.claim.papers.lazy_and_rich import ScaledNetwork, principal_maps, share_right, task_of
from ntkexp.claim.papers.wide_networks import network_of_width
from ntkexp.claim.trial import AbstractTrial
from ntkexp.component import Count
from ntkexp.data.base import AbstractSource
from ntkexp.effects.curvature import load_forward_mode
from ntkexp.init import AbstractInit
from ntkexp.limit.infinite_kernel import infinite_kernel
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractArchitecture, AbstractLayered, LearningTask
from ntkexp.records.sweep import Level
from ntkexp.shapes import Weights
from ntkexp.stream import stream


class EndOfTraining(AbstractTrial):
    """Where gradient descent ends, and what it made of the weights, width by width:

    A network learns two classes from f_0 = 0 on the mean of ½(f − y)², until `until` of that is left.

        gradient      ‖∇L(θ_T)‖/‖∇L(θ_0)‖
        curvature     λ_min/λ_max of the Hessian of L at θ_T: negative at a saddle point
        moved         ‖θ_T − θ_0‖/‖θ_T‖, the share of the weights that examples have added
        miss          ‖θ_T − θ_0 − Σᵢ sᵢ‖/‖θ_T − θ_0‖, sᵢ = −Σ_s η_s ∇ℓᵢ what example i has added
        norm          ‖θ_T − θ_0‖²/(f_T(X)ᵀ K_0⁻¹ f_T(X)), 1 where f_T has the least norm in the space of K_0

    f = α (g(θ) − g(θ_0)): a large α makes training lazy. What has not learned its examples within `steps` has no
    numbers. A Hessian is formed only where `curvature` asks for it.
    """

    model: AbstractArchitecture
    init: AbstractInit
    data: AbstractSource
    widths: tuple[Count, ...] = Field((64,), min_length=1)
    alpha: float = Field(1.0, gt=0)
    steps: Count = 4000
    until: float = Field(1e-4, gt=0)
    fraction: float = Field(0.4, gt=0, lt=1)
    curvature: bool = False

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        return [{"width": width, **self.row(seed, width)} for width in self.widths]

    def row(self, seed: int, width: int) -> Mapping[str, float]:
        data = self.data.split(seed)
        if len(data.classes) != 2:
            raise Mistake("trial.data: choose data of two classes, such as data=digits")
        task, shape = task_of(data.train), LearningTask(tuple(data.train.inputs.shape[1:]), 1)
        module = network_of_width(
            width, self.model, self.init, shape, stream("weights", seed, width)
        )
        network = ScaledNetwork(module, self.alpha)
        x, y = task.inputs, task.targets

        def loss_of_one(weights: Weights, point: Tensor, target: Tensor) -> Tensor:
            return (network.outputs(weights, point[None]) - target).square().sum() / 2

        def loss(weights: Weights) -> Tensor:
            return (network.outputs(weights, x) - y).square().mean() / 2

        # Train, and add up what every example does to the weights.
        gradients = vmap(grad(loss_of_one), (None, 0, 0))
        start, end = network.start, network.start
        added = {name: weight.new_zeros(len(x), *weight.shape) for name, weight in start.items()}
        for step in network.learn(
            start, task, self.steps, self.fraction, self.until * float(loss(start).detach())
        ):
            size = step.size / (self.alpha**2 * len(x))
            for name, gradient in gradients(step.before, x, y).items():
                added[name] -= size * gradient
            end = step.after
        if not float(loss(end)) <= self.until * float(loss(start)):
            return dict.fromkeys(("gradient", "curvature", "moved", "miss", "norm"), float("nan"))

        # θ_T − θ_0, beside the sum over examples and beside the least that leads to f_T.
        first, last = flat(start), flat(end)
        moved, sums = last - first, flat({name: each.sum(0) for name, each in added.items()})
        outputs = network.outputs(end, x).detach() / self.alpha
        least = outputs @ torch.linalg.solve(network.kernel(start, x, x), outputs)
        slopes = [float(flat(grad(loss)(weights)).norm()) for weights in (start, end)]
        found = {
            "gradient": slopes[1] / slopes[0],
            "moved": float(moved.norm() / last.norm()),
            "miss": float((moved - sums).norm() / moved.norm()),
            "norm": float(moved.square().sum() / least),
        }
        if not self.curvature:
            return found
        load_forward_mode()
        values = torch.linalg.eigvalsh(hessian(lambda weights: loss(unflat(weights, end)))(last))
        return {**found, "curvature": float(values[0] / values[-1])}


def flat(weights: Weights) -> Float[Tensor, " weight"]:
    """All weights in one vector."""
    return torch.cat([weight.detach().flatten() for weight in weights.values()])


def unflat(vector: Float[Tensor, " weight"], like: Weights) -> Weights:
    """The weights that a vector holds, in the shapes of others.

    >>> weights = {"w": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3.0])}
    >>> unflat(flat(weights), weights)
    {'w': tensor([[1., 2.]]), 'b': tensor([3.])}
    """
    parts = torch.split(vector, [weight.numel() for weight in like.values()])
    return {
        name: part.view_as(weight) for (name, weight), part in zip(like.items(), parts, strict=True)
    }


class LinearModes(AbstractTrial):
    """Every mode of a deep linear network in training, beside its closed form, from a small start and from a large:

    A network of one hidden layer without activation learns classes from whitened inputs, by small steps.

        Σ = E y xᵀ = Σ_k s_k u_k v_kᵀ,    a_k = u_kᵀ W₂W₁ v_k
        a_k(t) = s_k/(1 + (s_k/a_k(0) − 1) e^(−2 s_k t))

        miss    √(mean_t (a_k(t) − its closed form)²)/s_k, a mean over modes; t from where a_k passes `from_` s_k

    Weights start as Gaussian numbers of deviation `small` or `large`, over √width; rows are told apart by `start`.

    A. Saxe, J. McClelland & S. Ganguli, "Exact solutions to the nonlinear dynamics of learning in deep linear neural
    networks" (2013), arXiv:1312.6120.
    """

    data: AbstractSource
    width: Count = 64
    small: float = Field(0.01, gt=0)
    large: float = Field(1.0, gt=0)
    from_: float = Field(0.05, gt=0, lt=1)
    step_size: float = Field(0.02, gt=0)
    time: float = Field(60.0, gt=0)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data = self.data.split(seed)
        _, white = principal_maps(data.train.inputs.flatten(1))
        x, y = data.train.inputs.flatten(1) @ white, centred(data.train.target, len(data.classes))
        u, s, v = torch.linalg.svd(y.t() @ x / len(x), full_matrices=False)
        u, s, v = (
            u[:, : y.shape[1] - 1],
            s[:-1],
            v[: y.shape[1] - 1],
        )  # centred targets have a mode less than classes
        starts = {"small": self.small, "large": self.large}
        return [
            {"start": name, "miss": self.miss(scale, (u, s, v), seed)}
            for name, scale in starts.items()
        ]

    def miss(self, scale: float, modes: tuple[Tensor, Tensor, Tensor], seed: int) -> float:
        u, s, v = modes
        generator = stream("weights", seed)
        first = (
            torch.randn(self.width, v.shape[1], generator=generator, dtype=s.dtype)
            * scale
            / self.width**0.5
        )
        second = (
            torch.randn(len(u), self.width, generator=generator, dtype=s.dtype)
            * scale
            / self.width**0.5
        )

        # Train: E ½‖W₂W₁x − y‖² has the gradients −W₂ᵀ(Σ − W₂W₁) and −(Σ − W₂W₁)W₁ᵀ, as E xxᵀ = 1.
        target, strengths = (
            u @ (s[:, None] * v),
            [torch.einsum("ck,ch,hr,kr->k", u, second, first, v)],
        )
        for _ in range(round(self.time / self.step_size)):
            missing = target - second @ first
            first, second = (
                first + self.step_size * second.t() @ missing,
                second + self.step_size * missing @ first.t(),
            )
            strengths.append(torch.einsum("ck,ch,hr,kr->k", u, second, first, v))
        return sum(
            self.off(course, size)
            for course, size in zip(torch.stack(strengths, 1), s, strict=True)
        ) / len(s)

    def off(self, course: Float[Tensor, " step"], size: Tensor) -> float:
        """How far a mode is from its closed form; NaN where it does not come to the place from which it is compared."""
        passed = torch.nonzero(course >= self.from_ * size).flatten()
        if not len(passed):
            return float("nan")
        known = course[int(passed[0]) :]
        times = self.step_size * torch.arange(len(known), dtype=known.dtype)
        form = size / (1 + (size / known[0] - 1) * torch.exp(-2 * size * times))
        return float(((known - form).square().mean()).sqrt() / size)


class Operations(AbstractTrial):
    """What regression with a kernel of infinite width costs, beside training a network by back-propagation until it
    classifies nearly as many new examples:

        operations    of regression over those of training, until the network is right as often less `allowed`
        reached       the best accuracy of the network less that of the kernel

    of layers of weights that are used once for each example. Counted are products: for training 3 for each weight,
    example and step, one forwards and two backwards, and one for each weight and new example; for regression
    inputs + `each` · layers for each pair of examples, n³/3 to solve, and one for each pair of a coefficient and a
    new example. The network learns by Adam on all examples at once.
    """

    model: AbstractLayered
    init: AbstractInit
    data: AbstractSource
    width: Count = 256
    steps: Count = 2000
    each: Count = 40
    step_size: float = Field(0.1, gt=0)
    allowed: float = Field(0.05, ge=0, lt=1)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data = self.data.split(seed)
        x, new, classes = data.train.inputs, data.test.inputs, len(data.classes)
        y, shape = centred(data.train.target, classes), LearningTask(tuple(x.shape[1:]), classes)

        # Regression with the kernel of infinite width.
        layers = self.model.layers(self.init, shape.shape, 1)
        among, across = (
            infinite_kernel(layers, x, threads=1)[1],
            infinite_kernel(layers, new, x, threads=1)[1],
        )
        ridge = 1e-6 * among.diagonal().mean() * torch.eye(len(x), dtype=among.dtype)
        wanted = share_right(across @ torch.linalg.solve(among + ridge, y), data.test.target)
        pairs = len(x) * (len(x) + 1) / 2 + len(new) * len(x)
        by_kernel = (
            pairs * (x[0].numel() + self.each * len(layers))
            + len(x) ** 3 / 3
            + len(new) * len(x) * classes
        )

        # The network, until it classifies as many.
        module = network_of_width(self.width, self.model, self.init, shape, stream("weights", seed))
        weights = sum(weight.numel() for weight in module.parameters())
        right = 0.0
        for taken, outputs in enumerate(self.course(module, x, y, new)):
            right = max(right, share_right(outputs, data.test.target))
            if right >= wanted - self.allowed:
                by_training = weights * (3 * len(x) * taken + len(new))
                return [
                    {
                        "operations": by_kernel / by_training,
                        "reached": right - wanted,
                        "steps": taken,
                    }
                ]
        return [{"operations": float("nan"), "reached": right - wanted, "steps": self.steps}]

    def course(
        self, module: nn.Module, x: Tensor, y: Tensor, new: Tensor
    ) -> Iterator[Float[Tensor, "new class"]]:
        """The outputs at new examples before training and after every step, on the mean of ½‖f − y‖²."""
        optimizer = torch.optim.Adam(module.parameters(), lr=self.step_size)
        for _ in range(self.steps + 1):
            with torch.no_grad():
                outputs = module(new)
            yield outputs  # outside, or whoever takes it would be without gradients too
            optimizer.zero_grad()
            torch.autograd.backward((module(x) - y).square().sum() / (2 * len(x)))
            optimizer.step()
