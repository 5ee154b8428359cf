"""A list of layers as plain data: `{"layer": NAME, …}` each, whose keys are the fields of the layer's class.

>>> parse('[{"layer": "Dense", "features": 8}, {"layer": "ReLU"}]')
(Dense(features=8, W_std=1.0, b_std=0.0, param='ntk', frozen=False), ReLU())
>>> parse([{"layer": "Dence", "features": 8}])
Traceback (most recent call last):
ntkexp.mistake.Mistake: layers[0]: there is no layer 'Dence'; did you mean 'Dense'?
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from pydantic import ValidationError

from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.kinds import kinds
from ntkexp.mistake import Mistake, nearest

Spec: TypeAlias = str | Sequence[Mapping[str, Any] | AbstractLayer]
"""A list of layers, or the same as JSON."""


def parse(spec: Spec, place: str = "layers") -> tuple[AbstractLayer, ...]:
    """Parse the layers of a description; `place` is how it is spoken of."""
    items = decoded(spec, place) if isinstance(spec, str) else spec
    if not isinstance(items, Sequence) or isinstance(items, Mapping | str | bytes):
        raise Mistake(f'{place} is no list of layers; write [{{"layer": "Dense", "features": 64}}, …]')
    return tuple(layer(item, f"{place}[{k}]") for k, item in enumerate(items))


def decoded(text: str, place: str) -> Any:
    """The description, read from JSON if it is a text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise Mistake(f"{place} is no JSON: {error}") from None


def names_layer(node: Mapping[str, Any]) -> bool:
    """Whether a mapping is meant to be a layer."""
    return "layer" in node and "_target_" not in node


def layer(item: object, place: str) -> AbstractLayer:
    """Parse one layer of a description."""
    if isinstance(item, AbstractLayer):
        return item
    if not isinstance(item, Mapping) or "layer" not in item:
        raise Mistake(f'{place} is no layer; write {{"layer": NAME, …}} with a name such as Dense or ReLU')
    kind = kind_of(item["layer"], place)
    given = {str(key): value for key, value in item.items() if key != "layer"}
    refuse_strangers(kind, given, place)
    lists = {key: parse(value, f"{place}.{key}") for key, value in given.items() if takes_layers(kind, key)}
    branches = {key: parallel(value, f"{place}.{key}") for key, value in given.items() if takes_branches(kind, key)}
    try:
        return kind.model_validate(given | lists | branches)
    except ValidationError as error:
        raise refusal(error, kind, f"{place} ({kind.__name__})") from None


def kind_of(name: object, place: str) -> type[AbstractLayer]:
    """Find the class of a layer by its name."""
    known = kinds()
    if not isinstance(name, str) or name not in known:
        hint = nearest(str(name), known) or f"; there are {', '.join(sorted(known))}"
        raise Mistake(f"{place}: there is no layer '{name}'{hint}")
    return known[name]


def refuse_strangers(kind: type[AbstractLayer], given: Iterable[str], place: str) -> None:
    """Every key of a description is a field of its layer."""
    known = kind.model_fields
    for key in given:
        if key not in known:
            keys = f"its keys are {', '.join(known)}" if known else "it has none"
            raise Mistake(f"{place}: {kind.__name__} has no key '{key}'; {keys}{nearest(key, known)}")


def takes_layers(kind: type[AbstractLayer], key: str) -> bool:
    """Whether a field is a list of layers."""
    return kind.model_fields[key].annotation == tuple[AbstractLayer, ...]


def takes_branches(kind: type[AbstractLayer], key: str) -> bool:
    """Whether a field is a list of lists of layers."""
    return kind.model_fields[key].annotation == tuple[tuple[AbstractLayer, ...], ...]


def parallel(items: object, place: str) -> tuple[tuple[AbstractLayer, ...], ...]:
    """Parse lists of layers, each of which is a branch."""
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        raise Mistake(f"{place} is no list of branches; write [[…], […]], each a list of layers")
    return tuple(parse(item, f"{place}[{k}]") for k, item in enumerate(items))


def refusal(error: ValidationError, kind: type[AbstractLayer], place: str) -> Mistake:
    """The first thing that is wrong with a layer."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"][:1])
    said = str(first.get("ctx", {}).get("error", "")) or first["msg"]
    if first["type"] == "missing":
        return Mistake(f"{place}: {name} is missing; its keys are {', '.join(kind.model_fields)}")
    return Mistake(f"{place}: {name}={first['input']!r}: {said}" if name else f"{place}: {said}")
