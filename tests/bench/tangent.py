"""The tangent kernel of an MLP, against per-example Jacobians multiplied out, and against a plain matrix product.

Operations of ours, for N inputs and layers of d_in → d_out (a multiplication and an addition are two):

    forward     2 N d_in d_out                backward    2 N C d_in d_out
    gram        2 N² d_in + 2 N² C² d_out     product     2 N² C² (of the two, and into the sum)
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from ntkexp.library import tangent_kernel
from tests.bench.network import HIDDEN, INPUTS, mlp, points
from tests.bench.stopwatch import medians, milliseconds, table

SIZE = 1024  # of the matrices in the plain product
HEADER = ("width", "out", "ours ms", "jacrev ms", "ratio", "GFLOP/s", "of matmul")


def report(*, quick: bool) -> str:
    """A row for every width and number of outputs."""
    examples, widths, times = (32, (16, 32), 2) if quick else (256, (128, 512, 1024), 7)
    rows = [row(width, outputs, examples, times) for outputs in (1, 10) for width in widths]
    return table(f"Tangent kernel of an MLP {INPUTS}-w-w-w-C, N = {examples}", HEADER, rows)


def row(width: int, outputs: int, examples: int, times: int) -> list[str]:
    """One network."""
    module, inputs = mlp(width, outputs), points(examples, 1)
    square = torch.randn(SIZE, SIZE, dtype=torch.float64)
    acts: dict[str, Callable[[], object]] = {
        "ours": lambda: tangent_kernel(module, inputs),
        "matmul": lambda: square @ square,
    }
    found = medians(acts, times)
    speed = operations(width, outputs, examples) / found["ours"] / 1e9
    share = speed / (2 * SIZE**3 / found["matmul"] / 1e9)
    if outputs > 1:  # its Jacobians alone would take gigabytes
        return [str(width), str(outputs), milliseconds(found["ours"]), "", "", f"{speed:.1f}", f"{share:.0%}"]
    check(module, inputs)
    theirs = medians({"ours": acts["ours"], "jacrev": lambda: multiplied_out(module, inputs)}, max(2, times // 2))
    ratio = theirs["jacrev"] / theirs["ours"]
    shown = (milliseconds(found["ours"]), milliseconds(theirs["jacrev"]), f"{ratio:.1f}×")
    return [str(width), str(outputs), *shown, f"{speed:.1f}", f"{share:.0%}"]


def operations(width: int, outputs: int, examples: int) -> float:
    """How many a tangent kernel takes in factored form."""
    sizes = [INPUTS, *[width] * HIDDEN, outputs]
    layers = list(pairwise(sizes))
    passes = sum(2 * examples * (1 + outputs) * before * after for before, after in layers)
    pairs = examples**2
    grams = sum(2 * pairs * (before + 1) + 2 * pairs * outputs**2 * (after + 1) for before, after in layers)
    return float(passes + grams)


def multiplied_out(module: nn.Module, inputs: Tensor) -> Tensor:
    """J Jᵀ from the Jacobians of single examples."""

    def single(weights: dict[str, Tensor], example: Tensor) -> Tensor:
        outputs: Tensor = functional_call(module, weights, (example[None],))[0]
        return outputs

    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    jacobians: dict[str, Tensor] = vmap(jacrev(single), (None, 0))(weights, inputs)
    shares = (torch.einsum("qcp,ndp->qcnd", rows.flatten(2), rows.flatten(2)) for rows in jacobians.values())
    first, *others = shares
    return sum(others, start=first)


def check(module: nn.Module, inputs: Tensor) -> None:
    """What is compared is the same."""
    expected = multiplied_out(module, inputs)
    torch.testing.assert_close(tangent_kernel(module, inputs), expected, rtol=1e-11, atol=1e-11)
