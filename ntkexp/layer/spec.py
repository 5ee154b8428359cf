"""Layers as plain data, `{"layer": NAME, …}` each: which there are, by name, and lists of them made wider.

>>> parse_layers('[{"layer": "Dense", "features": 8}, {"layer": "ReLU"}]')
(Dense(features=8, W_std=1.0, b_std=0.0, param='ntk', frozen=False), ReLU())
>>> parse_layers([{"layer": "Dence", "features": 8}])
Traceback (most recent call last):
ntkexp.mistake.Mistake: layers[0]: there is no layer 'Dence'; did you mean 'Dense'?
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from math import sqrt
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, ValidationError

from ntkexp.component import can_be_built
from ntkexp.layer.affine import AbstractAffine
from ntkexp.layer.attention import SelfAttention
from ntkexp.layer.base import AbstractLayer, Concatenation, Residual, name_validator
from ntkexp.layer.pointwise import AbstractPointwise
from ntkexp.mistake import Mistake, in_short, nearest
from ntkexp.naming import class_path, module_names, option_name

PACKAGE = __name__.rpartition(".")[0]


def layer_classes() -> dict[str, type[AbstractLayer]]:
    """The classes of layers by name: those of this package, and subclasses that were imported from elsewhere.

    >>> layer_classes()["Dense"]
    <class 'ntkexp.layer.affine.Dense'>
    """
    # Import the files of this package, so that their classes are known as subclasses.
    for name in module_names(sys.modules[PACKAGE]):
        import_module(f"{PACKAGE}.{name}")
    # Two classes with the same option name are refused.
    by_option: dict[str, type[AbstractLayer]] = {}
    for kind in subclasses(AbstractLayer):  # type: ignore[type-abstract]  # it is not built here
        if not can_be_built(kind):
            continue
        first = by_option.setdefault(option_name(kind.__name__), kind)
        if class_path(first) != class_path(kind):
            raise Mistake(
                f"{class_path(kind)}: there is a layer of this name, {class_path(first)}; give the class another name"
            )
    return {kind.__name__: kind for kind in by_option.values()}


def subclasses(kind: type[AbstractLayer]) -> Iterator[type[AbstractLayer]]:
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def activations() -> dict[str, AbstractPointwise]:
    """Every pointwise layer that is known without a number, by the words of its class."""
    pointwise = [kind for kind in layer_classes().values() if issubclass(kind, AbstractPointwise)]
    usual = [
        kind()
        for kind in pointwise
        if not any(field.is_required() for field in kind.model_fields.values())
    ]
    return {layer.option: layer for layer in sorted(usual, key=lambda layer: layer.option)}


def activation(name: object) -> object:
    """A layer in place of its name; a layer stays as it is.

    >>> activation("leaky_relu")
    LeakyReLU(slope=0.1)
    """
    return name_validator("activation", activations())(name)


Activation = Annotated[AbstractPointwise, BeforeValidator(activation)]
"""A pointwise layer, or its name."""

Spec: TypeAlias = str | Sequence[Mapping[str, Any] | AbstractLayer]
"""A list of layers, or the same as JSON."""


def parse_layers(spec: Spec, place: str = "layers") -> tuple[AbstractLayer, ...]:
    """Parse the layers of a description; `place` is how it is spoken of."""
    try:
        items = json.loads(spec) if isinstance(spec, str) else spec
    except json.JSONDecodeError as error:
        raise Mistake(f"{place} is not JSON: {error}") from None
    if not isinstance(items, Sequence) or isinstance(items, Mapping | str | bytes):
        raise Mistake(
            f'{place} is not a list of layers; write [{{"layer": "Dense", "features": 64}}, …]'
        )
    return tuple(parse_layer(item, f"{place}[{k}]") for k, item in enumerate(items))


def names_layer(node: Mapping[str, Any]) -> bool:
    return "layer" in node and "_target_" not in node


def parse_layer(item: object, place: str) -> AbstractLayer:
    if isinstance(item, AbstractLayer):
        return item
    if not isinstance(item, Mapping) or "layer" not in item:
        raise Mistake(
            f'{place} is not a layer; write {{"layer": NAME, …}} with a name such as Dense or ReLU'
        )
    classes, name = layer_classes(), item["layer"]
    if not isinstance(name, str) or name not in classes:
        hint = nearest(str(name), classes) or f"; there are {', '.join(sorted(classes))}"
        raise Mistake(f"{place}: there is no layer '{name}'{hint}")
    kind = classes[name]
    given: dict[str, Any] = {str(key): value for key, value in item.items() if key != "layer"}
    fields = kind.model_fields
    for key in given:
        if key not in fields:
            keys = f"its keys are {', '.join(fields)}" if fields else "it has none"
            raise Mistake(
                f"{place}: {kind.__name__} has no key '{key}'; {keys}{nearest(key, fields)}"
            )
    # layers inside layers: a branch, or several of them
    for key, value in given.items():
        if fields[key].annotation == tuple[AbstractLayer, ...]:
            given[key] = parse_layers(value, f"{place}.{key}")
    for key, value in given.items():
        if fields[key].annotation == tuple[tuple[AbstractLayer, ...], ...]:
            if not isinstance(value, Sequence) or isinstance(value, str | bytes):
                raise Mistake(
                    f"{place}.{key} is not a list of branches; write [[…], […]], each a list of layers"
                )
            given[key] = tuple(
                parse_layers(branch, f"{place}.{key}[{k}]") for k, branch in enumerate(value)
            )
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise layer_mistake(error, f"{place} ({kind.__name__})", ", ".join(fields)) from None


def layer_mistake(error: ValidationError, place: str, keys: str = "") -> Mistake:
    """The first thing that is wrong with a layer."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"][:1])
    reason = str(first.get("ctx", {}).get("error", "")) or first["msg"]
    if first["type"] == "missing":
        return Mistake(f"{place}: {name} is missing; its keys are {keys}")
    return Mistake(
        f"{place}: {name}={in_short(first['input'])}: {reason}" if name else f"{place}: {reason}"
    )


Layers = tuple[AbstractLayer, ...]


def at_width(layers: Layers, width: int) -> Layers:
    """The widest hidden layer has `width` features, the others in proportion; the last layer keeps its own.

    >>> from ntkexp.layer.affine import Dense
    >>> [layer.features for layer in at_width((Dense(features=2), Dense(features=4), Dense(features=1)), 8)]
    [4, 8, 1]
    """
    *hidden, last = layers
    widest = max((layer.features for layer in affine_layers(tuple(hidden))), default=width)
    return (*(scale_features(layer, width / widest) for layer in hidden), last)


def scale_features(layer: AbstractLayer, factor: float) -> AbstractLayer:
    if isinstance(layer, AbstractAffine):
        return layer.model_copy(update={"features": max(1, round(layer.features * factor))})
    if isinstance(layer, SelfAttention):  # heads of more channels, and more of them
        heads = max(1, round(layer.heads * sqrt(factor)))
        return layer.model_copy(
            update={"features": max(1, round(layer.features * factor)), "heads": heads}
        )
    if isinstance(layer, Residual):
        branch, shortcut = (
            tuple(scale_features(one, factor) for one in side)
            for side in (layer.branch, layer.shortcut)
        )
        return layer.model_copy(update={"branch": branch, "shortcut": shortcut})
    if isinstance(layer, Concatenation):
        branches = tuple(
            tuple(scale_features(one, factor) for one in branch) for branch in layer.branches
        )
        return layer.model_copy(update={"branches": branches})
    return layer


def affine_layers(layers: Layers) -> Iterator[AbstractAffine]:
    """Find the affine layers, those of branches included."""
    return (layer for layer in every_layer(layers) if isinstance(layer, AbstractAffine))


def every_layer(layers: Layers) -> Iterator[AbstractLayer]:
    """The layers, and those of their branches."""
    for layer in layers:
        yield layer
        if isinstance(layer, Residual):
            yield from every_layer(layer.branch + layer.shortcut)
        if isinstance(layer, Concatenation):
            yield from every_layer(tuple(one for branch in layer.branches for one in branch))
