"""A recorded call of the model.

A call is recorded as its inputs, its circumstances, and the gradient ∂L/∂f of the loss
with respect to its outputs f. The circumstances are the modes of the layers, the states
of the random number generators, autocast, and the allowed kernels. A replay at the same
weights, inputs and circumstances returns the same bits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ntkexp.foreign_loop.clipping import StepFacts
from ntkexp.foreign_loop.cross_entropy import (
    CrossEntropyGradient,
    Logits,
    OutputGradient,
)
from ntkexp.foreign_loop.example_losses import LossFunction, rows_of_batch
from ntkexp.foreign_loop.example_names import digests
from ntkexp.foreign_loop.fingerprints import CHANGED, relative_distance
from ntkexp.mistake import Mistake
from ntkexp.model.functional import Output, as_rows
from ntkexp.shapes import Inputs, Weights

# --- States of torch's random number generators.
# A state determines the next random numbers.
#
# The state of the CPU's generator takes 5 kB.
# The state of a GPU's generator takes 16 bytes.


CPU = "cpu"


def generator_states(module: nn.Module) -> dict[str, Tensor]:
    """Return the states of the random number generators that a module may use,
    by device.

    >>> list(generator_states(nn.Linear(1, 1)))
    ['cpu']
    """
    if torch.accelerator.current_accelerator() is None:
        return {CPU: torch.get_rng_state()}
    devices = {weight.device for weight in module.parameters()}
    names = [CPU, *sorted(str(device) for device in devices if has_generator(device))]
    return {name: generator_state(name) for name in names}


def has_generator(device: torch.device) -> bool:
    """Return True if a device has its own random number generator.

    >>> has_generator(torch.device("cpu")), has_generator(torch.device("meta"))
    (False, False)
    """
    try:
        return hasattr(torch.get_device_module(device), "get_rng_state")
    except RuntimeError:  # torch has no module for this kind of device
        return False


def generator_state(device: str) -> Tensor:
    if device == CPU:
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_generator_states(states: Mapping[str, Tensor]) -> None:
    for device, state in states.items():
        if device == CPU:
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def device_generators() -> list[str]:
    """Return the accelerators whose random number generators this process may have
    used.

    A GPU that was never used stays uninitialized.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    module = torch.get_device_module(accelerator)
    if not getattr(module, "is_initialized", lambda: True)():
        return []
    return [f"{accelerator.type}:{index}" for index in range(module.device_count())]


@contextmanager
def beginning_at(states: Mapping[str, Tensor]) -> Iterator[None]:
    """Set random number generators to these states,
    and restore the previous states on exit.

    >>> state = torch.get_rng_state()
    >>> with beginning_at({"cpu": state}):
    ...     first = torch.rand(3)
    >>> torch.equal(first, torch.rand(3))
    True
    """
    before = {device: generator_state(device) for device in states}
    try:
        set_generator_states(states)
        yield
    finally:
        set_generator_states(before)


# --- Autocast.


@dataclass(frozen=True)
class Autocast:
    """An autocast context: matrix products use a dtype of lower precision
    than the weights."""

    device: str
    kind: str  # name of the lower precision's dtype
    # True if the context casts each weight only once, instead of at every use
    cached: bool
    # True if autocast encloses the model, False if the model itself enters autocast
    whole: bool = True

    @classmethod
    def now(cls, device: str, *, whole: bool = True) -> Autocast | None:
        """Return the current autocast context, or None outside of autocast.

        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     Autocast.now("cpu")
        Autocast(device='cpu', kind='bfloat16', cached=True, whole=True)
        """
        if not torch.is_autocast_enabled(device):
            return None
        kind = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        return cls(device, kind, torch.is_autocast_cache_enabled(), whole)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.kind)
        return dtype

    def again(self) -> AbstractContextManager[object]:
        """Return a new context with these settings, or a null context if the model
        itself enters autocast."""
        if not self.whole:
            return nullcontext()
        return torch.autocast(self.device, self.dtype, cache_enabled=self.cached)


# --- Switches that allow or forbid kernels of torch. Different kernels round
# differently, so a replay sets the switches as in the loop.


KERNEL_SWITCHES: dict[str, tuple[Callable[[], bool], Callable[[bool], object]]] = {
    "flash": (
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.enable_flash_sdp,
    ),
    "mem_efficient": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    "cudnn": (
        torch.backends.cuda.cudnn_sdp_enabled,
        torch.backends.cuda.enable_cudnn_sdp,
    ),
    "math": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "mkldnn": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
}
"""Switches that allow or forbid torch's implementations of attention, and of products
on CPUs. A switch is a pair of functions: the first reads it, the second sets it."""


def forbidden_kernels() -> frozenset[str]:
    """Return the kernels that are forbidden now, for example by
    `torch.nn.attention.sdpa_kernel`.

    >>> from torch.nn.attention import SDPBackend, sdpa_kernel
    >>> with sdpa_kernel(SDPBackend.MATH):
    ...     sorted(forbidden_kernels())
    ['cudnn', 'flash', 'mem_efficient']
    """
    return frozenset(
        name for name, (is_allowed, _) in KERNEL_SWITCHES.items() if not is_allowed()
    )


@contextmanager
def without_kernels(forbidden: frozenset[str]) -> Iterator[None]:
    """Forbid these kernels and allow all others. On exit, restore the switches."""
    before = forbidden_kernels()

    def set_switches(off: frozenset[str]) -> None:
        for name in before ^ forbidden:
            _, allow = KERNEL_SWITCHES[name]
            allow(name not in off)

    try:
        set_switches(forbidden)
        yield
    finally:
        set_switches(before)


# --- The circumstances of a call.


@dataclass(frozen=True)
class LayerModes:
    """The mode of the model, training or evaluation, and the layers in the other mode.

    >>> layers = {"": nn.Flatten(), "drop": nn.Dropout(0.1).eval()}
    >>> LayerModes.of(layers)
    LayerModes(trains=True, otherwise=frozenset({'drop'}))
    """

    trains: bool = False
    otherwise: frozenset[str] = frozenset()

    @classmethod
    def of(cls, layers: Mapping[str, nn.Module]) -> LayerModes:
        """Return the modes of a module. `layers` are its layers by name
        (`named_layers`)."""
        trains = layers[""].training
        otherwise = [name for name, layer in layers.items() if layer.training != trains]
        return cls(trains, frozenset(otherwise))

    def give(self, module: nn.Module) -> None:
        """Set the layers of a module to the recorded training and evaluation modes."""
        for name, layer in module.named_modules():
            layer.training = self.trains != (name in self.otherwise)


EVALUATION = LayerModes()


@dataclass(frozen=True, eq=False)
class Circumstances:
    """The state of the program that affects the outputs of a call."""

    modes: LayerModes = EVALUATION
    # states of the generators that the call used
    states: Mapping[str, Tensor] = field(default_factory=dict)
    autocast: Autocast | None = None
    # kernels that torch was forbidden to use, by their names in `KERNEL_SWITCHES`
    forbidden: frozenset[str] = frozenset()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore random states and autocast for a replay.

        The backward pass also needs the modes of the module and the allowed kernels, so
        the caller must set these."""
        autocast = nullcontext() if self.autocast is None else self.autocast.again()
        with beginning_at(self.states), autocast:
            yield

    @property
    def content(self) -> dict[str, object]:
        """The circumstances as tensors and plain values, to be written to a file."""
        content: dict[str, object] = {
            "trains": self.modes.trains,
            "otherwise": sorted(self.modes.otherwise),
            "states": dict(self.states),
            "casts": None,
        }
        if self.autocast is not None:
            content["casts"] = list(astuple(self.autocast))
        if self.forbidden:
            content["forbidden"] = sorted(self.forbidden)
        return content

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Circumstances:
        """Return the circumstances that `content` describes."""
        casts = content.get("casts")
        return cls(
            modes=LayerModes(
                content.get("trains", False), frozenset(content.get("otherwise", ()))
            ),
            states={
                device: state.clone()
                for device, state in content.get("states", {}).items()
            },
            autocast=None if casts is None else Autocast(*casts),
            forbidden=frozenset(content.get("forbidden", ())),
        )


# --- A call that returns several tensors.
#
# A hook on a tensor receives its total gradient. Suppose that the model computes one
# output from another, as an autoencoder computes the image from the latent code. The
# total gradient of the code then includes the gradient through the image, so the image
# would count twice. Therefore the loop receives an alias of each output. The gradient
# of an alias is a partial derivative. The terms of all outputs add up:
#
#     ∂L/∂θ = Σ_outputs Jᵀ ∂L/∂(alias)
#
# If the model itself computes a loss from an output, the gradient does not pass through
# the alias. In this case the total gradient of the followed output is used, as for a
# model with one output.


@dataclass
class SeveralOutputs:
    """The outputs of a call, and the gradients that reached their aliases."""

    followed: str  # the name of the followed output
    # by name, for the outputs with a row for each example:
    shapes: dict[str, tuple[int, ...]]
    fingerprints: dict[str, Float[Tensor, "example row"]]
    gradients: dict[str, Float[Tensor, "example number"]] = field(default_factory=dict)
    # True if a gradient reached a tensor without a row for each example
    has_inner_loss: bool = False

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Add the gradient that one backward pass gave to an alias."""
        rows = as_rows(gradient.detach().clone())
        self.gradients[name] = self.gradients.get(name, 0) + rows


# --- The call.


@dataclass
class ModelCall:
    """A recorded call of the model, or of the user's function of `trace.losses`.

    For a call of `trace.losses`, f is the vector of losses,
    and `inputs` is the batch."""

    at: int  # index of the first step after the call
    inputs: Inputs
    given_names: tuple[str, ...] | None = None  # names of the examples from `ids=`
    # the error of `ids=`. It is raised when a step uses the call, because calls for an
    # evaluation need no names. With `log=` or `again=`, it is raised at once.
    naming_error: Exception | None = None
    circumstances: Circumstances = field(default_factory=Circumstances)
    gradient: OutputGradient | None = None  # ∂L/∂f, after backward
    # the outputs, while the loop runs, if their gradient may be compressed
    logits: Logits | None = None
    # if several outputs received a gradient: their shapes by name. f is then the
    # concatenation of these outputs
    joined: dict[str, tuple[int, ...]] = field(default_factory=dict)
    backward: int = -1  # the id of the latest backward pass that reached the outputs
    # number of backward passes so far, including passes whose gradient was dropped
    passes: int = 0
    # fingerprint (random projection) of f
    fingerprint: Float[Tensor, "example row"] | None = None
    shape: tuple[int, ...] = ()  # shape of the followed output
    # BatchNorm's running statistics, before and after the call
    statistics: tuple[Weights, Weights] | None = None
    # for a log: two sums over the examples, of their losses and of their weights in the
    # mean
    sums_of_loss: tuple[Tensor, Tensor] | None = None
    # outputs with a gradient, but without a row for each example
    other_outputs: list[str] = field(default_factory=list)
    # all outputs of the call, while the loop runs
    several: SeveralOutputs | None = None
    losses: LossFunction | None = None  # the function of `trace.losses`
    # True if a backward pass in the step of this call had create_graph=True
    is_differentiated: bool = False
    # the perturbed weights of this call, if the loop perturbs them (as SAM does), else
    # None
    weights: Weights | None = None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the examples, by default digests of their content. Digests are
        computed when first read, because they take time."""
        return digests(self.rows) if self.given_names is None else self.given_names

    @property
    def rows(self) -> Inputs:
        """The inputs that have a row for each example."""
        if self.losses is None:
            return self.inputs
        return rows_of_batch(self.inputs, self.shape[0])

    def __copy__(self) -> ModelCall:
        """Return a shallow copy. The generic `copy.copy` is slow, and every step of the
        training copies its calls."""
        call = object.__new__(ModelCall)
        vars(call).update(vars(self))
        return call

    def add_gradient(self, gradient: Tensor, backward: int) -> None:
        """Add the gradient of one backward pass. `backward` is the id of this pass."""
        self.passes += backward != self.backward
        self.backward = backward
        if self.gradient is not None:
            self.gradient = self.dense_gradient() + as_rows(gradient.detach())
            return
        if self.logits is not None:
            self.gradient = self.logits.compressed(gradient)
        if self.gradient is None:
            self.gradient = as_rows(gradient.detach().clone())

    def dense_gradient(self) -> Float[Tensor, "example out"]:
        """Return ∂L/∂f while the loop runs."""
        if isinstance(self.gradient, CrossEntropyGradient):
            assert self.logits is not None
            return as_rows(self.gradient.at(self.logits.values))
        assert self.gradient is not None
        return self.gradient

    def gradient_at(self, outputs: Float[Tensor, "example ..."]) -> Tensor:
        """Return ∂L/∂f in the shape and dtype of the replayed outputs."""
        if isinstance(self.gradient, CrossEntropyGradient):
            logits = outputs.reshape(self.shape)
            self.refuse_other_outputs(logits)
            return self.gradient.at(logits).view(outputs.shape)
        assert self.gradient is not None
        return self.gradient.reshape(outputs.shape).to(outputs.dtype)

    def refuse_other_outputs(self, outputs: Float[Tensor, "example ..."]) -> None:
        """Raise if the fingerprint of replayed outputs is not the recorded one, up to
        √eps. Leave smaller differences, and calls with random numbers, to the proofs of
        the step, whose messages say more."""
        if self.fingerprint is None or self.circumstances.states:
            return
        missed = relative_distance(outputs, self.fingerprint)
        if missed > torch.finfo(self.fingerprint.dtype).eps ** 0.5:
            raise Mistake(
                f"step {self.at}: at the same weights, the model returned other "
                "outputs in the loop than it does now (relative difference "
                f"{missed:.2g}); {CHANGED}"
            )

    def drop_gradient(self) -> None:
        """Drop the gradients of all backward passes so far."""
        self.gradient = None
        if self.several is not None:
            self.several.gradients = {}

    @property
    def has_gradient(self) -> bool:
        """True if a backward pass reached the outputs."""
        return self.gradient is not None or bool(
            self.several and self.several.gradients
        )

    def output(self, followed: Output) -> Output:
        """Return the names of the outputs whose gradients are stored in `gradient`: the
        name `followed`, or several names."""
        return tuple(self.joined) or followed

    def consumed(self) -> ModelCall:
        """Return a copy of the call for its optimizer step. The copy's `gradient` is
        the gradient that the step used.

        If several outputs received a gradient, concatenate these gradients.
        """
        call = copy(self)
        call.several = None
        call.logits = None
        several = self.several
        if several is None or several.has_inner_loss:
            return call
        if list(several.gradients) == [several.followed]:
            call.gradient = several.gradients[several.followed]
            return call
        names = [name for name in several.shapes if name in several.gradients]
        call.joined = {name: several.shapes[name] for name in names}
        call.gradient = torch.cat([several.gradients[name] for name in names], 1)
        call.fingerprint = torch.cat([several.fingerprints[name] for name in names], 1)
        return call


def call_inputs(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> Inputs:
    """Return the inputs of a call. If some are given by position and some by name, name
    all of them. Convert scalar tensors to Python numbers, which all examples share.

    >>> call_inputs(nn.Identity(), (), {"x": torch.ones(2), "items": torch.tensor(3)})
    {'x': tensor([1., 1.]), 'items': 3}
    >>> call_inputs(nn.ReLU(), (torch.ones(2),), {"other": None})
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: the model is called with inputs by position and by name that its forward does not accept \
(got an unexpected keyword argument 'other'); pass the arguments that forward names
    """
    inputs: object = kwargs or args
    if args and kwargs:
        inputs = named_arguments(module, args, kwargs)
    elif len(args) == 1 and isinstance(args[0], Tensor):
        inputs = args[0]

    def as_number(leaf: object) -> object:
        return leaf.item() if isinstance(leaf, Tensor) and not leaf.dim() else leaf

    result: Inputs = tree_map(as_number, inputs)
    return result


def named_arguments(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> dict[str, object]:
    """Return all arguments of a call by the names in the signature of `forward`.

    >>> named_arguments(nn.Bilinear(1, 1, 1), (3,), {"input2": 4})
    {'input1': 3, 'input2': 4}
    """
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise Mistake(
            "the model is called with inputs by position and by name that its forward "
            f"does not accept ({error}); pass the arguments that forward names"
        ) from error
    named = dict[str, object]()
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        elif kind in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.POSITIONAL_ONLY,
        ):
            raise Mistake(
                "the model is called with inputs by position and by name, and its "
                f"forward takes '{name}' only by position; pass all inputs by position"
            )
        else:
            named[name] = value
    return named


def weights_of_calls(
    calls: Sequence[ModelCall], starts: Sequence[Weights]
) -> list[Weights]:
    """Return the weights of each call: the weights before its step, as listed in
    `starts`, or the perturbed weights if the loop perturbed them for the call.

    Calls with the same perturbed weights share one dict.

    >>> start, moved = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
    >>> calls = [ModelCall(0, torch.ones(1), weights=weights) for weights in (None, moved, moved)]
    >>> first, second, third = weights_of_calls(calls, [start] * 3)
    >>> first is start, second is third, second["w"]
    (True, True, tensor([1.]))
    """
    merged: dict[tuple[int, int], Weights] = {}
    weights = []
    for call, start in zip(calls, starts, strict=True):
        if call.weights is None:
            weights.append(start)
            continue
        key = (id(call.weights), id(start))
        if key not in merged:
            merged[key] = {**start, **call.weights}
        weights.append(merged[key])
    return weights


def facts_of(
    calls: Sequence[ModelCall], outputs_missed: Callable[[], float]
) -> StepFacts:
    """Return facts about the calls of a step, for the
    error message if proof (a) fails."""
    return StepFacts(
        rows=sum(len(call.names) for call in calls),
        drew=any(call.circumstances.states for call in calls),
        differentiated=any(call.is_differentiated for call in calls),
        losses=any(call.losses is not None for call in calls),
        passes=max((call.passes for call in calls), default=0),
        other_outputs=tuple(
            sorted({name for call in calls for name in call.other_outputs})
        ),
        outputs_missed=outputs_missed,
    )
