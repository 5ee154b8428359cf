"""Specifications of layers: parse `{"layer": NAME, …}`, list the known layers,
and change their width.

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
from ntkexp.layer.base import (
    AbstractBranching,
    AbstractLayer,
    Concatenation,
    LayerChain,
    Residual,
    name_validator,
)
from ntkexp.layer.pointwise import AbstractPointwise
from ntkexp.mistake import Mistake, in_short, nearest
from ntkexp.naming import class_path, module_names, option_name

LAYER_PACKAGE = __name__.rpartition(".")[0]


def layer_classes() -> dict[str, type[AbstractLayer]]:
    """Return all concrete layer classes by name,
    including classes of imported user code.

    >>> layer_classes()["Dense"]
    <class 'ntkexp.layer.affine.Dense'>
    """
    # Import all files of this package, so that `__subclasses__` finds their classes.
    for name in module_names(sys.modules[LAYER_PACKAGE]):
        import_module(f"{LAYER_PACKAGE}.{name}")
    # Refuse two classes with the same option name.
    by_option: dict[str, type[AbstractLayer]] = {}
    for kind in subclasses(AbstractLayer):  # type: ignore[type-abstract]  # no instance is made
        if not can_be_built(kind):
            continue
        first = by_option.setdefault(option_name(kind.__name__), kind)
        if class_path(first) != class_path(kind):
            raise Mistake(
                f"{class_path(kind)}: there is a layer of this name, {class_path(first)}; give the "
                "class another name"
            )
    return {kind.__name__: kind for kind in by_option.values()}


def subclasses(kind: type[AbstractLayer]) -> Iterator[type[AbstractLayer]]:
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def activations() -> dict[str, AbstractPointwise]:
    """Return all pointwise layers without required fields, by option name."""
    layers: dict[str, AbstractPointwise] = {}
    for kind in layer_classes().values():
        has_required_field = any(
            field.is_required() for field in kind.model_fields.values()
        )
        if issubclass(kind, AbstractPointwise) and not has_required_field:
            layer = kind()
            layers[layer.option] = layer
    return dict(sorted(layers.items()))


def activation(name: object) -> object:
    """Replace the name of an activation by its layer. Return layers unchanged.

    >>> activation("leaky_relu")
    LeakyReLU(slope=0.1)
    """
    hint = "; your own class MyLayer is named my_layer, and needs trust=FILE.py"
    return name_validator("activation", activations(), hint)(name)


Activation = Annotated[AbstractPointwise, BeforeValidator(activation)]
"""A pointwise layer, or its name."""

Spec: TypeAlias = str | Sequence[Mapping[str, Any] | AbstractLayer]
"""A list of layers, as Python objects or as JSON."""


def parse_layers(spec: Spec, place: str = "layers") -> LayerChain:
    """Parse a list of layers; `place` is its name in error messages."""
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
    classes = layer_classes()
    name = item["layer"]
    if not isinstance(name, str) or name not in classes:
        hint = (
            nearest(str(name), classes) or f"; there are {', '.join(sorted(classes))}"
        )
        raise Mistake(f"{place}: there is no layer '{name}'{hint}")
    kind = classes[name]
    values: dict[str, Any] = {
        str(key): value for key, value in item.items() if key != "layer"
    }
    fields = kind.model_fields
    for key in values:
        if key not in fields:
            keys = f"its keys are {', '.join(fields)}" if fields else "it has none"
            raise Mistake(
                f"{place}: {kind.__name__} has no key '{key}'; {keys}{nearest(key, fields)}"
            )
    for key, value in values.items():
        if fields[key].annotation == tuple[AbstractLayer, ...]:
            values[key] = parse_layers(value, f"{place}.{key}")
        if fields[key].annotation == tuple[tuple[AbstractLayer, ...], ...]:
            values[key] = parse_branches(value, f"{place}.{key}")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise layer_mistake(
            error, f"{place} ({kind.__name__})", ", ".join(fields)
        ) from None


def parse_branches(value: object, place: str) -> tuple[LayerChain, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise Mistake(
            f"{place} is not a list of branches; write [[…], […]], each a list of layers"
        )
    return tuple(
        parse_layers(branch, f"{place}[{k}]") for k, branch in enumerate(value)
    )


def layer_mistake(error: ValidationError, place: str, keys: str = "") -> Mistake:
    """Return a `Mistake` that describes the first validation error of a layer."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"][:1])
    reason = str(first.get("ctx", {}).get("error", "")) or first["msg"]
    if first["type"] == "missing":
        return Mistake(f"{place}: {name} is missing; its keys are {keys}")
    if not name:
        return Mistake(f"{place}: {reason}")
    return Mistake(f"{place}: {name}={in_short(first['input'])}: {reason}")


def at_width(layers: LayerChain, width: int) -> LayerChain:
    """Scale the features of all hidden layers by one factor,
    so that the widest has `width` features.

    The last layer does not change.

    >>> from ntkexp.layer.affine import Dense
    >>> layers = (Dense(features=2), Dense(features=4), Dense(features=1))
    >>> [layer.features for layer in at_width(layers, 8)]
    [4, 8, 1]
    """
    *hidden, last = layers
    widest = max(
        (layer.features for layer in affine_layers(tuple(hidden))), default=width
    )
    return (*(scale_features(layer, width / widest) for layer in hidden), last)


def scale_features(layer: AbstractLayer, factor: float) -> AbstractLayer:
    scaled: dict[str, object] = {}
    if isinstance(layer, AbstractAffine | SelfAttention):
        scaled["features"] = max(1, round(layer.features * factor))
    # the number of heads and their width grow equally
    if isinstance(layer, SelfAttention):
        scaled["heads"] = max(1, round(layer.heads * sqrt(factor)))
    if isinstance(layer, Residual):
        scaled["branch"] = scale_all(layer.branch, factor)
        scaled["shortcut"] = scale_all(layer.shortcut, factor)
    if isinstance(layer, Concatenation):
        scaled["branches"] = tuple(
            scale_all(branch, factor) for branch in layer.branches
        )
    return layer.model_copy(update=scaled)


def scale_all(layers: LayerChain, factor: float) -> LayerChain:
    return tuple(scale_features(layer, factor) for layer in layers)


def affine_layers(layers: LayerChain) -> Iterator[AbstractAffine]:
    """Yield all affine layers, including layers in branches."""
    return (layer for layer in every_layer(layers) if isinstance(layer, AbstractAffine))


def every_layer(layers: LayerChain) -> Iterator[AbstractLayer]:
    """Yield all layers, including layers in branches."""
    for layer in layers:
        yield layer
        if isinstance(layer, AbstractBranching):
            for branch in layer.chains:
                yield from every_layer(branch)
