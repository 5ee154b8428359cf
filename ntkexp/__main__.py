"""`ntkexp`, and `python -m ntkexp`: an interruption during import ends in the same line as later ones."""

# ruff: noqa: PLC0415  what is imported here takes time, in which Ctrl-C may come

from __future__ import annotations

import sys


def main() -> None:
    """Run the command of `sys.argv`."""
    try:
        from ntkexp.cli.main import main as obey

        obey()
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


if __name__ == "__main__":  # so that importing this module runs nothing
    main()
