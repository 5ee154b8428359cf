"""Whoever can compute a tile: the kernel between some points and some others, by the names of the file's arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeAlias

from jaxtyping import Float
from torch import Tensor

Blocks: TypeAlias = Mapping[str, Float[Tensor, "probe out train out_"]]


class AbstractFiller(ABC):
    """A filler computes a kernel as a function of points."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of the kernels that it computes."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """The length of the axes `out` and `out_`."""

    @property
    @abstractmethod
    def kernel(self) -> dict[str, Any]:
        """Which kernel it is, in words of JSON."""

    @property
    @abstractmethod
    def concurrent(self) -> bool:
        """Whether tiles may be computed at once, in threads of one process."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """What a pair of points takes on one core of an ordinary processor, from shapes alone: no less than this."""

    @property
    def remark(self) -> str:
        """What a reader of the kernel should know, when it is computed."""
        return ""

    @abstractmethod
    def between(self, left: Float[Tensor, "probe *shape"], right: Float[Tensor, "train *shape"]) -> Blocks:
        """The kernels between points and other points."""

    @abstractmethod
    def among(self, points: Float[Tensor, "probe *shape"]) -> Blocks:
        """The kernels among points: exact where a point meets itself."""
