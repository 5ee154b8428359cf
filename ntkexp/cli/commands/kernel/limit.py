"""`ntkexp kernel limit`: the kernels of an architecture at infinite width, into a file."""

from __future__ import annotations

from ntkexp.cli.kernel_files import FillOptions, KernelFile, compose_for_tiles, fill_file, tiles_at_once
from ntkexp.cli.options import CommonOptions, Overrides


def limit(overrides: Overrides = None, out: KernelFile = None, *, options: FillOptions, common: CommonOptions) -> None:
    """Compute the kernels of an architecture at infinite width, NNGP and NTK."""
    from ntkexp.engine.base import choose

    engine = choose(options.engine, options.workers)
    experiment = compose_for_tiles(overrides, common)
    from ntkexp.kernel_file.kernel import InfiniteKernel

    kernel = InfiniteKernel(experiment, experiment.draw(), tiles_at_once(engine))
    fill_file(kernel, out, engine, options, common)
