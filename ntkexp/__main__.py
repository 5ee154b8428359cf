"""The entry point of `ntkexp` and `python -m ntkexp`.
It handles Ctrl-C even during imports."""

# ruff: noqa: PLC0415  imports are inside `try`, so that Ctrl-C during an import is caught

from __future__ import annotations

import sys


def main() -> None:
    """Run the command in `sys.argv`."""
    try:
        from ntkexp.cli.main import main as run_command

        run_command()
    except KeyboardInterrupt:
        sys.stderr.write("ntkexp: interrupted\n")
        sys.exit(130)
    except (MemoryError, ImportError) as error:
        if isinstance(error, ImportError) and "failed to map segment" not in str(error):
            raise
        sys.stderr.write(
            "ntkexp: no memory is left to load libraries; raise the limit (ulimit -v)\n"
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
