"""`ntkexp kernel limit`: the kernels of an architecture at infinite width, into a file."""

from __future__ import annotations

from ntkexp.cli.kernel_files import Filling, compose_for_tiles, default_path, show_matrix, tiles_at_once
from ntkexp.cli.options import (
    AsJson,
    ConfigDir,
    Engine,
    FillDryRun,
    KernelFile,
    Overrides,
    Quiet,
    Recompute,
    Tiles,
    Trust,
)


def limit(
    overrides: Overrides = None,
    out: KernelFile = None,
    workers: Tiles = None,
    engine: Engine = "local",
    dry_run: FillDryRun = False,
    force: Recompute = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    trust: Trust = None,
    config_dir: ConfigDir = None,
) -> None:
    """Compute the kernels of an architecture at infinite width, NNGP and NTK."""
    from ntkexp.engine.base import choose

    chosen = choose(engine, workers)
    experiment = compose_for_tiles(overrides or [], config_dir, trust or [])
    from ntkexp.kernel_file.kernel import InfiniteKernel

    kernel = InfiniteKernel(experiment, experiment.draw(), tiles_at_once(chosen))
    filling = Filling(kernel, (out or default_path(kernel)).expanduser(), chosen, workers, force)
    if dry_run:
        filling.show(as_json=as_json)
    else:
        show_matrix(filling.carry_out(trust or [], quiet=quiet), quiet=quiet, as_json=as_json)
