"""BatchNorm in training mode, which couples the examples of a call by their mean and variance, and moves statistics.

The loss of a call is Σᵢ ℓᵢ(fᵢ(θ; whole batch)). What an example did is what its own term did, through the whole batch:

    gᵢ = ∂/∂θ ⟨ℓ′ᵢ, fᵢ(θ; batch)⟩        Σᵢ gᵢ is the gradient, exactly        (batch_norm="exact")

a backward pass of the whole batch for each example. With mean and variance as constants of the step an example's J is
its own again, which takes one pass a call; what that leaves is reported (batch_norm="constant"):

    gᵢ = J(xᵢ)ᵀℓ′ᵢ at the batch's mean and variance        coupling = what Σᵢ gᵢ lacks of the gradient

Queries are asked in evaluation, with the running statistics B, which calls move by themselves, and no step of weights:

    f(θ₁, B₁) − f(θ₀, B₀) = [f(θ₁, B₀) − f(θ₀, B₀)] + [f(θ₁, B₁) − f(θ₁, B₀)]
                            explained by the secant      `statistics`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode

from ntkexp.kernel.features.blocks import Rows
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.record.taping import is_out_of_memory, plain_kernels
from ntkexp.mistake import Mistake, in_short
from ntkexp.shapes import Function, Inputs, Weights
from ntkexp.text import short

if TYPE_CHECKING:
    import xarray as xr

BatchNormMode: TypeAlias = Literal["exact", "constant"]
"""What of a batch an example's part goes through: all of it, or what its mean and variance leave."""


MODES: tuple[BatchNormMode, ...] = ("exact", "constant")


def checked_mode(given: str) -> BatchNormMode:
    """One of them.

    >>> checked_mode("frozen")
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: batch_norm='frozen': give 'exact' or 'constant'
    """
    for mode in MODES:
        if isinstance(given, str) and given == mode:
            return mode
    raise Mistake(f"batch_norm={in_short(given)}: give 'exact' or 'constant'")


# --- Running statistics, as they move while a loop is watched. Calls of the model move them, with gradients or without;
# what anything else does to them is refused.


@dataclass
class RunningStatistics:
    """Those of a model: `latest` are as the latest call left them, `at_step` as they were after the latest step. In a
    loop that never had such a layer in training mode they do not `move`, and are buffers like others."""

    model: nn.Module
    processes: int = 1
    moves: bool = False
    latest: Weights = field(default_factory=dict)
    at_step: Weights = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.latest = self.at_step = {
            name: buffer.clone() for name, buffer in running_statistics(self.model).items()
        }

    def begin_call(self, step: int, *, with_gradients: bool) -> None:
        """A call begins, which has to find what the latest one left, if it may move that or be differentiated."""
        if running_statistics(self.model).keys() != self.latest.keys():
            raise Mistake(
                f"step {step}: a BatchNorm layer was exchanged, or came or went, since following began; follow from "
                "there on"
            )
        trains = bool(self.latest) and any(
            layer.training for layer in batch_norms(self.model).values()
        )
        if trains and not self.moves:
            self.refuse_kinds(step)
            self.moves = True
        if self.moves and (trains or with_gradients):
            self.refuse_writes(step)

    def end_call(self) -> tuple[Weights, Weights] | None:
        """What was there when the latest call began, and what it left; nothing, if they do not move."""
        if not self.moves:
            return None
        before = self.latest
        if any(
            not torch.equal(buffer, before[name])
            for name, buffer in running_statistics(self.model).items()
        ):
            self.latest = {
                name: buffer.clone() for name, buffer in running_statistics(self.model).items()
            }
        return before, self.latest

    def end_step(self) -> tuple[Weights, Weights] | None:
        """What was there after the step before, and what is there now."""
        before, self.at_step = self.at_step, self.latest
        return (before, self.at_step) if self.moves else None

    def refuse_writes(self, step: int) -> None:
        """Refuse what something else than a call of the model moved."""
        now = running_statistics(self.model) if self.moves else {}
        for name, buffer in now.items():
            if not torch.equal(buffer, self.latest[name]):
                raise Mistake(
                    f"step {step}: the running statistics '{name}' were changed by something else than a call of the "
                    "model (a load, an average, a reset?), which is not followed; do that before or after the loop"
                )

    def refuse_kinds(self, step: int) -> None:
        """Refuse norms whose statistics are not those of one call."""
        if self.processes > 1:
            raise Mistake(
                f"step {step}: BatchNorm in training mode is not followed where {self.processes} processes train "
                "together, each with statistics of its own; put these layers in eval(), or train in one process"
            )
        for name, layer in batch_norms(self.model).items():
            if isinstance(layer, nn.SyncBatchNorm) and layer.training:
                raise Mistake(
                    f"step {step}: layer '{name}' (SyncBatchNorm) takes its statistics from the batches of all "
                    "processes, which is not followed; put it in eval(), or a BatchNorm there"
                )


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of the layers that have some, by their names.

    >>> list(running_statistics(nn.Sequential(nn.BatchNorm1d(2))))
    ['0.running_mean', '0.running_var', '0.num_batches_tracked']
    """
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, layer in batch_norms(model).items()
        for name, buffer in layer.named_buffers(recurse=False)
    }


def refuse_instance_statistics(step: int, model: nn.Module) -> None:
    """Refuse instance norms that move running statistics: they are no batch's.

    >>> refuse_instance_statistics(0, nn.InstanceNorm1d(2, track_running_stats=True))
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: step 0: layer '' (InstanceNorm1d) moves running statistics; let it track none, or eval() it
    """
    for name, layer in model.named_modules():
        if isinstance(layer, _InstanceNorm) and layer.training and layer.running_mean is not None:
            raise Mistake(
                f"step {step}: layer '{name}' ({type(layer).__name__}) moves running statistics; let it track none, or "
                "eval() it"
            )


def couples(module: nn.Module) -> bool:
    """Whether some layer takes its statistics from the batch.

    >>> couples(nn.BatchNorm1d(2)), couples(nn.BatchNorm1d(2).eval())
    (True, False)
    """
    return any(
        layer.training or layer.running_mean is None for layer in batch_norms(module).values()
    )


def numbers_of(statistics: Weights) -> Weights:
    """The means and variances, without what counts batches."""
    return {name: each for name, each in statistics.items() if each.is_floating_point()}


# --- The update of a call, replayed: it begins with the statistics that it began with, and has to leave what it left.


AGREES = 1e3  # eps: of sums over a batch, in another order, relative to their size
OF_CASTS = 8  # eps of shorter numbers, where other kernels cast otherwise


@contextmanager
def beginning_with(
    module: nn.Module, statistics: tuple[Weights, Weights] | None, step: int, room: float
) -> Iterator[None]:
    """A module begins a call with statistics, and has to end it with others; afterwards it has those that it had."""
    if statistics is None:
        yield
        return
    before, after = statistics
    buffers = running_statistics(module)
    kept = {name: buffer.clone() for name, buffer in buffers.items()}
    try:
        for name, buffer in buffers.items():
            buffer.copy_(before[name])
        yield
        for name, buffer in buffers.items():
            if not buffer.is_floating_point():
                missed, bound = float((buffer - after[name]).abs()), 0.0
            else:
                # what moved is known to rounding of the batch's own statistics, which the change between both tells
                missed = float((buffer - after[name]).norm())
                size = float(after[name].norm() + before[name].norm())
                bound = max(AGREES * torch.finfo(buffer.dtype).eps, OF_CASTS * room) * size
            if not missed <= bound:
                raise Mistake(
                    f"step {step}: the running statistics '{name}' are not those to which the replay of a call leads, "
                    f"off by {short(missed)}; were they changed while it was made?"
                )
    finally:
        for name, buffer in buffers.items():
            buffer.copy_(kept[name])


# --- The gradient of each example's term, through the whole batch.


MOST = 64  # cotangents at a time: more are no faster


@dataclass
class TermGradients(Sequence[Jacobian]):
    """gᵢ = ∂/∂θ ⟨ℓ′ᵢ, fᵢ(θ; batch)⟩ of the examples of a call, a group at a time, made when it runs for; where all
    fit into the memory they are made once. `graph_bytes` is what autograd holds of the call."""

    outputs: Tensor
    came: Float[Tensor, "example ..."]
    leaves: Weights
    graph_bytes: int
    room: float  # bytes
    made: dict[int, Jacobian] = field(default_factory=dict)
    total: Weights = field(default_factory=dict)  # Σᵢ gᵢ of the first `summed` groups
    summed: int = 0

    def __post_init__(self) -> None:
        self.row_bytes = sum(leaf.nbytes for leaf in self.leaves.values())
        self.group = int(max(1, min(MOST, self.room / 2 / (self.row_bytes + self.graph_bytes))))

    def __len__(self) -> int:
        return (len(self.outputs) + self.group - 1) // self.group

    @property
    def fits(self) -> bool:
        """Whether the gradients of all examples are kept once they are made."""
        return len(self.outputs) * self.row_bytes <= self.room / 2

    def __getitem__(self, place: Any) -> Any:
        if not 0 <= place < len(self):
            raise IndexError(place)
        if place in self.made:
            return self.made[place]
        chosen = range(len(self.outputs))[place * self.group : (place + 1) * self.group]
        cotangents = self.outputs.new_zeros(len(chosen), *self.outputs.shape)
        for row, example in enumerate(chosen):
            cotangents[row, example] = self.came[example]
        rows = [found.flatten(1) for found in self.backward(cotangents)]
        blocks = tuple(
            Rows(found[:, None], name) for name, found in zip(self.leaves, rows, strict=True)
        )
        found = Jacobian(blocks, len(chosen), 1)
        if place == self.summed:
            for name, part in found.total(self.leaves).items():
                self.total[name] = self.total[name] + part if name in self.total else part
            self.summed += 1
        if self.fits:
            self.made[place] = found
        return found

    def refuse_other_sum(self, whole: Weights, step: int) -> None:
        """Refuse gradients of terms that do not add up to that of the batch."""
        ours, theirs = (
            torch.cat([each[name].detach().flatten() for name in whole])
            for each in (self.total, whole)
        )
        missed, eps = float((ours - theirs).norm()), torch.finfo(theirs.dtype).eps
        if not missed <= AGREES * eps * float(theirs.norm()):
            size = sum(float(self.came[k].norm()) for k in range(len(self.came)))
            raise Mistake(
                f"step {step}: the gradients of {len(self.came)} examples through their batch do not add up to that of "
                f"the batch, off by {short(missed)} beside ℓ′ of {short(size)}; follow in float64, or with "
                "batch_norm='constant'"
            )

    def backward(self, cotangents: Tensor) -> list[Tensor]:
        """A row of gradients for each cotangent: all at once where torch can, one after another where it cannot."""
        leaves = list(self.leaves.values())

        def gradients(cotangent: Tensor, *, batched: bool) -> tuple[Tensor, ...]:
            return torch.autograd.grad(
                self.outputs,
                leaves,
                cotangent,
                retain_graph=True,
                materialize_grads=True,
                is_grads_batched=batched,
            )

        if len(cotangents) > 1:
            try:
                return list(gradients(cotangents, batched=True))
            except RuntimeError as error:  # an operation without a rule for many at once
                if is_out_of_memory(error):
                    raise
        each = [gradients(cotangent, batched=False) for cotangent in cotangents]
        return [torch.stack(found) for found in zip(*each, strict=True)]


def differentiated(
    function: Function, weights: Weights, inputs: Inputs, trained: frozenset[str]
) -> tuple[Tensor, Weights, int]:
    """The outputs of a function with autograd's graph, the leaves of the weights that are trained, and the bytes that
    the graph holds."""
    leaves = {
        name: weight.detach().requires_grad_(name in trained) for name, weight in weights.items()
    }
    held = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal held
        held += tensor.nbytes
        return tensor

    with (
        torch.enable_grad(),
        plain_kernels(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        outputs = function(leaves, inputs)
    return outputs, {name: leaf for name, leaf in leaves.items() if name in trained}, held


# --- The same with mean and variance as constants of the step.


class FixedStatistics(TorchFunctionMode):
    """Batch norm of a batch by means and variances that are `given`, one layer after another; or, if none are, by the
    batch's own, which are `noted`.

    >>> x = torch.tensor([[1.0], [3.0]])
    >>> with FixedStatistics() as noting:
    ...     _ = nn.BatchNorm1d(1)(x)
    >>> noting.noted
    [(tensor([2.]), tensor([1.]))]
    >>> with FixedStatistics([(torch.tensor([0.0]), torch.tensor([1.0]))]):
    ...     nn.BatchNorm1d(1, eps=0.0, affine=False)(x)
    tensor([[1.],
            [3.]])
    """

    def __init__(self, given: Sequence[tuple[Tensor, Tensor]] | None = None) -> None:
        super().__init__()
        self.given = None if given is None else iter(given)
        self.noted = list[tuple[Tensor, Tensor]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.batch_norm:
            return func(*args, **(kwargs or {}))
        call = signature(func).bind(*args, **(kwargs or {}))
        call.apply_defaults()
        if not call.arguments["training"]:
            return func(*args, **(kwargs or {}))
        if self.given is None:
            x = call.arguments["input"].detach()
            axes = [axis for axis in range(x.dim()) if axis != 1]
            self.noted.append((x.mean(axes), x.var(axes, correction=0)))
        else:
            mean, variance = next(self.given)
            call.arguments.update(running_mean=mean, running_var=variance, training=False)
        return func(*call.args, **call.kwargs)


GIVEN = "statistics of the batch"
"""How the constants of a step are named among weights that no optimizer moves."""


def at_constants(function: Function) -> Function:
    """The function of an example by itself: batch norm takes the means and variances that stand beside its weights."""

    def fixed(weights: Weights, inputs: Inputs) -> Tensor:
        given = [weight for name, weight in weights.items() if name.startswith(GIVEN)]
        own = {name: weight for name, weight in weights.items() if not name.startswith(GIVEN)}
        with FixedStatistics(list(zip(given[::2], given[1::2], strict=True))):
            return function(own, inputs)

    return fixed


def constants_of(function: Function, weights: Weights, inputs: Inputs) -> Weights:
    """The means and variances of a batch, layer after layer."""
    with torch.no_grad(), plain_kernels(), FixedStatistics() as noting:
        function(weights, inputs)
    flat = [each for pair in noting.noted for each in pair]
    return {f"{GIVEN} {number}": each for number, each in enumerate(flat)}


# --- The sentence on running statistics.


def batch_norm_sentence(found: xr.Dataset) -> str:
    """The sentence on running statistics, and on what examples did to one another; none, if none moved."""
    if "statistics" not in found:
        return ""
    moved = float((found["change"] ** 2).sum() ** 0.5)

    def share(name: str) -> str:
        ours = float((found[name] ** 2).sum() ** 0.5)
        return short(ours / moved if moved else ours)

    said = (
        f"running statistics of BatchNorm did {share('statistics')} of what changed (`statistics`)"
    )
    if "coupling" in found:
        said += (
            f", and examples did {share('coupling')} of it to one another through batch statistics (`coupling`), which "
            "batch_norm='exact' splits over them; where that is more than the change, as under Adam where a bias comes "
            "before a norm, parts say little"
        )
    return said + ("" if "coupling" in found else ", which belongs to no example")
