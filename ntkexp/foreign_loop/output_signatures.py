"""Whether a model that is replayed is the one that was called: signatures of its outputs are held against its replay.

    σ_im = Σ_k r_k f_imk,   r_k ~ N(0, 1) drawn once          a number for each row of the last axis, of each example

A model may hang on what is no tensor (a number in a dict, a class or a global, a hook, a forward that was replaced).
When that changes, so do outputs, and gradients often by one factor alone, as if they had been clipped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import isfinite

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.foreign_loop.calls import beginning_at, generator_states
from ntkexp.kernel.record.tape import examples, map_tensors, part
from ntkexp.kernel.record.taping import columns, plain_kernels
from ntkexp.mistake import Mistake
from ntkexp.model.functional import arguments, choose_output
from ntkexp.shapes import Function, Inputs, Weights
from ntkexp.stream import stream

LOG = logging.getLogger("ntkexp.follow")

AGREES = 1e3  # eps: of outputs by other kernels, relative to their size
OF_NOISE = 64.0  # times what a relative noise of eps in weights and inputs does to outputs
OF_CASTS = 8  # eps of the shorter numbers
NOISE_OF_CASTS = 2.0  # times what noise of that size does
AT_ONCE = 256  # queries
NUMBERS: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
"""The numbers r that were drawn so far, by how many they are."""


def signature(outputs: Tensor) -> Float[Tensor, "example row"]:
    """The signature of some outputs.

    >>> signature(torch.ones(2, 3, 5)).shape, signature(torch.ones(2)).shape
    (torch.Size([2, 3]), torch.Size([2, 1]))
    """
    found = outputs.detach()
    found = torch.view_as_real(found) if found.is_complex() else found
    found = found[:, None] if found.dim() == 1 else found
    found = found.float() if found.element_size() < torch.float32.itemsize else found
    kind = found.device.type
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        count = found.shape[-1]
        key = (count, found.dtype, found.device)
        if key not in NUMBERS:
            NUMBERS[key] = torch.randn(count, generator=stream("outputs", count), dtype=torch.float64).to(found)
        return found.reshape(len(found), -1, count) @ NUMBERS[key]


@dataclass(frozen=True)
class Replayed:
    """A function, and its `outputs` at some weights and inputs, which were formed in numbers of this precision, under
    `casts` or without."""

    function: Function
    weights: Weights
    inputs: Inputs
    outputs: Float[Tensor, "example ..."]
    cast_eps: float = 0.0

    def other(self, signed: Float[Tensor, "example row"]) -> float:
        """How far they are from those with a signature, relative to their size, where rounding does not explain it.

        Rounding is small beside the outputs, or where these cancel, beside what noise in weights and inputs does.
        """
        outputs, missed, size = self.outputs, float("inf"), float(self.outputs.norm())
        if outputs.numel() % max(1, signed.numel()) == 0 and len(outputs) == len(signed):
            ours = signature(outputs.reshape(*signed.shape, -1))
            missed = float((ours - signed.to(ours)).norm())
            missed = missed if isfinite(missed) else float("inf")
        eps = torch.finfo(self.outputs.dtype).eps
        if missed <= max(AGREES * eps, OF_CASTS * self.cast_eps) * size or missed <= self.noise(eps):
            return 0.0
        return missed / size if size else missed

    def noise(self, eps: float) -> float:
        """How far outputs may be moved by relative noise of this size; not at all, where they are others at every call.

        Under casts the same kernels cast alike, and there is little room for more.
        """
        generator = stream("outputs", 0)

        def noisy(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            by = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
            return tensor * (1 + max(eps, self.cast_eps) * by)

        near = {name: noisy(weight) for name, weight in self.weights.items()}, map_tensors(noisy, self.inputs)
        with torch.no_grad(), plain_kernels():
            given = [columns(self.function, *at) for at in ((self.weights, self.inputs), near)]
            again = columns(self.function, self.weights, self.inputs)
        moved, by_itself = (float((each - given[0]).norm()) for each in (given[1], again))
        times = NOISE_OF_CASTS if self.cast_eps else OF_NOISE
        return times * moved if isfinite(moved) and by_itself <= moved / OF_NOISE else 0.0


CHANGED = (
    "something changed that is no tensor (a number in a dict, a class or a global, a hook, a 'forward' that was "
    "replaced?); let it be an input of the model, or follow from there on"
)


@dataclass
class OutputsAtEnds:
    """Signatures of what the model itself gave at the queries, in evaluation, when following began, and after the last
    of so many `steps`, if it was evaluated then: f_0 and f_T have to be that."""

    start: Tensor | None = None
    end: Tensor | None = None
    steps: int = -1

    def hold(self, began: Sequence[Replayed], ended: Sequence[Replayed], steps: int) -> None:
        """Refuse outputs at the queries that are none of those that the model may have given itself."""
        for when, signed, found in (("began", self.start, began), ("ended", self.end, ended)):
            if signed is None or (signed is self.end and steps != self.steps):
                continue
            if missed := min(each.other(signed) for each in found):
                raise Mistake(
                    f"when following {when}, the model gave other outputs at the queries than it does now at the same "
                    f"weights, off by {missed:.2g} of them; {CHANGED}"
                )


def evaluate_at_queries(model: nn.Module, output: str | int | None, queries: Inputs) -> Tensor | None:
    """The signature of what a model gives now in evaluation; it is left as it was, and so are generators."""
    device = next((weight.device for weight in model.parameters()), None)
    found, kind = list[Tensor](), "cpu" if device is None else device.type
    casts = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
    compiled = any(getattr(layer, "_compiled_call_impl", None) for layer in model.modules())
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()  # to compile for it takes minutes
    try:
        with torch.no_grad(), casts, eager, plain_kernels(), beginning_at(generator_states(model)), left_alone(model):
            model.eval()
            for begun in range(0, examples(queries), AT_ONCE):
                some = map_tensors(lambda tensor: tensor.to(device), part(queries, slice(begun, begun + AT_ONCE)))
                placed, named = arguments(some)
                found.append(signature(choose_output(model(*placed, **named), output)))
    except Exception as error:  # the model's own, and no reason to lose a training
        LOG.warning(
            "ntkexp: the model does not take the queries any more (%s); what it is at them is not proved", error
        )
        return None
    return torch.cat(found)


@contextmanager
def left_alone(model: nn.Module) -> Iterator[None]:
    """What modules hold under their names is afterwards what it was, such as their modes, or a counter."""
    before = [(layer, layer.training, dict(vars(layer))) for layer in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for layer, trains, held in before:
            vars(layer).clear()
            vars(layer).update(held)
            layer.training = trains
        for buffer, kept in buffers:
            if not torch.equal(buffer, kept):
                buffer.copy_(kept)
