"""The secant kernel of any module, and the kernel of one finite gradient step
on one output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from warnings import warn

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.kernel import Casts, ChosenOutputs, Closure, Jacobian, Reader, Tape, columns
from ntkexp.kernel.read.sketched import batches
from ntkexp.kernel.record.independence import refuse_dependence
from ntkexp.kernel.record.products import full_precision, refuse_rounded_products
from ntkexp.kernel.record.tape import examples
from ntkexp.kernel.secant.segment import closure_remark
from ntkexp.library.module import (
    finite,
    named,
    of_module,
    reader_of,
    refuse_unlike_outputs,
    warn_of,
)
from ntkexp.library.tangent import as_list, kernel, refuse_sides
from ntkexp.mistake import NO_DEPENDENCE, Mistake
from ntkexp.model.functional import function_of, weights_of
from ntkexp.shapes import Function, Inputs, Weights

# --- The secant kernel of any module.


@dataclass(frozen=True)
class SegmentSide:
    """The left or right examples of a secant kernel. `tape` and `end` are recorded
    forward passes of some examples at both ends of the step. `closures` collects the
    error ‖J̄Δθ − Δf‖ of each Jacobian."""

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
    queries: Inputs,
    train: Inputs,
    *,
    output: str | int | None = None,
    outputs: ChosenOutputs = "all",
    casts: Casts = "keep",
) -> Float[Tensor, "query out train out_"]:
    """Return the secant kernel K̄(x, x′) = J̄(x) J(x′)ᵀ.

    J̄(x) is the secant Jacobian of the segment start → end at the queries: f(x; end) −
    f(x; start) = J̄(x) (end − start). J(x′) is the Jacobian at `start` at the training
    inputs.

    Args:
        module: any module, as in `tangent_kernel`.
        start: the weights before the step, by name. The module supplies missing weights.
        end: the weights after the step, by name, completed in the same way.
        queries: the inputs x, as in `tangent_kernel`.
        train: the inputs x′.
        output: the name or index of a tensor, if the module returns several.
        outputs: "all", a list of indices, or "trace".
        casts: "ignore" skips casts to dtypes of lower precision than the weights.

    Returns:
        The kernel, [query, out, train, out_].

    Raises:
        Mistake: if the module has an operation without a difference rule, or if the
            secant does not explain the change of the outputs.

    For a gradient step end = start − η Σᵢ J(xᵢ)ᵀ ℓ′ᵢ, the change of the outputs is
    exactly −η Σᵢ K̄(x, xᵢ) ℓ′ᵢ:

    >>> import torch
    >>> layers = torch.nn.Linear(1, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)
    >>> net = torch.nn.Sequential(*layers).double()
    >>> x, start = torch.tensor([[1.0]]).double(), dict(net.named_parameters())
    >>> gradients = torch.autograd.grad(net(x).sum(), list(start.values()))
    >>> end = {name: w - 0.5 * g for (name, w), g in zip(start.items(), gradients)}
    >>> change = torch.func.functional_call(net, end, (x,)) - net(x)
    >>> bool((change + 0.5 * secant_kernel(net, start, end, x, x).sum()).abs() < 1e-14)
    True
    """
    reader, module_weights = reader_of(module, output, casts)
    start_weights = module_weights | named(module, start, "start")
    end_weights = module_weights | named(module, end, "end")
    refuse_rounded_products(start_weights)
    tape = reader.record(start_weights, queries)
    left = SegmentSide(reader, tape, reader.record(end_weights, queries))
    right = batches(reader, start_weights, train)
    warn_of(module, output, tape, casts)

    outputs = as_list(outputs)
    refuse_sides(left, right, outputs)
    secant = kernel(left, right, outputs)
    unexplained = closure_remark(left.closures, tape.eps)
    if unexplained is not None:
        warn(unexplained, stacklevel=3)
    return finite(secant)


# --- The kernel of one finite gradient step on one output,
# and the weights after such steps
#
#     k̃_η(x, x′) = (f(x; θ + η ∇f(x′; θ)) − f(x; θ))/η  →  k(x, x′)    as η → 0, with an error of O(η)
#
# Here f is a single output. F. Huszár, "Some intuition on the neural tangent kernel"
# (2020), introduces the tangent kernel k as this limit. k̃_η is a secant kernel,
# J̄(x) J(x′)ᵀ. Unlike k, it is not symmetric.


MAX_STEP_SIZE = 1e100
"""The largest step size; its square is still finite."""


@of_module
@full_precision()
def finite_step_kernel(
    module: nn.Module,
    x1: Float[Tensor, " query *shape"],
    x2: Float[Tensor, " train *shape"],
    step_size: float,
    *,
    weights: Mapping[str, Tensor] | None = None,
) -> Float[Tensor, "query out train out_"]:
    """Return the change of the outputs at `x1`, divided by the step size, for one
    gradient step on each output of each example in `x2`.

    As the step size goes to 0, this kernel tends to the tangent kernel. The module
    supplies missing weights. Axes of the outputs after the first are flattened.

    For a function that is linear in its weights,
    both kernels are equal at any step size:

    >>> line = torch.nn.Linear(1, 1).double()
    >>> x = torch.tensor([[10.0], [-1.0]], dtype=torch.float64)
    >>> finite_step_kernel(line, x, x[:1], step_size=0.5)[:, 0, 0, 0].round(decimals=9).tolist()
    [101.0, -9.0]
    """
    if not (isinstance(x1, Tensor) and isinstance(x2, Tensor)):
        raise Mistake(
            "x1 and x2 are tensors here, with examples along their first axis"
        )
    if (
        not isinstance(step_size, int | float)
        or not 0 < abs(step_size) <= MAX_STEP_SIZE
    ):
        raise Mistake(
            f"step_size={step_size!r:.20}: give a finite number other than 0; tangent_kernel is "
            "the limit for small steps"
        )
    function = partial(columns, function_of(module))
    start = start_of(module, weights)
    # Raise if the module couples examples. If its Python code branches on values, run
    # each example alone, because the step may change the branch.
    reader, module_weights = reader_of(module)
    refuse_rounded_products(module_weights | start)
    tape = reader.record(module_weights | start, x1)
    refuse_dependence(reader.function, tape)
    queries = torch.split(x1, 1) if tape.chooses else [x1]

    def outputs(weights: Weights) -> Tensor:
        return torch.cat([function(weights, query) for query in queries])

    outputs_before = outputs(start)
    changes = list[Tensor]()
    for x in torch.split(x2, 1):
        ends = [after_step(start, step_size, g) for g in gradients(function, start, x)]
        changes.append(
            torch.stack([(outputs(end) - outputs_before) / step_size for end in ends])
        )
    refuse_unlike_outputs(outputs_before.shape[1], len(changes[0]))
    return finite(torch.stack(changes).permute(2, 3, 0, 1))


@full_precision()
def ascend(
    module: nn.Module,
    point: Float[Tensor, " one *shape"],
    steps: int,
    step_size: float,
    *,
    weights: Mapping[str, Tensor] | None = None,
) -> Weights:
    """Return the weights after `steps` steps of gradient ascent on the output
    at one point.

    The module must have a single output. Each step is θ ← θ + η ∇f(point; θ).

    >>> line = torch.nn.Linear(1, 1).double()
    >>> ascended = ascend(line, torch.tensor([[2.0]], dtype=torch.float64), steps=3, step_size=1.0)
    >>> [round((ascended[name] - weight).item(), 9) for name, weight in line.named_parameters()]
    [6.0, 3.0]
    """
    function = partial(columns, function_of(module))
    ascended = start_of(module, weights)
    for _ in range(steps):
        (gradient,) = gradients(function, ascended, point)
        ascended = after_step(ascended, step_size, gradient)
    return ascended


def start_of(module: nn.Module, weights: Mapping[str, Tensor] | None) -> Weights:
    """Return the trained weights of the module. Replace those in `weights`."""
    trained = weights_of(module)
    return trained | {
        name: weight
        for name, weight in named(module, weights, "weights").items()
        if name in trained
    }


def gradients(
    function: Function, weights: Weights, x: Float[Tensor, " one *shape"]
) -> list[Weights]:
    """Return the gradient of each output at one point.
    Raise if no output depends on trained weights."""
    leaves = {
        name: weight.detach().requires_grad_() for name, weight in weights.items()
    }
    outputs = function(leaves, x)[0]
    if not outputs.requires_grad:
        raise Mistake(NO_DEPENDENCE)
    rows = list[Weights]()
    for output in outputs:
        row = torch.autograd.grad(
            output, list(leaves.values()), retain_graph=True, materialize_grads=True
        )
        rows.append(dict(zip(leaves, row, strict=True)))
    return rows


def after_step(weights: Weights, step_size: float, direction: Weights) -> Weights:
    """Return the weights after a step, θ + step_size · direction."""
    return {
        name: weight + step_size * direction[name] for name, weight in weights.items()
    }
