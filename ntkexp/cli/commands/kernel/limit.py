"""The arguments of `ntkexp kernel limit`."""

from __future__ import annotations

from ntkexp.cli.arguments import (
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
    from ntkexp.cli.kernel.fill import limit
    from ntkexp.cli.kernel.request import FillRequest

    limit(
        FillRequest(
            overrides=overrides or [],
            out=out,
            workers=workers,
            engine=engine,
            dry_run=dry_run,
            force=force,
            quiet=quiet,
            as_json=as_json,
            trust=trust or [],
            config_dir=config_dir,
        )
    )
