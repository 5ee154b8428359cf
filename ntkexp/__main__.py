"""`python -m ntkexp` is `ntkexp`."""

from ntkexp.cli.main import main

if __name__ == "__main__":  # so that importing this module runs nothing
    main()
