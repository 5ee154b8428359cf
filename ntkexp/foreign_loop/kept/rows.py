"""Examples on disk, each once by what it holds, however often and in whatever batch the model is called with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ntkexp.foreign_loop.kept.content import read, written
from ntkexp.kernel.record.inputs import map_tensors, tensors
from ntkexp.records.seal import Damaged
from ntkexp.records.sealed_log import SealedLog
from ntkexp.shapes import Inputs


@dataclass
class KeptRows:
    """A log of batches of examples that had not been seen before, by their digests and the kinds of their tensors."""

    log: SealedLog

    @cached_property
    def entries(self) -> list[Any]:
        """What was kept when this was first asked for."""
        return [read(entry) for entry in self.log.entries()]

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """The entry and the row of every example."""
        keys = [(place, entry["keys"]) for place, entry in enumerate(self.entries)]
        return {key: (place, row) for place, here in keys for row, key in enumerate(here)}

    def keep(self, digests: Sequence[str], inputs: Inputs) -> dict[str, object]:
        """Keep those that are new; what is to be kept of the call."""
        like = outline(inputs)
        keys = [f"{digest} {like}" for digest in digests]
        new = {key: row for row, key in enumerate(keys) if key not in self.places}
        if new:
            rows = torch.tensor(list(new.values()))
            chosen = [tensor[rows.to(tensor.device)] for tensor in tensors(inputs)]
            place = self.log.append(*written({"keys": list(new), "tensors": chosen}))
            self.places.update({key: (place, row) for row, key in enumerate(new)})
        return {"rows": keys, "form": map_tensors(lambda tensor: tensor[:0], inputs)}

    def find(self, call: Mapping[str, Any]) -> Inputs:
        """The inputs of a call, from what was kept of it."""
        if lost := [key for key in call["rows"] if key not in self.places]:
            raise Damaged(
                f"{self.log.path} is damaged: {len(lost)} of the {len(call['rows'])} examples of a call are missing; "
                "follow anew"
            )
        places = [self.places[key] for key in call["rows"]]
        rows = [[tensor[row : row + 1] for tensor in self.entries[entry]["tensors"]] for entry, row in places]
        found = iter([torch.cat(list(column)) for column in zip(*rows, strict=True)])
        return map_tensors(lambda _: next(found), call["form"])


def outline(inputs: Inputs) -> str:
    """The kinds of the tensors of one example.

    >>> outline({"x": torch.ones(2, 3), "mask": torch.ones(2)})
    'float32[3] float32[]'
    """
    return " ".join(map(kind, tensors(inputs)))


def kind(tensor: Tensor) -> str:
    """The kind of a tensor's rows."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape[1:])}"
