"""The arguments of `ntkexp config`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ntkexp.cli.arguments import ConfigDir, Overrides, Trust


def config(
    overrides: Overrides = None,
    everything: Annotated[bool, typer.Option("--tree", help="Show every group and option there is instead.")] = False,
    cost: Annotated[
        bool, typer.Option("--plan", help="Show how the kernel would be read instead, and what that costs.")
    ] = False,
    trust: Trust = None,
    config_dir: ConfigDir = None,
) -> None:
    """Show what would run, as YAML."""
    if everything:
        from ntkexp.config.choices import Choices
        from ntkexp.config.folders import folders
        from ntkexp.config.show import tree

        text = tree(Choices(folders(config_dir)))
    elif cost:
        from ntkexp.cli.kernel_cost import plan
        from ntkexp.config.compose import compose

        text = plan(compose(overrides or [], config_dir, trust or []))
    else:
        from ntkexp.config.compose import resolve
        from ntkexp.config.show import shown

        text = shown(resolve(overrides or [], config_dir, trust or []))
    sys.stdout.write(text)
