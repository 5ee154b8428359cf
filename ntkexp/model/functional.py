"""A module as a function of its weights, and what must be put right first: checkpoints of activations, several
outputs, batch norm of one example.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import fields, is_dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._pytree import tree_flatten

from ntkexp.kernel.record.tape import examples, map_tensors
from ntkexp.kernel.record.taping import is_out_of_memory
from ntkexp.mistake import Mistake, first_line, in_short, nearest
from ntkexp.records.atomic import Damaged
from ntkexp.shapes import Function, Inputs, Weights


def weights_of(module: nn.Module) -> Weights:
    """The parameters that are trained, detached from the module's graph."""
    return {
        name: weight.detach() for name, weight in module.named_parameters() if weight.requires_grad
    }


def load_tensors(path: Path, device: str = "cpu", *, mmap: bool = False) -> dict[str, Any]:
    """Tensors and numbers that torch has saved; nothing of a file that holds anything else is carried out."""
    try:
        with warnings.catch_warnings(action="ignore"):  # the refusal says it
            tensors: dict[str, Any] = torch.load(
                path, map_location=device, weights_only=True, mmap=mmap
            )
        return dict(tensors)
    except (
        UnpicklingError,
        RuntimeError,
        EOFError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
    ) as error:
        raise Damaged(
            f"{path} is damaged: it does not hold tensors alone ({type(error).__name__})"
        ) from None


def function_of(module: nn.Module, output: str | int | None = None) -> Function:
    """Turn the module into a function: weights, inputs ↦ outputs. Weights and buffers that are not given are the
    module's own.

    A tuple of inputs is given by position, a mapping by name; `output` picks one of several outputs.

    Buffers are passed as copies: a module that writes to one does not change itself.
    """
    if reasons := list(training_modes(module)):
        in_training = any(layer.training for layer in module.modules())
        advice = "call module.eval() first" if in_training else "let it track running statistics"
        raise Mistake(
            f"{reasons[0]}; {advice}, so that each output depends on its own example alone"
        )
    return function_as_it_is(module, output)


def copied(module: nn.Module, memo: Mapping[int, Any] | None = None) -> nn.Module:
    """Copy a module. `memo` maps ids of objects to what stands for them in the copy, as for `copy.deepcopy`.

    A layer may hold a tensor that it has computed, with its graph: a hidden state that it keeps for later, or the
    weight of the older `weight_norm` and of pruning. torch refuses to copy such a tensor, so its numbers are copied.

    >>> from torch.nn.utils import prune
    >>> layer = prune.l1_unstructured(nn.Linear(2, 2), "weight", 0.5)
    >>> layer.weight.is_leaf, copied(layer).weight.is_leaf
    (False, True)
    """
    known = dict(memo or {})
    for layer in module.modules():
        for value in tree_flatten(vars(layer))[0]:
            if isinstance(value, Tensor) and not value.is_leaf:
                known[id(value)] = value.detach().clone()
    try:
        return deepcopy(module, known)
    except Exception as error:  # a module may hold anything, such as a lock or an open file
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise Mistake(
            f"the module cannot be copied ({reason}); let it hold parameters, tensors and numbers"
        ) from error


def function_as_it_is(module: nn.Module, output: str | int | None = None) -> Function:
    """The same, whatever its layers do."""

    def function(weights: Weights, inputs: Inputs) -> Tensor:
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        placed, named = arguments(inputs)
        with without_checkpoints(), InOrder() if examples(inputs) == 1 else nullcontext():
            answer = called(module, {**buffers, **weights}, placed, named)
        return choose_output(answer, output)

    return function


def arguments(inputs: Inputs) -> tuple[tuple[object, ...], dict[str, object]]:
    """The inputs by position and those by name."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def called(
    module: nn.Module,
    values: Mapping[str, Tensor],
    placed: tuple[object, ...],
    named: Mapping[str, object] | None = None,
) -> Any:
    """Call a module with other parameters and buffers, which go wherever the module holds one that they name.

    Every place is named once. A layer that stands in a module twice has two names for each, and torch's own call would
    leave the latest values behind in it. Embeddings with `max_norm` shorten a copy of their weights.

    >>> import torch
    >>> twice = nn.Sequential(layer := nn.Linear(1, 1, bias=False), nn.Tanh(), layer)
    >>> before = layer.weight
    >>> called(twice, {"0.weight": torch.zeros(1, 1)}, (torch.ones(1, 1),)).tolist(), layer.weight is before
    ([[0.0]], True)
    """
    names = dict(held(module, named_once=False))
    by_tensor = {id(names[name]): value for name, value in values.items()}
    for weight in renormed(module):
        by_tensor[id(weight)] = by_tensor.get(id(weight), weight).clone()
    places = {name: by_tensor[id(value)] for name, value in held(module) if id(value) in by_tensor}
    return functional_call(module, places, placed, dict(named or {}), tie_weights=False)


def renormed(module: nn.Module) -> Iterator[Tensor]:
    """Yield the weights that an embedding with `max_norm` shortens in place whenever it looks rows up in them."""
    for layer in module.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            yield from layer.parameters(recurse=False)


def held(module: nn.Module, *, named_once: bool = True) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers at every place that holds one, each place by one of its names or by all."""
    for prefix, layer in module.named_modules(remove_duplicate=named_once):
        yield from layer.named_parameters(prefix, recurse=False, remove_duplicate=False)
        yield from layer.named_buffers(prefix, recurse=False, remove_duplicate=False)


def training_modes(module: nn.Module) -> Iterator[str]:
    """The reasons why outputs would be random, or depend on the rest of the batch: layers in training mode."""
    yield from batch_statistics(module)
    for name, layer in module.named_modules():
        if isinstance(layer, _DropoutNd) and layer.training and layer.p > 0:
            yield f"layer '{name}' ({type(layer).__name__}, p={layer.p}) is random in training mode"


def batch_statistics(module: nn.Module) -> Iterator[str]:
    """The reasons why outputs would depend on the rest of the batch: norms in training mode."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
            untracked = ", track_running_stats=False" if layer.running_mean is None else ""
            yield f"layer '{name}' ({type(layer).__name__}{untracked}) takes its statistics from the batch"


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


def choose_output(answer: object, output: str | int | None) -> Tensor:
    """The answer itself, or the part of a mapping, a dataclass or a tuple that `output` names.

    >>> choose_output({"logits": torch.ones(2), "loss": None}, "logits")
    tensor([1., 1.])
    """
    if output is None and isinstance(answer, Tensor):
        return answer
    if not (output is None or isinstance(output, str | int)):
        raise Mistake(
            f"output={in_short(output)} is a {type(output).__name__}; give the name or the place of one tensor, or let "
            "the model return several as one (torch.cat)"
        )
    parts = parts_of(answer)
    kind, tensors = (
        type(answer).__name__,
        [name for name, value in parts.items() if isinstance(value, Tensor)],
    )
    listed = f"its tensors are {', '.join(map(repr, tensors))}" if tensors else "it holds no tensor"
    if output is None:
        raise Mistake(
            f"the module gives a {kind}, not a tensor: {listed}; say which is meant with output="
        )
    if not parts:
        raise Mistake(
            f"output={output!r}: the module gives a {kind}, which has no parts; leave output out"
        )
    value = parts.get(output)
    if not isinstance(value, Tensor):
        hint = (
            nearest(output, [name for name in tensors if isinstance(name, str)])
            if isinstance(output, str)
            else ""
        )
        raise Mistake(
            f"output={output!r} is not a tensor of the {kind} that the module gives{hint}; {listed}"
        )
    return value


def parts_of(answer: object) -> dict[str | int, object]:
    """Return the parts of an answer by their names or places.

    >>> parts_of((torch.ones(2), None))
    {0: tensor([1., 1.]), 1: None}
    """
    if isinstance(answer, Mapping):
        return dict(answer)
    if is_dataclass(answer):
        return {field.name: getattr(answer, field.name) for field in fields(answer)}
    if isinstance(answer, tuple | list):
        return {
            **dict(enumerate(answer)),
            **dict(zip(getattr(answer, "_fields", ()), answer, strict=False)),
        }
    return {}


def batch_axis_missing(function: Function, weights: Weights, inputs: Inputs) -> bool:
    """Return whether a function that does not take these inputs takes them as the only example of a batch.

    >>> function = function_of(nn.Linear(3, 1))
    >>> batch_axis_missing(function, {}, torch.ones(3)), batch_axis_missing(function, {}, torch.ones(2))
    (True, False)
    """
    try:
        with torch.no_grad():
            answer = function(weights, map_tensors(lambda tensor: tensor[None].clone(), inputs))
    except Exception:  # the module's own
        return False
    return bool(answer.dim()) and len(answer) == 1


BATCH_AXIS = (
    "its inputs need an axis of examples, also if there is only one: give x[None] in place of x"
)


# --- Checkpoints of activations: a module that computes parts of itself again on its way back computes them once.
#
# That saves memory and changes no value. Computed again, a part would take the weights that the module holds by
# then, and not those that it was given.


class Forgetful:
    """Takes the place of torch's function that forgets at once: the part is computed as if it were to stay."""

    @staticmethod
    def apply(part: Callable[..., Any], _: bool, *args: Any) -> Any:
        return part(*args)


def nothing(*_: Any, **__: Any) -> Iterator[None]:
    """Do nothing before and after a part."""
    yield


INSTEAD = {"CheckpointFunction": Forgetful, "_checkpoint_without_reentrant_generator": nothing}
"""What is asked instead of torch's two ways to forget what is in a part."""


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Everything is computed once.

    >>> x = torch.ones(2, requires_grad=True)
    >>> with without_checkpoints():
    ...     y = checkpoint.checkpoint(torch.sin, x, use_reentrant=True)
    >>> type(y.grad_fn).__name__
    'SinBackward0'
    """
    before = {name: getattr(checkpoint, name) for name in INSTEAD}
    for name, other in INSTEAD.items():
        setattr(checkpoint, name, other)
    try:
        yield
    finally:
        for name, own in before.items():
            setattr(checkpoint, name, own)


# --- Batch norm of a single example, of which torch finds wrong gradients on CPUs.
#
# What comes back to it may lie with its channels last in memory, as from x.flatten(2).transpose(1, 2). Of one
# image torch 2.13 then takes numbers of one channel for those of another; of several it does not, nor where they
# lie in order.


BATCH_NORMS = (torch.batch_norm, functional.batch_norm)


class InOrder(TorchFunctionMode):
    """Gradients come back in order to the batch norm of one example.

    >>> x = torch.zeros(1, 2, 2, 2, requires_grad=True)
    >>> with InOrder():
    ...     y = functional.batch_norm(x, torch.zeros(2), torch.tensor([1.0, 4.0]), eps=0.0)
    >>> turned = torch.arange(0.0, 16.0, 2.0).view(4, 2).t().view(1, 2, 2, 2)
    >>> torch.autograd.grad(y, x, turned)[0].flatten().tolist()
    [0.0, 4.0, 8.0, 12.0, 1.0, 3.0, 5.0, 7.0]
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in BATCH_NORMS and len(result) == 1:
            return result.flatten().view(
                result.shape
            )  # what comes back to it is in the order of its axes
        return result
