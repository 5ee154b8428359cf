"""Run by an interpreter that has neural_tangents: a network's kernels, jitted, once for every line that it reads.

A line says which network, for how many examples, and how many bits a number has; the answer is the seconds of CPU as
JSON, or why there are none. A network is compiled, and called once, before it is measured, and stays so until there are
others.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any


def main(threads: int) -> None:
    """Answer until there are no more lines; XLA has as many threads as processors that it may use."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    import jax  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415  another environment has it

    jax.config.update("jax_enable_x64", True)
    compiled = lru_cache(2)(act_of)  # one for each precision
    for line in sys.stdin:
        try:
            act = compiled(line)
            start = time.process_time()
            act()
            told: float | str = time.process_time() - start
        except Exception as error:  # it has no such layer, or no memory: others may
            told = type(error).__name__
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


def act_of(line: str) -> Callable[[], object]:
    """The kernel of a line, compiled."""
    import jax  # noqa: PLC0415  of another environment

    head, depth, shape, count, kind, bits = json.loads(line)
    kernel, size = jax.jit(network(head, depth, len(shape) - 1, kind)), (count, *shape[1:], shape[0])  # channels last
    x1, x2 = (jax.random.normal(key, size, f"float{bits}") for key in jax.random.split(jax.random.PRNGKey(0)))
    jax.block_until_ready(kernel(x1, None if head == "dense" else x2))
    return lambda: jax.block_until_ready(kernel(x1, None if head == "dense" else x2))


def network(head: str, depth: int, axes: int, kind: str) -> Callable[[Any, Any], Any]:
    """The kernels of the network that goes by these words in `tests.bench.infinite`."""
    import jax  # noqa: PLC0415  of another environment
    from neural_tangents import stax  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415  as well

    padding, middle = "CIRCULAR" if kind == "circular" else "SAME", depth // 2
    kinds: dict[str, Callable[[], tuple[Any, ...]]] = {
        "norm": lambda: (stax.LayerNorm(), stax.Relu()),
        "erf": lambda: (stax.Erf(),),
        "gelu": lambda: (stax.Gelu(),),
        "sin": lambda: (stax.Sin(),),
        "tanh": lambda: (stax.ElementwiseNumerical(jax.numpy.tanh, deg=25),),
    }

    def block(k: int) -> tuple[Any, ...]:
        after = kinds[kind]() if kind in kinds else (stax.Relu(),)
        if head == "dense":
            body = (stax.Dense(8, 1.4, 0.1), *after)
            return beside(body, stax.Dense(4)) if kind == "concat" else body
        strides = (2 if kind == "stride" and k == middle else 1,) * axes
        conv = stax.Conv(8, (3,) * axes, strides=strides, padding=padding, W_std=1.4)
        pool = (stax.AvgPool((2,) * axes, (2,) * axes),) if kind == "pool" and k == middle else ()
        if kind == "residual":
            if k == 0:
                return (conv,)
            body = stax.serial(*after, conv)
            return stax.FanOut(2), stax.parallel(body, stax.Identity()), stax.FanInSum()
        if kind == "concat":
            return beside((conv, *after), stax.Conv(4, (1,) * axes))
        return *pool, conv, *after

    def beside(body: tuple[Any, ...], thin: Any) -> tuple[Any, ...]:
        branches = stax.parallel(stax.serial(*body), stax.serial(thin, stax.Abs()))
        return stax.FanOut(2), branches, stax.FanInConcat(-1)

    ends = {"gap": [stax.GlobalAvgPool()], "flatten": [stax.Flatten()], "dense": []}
    layers = [layer for k in range(depth - 1) for layer in block(k)]
    _, _, kernel_fn = stax.serial(*layers, *ends[head], stax.Dense(1))
    return lambda x1, x2: kernel_fn(x1, x2, ("nngp", "ntk"))


if __name__ == "__main__":
    main(*map(json.loads, sys.argv[1:]))
