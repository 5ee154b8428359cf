"""Run by an interpreter that has neural_tangents: median seconds per pair of one network, jitted, as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any


def main(head: str, depth: int, shape: list[int], count: int, times: int, kind: str) -> dict[str, float]:
    """By the bits of a number."""
    import jax  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415  another environment has it
    from neural_tangents import stax  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415

    jax.config.update("jax_enable_x64", True)
    window, padding = (3,) * (len(shape) - 1), "CIRCULAR" if kind == "circular" else "SAME"
    hidden = stax.Dense(8, 1.4, 0.1) if head == "dense" else stax.Conv(8, window, padding=padding, W_std=1.4)
    kinds: dict[str, Callable[[], tuple[Any, ...]]] = {
        "norm": lambda: (stax.LayerNorm(), stax.Relu()),
        "erf": lambda: (stax.Erf(),),
        "gelu": lambda: (stax.Gelu(),),
        "sin": lambda: (stax.Sin(),),
        "tanh": lambda: (stax.ElementwiseNumerical(jax.numpy.tanh, deg=25),),
    }
    after = kinds[kind]() if kind in kinds else (stax.Relu(),)
    ends = {"gap": [stax.GlobalAvgPool()], "flatten": [stax.Flatten()], "dense": []}
    layers = [layer for _ in range(depth - 1) for layer in (hidden, *after)]
    _, _, kernel_fn = stax.serial(*layers, *ends[head], stax.Dense(1))
    kernel = jax.jit(lambda x1, x2: kernel_fn(x1, x2, ("nngp", "ntk")))

    def seconds(bits: int) -> float:
        keys = jax.random.split(jax.random.PRNGKey(0))
        size = (count, *shape[1:], shape[0])  # channels last
        x1, x2 = (jax.random.normal(key, size, dtype=f"float{bits}") for key in keys)
        second: Any = None if head == "dense" else x2
        found = []
        for _ in range(times + 1):
            start = time.perf_counter()
            jax.block_until_ready(kernel(x1, second))
            found.append(time.perf_counter() - start)
        return median(found[1:]) / count**2

    return {str(bits): seconds(bits) for bits in (64, 32)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*map(json.loads, sys.argv[1:]))) + "\n")
