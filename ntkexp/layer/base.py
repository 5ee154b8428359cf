"""A layer as a value: one description with two readings, a module of finite width and a step of the kernel's
recursion; layers in a chain or in branches, by name.

Layers compose by shape: each says what shape it gives to an example of a given shape, so that a list of layers is an
architecture for inputs of any shape. The kernels of infinite width are read from the same list: `carry` says whether
there is a limit, `need` is asked from the last layer to the first, which pairs of pixels must be known, and `push`
takes K and Θ through the layer. A layer may also say its form for the engine that is fused for CPUs, `fused`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from math import isfinite, nan
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from pydantic import AfterValidator, BeforeValidator, Field
from torch import Tensor, nn

from ntkexp.component import Component
from ntkexp.covariance.covariance import Covariance, Signal
from ntkexp.covariance.pairs import ADD, COPY, NoFusedForm, Operation, Operations, Pairs, weigh
from ntkexp.mistake import Mistake, in_short, nearest

LARGEST = 1e150


# --- Scales of weights: numbers, or tensors of one number where a kernel is to be differentiated by them.


def finite_number(value: object) -> object:
    """A finite number, or a tensor, which is looked at later.

    >>> finite_number("a")
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: it takes a finite number, not 'a'
    """
    if isinstance(value, Tensor):
        return value
    try:
        number = float(value)  # type: ignore[arg-type]  # what cannot be converted is refused
    except (TypeError, ValueError, OverflowError):
        number = nan
    if not isfinite(number):
        raise Mistake(f"it takes a finite number, not {in_short(value)}")
    return number


def single_number(value: Tensor | float) -> Tensor | float:
    """A tensor without axes, if it is one.

    >>> single_number(torch.tensor([2.0]))
    tensor(2.)
    """
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1 or not value.is_floating_point() or value.is_meta:
        raise Mistake(
            f"a scale is one number, not a tensor of shape {list(value.shape)} and {value.dtype}"
        )
    return value.reshape(())


def detached_number(value: Tensor | float) -> float:
    """The number itself, without what it takes for derivatives."""
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def scale(zero: bool) -> AfterValidator:
    """A validator of scales that are more than zero, or may be zero; their squares are numbers as well."""

    def check(value: Tensor | float) -> Tensor | float:
        if not (detached_number(value) >= 0 if zero else detached_number(value) > 0):
            raise Mistake(
                f"it takes a number {'≥' if zero else '>'} 0, not {detached_number(value):g}"
            )
        if detached_number(value) > LARGEST:
            raise Mistake(
                f"it takes a number ≤ {LARGEST:g}, whose square is one as well, not {detached_number(value):g}"
            )
        return value

    return AfterValidator(check)


Positive = Annotated[
    Tensor | float, BeforeValidator(finite_number), AfterValidator(single_number), scale(zero=False)
]
NotNegative = Annotated[
    Tensor | float, BeforeValidator(finite_number), AfterValidator(single_number), scale(zero=True)
]


class AbstractLayer(Component):
    """A layer is one step of a network: shape [*shape] → shape [*shape′] for every example."""

    averages: ClassVar[bool] = (
        False  # whether it is the mean over the pairs of pixels that it needs, a vector
    )

    @abstractmethod
    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape this layer gives to an example of the given shape."""

    @abstractmethod
    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        """Make a module for examples of the given shape, its weights drawn from the generator."""

    def carry(self, signal: Signal) -> Signal:
        """What is known of the signal after this layer; a layer without a limit of infinite width says so here."""
        raise Mistake(f"{type(self).__name__} has no known limit of infinite width")

    def need(self, wanted: Pairs, shape: tuple[int, ...]) -> Pairs:
        """The pairs of pixels before this layer that those after it are made of."""
        return wanted

    def need_own(self, wanted: Pairs | None, shape: tuple[int, ...]) -> Pairs | None:
        """The pairs of an example with itself that are needed before this layer: none, unless a layer asks for
        variances.
        """
        return None if wanted is None else self.need(wanted, shape)

    def push(self, covariance: Covariance, shape: tuple[int, ...]) -> Covariance:
        """Take covariances through this layer."""
        raise NotImplementedError(
            type(self).__name__
        )  # `carry` refuses a layer that cannot do this

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        """`push` as operations on a tile, the registers from `free` on being to spare; one `bend` for each variance
        that it meets. Without them the layer is left to torch.
        """
        raise NoFusedForm(type(self).__name__)


# --- Layers one after the other, each asked with the shape that reaches it.


Layers = tuple[AbstractLayer, ...]
FORMULA = frozenset({"need", "push", "mix", "between", "dual", "alone"})
"""The methods of layers that say what a fused form is the form of."""


def shapes(layers: Layers, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shape before each layer, and after the last.

    >>> from ntkexp.layer.linear import Flatten
    >>> shapes((Flatten(),), (3, 4))
    [(3, 4), (12,)]
    """
    chain = [shape]
    for layer in layers:
        chain.append(layer.shape(chain[-1]))
    return chain


def build(layers: Layers, shape: tuple[int, ...], generator: torch.Generator) -> nn.Sequential:
    """The layers as a module for examples of the given shape."""
    each = zip(layers, shapes(layers, shape), strict=False)
    return nn.Sequential(*(layer.build(before, generator) for layer, before in each))


def carry(layers: Layers, signal: Signal) -> Signal:
    """What is known of the signal after all layers."""
    for layer in layers:
        signal = layer.carry(signal)
    return signal


def need(layers: Layers, wanted: Pairs, shape: tuple[int, ...]) -> Pairs:
    """The pairs before the layers, of those wanted after them."""
    for layer, before in zip(reversed(layers), reversed(shapes(layers, shape)[:-1]), strict=True):
        wanted = layer.need(wanted, before)
    return wanted


def need_own(layers: Layers, wanted: Pairs | None, shape: tuple[int, ...]) -> Pairs | None:
    """The pairs of examples with themselves before the layers, of those wanted after them."""
    for layer, before in zip(reversed(layers), reversed(shapes(layers, shape)[:-1]), strict=True):
        wanted = layer.need_own(wanted, before)
    return wanted


def push(layers: Layers, covariance: Covariance, shape: tuple[int, ...]) -> Covariance:
    """K and Θ after all layers."""
    for layer, before in zip(layers, shapes(layers, shape), strict=False):
        covariance = layer.push(covariance, before)
    return covariance


def fused(layers: Layers, shape: tuple[int, ...], register: int, free: int) -> Operations:
    """The operations on a tile that the layers say they are; they leave as many pixels as the layers do."""
    found: Operations = ()
    for layer, before in zip(layers, shapes(layers, shape), strict=False):
        if not says_itself(layer, "fused"):
            raise NoFusedForm(type(layer).__name__)
        operations = layer.fused(before, register, free)
        pixels = before[1:]
        for operation in operations:
            if operation.register == register and operation.coarse:
                pixels = tuple(len(one.members) for one in operation.coarse[-len(pixels) :])
        if layer.shape(before)[1:] != pixels:
            raise NoFusedForm(type(layer).__name__)
        found = (*found, *operations)
    return found


def registers(operations: Operations) -> int:
    """How many registers there are up to the last that operations use."""
    return 1 + max(
        (max(operation.register, operation.other) for operation in operations), default=-1
    )


def says_itself(layer: AbstractLayer, form: str) -> bool:
    """Whether this form is that of the layer's formula, and not of one that its class inherited and replaced."""
    definer = next(
        kind for kind in type(layer).__mro__ if not {form, *FORMULA}.isdisjoint(vars(kind))
    )
    return form in vars(definer)


class Residual(AbstractLayer):
    """Residual layers: the sum of two branches, whose kernels add up if one of them ends in weights of its own.

    branch(x) + shortcut(x); an empty shortcut is the identity.

    >>> Residual(branch=()).shape((4, 8))
    (4, 8)
    """

    branch: tuple[AbstractLayer, ...]
    shortcut: tuple[AbstractLayer, ...] = ()

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        ends = [shapes(layers, shape)[-1] for layers in (self.branch, self.shortcut)]
        if ends[0] != ends[1]:
            raise Mistake(
                f"the branches of a residual layer disagree: {list(ends[0])} and {list(ends[1])}"
            )
        return ends[0]

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        self.shape(shape)  # refuses branches that disagree
        return Sum(build(self.branch, shape, generator), build(self.shortcut, shape, generator))

    def carry(self, signal: Signal) -> Signal:
        ends = [
            carry(layers, replace(signal, fresh=False)) for layers in (self.branch, self.shortcut)
        ]
        if not any(end.fresh for end in ends):
            raise Mistake(
                "a residual layer has no limit of infinite width unless one of its branches ends in weights "
                "(Dense or Conv) that follow the last activation"
            )
        whole = [carry(layers, signal) for layers in (self.branch, self.shortcut)]
        return Signal(
            gaussian=all(end.gaussian for end in ends),
            fresh=all(end.fresh for end in whole),
            wide=all(end.wide for end in ends),
            uneven=any(end.uneven for end in ends),
        )

    def need(self, wanted: Pairs, shape: tuple[int, ...]) -> Pairs:
        branch, shortcut = (need(layers, wanted, shape) for layers in (self.branch, self.shortcut))
        return branch.union(shortcut)

    def need_own(self, wanted: Pairs | None, shape: tuple[int, ...]) -> Pairs | None:
        branch, shortcut = (
            need_own(layers, wanted, shape) for layers in (self.branch, self.shortcut)
        )
        return branch.union(shortcut) if branch and shortcut else branch or shortcut

    def push(self, covariance: Covariance, shape: tuple[int, ...]) -> Covariance:
        branch = push(self.branch, covariance, shape)
        return branch.plus(push(self.shortcut, covariance.following(branch), shape))

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        branch = fused(self.branch, shape, register, free + 1)
        shortcut = fused(self.shortcut, shape, free, max(free + 1, registers(branch)))
        copied, added = Operation(COPY, register, free), Operation(ADD, register, free)
        return copied, *branch, *shortcut, added


class Sum(nn.Module):
    """Two modules stand side by side, and their outputs are added."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut = branch, shortcut

    def forward(self, x: Float[Tensor, "example *shape"]) -> Float[Tensor, "example *shape_"]:
        total: Tensor = self.branch(x) + self.shortcut(x)
        return total


class Concatenation(AbstractLayer):
    """Concatenations: the channels of several branches behind each other, whose kernels are averaged by their shares.

    The channels of two or more branches, the first branch's first; an empty branch is the identity.

    >>> from ntkexp.layer.affine import Dense
    >>> layer = Concatenation(branches=((Dense(features=6),), ()))
    >>> layer.shape((2,)), layer.shares((2,))
    ((8,), (0.75, 0.25))

    What follows sees the mean over all channels, of which branch i has the share p_i = c_i/Σ_j c_j:

        K′ = Σ_i p_i K_i,    Θ′ = Σ_i p_i Θ_i

    Channels of different branches meet different weights, so that it does not matter whether they are independent. They
    may have different variances, so that no activation follows, nor a norm.
    """

    branches: Annotated[tuple[tuple[AbstractLayer, ...], ...], Field(min_length=2)]

    def ends(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        ends = [shapes(layers, shape)[-1] for layers in self.branches]
        if len({end[1:] for end in ends}) > 1:
            raise Mistake(
                f"the branches of a concatenation differ in pixels: {', '.join(str([*end]) for end in ends)}"
            )
        return ends

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        ends = self.ends(shape)
        return (sum(end[0] for end in ends), *ends[0][1:])

    def shares(self, shape: tuple[int, ...]) -> tuple[float, ...]:
        """The share that each branch has of the channels, p."""
        channels = [end[0] for end in self.ends(shape)]
        return tuple(one / sum(channels) for one in channels)

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        self.shape(shape)
        return SideBySide(build(layers, shape, generator) for layers in self.branches)

    def carry(self, signal: Signal) -> Signal:
        ends = [carry(layers, signal) for layers in self.branches]
        if not all(end.wide for end in ends):
            raise Mistake(
                "a concatenation of the inputs themselves has no limit of infinite width: channels of the inputs do "
                "not grow with width; put a Dense or Conv layer into that branch"
            )
        return Signal(fresh=all(end.fresh for end in ends), wide=True, uneven=True)

    def need(self, wanted: Pairs, shape: tuple[int, ...]) -> Pairs:
        return reduce(Pairs.union, (need(layers, wanted, shape) for layers in self.branches))

    def need_own(self, wanted: Pairs | None, shape: tuple[int, ...]) -> Pairs | None:
        needed = [before for layers in self.branches if (before := need_own(layers, wanted, shape))]
        return reduce(Pairs.union, needed) if needed else None

    def push(self, covariance: Covariance, shape: tuple[int, ...]) -> Covariance:
        total: Covariance | None = None
        for layers, share in zip(self.branches, self.shares(shape), strict=True):
            branch = push(
                layers, covariance if total is None else covariance.following(total), shape
            )
            branch = branch.map(lambda values, share=share: share * values)  # type: ignore[misc]
            total = branch if total is None else total.plus(branch)
        assert total is not None  # there are two branches or more
        return total

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        others = range(free, free + len(self.branches) - 1)
        free += len(others)
        operations = tuple(Operation(COPY, register, other) for other in others)
        for layers, here, share in zip(
            self.branches, (register, *others), self.shares(shape), strict=True
        ):
            branch = fused(layers, shape, here, free)
            free = max(free, registers(branch))
            operations = (*operations, *branch, weigh(here, share))
        return (*operations, *(Operation(ADD, register, other) for other in others))


class SideBySide(nn.ModuleList):
    """Several modules stand side by side, and their channels are put behind each other."""

    def forward(self, x: Float[Tensor, "example *shape"]) -> Float[Tensor, "example *shape_"]:
        return torch.cat([branch(x) for branch in self], dim=1)


def name_validator(kind: str, known: Mapping[str, object]) -> Callable[[object], object]:
    """A validator that puts a layer in place of its name in a configuration, and leaves a layer as it is.

    >>> name_validator("activation", {"relu": "R", "tanh": "T"})("tanh")
    'T'
    >>> name_validator("activation", {"relu": "R", "tanh": "T"})("tahn")
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: there is no activation 'tahn'; choose from relu, tanh; did you mean 'tanh'?
    """

    def layer(name: object) -> object:
        if not isinstance(name, str):
            return name
        if name not in known:
            raise Mistake(
                f"there is no {kind} '{name}'; choose from {', '.join(known)}{nearest(name, known)}"
            )
        return known[name]

    return layer
