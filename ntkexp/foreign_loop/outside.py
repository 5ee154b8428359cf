"""What changes the model and is no step that is followed: an average of weights that is loaded, a clamp.

Between steps such a change is refused, as later steps begin at it:

    weights that the optimizers move    are compared with a copy of what the last step left: `LatestWeights`
    frozen parameters and buffers       are compared with a copy of the model as it was: `FrozenTensors`

After the last step it is a part of its own, which belongs to no example:

    f_T − f_0 = Σ contributions + decay + casts + outside      outside = f(as the loop left it) − f(after the last step)
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.foreign_loop.call import Autocast
from ntkexp.foreign_loop.host_reads import to_host
from ntkexp.foreign_loop.model_function import CalledModule
from ntkexp.kernel.record.taping import columns
from ntkexp.mistake import Mistake
from ntkexp.model.functional import copied
from ntkexp.records.contributions import OUTSIDE
from ntkexp.shapes import Inputs, Weights
from ntkexp.text import short

if TYPE_CHECKING:
    import xarray as xr


# --- What no followed optimizer moves stays as it was: frozen parameters, and buffers.
#
# The queries are evaluated in a copy of the model, in which these are as they were when following began. A readout's
# bias that other code moves changes no gradient, so that no other proof would show it.


@dataclass
class FrozenTensors:
    """`copy` is the model as it was; `checked` are its tensors, each with the writes to it at the last look. A buffer
    may be assigned anew instead of written to.
    """

    model: nn.Module
    copy: nn.Module
    checked: dict[str, tuple[Tensor, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.checked.update(
            (name, (tensor, tensor._version)) for name, tensor in named_tensors(self.model).items()
        )

    def refuse_writes(self, step: int, moved: Container[str]) -> None:
        """Refuse what was written to and is not what it was, beside what is moved; that has to be where it was.

        >>> net = nn.Linear(2, 1)
        >>> frozen = FrozenTensors(net, nn.Linear(2, 1))
        >>> frozen.refuse_writes(0, set())
        >>> nn.init.zeros_(net.bias) is net.bias
        True
        >>> frozen.refuse_writes(0, {"bias"})
        >>> frozen.refuse_writes(0, set())
        Traceback (most recent call last):
        ntkexp.mistake.Mistake: step 0: 'bias', which no followed optimizer moves, was changed; follow what moves it too
        """
        now = named_tensors(self.model)
        for name, (tensor, _) in self.checked.items():
            if name not in now or (name in moved and now[name] is not tensor):
                refuse_other_weights(step, name, tensor, now.get(name))
                raise Mistake(
                    f"step {step}: '{name}' is no longer the tensor that it was when following began; write new values "
                    "into it, or follow from there on"
                )
        for name, tensor in now.items():
            known, writes = self.checked.get(name, (None, 0))
            if name in moved or (known is tensor and writes == tensor._version):
                continue
            if known is None or not torch.equal(tensor.detach(), named_tensors(self.copy)[name]):
                raise Mistake(
                    f"step {step}: '{name}', which no followed optimizer moves, was changed; follow what moves it too"
                )
            self.checked[name] = tensor, tensor._version

    def differences(self, weights: Weights) -> Iterator[str]:
        """What is otherwise than in a trace that ends at these weights: tensors, and numbers and words that modules
        hold, by themselves or as their class does.

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
        for name, was in {**named_tensors(self.copy), **weights}.items():
            if name not in now or not same_values(now[name], was):
                yield name

        def settings(module: nn.Module) -> dict[str, object]:
            return {
                key: value
                for key, value in vars(module).items()
                if isinstance(value, bool | int | float | str)
                and key != "training"
                and not key.startswith("_")
            }

        modules = dict(self.model.named_modules())
        for name, module in self.copy.named_modules():
            held = settings(modules.get(name, module))
            before = settings(module) | {
                key: getattr(module, key) for key in held if hasattr(type(module), key)
            }
            yield from (
                f"{name}.{key}".lstrip(".")
                for key, value in before.items()
                if held.get(key) != value
            )


def refuse_other_weights(step: int, name: str, own: Tensor, now: Tensor | None) -> None:
    """Refuse a call at weights that were computed and are not the model's own, as in the inner loop of MAML."""
    if isinstance(own, nn.Parameter) and now is not None and not isinstance(now, nn.Parameter):
        raise Mistake(
            f"step {step}: the model was called with another tensor in place of '{name}' (torch.func.functional_call, "
            "MAML?); losses at other weights than the model's own are not followed: call a copy of the model where no "
            "gradient comes back to its weights"
        )


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def same_values(now: Tensor, was: Tensor) -> bool:
    """Whether a tensor holds what it held, wherever it lies by now, in whatever numbers."""
    return now.shape == was.shape and torch.equal(now.detach().to(was), was)


# --- Whether anything else than the optimizers moved the weights.
#
# PyTorch counts the writes to a tensor, and the count is read at every call. It does not know of writes to
# `weight.data`, so before every step the weights themselves are compared with this copy, to the bit.


LIBRARY, SIZE = ctypes.CDLL(None), ctypes.c_size_t


@dataclass
class LatestWeights:
    """`weights` are those that the optimizers left, `writes` counts the writes to them until then. `spare` is memory
    that is no longer read: to fill fresh memory takes several times as long."""

    weights: Weights = field(default_factory=dict)
    writes: dict[str, int] = field(default_factory=dict)
    spare: Weights = field(default_factory=dict)
    strangers: dict[str, str] = field(
        default_factory=dict
    )  # optimizers that moved weights and are not followed

    def copy_in(self, weights: Mapping[str, Tensor]) -> None:
        """Copy some weights as they are now."""
        copies, now = list[Tensor](), list[Tensor]()
        for name, weight in weights.items():
            spare, value = self.spare.pop(name, None), weight.detach()
            self.weights[name] = (
                spare if spare is not None and alike(spare, value) else torch.empty_like(value)
            )
            self.writes[name] = weight._version
            copies.append(self.weights[name])
            now.append(value)
        torch._foreach_copy_(copies, now)  # with one call for all

    def release(self, before: Weights) -> None:
        """Copies older than the latest are no longer read."""
        self.spare |= {
            name: weight for name, weight in before.items() if weight is not self.weights[name]
        }

    def refuse_writes(
        self, step: int, members: Iterable[tuple[str, Tensor]], *, closely: bool = False
    ) -> None:
        """Refuse weights that were written to, and are not what they were; or those that are not, by whatever way."""
        looked_at = dict[str, Tensor]()
        for name, weight in members:
            if name not in self.weights:
                raise Mistake(f"step {step}: '{name}' was given to the optimizer during training")
            if weight._version != self.writes[name] or closely:
                looked_at[name] = weight
        same = same_bits(
            [(weight.detach(), self.weights[name]) for name, weight in looked_at.items()]
        )
        for (name, weight), is_same in zip(looked_at.items(), same, strict=True):
            if not is_same:
                if name in self.strangers:
                    raise Mistake(
                        f"step {step}: '{name}' was moved by another optimizer ({self.strangers[name]}), which is not "
                        "followed; build it before the loop, and follow both: follow(model, [first, second])"
                    )
                raise Mistake(
                    f"step {step}: '{name}' was changed by something other than the optimizer since the last step (a "
                    "clamp, an average that was copied back, a load, the ascent of SAM?), which is not followed"
                )
            self.writes[name] = weight._version


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether one tensor holds what another can."""
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def same_bits(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Whether the tensors of each pair are the same to the bit; a device is read once for all.

    >>> same_bits([(torch.zeros(2), -torch.zeros(2)), (torch.ones(3), torch.ones(3))])
    [False, True]
    """
    return [bool(same) for same in to_host([have_same_bits(*pair) for pair in pairs])]


def have_same_bits(one: Tensor, other: Tensor) -> Tensor:
    """Whether two tensors are the same to the bit, seen in numbers of eight bytes where the system cannot compare them;
    as a truth value where they lie."""
    if not alike(one, other):
        return torch.tensor(False)
    if one.device.type == "cpu" and one.is_contiguous() and other.is_contiguous():
        places = (ctypes.c_void_p(each.data_ptr()) for each in (one, other))
        return torch.tensor(not LIBRARY.memcmp(*places, SIZE(one.nbytes)))
    kind = torch.int64 if one.nbytes % 8 == 0 else torch.uint8
    return (one.reshape(-1).view(kind) == other.reshape(-1).view(kind)).all()


# --- Memory of large models.


LARGE = 1e8  # bytes of weights
KEPT = 2**28  # bytes of an allocation that stays with the process
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of mallopt; where glibc's own rule takes them at most:
USUAL = {MMAP_THRESHOLD: 2**25, TRIM_THRESHOLD: 2**26}
KEEPING: list[
    int
] = []  # what the process keeps now: a loop that is repeated inside an attribution changes nothing


@contextmanager
def memory_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Let the C library keep what large tensors took for those that come next: to fill fresh pages may take longer than
    to compute what is written there. Not for a large model with these tensors, nor where the user has said how."""
    set_option = getattr(LIBRARY, "mallopt", None)  # of glibc alone
    said = {"MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys()
    if set_option is None or KEEPING or said or is_large(tensors):
        yield
        return
    KEEPING.append(KEPT)
    set_option(MMAP_THRESHOLD, KEPT)
    set_option(TRIM_THRESHOLD, 4 * KEPT)
    try:
        yield
    finally:
        KEEPING.clear()
        for option, value in USUAL.items():
            set_option(option, value)
        LIBRARY.malloc_trim(0)


def is_large(tensors: Iterable[Tensor]) -> bool:
    return sum(tensor.nbytes for tensor in tensors) > LARGE


def release_memory(tensors: Iterable[Tensor]) -> None:
    """Return free memory to the system before much more is needed, of a large model with these tensors.

    The C library keeps what tensors below 32 MB took, and of a large model these are several times its weights.
    """
    trim = getattr(LIBRARY, "malloc_trim", None)  # of glibc alone
    if trim is not None and is_large(tensors):
        gc.collect()
        trim(0)


# --- What changed after the last step.


@dataclass(frozen=True)
class Outside:
    """The `names` of what is otherwise than after the last step, and the `tensors` among it as the loop left them."""

    names: tuple[str, ...] = ()
    tensors: Weights = field(default_factory=dict)

    def change(
        self, called: CalledModule, casts: Autocast | None, end: Weights, queries: Inputs
    ) -> Float[Tensor, "probe out"]:
        """What these tensors change in the outputs at some queries: f(as the loop left it) − f(after the last step)."""
        after = copied(called.module)
        for name, tensor in named_tensors(after).items():
            tensor.data = (
                self.tensors.get(name, end.get(name, tensor)).detach().to(tensor, copy=True)
            )
        left = CalledModule(after, called.output, casts, measured=called.measured).function
        weights = {
            name: tensor.detach() for name, tensor in after.named_parameters() if name in end
        }
        with torch.no_grad():
            return columns(left, weights, queries) - columns(called.function, end, queries)

    @property
    def named(self) -> str:
        """What changed, in words."""
        return f"'{self.names[0]}'" + (
            f", and {len(self.names) - 1} more," if self.names[1:] else ""
        )


def outside_sentence(found: xr.Dataset) -> str:
    """The sentence on what no followed step did; none, if there was nothing."""
    if OUTSIDE not in found.attrs:
        return ""
    named = Outside(tuple(str(found.attrs[OUTSIDE]).split(", "))).named
    if OUTSIDE not in found:
        return f"{named} changed after the last step; the model is attributed without that change"
    ours, moved = (float((found[name] ** 2).sum() ** 0.5) for name in (OUTSIDE, "change"))
    share = short(ours / moved if moved else ours)
    return f"{named} changed after the last step, which did {share} of what changed (`outside`) and is no example's"
