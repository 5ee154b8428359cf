"""Plain modules: those in which all Python is torch's own, so that what they do is known from what they hold.

A sequence of torch's layers has no mind of its own. Its type, its plain attributes, the shapes of its parameters and
which of them are one decide what runs when it is called, and two calls that agree in these do the same operations with
other numbers. Whatever could make it another function is looked at each time: hooks and parametrizations, methods and
attributes that were put on a layer, buffers, modes of torch, and whether torch's own code is as it was.

>>> net = nn.Sequential(nn.Linear(2, 1), nn.LeakyReLU(0.1))
>>> before = plain_module(net)
>>> net[1].negative_slope = 0.2
>>> plain_module(net).told == before.told
False
>>> net[1].forward = torch.tanh
>>> plain_module(net) is None
True
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from ntkexp.library.torch_code import code_of


def declared(kind: type[nn.Module]) -> frozenset[str]:
    """The attributes that a class of torch's says its layers have."""
    return frozenset(
        name
        for each in kind.__mro__[: kind.__mro__.index(nn.Module)]
        for told in ("__constants__", "__annotations__")
        for name in vars(each).get(told, ())
    )


LAYERS = frozenset(
    (
        *(nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Linear, nn.Embedding),
        *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.GroupNorm),
        *(nn.AvgPool1d, nn.AvgPool2d, nn.MaxPool1d, nn.MaxPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
        *(nn.CELU, nn.ELU, nn.GELU, nn.GLU, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid, nn.LogSoftmax, nn.Mish),
        *(nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softmax, nn.Softplus, nn.Softsign),
        *(nn.Tanh, nn.Tanhshrink),
    )
)
"""Layers whose outputs follow from an input, their parameters and their attributes, in evaluation."""

OF_ALL = frozenset(vars(nn.Module()))
DECLARED = {kind: ("training", *sorted(declared(kind) - OF_ALL)) for kind in (nn.Sequential, *LAYERS)}
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
NUMBERS = frozenset((bool, int, float, str, type(None)))


class PlainModule(NamedTuple):
    """All that decides what a call of a module does with numbers, and its parameters, each once."""

    told: Hashable
    parameters: Sequence[nn.Parameter]


def plain_module(module: nn.Module) -> PlainModule | None:
    """A module in which all Python is torch's own, and None where some other code may decide as well."""
    if is_watched():
        return None
    kinds: set[type[nn.Module]] = set()
    places: dict[nn.Parameter, int] = {}
    told: list[Hashable] = []
    if not tell(module, told, kinds, places):
        return None
    code = code_of(frozenset(kinds))
    if code is None or not code.is_unchanged():
        return None
    trained = tuple([weight.requires_grad for weight in places])
    return PlainModule((torch.are_deterministic_algorithms_enabled(), trained, *told), list(places))


def is_watched() -> bool:
    """Whether something stands between torch's functions and what they do: hooks of all modules, or a mode."""
    return bool(
        _has_any_global_hook()  # type: ignore[no-untyped-call]  # torch's own
        or torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._is_any_autocast_enabled()
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        or torch.is_inference_mode_enabled()
    )


def tell(module: nn.Module, told: list[Hashable], kinds: set[type[nn.Module]], places: dict[nn.Parameter, int]) -> bool:
    """Say what a layer is and holds, and those inside it; False if that is not all that decides."""
    kind: type[nn.Module] = type(module)
    names = DECLARED.get(kind)
    holds = vars(module)
    if names is None or not holds.keys() >= OF_ALL or any(map(holds.get, HOOKS)):
        return False
    attributes = {name: holds[name] for name in names if name in holds}
    if len(attributes) + len(OF_ALL) < len(holds) + 1 or not all(map(is_plain, attributes.values())):
        return False  # there is something that torch's layers have not, such as a method of its own
    parameters = {name: value for name, value in holds["_parameters"].items() if value is not None}
    others = [value for value in holds["_buffers"].values() if value is not None]
    if others or not {nn.Parameter}.issuperset(map(type, parameters.values())):
        return False
    met = [(name, places.setdefault(value, len(places))) for name, value in parameters.items()]
    kinds.add(kind)
    inside = holds["_modules"]
    told.append((kind, repr((attributes, met)), *inside))
    if kind is not nn.Sequential:
        return not inside
    return all(tell(each, told, kinds, places) for each in inside.values())


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a word, or several of them."""
    if type(value) in NUMBERS:
        return True
    return type(value) in (tuple, list, torch.Size) and all(map(is_plain, value))
