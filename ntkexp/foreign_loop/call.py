"""One recorded call of the model: its circumstances, its inputs, and the gradient ∂L/∂f that came back to its outputs.

A call depends on its weights, its inputs and its circumstances: the modes of the layers, the states of the random
number generators, and autocast. Under the same circumstances a replay gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ntkexp.foreign_loop.clipping import StepFacts
from ntkexp.foreign_loop.example_names import digests
from ntkexp.mistake import Mistake
from ntkexp.shapes import Inputs, Weights

# --- The states of torch's own generators: what is drawn next follows from them.
#
# A state of the CPU's takes 5 kB, one of a GPU's 16 bytes.


CPU = "cpu"


def generator_states(module: nn.Module) -> dict[str, Tensor]:
    """The states of the generators that a module may draw from, by their devices.

    >>> list(generator_states(nn.Linear(1, 1)))
    ['cpu']
    """
    if torch.accelerator.current_accelerator() is None:
        return {CPU: torch.get_rng_state()}
    devices = {weight.device for weight in module.parameters()}
    places = [CPU, *sorted(str(device) for device in devices if has_generator(device))]
    return {place: generator_state(place) for place in places}


def has_generator(device: torch.device) -> bool:
    """Whether numbers are drawn on a device by a generator of its own.

    >>> has_generator(torch.device("cpu")), has_generator(torch.device("meta"))
    (False, False)
    """
    try:
        return hasattr(torch.get_device_module(device), "get_rng_state")
    except RuntimeError:  # torch knows nothing but the name
        return False


def generator_state(place: str) -> Tensor:
    """The state of the generator of a device."""
    state: Tensor = (
        torch.get_rng_state()
        if place == CPU
        else torch.get_device_module(place).get_rng_state(place)
    )
    return state


def device_generators() -> list[str]:
    """The devices besides the processor whose generators this process may have used.

    A GPU that was never used is not initialized only to be asked for its state.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    module = torch.get_device_module(accelerator)
    is_used = getattr(module, "is_initialized", lambda: True)()
    return (
        [f"{accelerator.type}:{index}" for index in range(module.device_count())] if is_used else []
    )


@contextmanager
def beginning_at(states: Mapping[str, Tensor]) -> Iterator[None]:
    """Generators begin at these states, and stand afterwards where they stood before.

    >>> state = torch.get_rng_state()
    >>> with beginning_at({"cpu": state}):
    ...     first = torch.rand(3)
    >>> torch.equal(first, torch.rand(3))
    True
    """

    def set_states(states: Mapping[str, Tensor]) -> None:
        for place, state in states.items():
            if place == CPU:
                torch.set_rng_state(state)
            else:
                torch.get_device_module(place).set_rng_state(state, place)

    before = {place: generator_state(place) for place in states}
    try:
        set_states(states)
        yield
    finally:
        set_states(before)


# --- Autocast: the context in which a call was made whose products are formed in shorter numbers than weights have.


@dataclass(frozen=True)
class Autocast:
    """Casts on a kind of device to numbers of a `kind`, each weight's once in the context or at every use; of the
    `whole` model, or of a part that enters autocast by itself."""

    device: str
    kind: str
    cached: bool
    whole: bool = True

    @classmethod
    def now(cls, device: str, *, whole: bool = True) -> Autocast | None:
        """The one that we are in.

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
        """The numbers that are cast to."""
        found: torch.dtype = getattr(torch, self.kind)
        return found

    def again(self) -> AbstractContextManager[object]:
        """Such a context, unless the model enters it by itself."""
        return (
            torch.autocast(self.device, self.dtype, cache_enabled=self.cached)
            if self.whole
            else nullcontext()
        )


# --- The kernels that torch may choose among: others cast otherwise, so a call is replayed by its own.


KERNELS: dict[str, tuple[Callable[[], bool], Callable[[bool], object]]] = {
    "flash": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "mem_efficient": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    "cudnn": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    "math": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "mkldnn": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
}
"""Of attention, and of products on processors: whether each is allowed now, and how to say so."""


def forbidden_kernels() -> frozenset[str]:
    """Those that may not be chosen now, as inside `torch.nn.attention.sdpa_kernel`.

    >>> from torch.nn.attention import SDPBackend, sdpa_kernel
    >>> with sdpa_kernel(SDPBackend.MATH):
    ...     sorted(forbidden_kernels())
    ['cudnn', 'flash', 'mem_efficient']
    """
    return frozenset(name for name, (allowed, _) in KERNELS.items() if not allowed())


@contextmanager
def without_kernels(forbidden: frozenset[str]) -> Iterator[None]:
    """Choose among all kernels but these."""
    before = forbidden_kernels()
    try:
        for name in before ^ forbidden:
            KERNELS[name][1](name not in forbidden)
        yield
    finally:
        for name in before ^ forbidden:
            KERNELS[name][1](name not in before)


# --- The circumstances of a call: what it depends on besides weights and inputs.
#
# Layers are in training mode or in evaluation, most of them as the whole model is. Generators begin in a state, which
# is only of interest if the call draws from them. Products may be formed in shorter numbers, and by some kernels only.


@dataclass(frozen=True)
class LayerModes:
    """Whether the model trains, and the layers that do `otherwise`.

    >>> net = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.1))
    >>> net[1].eval()
    Dropout(p=0.1, inplace=False)
    >>> LayerModes.of(net)
    LayerModes(trains=True, otherwise=frozenset({'1'}))
    """

    trains: bool = False
    otherwise: frozenset[str] = frozenset()

    @classmethod
    def of(cls, module: nn.Module) -> LayerModes:
        trains = module.training
        return cls(
            trains,
            frozenset(name for name, each in module.named_modules() if each.training != trains),
        )

    def give(self, module: nn.Module) -> None:
        """Put a module in them."""
        for name, each in module.named_modules():
            each.training = self.trains != (name in self.otherwise)


EVALUATION = LayerModes()


@dataclass(frozen=True, eq=False)
class Circumstances:
    """The modes, the states of the generators that were drawn from, by their devices, the casts, and the kernels that
    were forbidden."""

    modes: LayerModes = EVALUATION
    states: Mapping[str, Tensor] = field(default_factory=dict)
    autocast: Autocast | None = None
    forbidden: frozenset[str] = frozenset()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw and cast as then; modes are the module's affair, and kernels those of the way back too."""
        with (
            beginning_at(self.states),
            nullcontext() if self.autocast is None else self.autocast.again(),
        ):
            yield

    @property
    def content(self) -> dict[str, object]:
        """All of it as plain content, for a file."""
        otherwise = sorted(self.modes.otherwise)
        casts = None if self.autocast is None else list(astuple(self.autocast))
        forbidden = {"forbidden": sorted(self.forbidden)} if self.forbidden else {}
        modes = {"trains": self.modes.trains, "otherwise": otherwise}
        return {**modes, "states": dict(self.states), "casts": casts, **forbidden}

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Circumstances:
        """The same from its plain content."""
        states = {place: state.clone() for place, state in content.get("states", {}).items()}
        modes = LayerModes(content.get("trains", False), frozenset(content.get("otherwise", ())))
        casts = content.get("casts")
        forbidden = frozenset(content.get("forbidden", ()))
        return cls(modes, states, None if casts is None else Autocast(*casts), forbidden)


@dataclass
class ModelCall:
    """A call at the weights of a step, `at`; `gradient` is ∂L/∂f of each example as autograd had it, once it did, in
    the latest pass, `backward`. Examples that were not `called` by names go by what they hold; `signed` is the
    signature of the outputs and `shape` their shape, `statistics` are the running ones before the call and after it,
    where calls move them."""

    at: int
    inputs: Inputs
    called: tuple[str, ...] | None = None
    how: Circumstances = field(default_factory=Circumstances)
    gradient: Float[Tensor, "example out"] | None = None
    backward: int = -1
    signed: Float[Tensor, "example row"] | None = None
    shape: tuple[int, ...] = ()
    statistics: tuple[Weights, Weights] | None = None
    sums_of_loss: tuple[Tensor, Tensor] | None = (
        None  # of the losses, and of what counts in their mean, for a log
    )
    other_outputs: list[str] = field(
        default_factory=list
    )  # of the model, to which gradients came in the first step

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the examples; digests take time, and are not formed in the loop."""
        return digests(self.inputs) if self.called is None else self.called

    def add_gradient(self, gradient: Tensor, backward: int) -> None:
        self.backward = backward
        rows = gradient.detach().clone()
        rows = rows[:, None] if rows.dim() == 1 else rows.flatten(1)
        self.gradient = rows if self.gradient is None else self.gradient + rows


def call_inputs(args: tuple[object, ...], kwargs: dict[str, object]) -> Inputs:
    """The inputs of a call, as the library takes them; a tensor without axes is a number that all examples share.

    >>> call_inputs((), {"x": torch.ones(2), "items": torch.tensor(3)})
    {'x': tensor([1., 1.]), 'items': 3}
    """
    if args and kwargs:
        raise Mistake(
            "the model is called with inputs by position and by name at once; call it with one kind"
        )
    only = kwargs or (args[0] if len(args) == 1 else args)
    if not isinstance(only, Tensor | tuple | dict):
        raise Mistake(
            f"the model is called with a {type(only).__name__}; tensors are followed, by position or by name"
        )
    found: Inputs = tree_map(
        lambda leaf: leaf.item() if isinstance(leaf, Tensor) and not leaf.dim() else leaf, only
    )
    return found


def facts_of(calls: Sequence[ModelCall]) -> StepFacts:
    """Return the facts about the calls of a step that a refusal of their gradient needs."""
    return StepFacts(
        rows=sum(len(call.names) for call in calls),
        drew=any(call.how.states for call in calls),
        other_outputs=tuple(sorted({name for call in calls for name in call.other_outputs})),
    )
