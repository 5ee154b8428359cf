"""Libraries that not everybody wants: imported where they are needed, and asked for in one line where they are not."""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ntkexp.mistake import Mistake
from ntkexp.model.foreign.error_line import one_line
from ntkexp.model.foreign.torchvision_import import load_torchvision

Option = bool | int | float | str | None
"""What a library's own settings are made of."""


def library(package: str, extra: str) -> Any:  # the types of another library are its own
    """Import the package that an extra of this one installs."""
    if find_spec(package) is None:
        raise Mistake(f"model={extra} needs {package}, which is not installed: pip install 'ntkexp[{extra}]'")
    with one_line(f"model={extra}: {package} is installed, and cannot be imported"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what its own imports do is not the user's business
        load_torchvision()
        return import_module(package)
