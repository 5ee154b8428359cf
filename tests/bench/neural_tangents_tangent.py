"""Run by an interpreter that has neural_tangents: it races with kernels of networks, each by one of its algorithms."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

ALGORITHMS = {"jacobian contraction": 1, "vector products": 2, "structured derivatives": 3}


def act_of(kind: str, width: int, outputs: int, examples: int, method: str) -> Callable[[], object]:
    """A kernel, jitted."""
    import jax  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415  another environment has it
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


if __name__ == "__main__":
    asked = json.loads(sys.stdin.readline())
    # XLA takes as many threads as there are cores, so it gets that many
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: asked["threads"]])
    import neural_tangents  # type: ignore[import-not-found, unused-ignore]  # noqa: F401  before it says that it is ready

    from tests.bench.racing import race

    race(asked, act_of)
