"""A module's answer: the tensor that is read, where a module gives several in a mapping, a dataclass or a tuple.

>>> import torch
>>> choose_output({"logits": torch.ones(2), "loss": None}, "logits")
tensor([1., 1.])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass

from torch import Tensor

from ntkexp.mistake import Mistake, nearest


def choose_output(answer: object, output: str | int | None) -> Tensor:
    """Choose the answer itself, or the part of it that `output` names."""
    if output is None and isinstance(answer, Tensor):
        return answer
    kind, found = type(answer).__name__, parts(answer)
    known = [name for name, value in found.items() if isinstance(value, Tensor)]
    listed = f"its tensors are {', '.join(map(repr, known))}" if known else "it holds no tensor"
    if output is None:
        raise Mistake(f"the module gives a {kind}, not a tensor: {listed}; say which is meant with output=")
    if not found:
        raise Mistake(f"output={output!r}: the module gives a {kind}, which has no parts; leave output out")
    value = found.get(output)
    if not isinstance(value, Tensor):
        hint = nearest(output, [name for name in known if isinstance(name, str)]) if isinstance(output, str) else ""
        raise Mistake(f"output={output!r} is no tensor of the {kind} that the module gives{hint}; {listed}")
    return value


def parts(answer: object) -> dict[str | int, object]:
    """Take the answer apart, by name or by place."""
    if isinstance(answer, Mapping):
        return dict(answer)
    if is_dataclass(answer):
        return {field.name: getattr(answer, field.name) for field in fields(answer)}
    if isinstance(answer, tuple | list):
        return {**dict(enumerate(answer)), **dict(zip(getattr(answer, "_fields", ()), answer, strict=False))}
    return {}
