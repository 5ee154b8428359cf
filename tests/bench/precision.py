"""Single precision beside double: the same kernels, steps and training, how long they take in each."""

from __future__ import annotations

import torch

from ntkexp.library import tangent_kernel
from tests.bench.architectures import NETWORKS, points
from tests.bench.architectures import mlp_of as mlp
from tests.bench.cell import Act, Table, medians, milliseconds
from tests.bench.steps import acts
from tests.bench.training import with_path_kernel

HEADER = ("what", "float64, ms", "float32, ms", "ratio")
STEPS = 20  # programs are made in the first
KINDS = {"float64": torch.float64, "float32": torch.float32}


def report(quick: bool = False) -> list[Table]:
    """A line for every kernel, step and training."""
    names, examples, width, times = (("mlp",), 8, 8, 1) if quick else (tuple(NETWORKS), 256, 512, 5)
    rows = [line(f"kernel, {name}", {kind: kernel(name, examples, kind) for kind in KINDS}, times) for name in names]
    for outputs in (1, 10):
        title = f"step with features, {{}}, C={outputs}"
        rows += [line(title.format(name), {kind: step(name, outputs, kind) for kind in KINDS}, times) for name in names]
    trained = {kind: training(width, examples, kind) for kind in KINDS}
    rows.append(line(f"{STEPS} steps of training, mlp, w={width}", trained, times))
    return [Table(f"Precision: N = {examples}, of steps 64", HEADER, rows)]


def line(name: str, both: dict[str, Act], times: int) -> list[str]:
    """Medians in turns."""
    found = medians(both, times)
    ratio = found["float64"] / found["float32"]
    return [name, *(milliseconds(found[kind]) for kind in KINDS), f"{ratio:.2f}"]


def kernel(name: str, examples: int, kind: str) -> Act:
    """The tangent kernel of one network."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    module, inputs = make(1).to(KINDS[kind]).eval(), torch.randn(examples, *shape, dtype=KINDS[kind])
    return lambda: tangent_kernel(module, inputs)


def step(name: str, outputs: int, kind: str) -> Act:
    """The features of a step, by programs."""
    return acts(name, outputs, KINDS[kind])["features"]


def training(width: int, examples: int, kind: str) -> Act:
    """Training with the path kernel at every step, the making of programs included."""
    module, inputs = mlp(width, 1).to(KINDS[kind]), points(examples, 1).to(KINDS[kind])
    targets = points(examples, 2)[:, :1].to(KINDS[kind])
    return lambda: with_path_kernel(module, inputs, targets, STEPS)
