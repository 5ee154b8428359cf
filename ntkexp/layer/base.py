"""The interface of layers: a layer builds a module of finite width, and transforms
kernels of infinite width.

A list of layers is an architecture for inputs of any shape. Networks of finite width
and kernels of infinite width use the same list.

- `shape` maps the shape of an example to the shape after the layer.
- `build` returns a module.
- `carry` raises if the layer has no limit at infinite width.
- `input_pairs` is called from the last layer to the first. It collects the pixel pairs
  whose covariances are required.
- `push` transforms the kernels K and Θ.
- `fused` returns `push` as operations for the fused engine,
  if the layer supports it."""

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
from ntkexp.covariance.pairs import (
    ADD,
    COPY,
    NoFusedForm,
    Operation,
    Operations,
    Pairs,
    weigh,
)
from ntkexp.mistake import Mistake, in_short, nearest
from ntkexp.shapes import Shape

MAX_LAYER_SCALE = 1e150
"""The largest scale of weights. The square of a larger scale could overflow."""


# --- Scales of weights: numbers, or one-element tensors. Kernels can be differentiated
# with respect to such tensors.


def finite_number(value: object) -> object:
    """Convert a value to a finite float, or raise. Return tensors unchanged.

    >>> finite_number("a")
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: it takes a finite number, not 'a'
    """
    if isinstance(value, Tensor):
        return value
    try:
        number = float(value)  # type: ignore[arg-type]  # checked here
    except (TypeError, ValueError, OverflowError):
        number = nan
    if not isfinite(number):
        raise Mistake(f"it takes a finite number, not {in_short(value)}")
    return number


def single_number(value: Tensor | float) -> Tensor | float:
    """Reshape a one-element tensor to shape (), or raise. Return numbers unchanged.

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
    """Return the number without its autograd graph."""
    if isinstance(value, Tensor):
        value = value.detach()
    return float(value)


def scale(zero: bool) -> AfterValidator:
    """Return a validator of positive scales. If `zero`, it also accepts 0."""
    sign = "≥" if zero else ">"

    def check(value: Tensor | float) -> Tensor | float:
        number = detached_number(value)
        if not (number > 0 or (zero and number == 0)):
            raise Mistake(f"it takes a number {sign} 0, not {number:g}")
        if number > MAX_LAYER_SCALE:
            raise Mistake(
                f"it takes a number ≤ {MAX_LAYER_SCALE:g}, whose square cannot overflow, "
                f"not {number:g}"
            )
        return value

    return AfterValidator(check)


Positive = Annotated[
    Tensor | float,
    BeforeValidator(finite_number),
    AfterValidator(single_number),
    scale(zero=False),
]
NotNegative = Annotated[
    Tensor | float,
    BeforeValidator(finite_number),
    AfterValidator(single_number),
    scale(zero=True),
]


class AbstractLayer(Component):
    """A layer of a network, which maps examples of shape [*shape]
    to shape [*shape′]."""

    averages: ClassVar[bool] = False
    """True if the layer turns images into vectors, and its kernels are the means of K
    and Θ over some pairs of pixels."""

    @abstractmethod
    def shape(self, shape: Shape) -> Shape:
        """Return the shape of an example after this layer."""

    @abstractmethod
    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Return a module for examples of this shape,
        with weights from the generator."""

    def carry(self, signal: Signal) -> Signal:
        """Return the properties of the signal after this layer, given its properties
        before. Raise if the layer has no infinite-width limit."""
        raise Mistake(f"{type(self).__name__} has no known limit of infinite width")

    def input_pairs(self, output_pairs: Pairs, shape: Shape) -> Pairs:
        """Return the pixel pairs of the input at which `push` needs covariances, to
        compute the covariances at `output_pairs` after the layer."""
        return output_pairs

    def input_self_pairs(
        self, output_pairs: Pairs | None, shape: Shape
    ) -> Pairs | None:
        """Return the pixel pairs of the input
        that are needed between an example and itself.

        `output_pairs` are the pairs that later layers need between an example and
        itself, or None if they need none."""
        return None if output_pairs is None else self.input_pairs(output_pairs, shape)

    def push(self, covariance: Covariance, shape: Shape) -> Covariance:
        """Apply this layer to covariances and tangent kernels."""
        # not reached, because `carry` raises
        raise NotImplementedError(type(self).__name__)

    def fused(self, shape: Shape, register: int, free: int) -> Operations:
        """Return the operations that the fused engine runs instead of `push` (see
        `covariance.pairs`). They transform the kernels in `register`.

        The operations may overwrite registers from `free` on. A nonlinear layer must
        have exactly one operation with `fields_of` (functions of the variance). Raise
        `NoFusedForm` if only the torch engine supports the layer."""
        raise NoFusedForm(type(self).__name__)


# --- Chains of layers


LayerChain = tuple[AbstractLayer, ...]
FORMULA = frozenset({"input_pairs", "push", "mix", "between", "dual", "alone"})
"""The methods that define a layer's formula. A fused form must agree with them."""


def shapes(layers: LayerChain, shape: Shape) -> list[Shape]:
    """Return the shape of an example before each layer, and after the last layer.

    >>> from ntkexp.layer.linear import Flatten
    >>> shapes((Flatten(),), (3, 4))
    [(3, 4), (12,)]
    """
    chain = [shape]
    for layer in layers:
        chain.append(layer.shape(chain[-1]))
    return chain


def build(
    layers: LayerChain, shape: Shape, generator: torch.Generator
) -> nn.Sequential:
    """Return the layers as a module for examples of this shape."""
    pairs = zip(layers, shapes(layers, shape), strict=False)
    return nn.Sequential(*(layer.build(before, generator) for layer, before in pairs))


def carry(layers: LayerChain, signal: Signal) -> Signal:
    """Return the properties of the signal after all layers."""
    for layer in layers:
        signal = layer.carry(signal)
    return signal


def input_pairs(layers: LayerChain, output_pairs: Pairs, shape: Shape) -> Pairs:
    """Return the pixel pairs of the input at which `push` needs covariances, to compute
    the covariances at `output_pairs` after all layers."""
    for layer, before in zip(
        reversed(layers), reversed(shapes(layers, shape)[:-1]), strict=True
    ):
        output_pairs = layer.input_pairs(output_pairs, before)
    return output_pairs


def input_self_pairs(
    layers: LayerChain, output_pairs: Pairs | None, shape: Shape
) -> Pairs | None:
    """Return the pixel pairs of the input that the layers need between an example and
    itself."""
    for layer, before in zip(
        reversed(layers), reversed(shapes(layers, shape)[:-1]), strict=True
    ):
        output_pairs = layer.input_self_pairs(output_pairs, before)
    return output_pairs


def push(layers: LayerChain, covariance: Covariance, shape: Shape) -> Covariance:
    """Apply all layers to K and Θ."""
    for layer, before in zip(layers, shapes(layers, shape), strict=False):
        covariance = layer.push(covariance, before)
    return covariance


def fused(layers: LayerChain, shape: Shape, register: int, free: int) -> Operations:
    """Return the operations of all layers. Raise `NoFusedForm` if a layer has no fused
    form, or if its operations and its `shape` give images of different sizes."""
    operations: Operations = ()
    for layer, before in zip(layers, shapes(layers, shape), strict=False):
        if not defines_itself(layer, "fused"):
            raise NoFusedForm(type(layer).__name__)
        of_layer = layer.fused(before, register, free)
        # Compare the image size after the operations with the size after the layer.
        pixels = before[1:]
        for operation in of_layer:
            if operation.register == register and operation.coarse:
                coarse = operation.coarse[-len(pixels) :]
                pixels = tuple(len(one.members) for one in coarse)
        if layer.shape(before)[1:] != pixels:
            raise NoFusedForm(type(layer).__name__)
        operations += of_layer
    return operations


def registers(operations: Operations) -> int:
    """Return one more than the number of the largest register
    that the operations use."""
    used = [max(operation.register, operation.other) for operation in operations]
    return 1 + max(used, default=-1)


def defines_itself(layer: AbstractLayer, form: str) -> bool:
    """Return True if the class that defines the layer's formula also defines the
    attribute `form`.

    A subclass that overrides the formula, such as `dual`, must not use the fused form
    of its parent class."""
    names = {form, *FORMULA}
    definer = next(
        kind for kind in type(layer).__mro__ if not names.isdisjoint(vars(kind))
    )
    return form in vars(definer)


class AbstractBranching(AbstractLayer):
    """A layer of several branches with the same input."""

    @property
    @abstractmethod
    def chains(self) -> tuple[LayerChain, ...]:
        """The layers of each branch."""

    def input_pairs(self, output_pairs: Pairs, shape: Shape) -> Pairs:
        return reduce(
            Pairs.union,
            (input_pairs(layers, output_pairs, shape) for layers in self.chains),
        )

    def input_self_pairs(
        self, output_pairs: Pairs | None, shape: Shape
    ) -> Pairs | None:
        by_branch = [
            input_self_pairs(layers, output_pairs, shape) for layers in self.chains
        ]
        needed = [pairs for pairs in by_branch if pairs is not None]
        return reduce(Pairs.union, needed) if needed else None


class Residual(AbstractBranching):
    """Residual layers: branch(x) + shortcut(x).
    Their kernels are K_branch + K_shortcut.

    The branch or the shortcut must end in weights (Dense or Conv) after its last
    activation. Without such independent weights, the kernels would not add. An empty
    shortcut is the identity.

    >>> Residual(branch=()).shape((4, 8))
    (4, 8)
    """

    branch: LayerChain
    shortcut: LayerChain = ()

    @property
    def chains(self) -> tuple[LayerChain, ...]:
        return self.branch, self.shortcut

    def shape(self, shape: Shape) -> Shape:
        branch = shapes(self.branch, shape)[-1]
        shortcut = shapes(self.shortcut, shape)[-1]
        if branch != shortcut:
            raise Mistake(
                f"the branches of a residual layer disagree: {list(branch)} and {list(shortcut)}"
            )
        return branch

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        self.shape(shape)  # raises if the branches disagree
        return Sum(
            build(self.branch, shape, generator), build(self.shortcut, shape, generator)
        )

    def carry(self, signal: Signal) -> Signal:
        # Here, `fresh` means independent of the input of this residual layer.
        ends = [carry(layers, replace(signal, fresh=False)) for layers in self.chains]
        if not any(end.fresh for end in ends):
            raise Mistake(
                "a residual layer has no limit of infinite width unless one of its branches ends "
                "in weights (Dense or Conv) that follow the last activation"
            )
        return Signal(
            gaussian=all(end.gaussian for end in ends),
            fresh=all(carry(layers, signal).fresh for layers in self.chains),
            wide=all(end.wide for end in ends),
            uneven=any(end.uneven for end in ends),
        )

    def push(self, covariance: Covariance, shape: Shape) -> Covariance:
        branch = push(self.branch, covariance, shape)
        shortcut = push(self.shortcut, covariance.for_next_branch(branch), shape)
        return branch.plus(shortcut)

    def fused(self, shape: Shape, register: int, free: int) -> Operations:
        branch = fused(self.branch, shape, register, free + 1)
        shortcut = fused(self.shortcut, shape, free, max(free + 1, registers(branch)))
        copy = Operation(COPY, register, free)
        add = Operation(ADD, register, free)
        return copy, *branch, *shortcut, add


class Sum(nn.Module):
    """The sum of the outputs of two modules."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut

    def forward(
        self, x: Float[Tensor, " example *shape"]
    ) -> Float[Tensor, " example *shape_"]:
        total: Tensor = self.branch(x) + self.shortcut(x)
        return total


class Concatenation(AbstractBranching):
    """Concatenations of the channels of two or more branches, with averaged kernels.

    Channels have the order of the branches. An empty branch is the identity.

    >>> from ntkexp.layer.affine import Dense
    >>> layer = Concatenation(branches=((Dense(features=6),), ()))
    >>> layer.shape((2,)), layer.shares((2,))
    ((8,), (0.75, 0.25))

    Kernels are means over channels. Branch i has c_i channels, which is the share p_i =
    c_i/Σ_j c_j:

        K′ = Σ_i p_i K_i,    Θ′ = Σ_i p_i Θ_i

    The branches need not be independent, because the next layer has separate weights
    for the channels of each branch. No activation or norm may follow directly, because
    the variances of the branches may differ."""

    branches: Annotated[tuple[LayerChain, ...], Field(min_length=2)]

    @property
    def chains(self) -> tuple[LayerChain, ...]:
        return self.branches

    def ends(self, shape: Shape) -> list[Shape]:
        ends = [shapes(layers, shape)[-1] for layers in self.branches]
        if len({end[1:] for end in ends}) > 1:
            shown = ", ".join(str([*end]) for end in ends)
            raise Mistake(f"the branches of a concatenation differ in pixels: {shown}")
        return ends

    def shape(self, shape: Shape) -> Shape:
        ends = self.ends(shape)
        return (sum(end[0] for end in ends), *ends[0][1:])

    def shares(self, shape: Shape) -> tuple[float, ...]:
        """Return the share of each branch in the channels."""
        channels = [end[0] for end in self.ends(shape)]
        return tuple(one / sum(channels) for one in channels)

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        self.shape(shape)
        return SideBySide(build(layers, shape, generator) for layers in self.branches)

    def carry(self, signal: Signal) -> Signal:
        ends = [carry(layers, signal) for layers in self.branches]
        if not all(end.wide for end in ends):
            raise Mistake(
                "a concatenation of the inputs themselves has no limit of infinite width: channels "
                "of the inputs do not grow with width; put a Dense or Conv layer into that branch"
            )
        return Signal(fresh=all(end.fresh for end in ends), wide=True, uneven=True)

    def push(self, covariance: Covariance, shape: Shape) -> Covariance:

        def weighed(
            covariance: Covariance, layers: LayerChain, share: float
        ) -> Covariance:
            return push(layers, covariance, shape).map(lambda values: share * values)

        first, *shares = self.shares(shape)
        total = weighed(covariance, self.branches[0], first)
        for layers, share in zip(self.branches[1:], shares, strict=True):
            branch = weighed(covariance.for_next_branch(total), layers, share)
            total = total.plus(branch)
        return total

    def fused(self, shape: Shape, register: int, free: int) -> Operations:
        # Copy the input into a register for each branch,
        # multiply each result by its share, and add.
        others = range(free, free + len(self.branches) - 1)
        free += len(others)
        operations = tuple(Operation(COPY, register, other) for other in others)
        branches = zip(
            self.branches, (register, *others), self.shares(shape), strict=True
        )
        for layers, branch_register, share in branches:
            branch = fused(layers, shape, branch_register, free)
            free = max(free, registers(branch))
            operations += (*branch, weigh(branch_register, share))
        for other in others:
            operations += (Operation(ADD, register, other),)
        return operations


class SideBySide(nn.ModuleList):
    """Several modules whose outputs are concatenated along the channels."""

    def forward(
        self, x: Float[Tensor, " example *shape"]
    ) -> Float[Tensor, " example *shape_"]:
        return torch.cat([branch(x) for branch in self], dim=1)


def name_validator(
    kind: str, known: Mapping[str, object], hint: str = ""
) -> Callable[[object], object]:
    """Return a validator that replaces the name of a layer by the layer `known[name]`.

    If a name is not similar to any known name, the error message ends with `hint`.

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
            remedy = nearest(name, known) or hint
            raise Mistake(
                f"there is no {kind} '{name}'; choose from {', '.join(known)}{remedy}"
            )
        return known[name]

    return layer
