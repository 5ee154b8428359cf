"""What the followed optimizers move, by name; what must stay as it was; and what lies inside the wrappers of
libraries.
"""

from __future__ import annotations

import ctypes
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import get_world_size
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ntkexp.mistake import Mistake
from ntkexp.shapes import Weights

# --- The parameters that optimizers move, by the names that the model gives them.


Group: TypeAlias = tuple[Mapping[str, Any], dict[str, nn.Parameter]]
"""The settings of a group of parameters, and these."""

SHORTEST = 32  # bits


@dataclass
class Members:
    """The groups of each optimizer; they are named again where a group has come, grown or been loaded."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    known: dict[int, tuple[list[int], list[Group]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = {id(weight): name for name, weight in self.model.named_parameters()}

    def groups(self, optimizer: torch.optim.Optimizer) -> list[Group]:
        """The settings and parameters of each group of an optimizer.

        >>> net = nn.Linear(2, 1)
        >>> sgd = torch.optim.SGD([net.weight])
        >>> [list(members) for _, members in Members(net, [sgd]).groups(sgd)]
        [['weight']]
        """
        present = [id(part) for group in optimizer.param_groups for part in (group, *group["params"])]
        known = self.known.get(id(optimizer))
        if known is None or known[0] != present:
            known = self.known[id(optimizer)] = (present, [self.named(group) for group in optimizer.param_groups])
        return known[1]

    def named(self, group: Mapping[str, Any]) -> Group:
        """A group with the names of its parameters."""
        for weight in group["params"]:
            if id(weight) not in self.names:
                raise Mistake(
                    f"the optimizer moves a tensor of shape {list(weight.shape)} that is no parameter of the model; "
                    "follow the module that holds all of them"
                )
        return group, {self.names[id(weight)]: weight for weight in group["params"]}

    def of(self, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
        """The parameters of one optimizer."""
        return {name: weight for _, members in self.groups(optimizer) for name, weight in members.items()}

    def __iter__(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of all."""
        for optimizer in self.optimizers:
            for _, members in self.groups(optimizer):
                yield from members.items()


def moved_names(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> set[str]:
    """The parameters of the model that some optimizer moves."""
    moved = {id(weight) for each in optimizers for group in each.param_groups for weight in group["params"]}
    return {name for name, weight in model.named_parameters() if id(weight) in moved}


def refuse_short(name: str, weight: Tensor) -> None:
    """Refuse weights in numbers so short that no proof of a step says anything.

    >>> refuse_short("a", torch.ones(1)), refuse_short("b", torch.ones(1, dtype=torch.bfloat16))
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: 'b' is in bfloat16, to whose rounding nothing can be proved; train float32 under autocast
    """
    if weight.is_floating_point() and torch.finfo(weight.dtype).bits < SHORTEST:
        kind = str(weight.dtype).removeprefix("torch.")
        raise Mistake(f"'{name}' is in {kind}, to whose rounding nothing can be proved; train float32 under autocast")


# --- What lies inside the wrappers that libraries put around models and optimizers.


SHARDED = {"FullyShardedDataParallel", "FSDPModule"}
"""Classes that need not be imported, which takes a while, to be recognised."""


def unwrapped_optimizers(given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """One optimizer, or several, without what is around them. A wrapper that moves weights itself is found out by that.

    >>> from types import SimpleNamespace
    >>> sgd = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    >>> unwrapped_optimizers([SimpleNamespace(optimizer=sgd)]) == unwrapped_optimizers(sgd) == [sgd]
    True
    """
    found = [given] if not isinstance(given, Sequence) else list(given)
    while any(isinstance(inner_of(each), torch.optim.Optimizer) for each in found):
        found = [inner_of(each) or each for each in found]
    return found


def inner_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """What an optimizer is wrapped around, as accelerate and Lightning do it."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else None


def unwrapped_model(model: nn.Module) -> nn.Module:
    """The module whose parameters are trained.

    >>> net = nn.Linear(1, 1)
    >>> unwrapped_model(net) is net
    True
    """
    inner = getattr(called_model(model), "_orig_mod", None)
    return unwrapped_model(inner) if isinstance(inner, nn.Module) else called_model(model)


def runs_as_it_is(model: nn.Module) -> bool:
    """Whether the model runs on processors alone, and nothing of it was compiled.

    >>> runs_as_it_is(nn.Linear(1, 1)), runs_as_it_is(nn.Linear(1, 1, device="meta"))
    (True, False)
    """
    compiled = any(hasattr(each, "_orig_mod") or each._compiled_call_impl is not None for each in model.modules())
    return not compiled and all(weight.device.type == "cpu" for weight in model.parameters())


def called_model(model: nn.Module) -> nn.Module:
    """The module that calls reach in this process, without what averages gradients of several.

    >>> called_model(DataParallel(nn.Linear(1, 1)))
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: the model is wrapped in DataParallel, which cuts batches apart; use DistributedDataParallel
    """
    if isinstance(model, DataParallel):
        raise Mistake("the model is wrapped in DataParallel, which cuts batches apart; use DistributedDataParallel")
    for name, layer in model.named_modules():
        if SHARDED & {kind.__name__ for kind in type(layer).__mro__}:
            where = f"layer '{name}'" if name else "the model"
            raise Mistake(
                f"{where} is a {type(layer).__name__}, whose weights are cut apart over the processes (FSDP), and "
                "none sees a whole step; wrap the model in DistributedDataParallel, or follow one process"
            )
    if not isinstance(model, DistributedDataParallel):
        return model
    if (size := model.process_group.size()) < get_world_size():
        raise Mistake(
            f"gradients are averaged over {size} of {get_world_size()} processes, and those of others are not known "
            "here; follow where all of them train one model"
        )
    inner: nn.Module = model.module
    return inner


# --- What no followed optimizer moves stays as it was: frozen parameters, and buffers.
#
# The trace asks a copy of the model, in which these are as they were when following began. A readout's bias that
# somebody else moves changes no gradient, so that no other proof would show it.


@dataclass
class Unmoved:
    """`copy` is the model as it was; `known` are tensors, and the writes to them, that are known to be as they were. A
    buffer may be assigned anew instead of written to.
    """

    model: nn.Module
    copy: nn.Module
    known: dict[str, tuple[Tensor, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.known.update((name, (tensor, tensor._version)) for name, tensor in named_tensors(self.model).items())

    def refuse_writes(self, step: int, moved: Container[str]) -> None:
        """Refuse what was written to and is not what it was, beside what is moved; that has to be where it was.

        >>> net = nn.Linear(2, 1)
        >>> unmoved = Unmoved(net, nn.Linear(2, 1))
        >>> unmoved.refuse_writes(0, set())
        >>> nn.init.zeros_(net.bias) is net.bias
        True
        >>> unmoved.refuse_writes(0, {"bias"})
        >>> unmoved.refuse_writes(0, set())
        Traceback (most recent call last):
        ntkexp.mistake.Mistake: step 0: 'bias', which no followed optimizer moves, was changed; follow what moves it too
        """
        found = named_tensors(self.model)
        for name, (tensor, _) in self.known.items():
            if name not in found or (name in moved and found[name] is not tensor):
                raise Mistake(
                    f"step {step}: '{name}' is no longer the tensor that it was when following began; write new values "
                    "into it, or follow from there on"
                )
        for name, tensor in found.items():
            if name in moved or self.knows(name, tensor):
                continue
            if name not in self.known or not torch.equal(tensor.detach(), named_tensors(self.copy)[name]):
                raise Mistake(
                    f"step {step}: '{name}', which no followed optimizer moves, was changed; follow what moves it too"
                )
            self.known[name] = tensor, tensor._version

    def otherwise(self, weights: Weights) -> Iterator[str]:
        """What is otherwise than in a trace that ends at these weights: tensors, and numbers that modules hold.

        >>> net = nn.Dropout(0.5)
        >>> unmoved, net.p = Unmoved(net, nn.Dropout(0.5)), 0.1
        >>> list(unmoved.otherwise({}))
        ['p']

        Also where a number of the class is another of this module's:

        >>> class Warm(nn.Module):
        ...     heat = 1.0
        >>> net = Warm()
        >>> unmoved, net.heat = Unmoved(net, Warm()), 2.0
        >>> list(unmoved.otherwise({}))
        ['heat']
        """
        now = named_tensors(self.model)
        for name, kept in {**named_tensors(self.copy), **weights}.items():
            if name not in now or not same_values(now[name].detach(), kept):
                yield name
        modules = dict(self.model.named_modules())
        for name, was in self.copy.named_modules():
            now_held = dict(settings(modules.get(name, was)))
            before = dict(settings(was)) | {key: getattr(was, key) for key in now_held if hasattr(type(was), key)}
            yield from (f"{name}.{key}".lstrip(".") for key, value in before.items() if now_held.get(key) != value)

    def knows(self, name: str, tensor: Tensor) -> bool:
        """Whether this very tensor was looked at, and not written to since."""
        known, count = self.known.get(name, (None, 0))
        return known is tensor and count == tensor._version


def same_values(now: Tensor, kept: Tensor) -> bool:
    """Whether a tensor holds what it held, wherever it lies by now.

    >>> same_values(torch.ones(1).half(), torch.ones(1)), same_values(torch.ones(2), torch.ones(1))
    (True, False)
    """
    return now.shape == kept.shape and torch.equal(now.to(kept), kept)


def settings(module: nn.Module) -> Iterator[tuple[str, object]]:
    """The numbers and words that a module holds, but its mode.

    >>> dict(settings(nn.Dropout(0.5)))
    {'p': 0.5, 'inplace': False}
    """
    for key, value in vars(module).items():
        if isinstance(value, bool | int | float | str) and key != "training" and not key.startswith("_"):
            yield key, value


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


# --- Whether anything else than the optimizers moved the weights.
#
# PyTorch counts the writes to a tensor, and the count is asked at every call. It does not know of writes to
# `weight.data`, so before every step the weights themselves are held against those that are kept here, to the
# bit.


LIBRARY, SIZE = ctypes.CDLL(None), ctypes.c_size_t


@dataclass
class Untouched:
    """`weights` are those that the optimizers left, `counts` the writes to them until then. `spare` is memory that
    nobody looks at any more: to fill fresh memory takes several times as long."""

    weights: Weights = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    spare: Weights = field(default_factory=dict)

    def keep(self, weights: Mapping[str, Tensor]) -> None:
        """Keep some weights as they are now."""
        places, found = list[Tensor](), list[Tensor]()
        for name, weight in weights.items():
            place, now = self.spare.pop(name, None), weight.detach()
            self.weights[name] = place if place is not None and alike(place, now) else torch.empty_like(now)
            self.counts[name] = weight._version
            places.append(self.weights[name])
            found.append(now)
        torch._foreach_copy_(places, found)  # with one call for all

    def forget(self, before: Weights) -> None:
        """Nobody looks any more at weights that were kept before the latest."""
        self.spare |= {name: weight for name, weight in before.items() if weight is not self.weights[name]}

    def refuse_writes(self, step: int, members: Iterable[tuple[str, Tensor]], *, closely: bool = False) -> None:
        """Refuse weights that were written to, and are not what they were; or those that are not, by whatever way."""
        for name, weight in members:
            if name not in self.weights:
                raise Mistake(f"step {step}: '{name}' was given to the optimizer during training")
            if weight._version == self.counts[name] and not closely:
                continue
            if not same_bits(weight.detach(), self.weights[name]):
                raise Mistake(
                    f"step {step}: '{name}' was changed by something else than the optimizer since the last step (a "
                    "clamp, an average that was copied back, a load, the ascent of SAM?), which is not followed"
                )
            self.counts[name] = weight._version


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether one tensor holds what another can."""
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same to the bit, seen in numbers of eight bytes where the system cannot compare them.

    >>> same_bits(torch.zeros(2), -torch.zeros(2)), same_bits(torch.ones(3), torch.ones(3))
    (False, True)
    """
    if not alike(one, other):
        return False
    if one.device.type == "cpu" and one.is_contiguous() and other.is_contiguous():
        return not LIBRARY.memcmp(*(ctypes.c_void_p(each.data_ptr()) for each in (one, other)), SIZE(one.nbytes))
    ours, theirs = one.reshape(-1), other.reshape(-1)
    kind = torch.int64 if one.nbytes % 8 == 0 else torch.uint8
    return torch.equal(ours.view(kind), theirs.view(kind))
