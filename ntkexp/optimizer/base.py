"""The interface of optimizers: an update rule,
and each step as a linear map of gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import torch
from jaxtyping import Float, Int
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator
from torch import Tensor

from ntkexp.component import Component, Count
from ntkexp.mistake import Mistake, in_short, nearest
from ntkexp.shapes import Weights
from ntkexp.stream import stream

VectorField: TypeAlias = Callable[[Weights], Weights]
"""A function that returns a direction for the given weights, e.g. the gradient."""


@dataclass(frozen=True)
class Arc:
    """A polynomial θ(u), 0 ≤ u ≤ 1, of degree 4 that approximates a piece
    of a curve in weight space.

    The polynomial and the piece of the curve have the same ends, and the same slopes at
    both ends. The arc begins at the weights `start`, and covers `length` training steps
    (usually a fraction of one).

    θ(u) = θ₀ + u(c₁ + (1−u)(c₂ + u(c₃ + (1−u)c₄)))        (Hairer, Nørsett & Wanner 1993, II.6)
    """

    start: Weights
    coefficients: tuple[Weights, Weights, Weights, Weights]
    length: float

    def at(self, position: float) -> Weights:
        """Return the weights θ(u) at u = `position`.

        >>> one, zero = {"w": torch.tensor(1.0)}, {"w": torch.tensor(0.0)}
        >>> Arc(zero, (one, one, zero, zero), 1.0).at(0.5)
        {'w': tensor(0.7500)}
        """
        u, v = position, 1 - position
        first, second, third, fourth = self.coefficients
        return {
            name: torch.add(
                weight,
                first[name] + v * (second[name] + u * (third[name] + v * fourth[name])),
                alpha=position,
            )
            for name, weight in self.start.items()
        }


# --- One step as an update, and as a linear map
#
# During training, a step follows PyTorch: clip the gradient, add L2 weight decay,
# update the memory of past gradients, change the weights. After a run, the optimizer's
# scalings (such as Adam's denominator) are known. With these scalings as constants,
# every step is a linear map of the gradient, separately for each parameter. `LinearStep`
# defines this map and its symbols S, N, β, α, λ, d, M and r, which the whole package
# uses. It describes the steps of this package's optimizers, of PyTorch's optimizers in
# a followed loop, and of recorded trainings.


GUARD = 1e-6
"""PyTorch's clipping divides by the norm of the gradient plus this number."""

Memory: TypeAlias = Mapping[str, Weights]
"""The state of an optimizer after a step, by name, such as `velocity`."""

Sizes: TypeAlias = Mapping[str, float]
"""The step size of each parameter, by name."""


Coefficient: TypeAlias = float | Tensor
"""One number for a whole parameter, or a tensor with one number per weight."""


@dataclass(frozen=True)
class Mixing:
    """A linear map of the matrix v of a parameter: v ↦ Lv, or v ↦ vLᵀ if `by_rows`.

    >>> swap = Mixing(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    >>> swap.of(torch.tensor([[1.0], [2.0]])).tolist()
    [[2.0], [1.0]]
    """

    matrix: Float[Tensor, "line line"]  # the matrix L
    by_rows: bool = False

    def of(
        self, weight: Float[Tensor, "*several row column"]
    ) -> Float[Tensor, "*several row column"]:
        return weight @ self.matrix.mT if self.by_rows else self.matrix @ weight

    def adjoint(
        self, weight: Float[Tensor, "*several row column"]
    ) -> Float[Tensor, "*several row column"]:
        """Apply the transposed map, which satisfies ⟨u, of(v)⟩ = ⟨adjoint(u), v⟩."""
        return weight @ self.matrix if self.by_rows else self.matrix.mT @ weight


COEFFICIENTS = (
    "momentum_scale",
    "gradient_scale",
    "momentum_decay",
    "momentum_gain",
    "l2",
    "decoupled_decay",
)
"""The fields of `LinearStep` that are numbers, or tensors shaped like the parameter."""

RENAMED = {
    "scale": "momentum_scale",
    "ahead": "gradient_scale",
    "carry": "momentum_decay",
    "intake": "momentum_gain",
    "coupled": "l2",
    "lost": "decoupled_decay",
    "below": "denominator",
    "rest": "residual",
}
"""Former names of the fields of `LinearStep`, and their present names."""


@dataclass(frozen=True)
class LinearStep:
    """The step of one parameter, as a linear map of its gradient g:

        p = g + λθ        m ← βm + α ⊙ p        θ ← (1 − d)θ − M(S ⊙ m + N ⊙ p) − r

    θ is the parameter, m its momentum, and ⊙ multiplies elementwise. S and N include the
    division by the denominator n:

        S = momentum_scale / n        N = gradient_scale / n

    A coefficient is one number, or a tensor with one number per weight. M is the
    identity, except for optimizers such as Muon, which multiply the momentum by a
    matrix. r is the part of the step that is not linear in gradients, such as rounding.

    Args:
        momentum_scale: S · n. If n = 1, this is S, the factor of the momentum.
        gradient_scale: N · n. If n = 1, this is N, the factor of the gradient. Nesterov's
            momentum has N ≠ 0.
        momentum_decay: β, the factor of the old momentum.
        momentum_gain: α, the factor of the gradient in the momentum.
        l2: λ, weight decay that is added to the gradient.
        decoupled_decay: d, weight decay that acts on the weights, as in AdamW.
        denominator: n, by which optimizers such as Adam divide their step. None means 1.
        mixing: M, a linear map between the entries of a matrix.
            None means the identity.
        residual: r, the part of the step that is not linear in gradients. None means 0.

    Raises:
        Mistake: if a coefficient is neither a number nor a tensor.
    """

    momentum_scale: Coefficient  # S · n
    gradient_scale: Coefficient = 0.0  # N · n
    momentum_decay: float = 0.0  # β
    momentum_gain: Coefficient = 1.0  # α
    l2: Coefficient = 0.0  # λ
    decoupled_decay: Coefficient = 0.0  # d
    denominator: Tensor | None = None  # n; None means 1
    mixing: Mixing | None = None  # M
    residual: Tensor | None = None  # r

    def __new__(cls, *_: object, **fields: object) -> Self:
        """Raise if a field is given by its former name.

        >>> LinearStep(scale=0.1)
        Traceback (most recent call last):
        ntkexp.mistake.Mistake: LinearStep: scale= is now momentum_scale=
        """
        if not RENAMED.keys().isdisjoint(fields):
            renamed = ", ".join(
                f"{n}= is now {RENAMED[n]}=" for n in RENAMED if n in fields
            )
            raise Mistake(f"LinearStep: {renamed}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Raise unless every coefficient is a number or a tensor.

        >>> LinearStep(momentum_scale="0.1")
        Traceback (most recent call last):
        ntkexp.mistake.Mistake: LinearStep: momentum_scale='0.1': it takes a number, or a tensor shaped like the \
parameter
        """
        for name in COEFFICIENTS:
            value = getattr(self, name)
            if type(value) is float:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
                raise Mistake(
                    f"LinearStep: {name}={in_short(value)}: it takes a number, or a tensor shaped "
                    "like the parameter"
                )

    @property
    def moves_in_numbers(self) -> tuple[float, float] | None:
        """The pair (S, N) if both are plain numbers. None if S or N differs between the
        weights of the parameter, or if the step has a matrix M."""
        if self.denominator is not None or self.mixing is not None:
            return None
        if isinstance(self.momentum_scale, Tensor) or isinstance(
            self.gradient_scale, Tensor
        ):
            return None
        return self.momentum_scale, self.gradient_scale

    @property
    def moves_momentum_by_number(self) -> bool:
        """True if S is one number, and the step has no matrix M."""
        is_plain = self.denominator is None and self.mixing is None
        return is_plain and not isinstance(self.momentum_scale, Tensor)

    @property
    def moves_by_momentum(self) -> bool:
        """True if the gradient acts only through the momentum m (N = 0)."""
        return (
            not isinstance(self.gradient_scale, Tensor) and self.gradient_scale == 0.0
        )

    @property
    def divides(self) -> bool:
        """True if the coefficients differ between the weights of the parameter,
        as for Adam."""
        return self.moves_in_numbers is None or isinstance(self.momentum_gain, Tensor)

    def divided(self) -> LinearStep:
        """Return the same step with the fields `momentum_scale` = S and
        `gradient_scale` = N, and without a denominator.

        >>> LinearStep(1.0, denominator=torch.tensor([2.0, 4.0])).divided().momentum_scale
        tensor([0.5000, 0.2500])
        """
        if self.denominator is None:
            return self
        inverse = self.denominator.reciprocal()
        gradient_scale: Coefficient = 0.0
        if not self.moves_by_momentum:
            gradient_scale = inverse * self.gradient_scale
        return self.changed(
            momentum_scale=inverse * self.momentum_scale,
            gradient_scale=gradient_scale,
            denominator=None,
        )

    def changed(self, **fields: Any) -> LinearStep:
        """Return a copy with other values of some fields.

        A followed loop calls this for each parameter in every step. `replace` would
        take three times as long, because it checks all fields again."""
        step = object.__new__(LinearStep)
        vars(step).update(vars(self) | fields)
        return step

    def reversed(self) -> LinearStep:
        """Return the step of the same optimizer with `maximize=True`. PyTorch then
        replaces g by −g, so that its momentum buffer holds −m. In terms of g and m,
        the factors S, N and λ have the opposite signs."""
        return self.changed(
            momentum_scale=-self.momentum_scale,
            gradient_scale=-self.gradient_scale,
            l2=-self.l2,
        )


IDLE = LinearStep(momentum_scale=0.0, momentum_decay=1.0, momentum_gain=0.0)
"""The step of a parameter without a gradient:
its weights and its momentum do not change."""


class DenominatorFormula(NamedTuple):
    """The constants in the denominator n of an adaptive step:

        v ← β₂v + (1 − β₂)g²        n = √v/ρ + ε

    v is the mean square of the gradients. If `amsgrad`, the largest v so far replaces v
    in n."""

    beta2: float
    bias_correction: float  # ρ, which is √(1 − β₂ˢ⁺¹) for step s of Adam, 1 for RMSprop
    eps: float
    amsgrad: bool


class Move(NamedTuple):
    """The weights and the optimizer's memory after a step. For a gradient flow, also
    the arcs (`Arc`) of its curved path."""

    weights: Weights
    memory: Memory
    arcs: tuple[Arc, ...] = ()


RENAMED_ATTRIBUTES = {
    "remembers": "needs_backward_sum",
    "spread_at": "denominator_at",
}
"""Former names of attributes of optimizer classes, and their present names."""


class AbstractOptimizer(Component):
    """The base of all optimizers: hyperparameters, and the update of a step.

    `layers` maps prefixes of parameter names to factors of the step size.
    """

    weight_decay: NonNegativeFloat = 0.0
    clip_norm: PositiveFloat | None = None
    layers: dict[str, PositiveFloat] = Field(default_factory=dict)

    needs_backward_sum: ClassVar[bool] = False
    """True if past gradients move the weights, as with momentum, or if each weight has
    its own step size, as in Adam. Contributions are then summed from the last step to
    the first (`path.backward_sum`)."""

    records: ClassVar[tuple[str, ...]] = ()
    """The entries of the optimizer's memory that `recursion` needs at every step."""

    decouples: ClassVar[bool] = False
    """True if weight decay is decoupled from the gradient, as in AdamW."""

    flows: ClassVar[bool] = False
    """True if the weights follow a curve, given by `Arc`s,
    instead of straight steps."""

    copies: ClassVar[int] = 0
    """Number of copies of the weights that `move` needs, in addition to the weights at
    both ends of the step and the gradient."""

    elementwise: ClassVar[bool] = False
    """True if each weight has its own step size,
    so that no fixed kernel describes training."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise if a class defines an attribute by its former name."""
        for former, name in RENAMED_ATTRIBUTES.items():
            if former in vars(cls):
                raise Mistake(f"{cls.__name__}: {former} is now {name}")
        super().__init_subclass__(**options)

    @property
    def needs_kernels(self) -> bool:
        """True if the path sum needs kernels between all outputs."""
        return self.flows or self.needs_backward_sum

    @abstractmethod
    def chosen_step(self, largest_stable: float) -> float:
        """Return the step size before the schedule changes it. `largest_stable` is the
        largest stable step size of gradient descent."""

    @abstractmethod
    def batch_indices(
        self, step: int, examples: int, seed: int
    ) -> Int[Tensor, " batch"] | None:
        """Return the indices of the training examples in a step;
        None means all examples."""

    @abstractmethod
    def update(
        self,
        step: int,
        weights: Weights,
        gradient: Weights,
        sizes: Sizes,
        memory: Memory,
    ) -> tuple[Weights, Memory]:
        """Return the weights and the memory after one step."""

    def move(
        self,
        step: int,
        weights: Weights,
        gradient: Weights,
        field: VectorField,
        sizes: Sizes,
        memory: Memory,
    ) -> Move:
        """Take one step. A gradient flow also evaluates the gradient `field` inside the
        step."""
        return Move(*self.update(step, weights, gradient, sizes, memory))

    @abstractmethod
    def recursion(
        self, step: int, sizes: Sizes, memory: Memory
    ) -> dict[str, LinearStep]:
        """Return the linear step of every parameter, without weight decay.

        The coefficients follow from the recorded memory after the step."""

    def linear_steps(
        self, step: int, sizes: Sizes, memory: Memory
    ) -> dict[str, LinearStep]:
        """Return the linear step of every parameter, with weight decay: λ, or d = λη if
        the decay is decoupled."""
        linear_steps = self.recursion(step, sizes, memory)
        decay = self.weight_decay
        if not decay:
            return linear_steps
        decayed = {}
        for name, linear in linear_steps.items():
            if self.decouples:
                decayed[name] = replace(linear, decoupled_decay=decay * sizes[name])
            else:
                decayed[name] = replace(linear, l2=decay)
        return decayed

    @property
    def differentiated(self) -> tuple[str, ...]:
        """Entries of the memory that leave-out effects need at every step, in addition
        to `records`."""
        return ()

    def denominator_at(self, step: int) -> DenominatorFormula | None:
        """Return the formula of the denominator n at a step. Return None if the
        optimizer does not divide by past gradients."""
        return None

    @property
    def divides(self) -> bool:
        """True if steps are divided by the magnitude of past gradients."""
        return self.denominator_at(0) is not None

    def factors(self, weights: Weights) -> dict[str, float]:
        """Return the factor of each parameter's step size. If several keys of `layers`
        match, the longest one decides.

        >>> from ntkexp.optimizer.descent import GD
        >>> GD(layers={"head": 0.1}).factors({"body.weight": 0, "head.weight": 0})
        {'body.weight': 1.0, 'head.weight': 0.1}
        """
        for prefix in self.layers:
            if not any(has_prefix(name, prefix) for name in weights):
                raise Mistake(
                    "optimizer.layers: no parameter's name begins with "
                    f"{prefix}{nearest(prefix, weights)}; the "
                    f"first of {len(weights)} is {next(iter(weights))}"
                )
        known = {"": 1.0} | self.layers
        factors = {}
        for name in weights:
            matches = [
                prefix for prefix in known if not prefix or has_prefix(name, prefix)
            ]
            factors[name] = known[max(matches, key=len)]
        return factors

    def clipping(self, gradient: Weights) -> float:
        """Return the clipping factor min(1, clip_norm/(‖g‖ + 1e-6)), as in PyTorch."""
        if self.clip_norm is None:
            return 1.0
        norm = torch.stack([part.norm() for part in gradient.values()]).norm()
        return min(1.0, float(self.clip_norm / (norm + GUARD)))

    def with_decay(self, gradient: Weights, weights: Weights) -> Weights:
        """Return p = g + λθ, the gradient with L2 decay."""
        if not self.weight_decay:
            return gradient
        return {
            name: part.add(weights[name], alpha=self.weight_decay)
            for name, part in gradient.items()
        }


def has_prefix(name: str, prefix: str) -> bool:
    """Return True if a parameter's name is `prefix`,
    or starts with `prefix` and a dot."""
    return f"{name}.".startswith(f"{prefix}.")


def after_step(weights: Weights, direction: Weights, sizes: Sizes) -> Weights:
    """Return the weights after a step, θ − η ⊙ direction.

    >>> after_step({"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}, {"w": 0.25})
    {'w': tensor([0.5000])}
    """
    return {
        name: torch.sub(weight, direction[name], alpha=sizes[name])
        for name, weight in weights.items()
    }


def per_weight(coefficient: Coefficient, weight: Tensor) -> Tensor:
    """Expand the coefficient of a parameter to a tensor with one number per weight."""
    if isinstance(coefficient, Tensor):
        return coefficient
    return torch.full_like(weight, coefficient)


# --- Mini-batches. A batch depends only on the seed and the step, so that a resumed run
# draws equal batches.


class AbstractBatched(AbstractOptimizer):
    """Mini-batches, or all examples if `batch` is null.

    Without replacement, each epoch uses a new permutation of the examples. The last
    batch of an epoch may be smaller."""

    batch: Count | None = None
    replacement: bool = False

    def batch_indices(
        self, step: int, examples: int, seed: int
    ) -> Int[Tensor, " batch"] | None:
        if self.batch is None:
            return None
        if self.replacement:
            return torch.randint(
                examples, (self.batch,), generator=stream("batches", seed, step)
            )
        batches_per_epoch = -(-examples // self.batch)
        epoch, number = divmod(step, batches_per_epoch)
        order = torch.randperm(examples, generator=stream("batches", seed, epoch))
        start = number * self.batch
        return order[start : start + self.batch]


class AbstractStable(AbstractOptimizer):
    """An optimizer whose step size is given by the user, or is a fraction of the
    largest stable one.

    The largest stable step size is that of gradient descent before training. The
    default fraction is ½."""

    step_size: PositiveFloat | None = None
    stable_fraction: PositiveFloat | None = None

    @model_validator(mode="after")
    def refuse_both(self) -> AbstractStable:
        """Raise if both `step_size` and `stable_fraction` are given."""
        if self.step_size is not None and self.stable_fraction is not None:
            raise Mistake(
                f"optimizer.step_size={self.step_size:g} "
                f"optimizer.stable_fraction={self.stable_fraction:g}: both set "
                "the step size; give one of them"
            )
        return self

    def chosen_step(self, largest_stable: float) -> float:
        return self.step_size or (self.stable_fraction or 0.5) * largest_stable


# --- A step along the current gradient, without memory: θ ← θ − η (g + λθ).


class AbstractPlain(AbstractStable):
    """A step along the gradient without memory: S = η."""

    def update(
        self,
        step: int,
        weights: Weights,
        gradient: Weights,
        sizes: Sizes,
        memory: Memory,
    ) -> tuple[Weights, Memory]:
        return after_step(weights, self.with_decay(gradient, weights), sizes), {}

    def recursion(
        self, step: int, sizes: Sizes, memory: Memory
    ) -> dict[str, LinearStep]:
        return {name: LinearStep(size) for name, size in sizes.items()}
