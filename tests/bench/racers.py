"""Kernels by other programs, which `tests.bench.peers` compares with ours.

`python -m tests.bench.racers RACE THREADS` runs in the environment of the other program, which has no ntkexp. It reads
the arguments of a kernel as a line of JSON, and answers with the seconds of one call:

    nngeometry         Gram matrices of networks
    neural_tangents    tangent kernels of networks, each by one of its algorithms
    infinite           neural_tangents again: kernels of infinite width
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

MEMORY = 8_000_000_000  # bytes: the Jacobians of ten outputs take 40 GB, and swapping would distort every time


def answer(act_of: Callable[..., Callable[[], object]], clock: Callable[[], float]) -> None:
    """Answer each line with the seconds of one call, or with the name of the error. Keep the last compiled kernels."""
    compiled = lru_cache(2)(lambda line: act_of(*json.loads(line)))
    for line in sys.stdin:
        try:
            act = compiled(line)
            start = clock()
            act()
            told: float | str = clock() - start
        except Exception as error:  # a missing layer or memory; other kernels may work
            told = "too large" if "memory" in str(error) else type(error).__name__
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


# nngeometry.


def of_nngeometry(threads: int) -> None:
    """Answer with times of Gram matrices."""
    import torch  # noqa: PLC0415  other environments have no torch

    torch.set_num_threads(threads)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    answer(nngeometry_act, time.perf_counter)


def nngeometry_act(kind: str, width: int, outputs: int, examples: int, _: str) -> Callable[[], object]:
    """Return the computation of a Gram matrix, with all examples in one batch, the fastest setting."""
    import torch  # noqa: PLC0415  other environments have no torch
    from nngeometry.gram import GramMatrix  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    layers: list[nn.Module] = []
    shape: tuple[int, ...] = (64,) if kind == "mlp" else (1, 14, 14)
    if kind == "mlp":
        for before, after in pairwise((64, width, width, width, outputs)):
            layers += [nn.Linear(before, after), nn.ReLU()]
        layers = layers[:-1]
    else:
        for before in (1, width, width):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
        layers += [nn.Flatten(), nn.Linear(width * 14 * 14, outputs)]
    network = nn.Sequential(*layers).double().eval()
    data = torch.utils.data.TensorDataset(torch.randn(examples, *shape, dtype=torch.float64), torch.zeros(examples))
    loader = torch.utils.data.DataLoader(data, batch_size=examples)
    return lambda: GramMatrix(model=network, loader=loader, function=lambda *batch: network(batch[0]))


# neural_tangents, tangent kernels.


ALGORITHMS = {"jacobian contraction": 1, "vector products": 2, "structured derivatives": 3}


def of_neural_tangents(threads: int) -> None:
    """Answer with times of tangent kernels."""
    limit_threads(threads)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    answer(neural_tangents_act, time.perf_counter)


def limit_threads(threads: int) -> None:
    """Restrict this process to some cores. XLA takes one thread for each core."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def neural_tangents_act(kind: str, width: int, outputs: int, examples: int, method: str) -> Callable[[], object]:
    """Return the jitted computation of a tangent kernel."""
    import jax  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415
    import neural_tangents  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415
    from neural_tangents import stax  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415

    jax.config.update("jax_enable_x64", True)
    hidden = stax.Dense(width) if kind == "mlp" else stax.Conv(width, (3, 3), padding="SAME")
    end = [stax.Dense(outputs)] if kind == "mlp" else [stax.Flatten(), stax.Dense(outputs)]
    init, apply, _ = stax.serial(*[hidden, stax.Relu()] * 3, *end)
    shape = (examples, 64) if kind == "mlp" else (examples, 14, 14, 1)
    inputs = jax.random.normal(jax.random.PRNGKey(0), shape, dtype="float64")
    _, weights = init(jax.random.PRNGKey(1), shape)
    algorithm = ALGORITHMS[method]
    kernel = jax.jit(neural_tangents.empirical_ntk_fn(apply, trace_axes=(), vmap_axes=0, implementation=algorithm))
    return lambda: jax.block_until_ready(kernel(inputs, None, weights))


# neural_tangents, kernels of infinite width, in seconds of CPU.


def of_infinite_width(threads: int) -> None:
    """Answer with times of kernels of infinite width."""
    limit_threads(threads)
    import jax  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415

    jax.config.update("jax_enable_x64", True)
    answer(infinite_act, time.process_time)


def infinite_act(head: str, depth: int, shape: list[int], count: int, kind: str, bits: int) -> Callable[[], object]:
    """Return the jitted computation of a kernel of infinite width, called once."""
    import jax  # noqa: PLC0415

    kernel, size = jax.jit(network(head, depth, len(shape) - 1, kind)), (count, *shape[1:], shape[0])  # channels last
    x1, x2 = (jax.random.normal(key, size, f"float{bits}") for key in jax.random.split(jax.random.PRNGKey(0)))
    jax.block_until_ready(kernel(x1, None if head == "dense" else x2))
    return lambda: jax.block_until_ready(kernel(x1, None if head == "dense" else x2))


def network(head: str, depth: int, axes: int, kind: str) -> Callable[[Any, Any], Any]:
    """Return the kernel function of a network of `tests.bench.infinite`."""
    import jax  # noqa: PLC0415
    from neural_tangents import stax  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415

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


RACES = {"nngeometry": of_nngeometry, "neural_tangents": of_neural_tangents, "infinite": of_infinite_width}

if __name__ == "__main__":
    RACES[sys.argv[1]](int(sys.argv[2]))
