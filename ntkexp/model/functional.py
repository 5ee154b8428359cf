"""A module as a function of its weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ntkexp.kernel.record.inputs import examples
from ntkexp.mistake import Mistake
from ntkexp.model.foreign.checkpoints import without_checkpoints
from ntkexp.model.foreign.chosen_output import choose_output
from ntkexp.model.foreign.single_example import InOrder
from ntkexp.records.seal import Damaged
from ntkexp.shapes import Function, Inputs, Weights


def weights_of(module: nn.Module) -> Weights:
    """The parameters that are trained, detached from the module's graph."""
    return {name: weight.detach() for name, weight in module.named_parameters() if weight.requires_grad}


def load_tensors(path: Path, device: str = "cpu", *, mmap: bool = False) -> dict[str, Any]:
    """Tensors and numbers that torch has saved; nothing of a file that holds anything else is carried out."""
    try:
        with warnings.catch_warnings(action="ignore"):  # the refusal says it
            found: dict[str, Any] = torch.load(path, map_location=device, weights_only=True, mmap=mmap)
        return dict(found)
    except (UnpicklingError, RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise Damaged(f"{path} is damaged: it does not hold tensors alone ({type(error).__name__})") from None


def function_of(module: nn.Module, output: str | int | None = None) -> Function:
    """Turn the module into a function: weights, inputs ↦ outputs. Weights that are not given, and all buffers, are the
    module's own.

    A tuple of inputs is given by position, a mapping by name; `output` picks one of several outputs.

    Buffers are passed as copies: a module that writes to one does not change itself.
    """
    if reasons := list(training_modes(module)):
        raise Mistake(f"{reasons[0]}; call module.eval() first, so that each output depends on its own example alone")
    return function_as_it_is(module, output)


def function_as_it_is(module: nn.Module, output: str | int | None = None) -> Function:
    """The same, whatever its layers do."""

    def function(weights: Weights, inputs: Inputs) -> Tensor:
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        placed, named = arguments(inputs)
        with without_checkpoints(), InOrder() if examples(inputs) == 1 else nullcontext():
            answer = called(module, weights | buffers, placed, named)
        return choose_output(answer, output)

    return function


def called(
    module: nn.Module,
    values: Mapping[str, Tensor],
    placed: tuple[object, ...],
    named: Mapping[str, object] | None = None,
) -> Any:
    """Call a module with other parameters and buffers, which go wherever the module holds one that they name.

    Every place is named once. A layer that stands in a module twice has two names for each, and torch's own call would
    leave the latest values behind in it.

    >>> import torch
    >>> twice = nn.Sequential(layer := nn.Linear(1, 1, bias=False), nn.Tanh(), layer)
    >>> before = layer.weight
    >>> called(twice, {"0.weight": torch.zeros(1, 1)}, (torch.ones(1, 1),)).tolist(), layer.weight is before
    ([[0.0]], True)
    """
    names = dict(held(module, named_once=False))
    known = {id(names[name]): value for name, value in values.items()}
    places = {name: known[id(value)] for name, value in held(module) if id(value) in known}
    return functional_call(module, places, placed, dict(named or {}), tie_weights=False)


def held(module: nn.Module, *, named_once: bool = True) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers at every place that holds one, each place by one of its names or by all."""
    for prefix, layer in module.named_modules(remove_duplicate=named_once):
        yield from layer.named_parameters(prefix, recurse=False, remove_duplicate=False)
        yield from layer.named_buffers(prefix, recurse=False, remove_duplicate=False)


def arguments(inputs: Inputs) -> tuple[tuple[object, ...], dict[str, object]]:
    """Split the inputs into those by position and those by name."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def training_modes(module: nn.Module) -> Iterator[str]:
    """The reasons why outputs would be random, or depend on the rest of the batch: layers in training mode."""
    yield from batch_statistics(module)
    yield from random_layers(module)


def batch_statistics(module: nn.Module) -> Iterator[str]:
    """The reasons why outputs would depend on the rest of the batch: norms in training mode."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
            yield f"layer '{name}' ({type(layer).__name__}) takes its statistics from the batch"


def random_layers(module: nn.Module) -> Iterator[str]:
    """The reasons why outputs would be random: dropout in training mode."""
    for name, layer in module.named_modules():
        if isinstance(layer, _DropoutNd) and layer.training and layer.p > 0:
            yield f"layer '{name}' ({type(layer).__name__}, p={layer.p}) is random in training mode"


def hooked(module: nn.Module) -> Iterator[str]:
    """The trained parameters with hooks, by which `backward` may give them another gradient than the derivative, or
    move them.

    >>> layer = nn.Linear(1, 1)
    >>> hook = layer.bias.register_hook(torch.sign)
    >>> list(hooked(layer)), hook.remove(), list(hooked(layer))
    (['bias'], None, [])
    """
    for name, weight in module.named_parameters():
        if weight.requires_grad and (weight._backward_hooks or weight._post_accumulate_grad_hooks):
            yield name
