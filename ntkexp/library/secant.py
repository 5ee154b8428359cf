"""The secant kernel of any module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from warnings import warn

from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.kernel.features.features import Features
from ntkexp.kernel.read.batches import batches
from ntkexp.kernel.read.outputs import Outputs
from ntkexp.kernel.read.threads import work
from ntkexp.kernel.record.casts import Casts
from ntkexp.kernel.record.full_precision import full_precision
from ntkexp.kernel.record.inputs import examples
from ntkexp.kernel.secant.closure import Closure, explained
from ntkexp.library.blocks import KernelSide, kernel, refuse_pairs, side
from ntkexp.library.module import finite, named, of_module, reader_of, refuse_unlike_outputs, warn_of
from ntkexp.shapes import Inputs


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
    left, later, right = reader.record(before, probes), reader.record(after, probes), batches(reader, before, train)
    warn_of(module, output, left, casts)

    closures: list[Closure] = []

    def segment(chosen: Sequence[int]) -> Features:
        reading = reader.secant(left, later, chosen)
        closures.extend(reader.closures(reading, left, later, chosen))
        return reading.features

    probed = KernelSide(segment, examples(left.given), left.outputs.shape[1], work(left), lambda: left)
    trained = side(right)
    refuse_unlike_outputs(probed.outputs, trained.outputs)
    refuse_pairs(probed, trained, outputs)
    found = kernel(probed, trained, outputs)
    if (missed := explained(closures, left.eps)) is not None:
        warn(missed, stacklevel=3)
    return finite(found)
