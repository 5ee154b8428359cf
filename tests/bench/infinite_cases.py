"""Networks whose kernels of infinite width are measured, and of how many examples."""

from __future__ import annotations

from dataclasses import dataclass

from ntkexp.covariance.pairs import Pairs
from ntkexp.layer import base
from ntkexp.layer.affine import AbstractAffine, Conv, Dense
from ntkexp.layer.base import AbstractLayer, Concatenation, Residual
from ntkexp.layer.linear import AvgPool, Flatten, GlobalAvgPool, LayerNorm
from ntkexp.layer.pointwise import GELU, Abs, Erf, ReLU, Sin
from ntkexp.layer.smooth import Tanh

KINDS: dict[str, tuple[AbstractLayer, ...]] = {
    "relu": (ReLU(),),
    "circular": (ReLU(),),
    "stride": (ReLU(),),
    "pool": (ReLU(),),
    "residual": (ReLU(),),
    "concat": (ReLU(),),
    "norm": (LayerNorm(), ReLU()),
    "erf": (Erf(),),
    "gelu": (GELU(),),
    "sin": (Sin(),),
    "tanh": (Tanh(),),
}
"""What follows the layers with weights, which are circular, beside others, or in the middle strided or pooled, if they
say so.
"""
OF_IMAGES = tuple(kind for kind in KINDS if kind != "relu")
OF_VECTORS = ("norm", "concat", "erf", "gelu", "sin", "tanh")


@dataclass(frozen=True)
class Case:
    """A network of so many layers with weights; the fused engine gets many examples on each side, others few."""

    head: str
    depth: int
    shape: tuple[int, ...]
    few: int
    many: int
    kind: str = "relu"

    @property
    def layers(self) -> tuple[AbstractLayer, ...]:
        """Convolutions with windows of 3 or dense layers, each with what its kind says, and the readout."""
        ends: dict[str, tuple[AbstractLayer, ...]] = {"gap": (GlobalAvgPool(),), "flatten": (Flatten(),), "dense": ()}
        body = tuple(layer for k in range(self.depth - 1) for layer in self.block(k))
        return (*body, *ends[self.head], Dense(features=1))

    def block(self, k: int) -> tuple[AbstractLayer, ...]:
        """One layer with weights, and what belongs to it."""
        if self.head == "dense":
            body = (Dense(features=8, W_std=1.4, b_std=0.1), *KINDS[self.kind])
            return beside(body, Dense(features=4)) if self.kind == "concat" else body
        middle = k == self.depth // 2
        stride = 2 if middle and self.kind == "stride" else 1
        conv = Conv(features=8, W_std=1.4, circular=self.kind == "circular", stride=stride)
        if self.kind == "residual":
            return (Residual(branch=(*KINDS[self.kind], conv)),) if k else (conv,)
        if self.kind == "concat":
            return beside((conv, *KINDS[self.kind]), Conv(features=4, window=1))
        return *((AvgPool(),) if middle and self.kind == "pool" else ()), conv, *KINDS[self.kind]

    @property
    def pixel_pairs(self) -> int:
        """Of one pair of examples, in all layers with weights but the last."""
        shapes, end = base.shapes(self.layers, self.shape), Pairs((), ())
        hidden = [
            k
            for k, layer in enumerate(self.layers[:-1])
            if isinstance(layer, AbstractAffine | Residual | Concatenation)
        ]
        return sum(base.need(self.layers[k:], end, shapes[k]).count for k in hidden)

    @property
    def name(self) -> str:
        """For the table."""
        shape = "×".join(map(str, self.shape))
        return f"{self.kind}, {self.head}, depth {self.depth}, {shape}, n={self.many} ({self.few})"


def beside(body: tuple[AbstractLayer, ...], thin: AbstractLayer) -> tuple[AbstractLayer, ...]:
    """Layers, and half as many channels of others."""
    return (Concatenation(branches=(body, (thin, Abs()))),)


CASES = (
    Case("gap", 5, (3, 32, 32), 2, 6),
    Case("gap", 11, (3, 32, 32), 1, 4),
    *(Case("gap", 5, (3, 16, 16), 3, 12, kind) for kind in OF_IMAGES if kind != "tanh"),
    Case("gap", 5, (3, 8, 8), 2, 12, "tanh"),
    Case("gap", 5, (1, 6, 6, 6), 3, 12),
    Case("gap", 5, (3, 128), 6, 24),
    Case("flatten", 11, (3, 32, 32), 50, 100),
    *(Case("flatten", 5, (3, 16, 16), 40, 80, kind) for kind in OF_IMAGES if kind not in {"pool", "tanh"}),
    Case("flatten", 5, (3, 16, 16), 8, 80, "pool"),
    Case("flatten", 5, (3, 16, 16), 10, 40, "tanh"),
    Case("dense", 4, (784,), 2000, 5000),
    *(Case("dense", 4, (784,), 500, 2000, kind) for kind in OF_VECTORS if kind != "tanh"),
    Case("dense", 4, (784,), 100, 2000, "tanh"),
)
QUICK = (
    *(Case("gap", 3, (1, 6, 6), 2, 4, kind) for kind in KINDS),
    Case("gap", 3, (1, 3, 3, 3), 2, 4),
    Case("flatten", 3, (1, 6, 6), 4, 8),
    *(Case("dense", 3, (5,), 50, 50, kind) for kind in ("relu", "erf", "tanh")),
)
