"""The tables of docs/secant.md: `python -m tests.docs.orders` measures and prints them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache

from jaxtyping import Float
from torch import Tensor

from tests.run.small import Ran, ran

TIME = 6.0
STEP_SIZES = (0.4, 0.2, 0.1, 0.05)  # the largest stable step size of the ReLU network is 0.42
NETS = ("tanh", "relu")
SHARED = ("model.width=64", "path.queries=[query]", "path.schedule=1000", "ladder.machine=[]")
INTEGRAL = 64  # number of substeps that approximate the integral


@cache
def trained(activation: str, size: float, *words: str) -> Ran:
    """Train a network for the same path time, with this step size."""
    steps = f"steps={round(TIME / size)}"
    return ran(*SHARED, f"model.activation={activation}", f"optimizer.step_size={size}", steps, *words)


def sums(activation: str, size: float) -> tuple[float, ...]:
    """Return the errors of the sums by four rules."""
    one = trained(activation, size, "path.rule=[left,gauss,secant]", "path.quadrature_points=1")
    two = trained(activation, size, "path.rule=[gauss]", "path.quadrature_points=2")
    return one.error("left"), one.error("gauss"), two.error("gauss"), one.error("secant")


def parts(activation: str, size: float) -> tuple[float, ...]:
    """Return the errors of contributions by 1, 2 and 4 substeps, and the error bar of the run."""
    integral = secants(activation, size, INTEGRAL)
    misses = [float((secants(activation, size, n) - integral).norm() / integral.norm()) for n in (1, 2, 4)]
    run = trained(activation, size, "path.rule=[secant]", "path.error_samples=1000")
    return (*misses, run.error_bar)


def secants(activation: str, size: float, substeps: int) -> Float[Tensor, "point out train"]:
    """Return 𝒮 by this number of substeps per step."""
    return trained(activation, size, "path.rule=[secant]", f"path.substeps={substeps}").contributions("secant")


def table(header: tuple[str, ...], measured: dict[tuple[str, float], tuple[float, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [("network", "η", *header), ("---", "--:", *["--:"] * len(header))]
    lines += [(net, str(size), *(f"{error:.0e}" for error in row)) for (net, size), row in measured.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("e-0", "e-")


def tables(sizes: Sequence[float] = STEP_SIZES) -> tuple[str, str]:
    """Return the table of sums and the table of contributions."""
    places = [(net, size) for net in NETS for size in sizes]
    return (
        table(("left", "gauss 1", "gauss 2", "secant"), {place: sums(*place) for place in places}),
        table(("1 piece", "2", "4", "its own error bar for 1"), {place: parts(*place) for place in places}),
    )


if __name__ == "__main__":
    sys.stdout.write("\n".join(tables()))
