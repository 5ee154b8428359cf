"""Changes of the model that no followed step made,
such as a loaded average of weights, or a clamp.

Between steps, such a change raises an error:

    weights that the optimizers move    `LatestWeights` compares them with a copy, made after each step
    frozen parameters and buffers       `FrozenTensors` compares them with a copy, made at the start

After the last step, the change is reported as `outside`,
a part that belongs to no example:

    f_T − f_0 = Σ contributions + decay + rounding + outside
    outside = f(at the end of the loop) − f(after the last step)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.foreign_loop.call import Autocast
from ntkexp.foreign_loop.clipping import ASK_LOSSES
from ntkexp.foreign_loop.closing import share_of
from ntkexp.foreign_loop.host_reads import to_host
from ntkexp.foreign_loop.model_function import CalledModule
from ntkexp.kernel import columns
from ntkexp.mistake import Mistake
from ntkexp.model.functional import copy_module, named_layers
from ntkexp.records.contributions import OUTSIDE
from ntkexp.shapes import Inputs, Weights
from ntkexp.text import short

if TYPE_CHECKING:
    import xarray as xr


# --- Frozen parameters and buffers.
#
# The queries are evaluated by a copy of the model, which holds the frozen tensors from
# the start. Other code may change some tensors without any effect on gradients, for
# example the bias of the last layer. The proofs of the steps would not detect such a
# change.


@dataclass
class FrozenTensors:
    """Checks for the tensors of the model that no followed optimizer moves."""

    model: nn.Module
    copy: nn.Module  # copy of the model from the start
    # each tensor of the model, and its `_version` (count of writes) at the last check
    checked: dict[str, tuple[Tensor, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, tensor in named_tensors(self.model).items():
            self.checked[name] = (tensor, tensor._version)

    def refuse_writes(
        self,
        step: int,
        updated: Container[str],
        layers: Mapping[str, nn.Module] | None = None,
    ) -> None:
        """Raise if a frozen tensor has changed, if an updated tensor was replaced by
        another one, or if a tensor was removed.

        `updated` names the tensors that optimizers and calls update. All other tensors
        are frozen. They may be replaced by tensors with equal values. `layers` are the
        present layers of the model (`named_layers`).

        >>> net = nn.Linear(2, 1)
        >>> frozen = FrozenTensors(net, nn.Linear(2, 1))
        >>> frozen.refuse_writes(0, set())
        >>> nn.init.zeros_(net.bias) is net.bias
        True
        >>> frozen.refuse_writes(0, {"bias"})
        >>> frozen.refuse_writes(0, set())
        Traceback (most recent call last):
        ntkexp.mistake.Mistake: step 0: 'bias' was changed, and no followed optimizer updates it; follow the optimizer \
that does, too
        """
        now = tensors_of(named_layers(self.model) if layers is None else layers)
        for name, (tensor, _) in self.checked.items():
            if name not in now or (name in updated and now[name] is not tensor):
                refuse_other_weights(step, name, tensor, now.get(name))
                raise Mistake(
                    f"step {step}: '{name}' is no longer the tensor that it was when "
                    "following began; write new values into the old tensor, or begin "
                    "to follow after this change"
                )
        for name, tensor in now.items():
            known, writes = self.checked.get(name, (None, 0))
            if name in updated or (known is tensor and writes == tensor._version):
                continue
            if known is None or not torch.equal(
                tensor.detach(), named_tensors(self.copy)[name]
            ):
                if not isinstance(tensor, nn.Parameter):
                    raise Mistake(
                        f"step {step}: the buffer '{name}' was changed, so the model is "
                        "no longer the same function of its weights; put its layer in "
                        "eval() (spectral norm?), or pass its value to the model as an "
                        "input. If outputs do not depend on it, keep it outside of the "
                        "model"
                    )
                raise Mistake(
                    f"step {step}: '{name}' was changed, and no followed optimizer "
                    "updates it; follow the optimizer that does, too"
                )
            self.checked[name] = (tensor, tensor._version)

    def differences(self, weights: Weights) -> Iterator[str]:
        """Yield the names of the tensors and attributes that differ at the end of the
        loop.

        Compare each tensor with its value in `weights`, the weights after the last
        step. Compare tensors that are not in `weights` with the copy of the model. Also
        compare the numbers and strings that are attributes of modules or of their
        classes.

        >>> net = nn.Dropout(0.5)
        >>> frozen, net.p = FrozenTensors(net, nn.Dropout(0.5)), 0.1
        >>> list(frozen.differences({}))
        ['p']
        >>> class Warm(nn.Module):
        ...     heat = 1.0
        >>> net = Warm()
        >>> frozen, net.heat = FrozenTensors(net, Warm()), 2.0
        >>> list(frozen.differences({}))
        ['heat']
        """
        now = named_tensors(self.model)
        for name, before in {**named_tensors(self.copy), **weights}.items():
            if name not in now or not same_values(now[name], before):
                yield name

        modules = dict(self.model.named_modules())
        for prefix, copy in self.copy.named_modules():
            settings = settings_of(modules.get(prefix, copy))
            settings_before = settings_of(copy)
            for key in settings:
                if hasattr(type(copy), key):
                    settings_before[key] = getattr(copy, key)
            for key, value in settings_before.items():
                if settings.get(key) != value:
                    yield f"{prefix}.{key}".lstrip(".")


def settings_of(module: nn.Module) -> dict[str, object]:
    """Return the public attributes of a module that are numbers or strings,
    except `training`."""
    return {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str)
        and key != "training"
        and not key.startswith("_")
    }


def refuse_other_weights(step: int, name: str, own: Tensor, now: Tensor | None) -> None:
    """Raise if the loop calls the model with a computed tensor in place of a
    parameter, as MAML does."""
    if (
        isinstance(own, nn.Parameter)
        and now is not None
        and not isinstance(now, nn.Parameter)
    ):
        raise Mistake(
            f"step {step}: the model was called with another tensor in place of "
            f"'{name}' (torch.func.functional_call, MAML?); {ASK_LOSSES}, or call a "
            "copy of the model if its weights need no gradient"
        )


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name. Use the first name of a shared tensor."""
    return tensors_of(named_layers(model))


def tensors_of(layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the parameters and buffers of some layers, in one pass.
    See `named_tensors`."""
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    known = set[int]()
    for prefix, layer in layers.items():
        for named, members in (
            (parameters, layer._parameters),
            (buffers, layer._buffers),
        ):
            for name, tensor in members.items():
                if tensor is not None and id(tensor) not in known:
                    known.add(id(tensor))
                    named[f"{prefix}.{name}" if prefix else name] = tensor
    return parameters | buffers


def same_values(now: Tensor, before: Tensor) -> bool:
    """Return True if two tensors have the same values,
    regardless of device and dtype."""
    return now.shape == before.shape and torch.equal(now.detach().to(before), before)


# --- Weights that the optimizers move.
#
# PyTorch counts the writes to a tensor (`_version`). This count is checked at every
# call. But PyTorch does not count writes to `weight.data`. So the weights are also
# compared with a copy before every step, bit by bit.


MEMCMP = ctypes.CDLL(None).memcmp
MEMCMP.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass
class LatestWeights:
    """Copies of the weights after the latest step."""

    weights: Weights = field(default_factory=dict)
    # `_version` after the latest step
    writes: dict[str, int] = field(default_factory=dict)
    # buffers to reuse, because allocation is slow
    spare: Weights = field(default_factory=dict)
    # SAM changes weights and then undoes the change, which may leave a rounding error.
    # This function returns the bound on the error of a parameter, or None if the bits
    # must be equal.
    rounding_of_swaps: Callable[[str], Tensor | None] = lambda _: None
    # parameters that an unfollowed optimizer has updated, with the name of its class
    unfollowed: dict[str, str] = field(default_factory=dict)

    def copy_in(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the present values of some weights into this object."""
        copies = list[Tensor]()
        values = list[Tensor]()
        for name, weight in weights.items():
            value = weight.detach()
            spare = self.spare.pop(name, None)
            if spare is None or not alike(spare, value):
                spare = torch.empty_like(value)
            self.weights[name] = spare
            self.writes[name] = weight._version
            copies.append(self.weights[name])
            values.append(value)
        torch._foreach_copy_(copies, values)  # one call for all weights

    def release(self, before: Weights) -> None:
        """Keep the memory of older copies, `before`, for the next copies."""
        self.spare |= {
            name: weight
            for name, weight in before.items()
            if weight is not self.weights[name]
        }

    def refuse_writes(
        self, step: int, members: Iterable[tuple[str, Tensor]], *, closely: bool = False
    ) -> None:
        """Raise if weights have changed since the latest step.

        If `closely`, compare all weights. Else compare only weights whose number of
        writes has changed.
        """
        for name in self.changed(members, closely=closely):
            self.refuse_change(step, name)

    def changed(
        self, members: Iterable[tuple[str, Tensor]], *, closely: bool = False
    ) -> dict[str, Tensor]:
        """Return the weights that have changed since the latest step.
        See `refuse_writes`."""
        written: dict[str, Tensor] = {}
        for name, weight in members:
            # the loop has added this weight to an optimizer since the latest step, and
            # `FrozenTensors` compares it until its first step
            if name not in self.weights:
                continue
            if weight._version != self.writes[name] or closely:
                written[name] = weight
        same = same_bits(
            [(weight.detach(), self.weights[name]) for name, weight in written.items()]
        )
        changed: dict[str, Tensor] = {}
        for (name, weight), is_same in zip(written.items(), same, strict=True):
            if not is_same:
                allowed = self.rounding_of_swaps(name)
                change = weight.detach() - self.weights[name]
                if allowed is None or not bool((change.abs() <= allowed).all()):
                    changed[name] = weight
                    continue
                self.weights[name] = weight.detach().clone()
            self.writes[name] = weight._version
        return changed

    def refuse_change(self, step: int, name: str) -> None:
        """Raise the error for a weight that has changed between steps."""
        if name in self.unfollowed:
            raise Mistake(
                f"step {step}: '{name}' was updated by another optimizer "
                f"({self.unfollowed[name]}), which is not followed; create it before the "
                "loop, and follow both: follow(model, [first, second]), or end follow "
                "before this stage, and begin again with its optimizer"
            )
        raise Mistake(
            f"step {step}: '{name}' was changed by something other than the optimizer "
            "since the last step (a clamp, a copied average, a load, an ascent of SAM "
            "that was not undone?), which cannot be followed; change weights before or "
            "after the loop"
        )


def alike(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same shape, dtype and device."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return (one.is_cpu and other.is_cpu) or one.device == other.device


def same_bits(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Return a bool for each pair: True if both tensors have the same bits. Copy all
    results in one transfer.

    >>> same_bits([(torch.zeros(2), -torch.zeros(2)), (torch.ones(3), torch.ones(3))])
    [False, True]
    """
    same = [have_same_bits(*pair) for pair in pairs]
    on_device = [each for each in same if isinstance(each, Tensor)]
    read = iter(to_host(on_device))
    return [bool(next(read)) if isinstance(each, Tensor) else each for each in same]


def have_same_bits(one: Tensor, other: Tensor) -> bool | Tensor:
    """Return True if two tensors have the same bits.
    The result may be a tensor on the device.

    Contiguous tensors on the CPU are compared by `memcmp`, all others as integers.
    """
    if not alike(one, other):
        return False
    if one.is_cpu and one.is_contiguous() and other.is_contiguous():
        return not MEMCMP(one.data_ptr(), other.data_ptr(), one.nbytes)
    kind = torch.int64 if one.nbytes % 8 == 0 else torch.uint8
    return (one.reshape(-1).view(kind) == other.reshape(-1).view(kind)).all()


# --- Changes after the last step.


@dataclass(frozen=True)
class Outside:
    """The changes of the model after the last step."""

    names: tuple[str, ...] = ()  # names of changed tensors and attributes
    # changed tensors, at the end of the loop
    tensors: Weights = field(default_factory=dict)

    def change(
        self,
        called: CalledModule,
        casts: Autocast | None,
        end: Weights,
        queries: Inputs,
    ) -> Float[Tensor, "query out"]:
        """Return f(at the end of the loop) − f(after the last step) at the queries.

        Args:
            called: the followed model.
            casts: autocast context of the loop.
            end: weights after the last step.
            queries: inputs of f.
        """
        module = copy_module(called.module)
        for name, tensor in named_tensors(module).items():
            value = self.tensors.get(name, end.get(name, tensor))
            tensor.data = value.detach().to(tensor, copy=True)
        left = CalledModule(module, called.output, casts, measured=called.measured)
        weights = {
            name: tensor.detach()
            for name, tensor in module.named_parameters()
            if name in end
        }
        with torch.no_grad():
            after = columns(left.function, weights, queries)
            return after - columns(called.function, end, queries)

    @property
    def named(self) -> str:
        """The names of the changed tensors and attributes, for a message."""
        if len(self.names) == 1:
            return f"'{self.names[0]}'"
        return f"'{self.names[0]}', and {len(self.names) - 1} more,"


def outside_sentence(attribution: xr.Dataset) -> str:
    """Return a sentence on changes after the last step, or an empty string."""
    if OUTSIDE not in attribution.attrs:
        return ""
    named = Outside(tuple(str(attribution.attrs[OUTSIDE]).split(", "))).named
    if OUTSIDE not in attribution:
        return f"{named} changed after the last step; the model is attributed without that change"
    share = short(share_of(attribution, OUTSIDE))
    return (
        f"{named} changed after the last step, which caused {share} of the change "
        "(`outside`), and no example did"
    )
