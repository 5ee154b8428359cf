"""Run by an interpreter that has neural_tangents: median seconds of one network's kernel by each algorithm, as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from statistics import median

ALGORITHMS = {1: "jacobian contraction", 2: "vector products", 3: "structured derivatives"}


def main(kind: str, width: int, outputs: int, examples: int, times: int, threads: int) -> dict[str, float]:
    """Jitted; XLA takes as many threads as there are cores, so it gets that many."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
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

    def seconds(algorithm: int) -> float:
        kernel = jax.jit(neural_tangents.empirical_ntk_fn(apply, trace_axes=(), vmap_axes=0, implementation=algorithm))
        found = []
        for _ in range(times + 1):
            start = time.perf_counter()
            jax.block_until_ready(kernel(inputs, None, weights))
            found.append(time.perf_counter() - start)
        return median(found[1:])

    return {name: seconds(algorithm) for algorithm, name in ALGORITHMS.items()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*map(json.loads, sys.argv[1:]))) + "\n")
