"""The secant kernel of any module, and the kernel of one finite step on one output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from warnings import warn

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.kernel import Casts, Closure, Jacobian, Outputs, Reader, Tape, columns
from ntkexp.kernel.read.sketched import batches
from ntkexp.kernel.record.independence import refuse_dependence
from ntkexp.kernel.record.products import full_precision, refuse_rounded_products
from ntkexp.kernel.record.tape import examples
from ntkexp.kernel.secant.segment import explained
from ntkexp.library.module import (
    finite,
    named,
    of_module,
    reader_of,
    refuse_unlike_outputs,
    warn_of,
)
from ntkexp.library.tangent import kernel, listed, refuse_sides
from ntkexp.mistake import Mistake
from ntkexp.model.functional import function_of, weights_of
from ntkexp.shapes import Function, Inputs, Weights

# --- The secant kernel of any module.


@dataclass(frozen=True)
class SegmentSide:
    """Examples between two sets of weights; how well the secant closes is kept, for each time that it is read."""

    reader: Reader
    tape: Tape
    end: Tape
    closures: list[Closure] = field(default_factory=list)

    @property
    def examples(self) -> int:
        return examples(self.tape.given)

    def read(self, chosen: Sequence[int]) -> Jacobian:
        reading = self.reader.secant(self.tape, self.end, chosen)
        self.closures.extend(self.reader.closures(reading, self.tape, self.end, chosen))
        return reading.jacobian


@of_module
@full_precision()
def secant_kernel(
    module: nn.Module,
    start: Mapping[str, Tensor],
    end: Mapping[str, Tensor],
    probes: Inputs,
    train: Inputs,
    *,
    output: str | int | None = None,
    outputs: Outputs = "all",
    casts: Casts = "keep",
) -> Float[Tensor, "probe out train out_"]:
    """K̄(x, x′) = J̄(x) J(x′)ᵀ between the segment start → end at the probes and its start at the training inputs.

    Inputs, `output`, `outputs` and `casts` are those of `tangent_kernel`. A secant that does not explain the change of
    the module between the two ends to rounding is warned of, and one that is wrong is refused. With
    g = Σᵢ J(start; xᵢ)ᵀ ℓ′ᵢ and end = start − η g, the change of the module is −η Σᵢ K̄(x, xᵢ) ℓ′ᵢ exactly:

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)).double()
    >>> x, start = torch.tensor([[1.0]]).double(), dict(net.named_parameters())
    >>> gradients = torch.autograd.grad(net(x).sum(), list(start.values()))
    >>> end = {name: w - 0.5 * g for (name, w), g in zip(start.items(), gradients)}
    >>> change = torch.func.functional_call(net, end, (x,)) - net(x)
    >>> bool((change + 0.5 * secant_kernel(net, start, end, x, x).sum()).abs() < 1e-14)
    True
    """
    reader, own = reader_of(module, output, casts)
    before, after = own | named(module, start, "start"), own | named(module, end, "end")
    refuse_rounded_products(before)
    left, later, right = (
        reader.record(before, probes),
        reader.record(after, probes),
        batches(reader, before, train),
    )
    warn_of(module, output, left, casts)

    probed, outputs = SegmentSide(reader, left, later), listed(outputs)
    refuse_sides(probed, right, outputs)
    found = kernel(probed, right, outputs)
    if (missed := explained(probed.closures, left.eps)) is not None:
        warn(missed, stacklevel=3)
    return finite(found)


# --- The kernel of one finite step on one output, and the weights that such steps lead to.
#
#     k̃_η(x, x′) = (f(x; θ + η ∇f(x′; θ)) − f(x; θ))/η  →  k(x, x′)    as η → 0, with an error of O(η)
#
# F. Huszár, "Some intuition on the neural tangent kernel" (2020), introduces the tangent kernel as this limit. It
# is a kernel of the secant, K̃ = J̄(x) J(x′)ᵀ, and unlike k it is not symmetric.


LARGEST = 1e100
"""The size of a step, beyond which its square is not a number."""


@of_module
@full_precision()
def finite_step_kernel(
    module: nn.Module,
    x1: Float[Tensor, "probe *shape"],
    x2: Float[Tensor, "train *shape"],
    step_size: float,
    *,
    weights: Mapping[str, Tensor] | None = None,
) -> Float[Tensor, "probe out train out_"]:
    """k̃_η for all outputs, a step at a time; of weights that are not given, the module's own. Axes of the outputs but
    the first are flattened.

    A function that is linear in its weights has the kernel of its tangent at any step:

    >>> line = torch.nn.Linear(1, 1).double()
    >>> x = torch.tensor([[10.0], [-1.0]], dtype=torch.float64)
    >>> finite_step_kernel(line, x, x[:1], step_size=0.5)[:, 0, 0, 0].round(decimals=9).tolist()
    [101.0, -9.0]
    """
    if not (isinstance(x1, Tensor) and isinstance(x2, Tensor)):
        raise Mistake("x1 and x2 are tensors here, with examples along their first axis")
    if not isinstance(step_size, int | float) or not 0 < abs(step_size) <= LARGEST:
        raise Mistake(
            f"step_size={step_size!r:.20}: a finite step is a number that is not 0; tangent_kernel is its limit"
        )
    function, start = partial(columns, function_of(module)), start_of(module, weights)
    # No example may change another's outputs; where examples choose what Python does, which they may do otherwise
    # after a step, each runs by itself
    reader, own = reader_of(module)
    refuse_rounded_products(own | start)
    tape = reader.record(own | start, x1)
    refuse_dependence(reader.function, tape)
    probes = torch.split(x1, 1) if tape.chooses else [x1]

    def outputs(weights: Weights) -> Tensor:
        return torch.cat([function(weights, probe) for probe in probes])

    before = outputs(start)
    found = [
        torch.stack(
            [
                (outputs(moved(start, step_size, g)) - before) / step_size
                for g in gradients(function, start, x)
            ]
        )
        for x in torch.split(x2, 1)
    ]
    refuse_unlike_outputs(before.shape[1], len(found[0]))
    return finite(torch.stack(found).permute(2, 3, 0, 1))


@full_precision()
def ascend(
    module: nn.Module,
    point: Float[Tensor, "one *shape"],
    steps: int,
    step_size: float,
    *,
    weights: Mapping[str, Tensor] | None = None,
) -> Weights:
    """The weights after steps θ ← θ + η ∇f(point; θ), which raise the one output at one point.

    >>> line = torch.nn.Linear(1, 1).double()
    >>> ascended = ascend(line, torch.tensor([[2.0]], dtype=torch.float64), steps=3, step_size=1.0)
    >>> [round((ascended[name] - weight).item(), 9) for name, weight in line.named_parameters()]
    [6.0, 3.0]
    """
    function, reached = partial(columns, function_of(module)), start_of(module, weights)
    for _ in range(steps):
        (gradient,) = gradients(function, reached, point)
        reached = moved(reached, step_size, gradient)
    return reached


def start_of(module: nn.Module, weights: Mapping[str, Tensor] | None) -> Weights:
    """The trained weights, of which some may be given."""
    own = weights_of(module)
    return own | {
        name: weight
        for name, weight in named(module, {} if weights is None else weights, "weights").items()
        if name in own
    }


def gradients(
    function: Function, weights: Weights, x: Float[Tensor, "one *shape"]
) -> list[Weights]:
    """The gradient of each output at one point."""
    known = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    outputs = function(known, x)[0]
    if not outputs.requires_grad:
        raise Mistake(
            "the outputs depend on no parameter that requires gradients, so the kernel is zero"
        )
    found = [
        torch.autograd.grad(output, list(known.values()), retain_graph=True, materialize_grads=True)
        for output in outputs
    ]
    return [dict(zip(known, each, strict=True)) for each in found]


def moved(weights: Weights, step_size: float, direction: Weights) -> Weights:
    """The weights after a step in a direction."""
    return {name: weight + step_size * direction[name] for name, weight in weights.items()}
