"""Kernels of any module are computed by functions, without a run.

>>> import torch
>>> layer = torch.nn.Linear(2, 1, dtype=torch.float64)
>>> x = torch.tensor([[1.0, 2.0], [0.0, 3.0]], dtype=torch.float64)
>>> tangent_kernel(layer, x)[:, 0, :, 0]
tensor([[ 6.,  7.],
        [ 7., 10.]], dtype=torch.float64)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from warnings import warn
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.kernel.features.features import Features
from ntkexp.kernel.features.gram import gram, trace
from ntkexp.kernel.read.outputs import Outputs, chunks, wanted
from ntkexp.kernel.read.reader import Found, Reader
from ntkexp.kernel.record.casts import Casts, remark, with_casts
from ntkexp.kernel.record.full_precision import full_precision
from ntkexp.kernel.record.inputs import examples
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.secant.closure import Closure, explained
from ntkexp.kernel.secant.rules.base import NoRule
from ntkexp.limit import infinite_kernel as infinite
from ntkexp.mistake import Mistake, nearest
from ntkexp.model.functional import function_of
from ntkexp.shapes import Inputs, Weights

infinite_kernel = full_precision()(infinite.infinite_kernel)


@full_precision()
def tangent_kernel(
    module: nn.Module,
    x1: Inputs,
    x2: Inputs | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
    output: str | int | None = None,
    outputs: Outputs = "all",
    casts: Casts = "keep",
) -> Float[Tensor, "probe out train out_"]:
    """K(θ; x, x′) = J(θ; x) J(θ; x′)ᵀ, summed over the parameters that require gradients.

    Inputs are a tensor, a tuple of tensors or a dict of keyword arguments, each tensor with the examples along its
    first axis. `weights` may name some or all parameters; the others are the module's own. Of a module that gives
    several tensors, `output` names the one that is read. Its axes but the first are flattened, and `outputs` chooses
    among them: "all", a list of places, or "trace" for Σ_c K[x, c, x′, c] as [n1, 1, n2, 1], however many there are.
    `casts="ignore"` leaves out what the module casts to shorter numbers than its weights.
    """
    reader, own = reader_of(module, output, casts)
    chosen = own | named(module, weights or {}, "weights")
    left = partial(tangent, reader, reader.record(chosen, x1))
    if casts == "ignore":
        warn_of(module, output, left.args[1], casts)
    right = left if x2 is None else partial(tangent, reader, reader.record(chosen, x2))
    return kernel(left, right, [left.args[1], right.args[1]], outputs)


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
    left, later, right = reader.record(before, probes), reader.record(after, probes), reader.record(before, train)
    warn_of(module, output, left, casts)

    closures: list[Closure] = []

    def segment(chosen: Sequence[int]) -> Features:
        reading = reader.secant(left, later, chosen)
        closures.extend(reader.closures(reading, left, later, chosen))
        return reading.features

    found = kernel(segment, partial(tangent, reader, right), [left, right], outputs)
    if (missed := explained(closures, left.eps)) is not None:
        warn(missed, stacklevel=3)
    return found


def tangent(reader: Reader, tape: Tape, chosen: Sequence[int]) -> Features:
    """The features of a point; where no rules lead through the module, it is said why, and Jacobians are taken."""
    try:
        return reader.factored(tape, chosen)
    except NoRule as error:
        warn(error.remark, stacklevel=6)
        return reader.dense(tape, chosen)


def warn_of(module: nn.Module, output: str | int | None, tape: Tape, casts: Casts) -> None:
    """Say what casts inside the module cost."""
    if (found := remark(function_of(module, output), tape, casts)) is not None:
        warn(found, stacklevel=4)


def kernel(
    left: Callable[[Sequence[int]], Features],
    right: Callable[[Sequence[int]], Features],
    tapes: Sequence[Tape],
    outputs: Outputs,
) -> Float[Tensor, "probe out train out_"]:
    """The kernel of features that are read for some outputs at a time."""
    count = tapes[0].outputs.shape[1]
    chosen = wanted(outputs, count)
    if outputs != "trace":
        return between(left, right, chosen, gram)
    largest = max(tapes, key=lambda tape: examples(tape.given))
    first, *rest = (between(left, right, chunk, trace) for chunk in chunks(largest, count))
    return sum(rest, start=first)


def between(
    left: Callable[[Sequence[int]], Features],
    right: Callable[[Sequence[int]], Features],
    chosen: Sequence[int],
    inner: Callable[[Features, Features], Tensor],
) -> Tensor:
    """The kernel of some outputs; features of the same tape are read once."""
    ones = left(chosen)
    return inner(ones, ones if left is right else right(chosen))


FOUND: WeakKeyDictionary[nn.Module, dict[frozenset[str], Found]] = WeakKeyDictionary()
"""What was found of each module that is still alive, by what it trains."""


def reader_of(module: nn.Module, output: str | int | None = None, casts: Casts = "keep") -> tuple[Reader, Weights]:
    """A reader of the module, and all its parameters."""
    own = {name: weight.detach() for name, weight in module.named_parameters()}
    trained = frozenset(name for name, weight in module.named_parameters() if weight.requires_grad)
    if not trained:
        raise Mistake("no parameter of the module requires gradients, so it has no tangent kernel")
    found = FOUND.setdefault(module, {}).setdefault(trained, Found())
    return Reader(with_casts(function_of(module, output), casts), trained, found), own


def named(module: nn.Module, weights: Mapping[str, Tensor], argument: str) -> Weights:
    """The tensors of a mapping that are parameters; buffers in it are the module's business.

    A parameter may be given by any of its names, and by several that agree.
    """
    own = {parameter: name for name, parameter in module.named_parameters()}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    given: dict[str, str] = {}  # the name that it is given by
    for name, weight in weights.items():
        if name not in parameters:
            if name not in buffers:
                raise Mistake(f"{argument}['{name}']: the module has no such parameter{nearest(name, parameters)}")
            continue
        shape = parameters[name].shape
        if weight.shape != shape:
            raise Mistake(f"{argument}['{name}'] has shape {list(weight.shape)}; the module's has {list(shape)}")
        first = given.setdefault(own[parameters[name]], name)
        if not same(weight, weights[first]):
            raise Mistake(
                f"{argument}['{first}'] and {argument}['{name}'] are one parameter of the module, and differ; give one"
            )
    return {name: weights[known].detach() for name, known in given.items()}


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers; one view of the same memory does, even where some are none."""
    one_view = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return one.dtype == other.dtype and (one_view or torch.equal(one, other))
