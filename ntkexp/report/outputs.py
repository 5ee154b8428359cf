"""The axis `out` of contributions: names of outputs, and selection of one output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ntkexp.mistake import WrongArgument, nearest
from ntkexp.records.data import OUT_NAME

if TYPE_CHECKING:
    import xarray as xr

FEW = 8  # an error message lists at most this many names of outputs


def output_names(found: xr.Dataset | xr.DataArray) -> list[str | int]:
    """Return the names of the outputs if a measure defines names.
    Otherwise return their indices."""
    names: list[str | int] = (
        found[OUT_NAME if OUT_NAME in found.coords else "out"].to_numpy().tolist()
    )
    return names


def one_output(parts: xr.DataArray, out: str | int | None) -> xr.DataArray:
    """Select one output by its name or index.

    Raise if `out` is None and there are several outputs.
    """
    if "out" in parts.dims:
        parts = parts.isel(out=output_index(parts, out))
    return parts.drop_vars(["out", OUT_NAME], errors="ignore")


def output_index(parts: xr.Dataset | xr.DataArray, out: str | int | None) -> int:
    """Return the index of an output, given its name or index.

    Raise if `out` is None and there are several outputs.
    """
    names = output_names(parts)
    numbers: list[int] = parts["out"].to_numpy().tolist()
    shown = ", ".join(map(repr, names[:FEW])) + ", …" * (len(names) > FEW)
    if out is None and len(names) > 1:
        raise WrongArgument(
            f"out=: there are {len(names)} outputs, {shown}; name one, out={names[0]!r}",
            "out",
        )
    if out is not None and (out not in names + numbers or isinstance(out, bool)):
        near = nearest(str(out), map(str, names)) or f"; there are {shown}"
        raise WrongArgument(f"out={out!r}: there is no such output{near}", "out")
    if out is None:
        return 0
    return names.index(out) if out in names else numbers.index(int(out))


def refuse_query(arrays: xr.Dataset, query: Any) -> None:
    """Raise if `query` is not an index along the axis `query`."""
    queries = arrays.sizes["query"]
    is_index = isinstance(query, int | np.integer) and not isinstance(query, bool)
    if not is_index or not -queries <= query < queries:
        raise WrongArgument(
            f"query={query!r}: it takes a number below {queries}, the index of a query",
            "query",
        )
