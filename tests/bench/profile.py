"""Where the time of a cell goes, operation by operation: the medians of several profiles, and of these the shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import TypeAlias

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ntkexp.library import tangent_kernel
from tests.bench.architectures import INPUTS, NETWORKS, Encoder, cnn
from tests.bench.architectures import mlp_of as mlp
from tests.bench.cell import Act, Table, seconds
from tests.bench.steps import acts

TITLE = "Shares of operations: the six that take longest, and what is left"
SHOWN = 6
ENOUGH, MOST = 2.0, 25  # seconds of a cell, and rounds

Shares: TypeAlias = Mapping[str, float]


def report(*, quick: bool) -> list[Table]:
    """A row for every cell."""
    some, few, times = (8, 4, 1) if quick else (256, 48, 3)
    channels, side = (4, 6) if quick else (64, 14)
    widths = (16,) if quick else (128, 512, 1024)
    found: dict[str, Act] = {
        f"MLP w={width}, C={outputs}, N={some}": kernel(mlp(width, outputs), (INPUTS,), some)
        for outputs in (1, 10)
        for width in widths
    }
    found |= {
        f"CNN, C=1, N={some}": kernel(cnn(1, channels, side, 3), (1, side, side), some),
        f"CNN, C=10, N={few}": kernel(cnn(10, channels, side, 3), (1, side, side), few),
        f"transformer, C=1, N={some}": kernel(Encoder(1), (8, 8), some),
    }
    found |= {
        f"step of {name}, C={outputs}, N=64": acts(name, outputs, torch.float64)["features"]
        for name in NETWORKS
        for outputs in ((1,) if quick else (1, 10))
    }
    rows = [[name, in_words(shares(act, times))] for name, act in found.items()]
    return [Table(TITLE, ["cell", "operations"], rows)]


def kernel(module: nn.Module, shape: tuple[int, ...], examples: int) -> Callable[[], object]:
    """The tangent kernel of a module at random inputs."""
    made, inputs = module.double().eval(), torch.randn(examples, *shape, dtype=torch.float64)
    return lambda: tangent_kernel(made, inputs)


def shares(act: Act, times: int) -> Shares:
    """What part of the time each operation takes by itself; a median forgets the times at which others ran.

    What is short takes more rounds, for a turn of others makes more of it.
    """
    act()
    rounds = [once(act) for _ in range(max(times, min(MOST, int(ENOUGH / seconds(act)))))]
    middle = {name: median(each.get(name, 0.0) for each in rounds) for name in rounds[0]}
    return {name: value / sum(middle.values()) for name, value in middle.items()}


def once(act: Act) -> dict[str, float]:
    """Seconds of each operation, by its name."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        act()
    return {each.key.removeprefix("aten::"): each.self_cpu_time_total / 1e6 for each in found.key_averages()}


def in_words(found: Shares) -> str:
    """The largest shares.

    >>> in_words({"mm": 0.25, "bmm": 0.75})
    'bmm 75 %, mm 25 %, others 0 %'
    """
    first = sorted(found.items(), key=lambda item: -item[1])[:SHOWN]
    said = [f"{name} {share:.0%}" for name, share in [*first, ("others", 1 - sum(share for _, share in first))]]
    return ", ".join(said).replace("%", " %")
