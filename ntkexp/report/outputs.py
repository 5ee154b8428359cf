"""The axis `out` of contributions: names of outputs, and selection of one output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ntkexp.mistake import WrongArgument, nearest
from ntkexp.records.data import OUT_NAME

if TYPE_CHECKING:
    import xarray as xr

FEW = 8  # an error message lists at most this many names of outputs


def output_names(found: xr.Dataset | xr.DataArray) -> list[str | int]:
    """Return the names of the outputs if a measure defines names, else their indices."""
    names: list[str | int] = (
        found[OUT_NAME if OUT_NAME in found.coords else "out"].to_numpy().tolist()
    )
    return names


def one_output(parts: xr.DataArray, out: str | int | None) -> xr.DataArray:
    """Select one output by its name or index.

    Raise if `out` is None and there are several outputs.
    """
    if "out" not in parts.dims:
        return parts.drop_vars(["out", OUT_NAME], errors="ignore")
    names, numbers = output_names(parts), parts["out"].to_numpy().tolist()
    shown = ", ".join(map(repr, names[:FEW])) + ", …" * (len(names) > FEW)
    if out is None and len(names) > 1:
        raise WrongArgument(
            f"out=: there are {len(names)} outputs, {shown}; name one, out={names[0]!r}", "out"
        )
    if out is not None and (out not in names + numbers or isinstance(out, bool)):
        near = nearest(str(out), map(str, names)) or f"; there are {shown}"
        raise WrongArgument(f"out={out!r}: there is no such output{near}", "out")
    place = 0 if out is None else (names if out in names else numbers).index(out)
    return parts.isel(out=place).drop_vars(["out", OUT_NAME], errors="ignore")
