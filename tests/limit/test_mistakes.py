"""What cannot be computed is refused in one line that says what to do."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

import ntkexp
from ntkexp.layer.affine import Dense
from ntkexp.layer.pointwise import AbstractPointwise
from ntkexp.limit.infinite_kernel import Engine, engine_of
from ntkexp.limit.network import network
from ntkexp.mistake import Mistake

DENSE = {"layer": "Dense", "features": 4}
CONV = {"layer": "Conv", "features": 4}
RELU = {"layer": "ReLU"}
FLATTEN = {"layer": "Flatten"}


def beside(*branches: list[dict[str, Any]]) -> dict[str, Any]:
    return {"layer": "Concatenation", "branches": list(branches)}


BESIDE = beside([], [])
VECTORS, IMAGES = torch.ones(2, 3), torch.ones(2, 1, 4, 4)


class Cubed(AbstractPointwise):
    """A user's own, of which nobody knows the kernel."""

    def apply(self, z: Tensor) -> Tensor:
        return z**3


def test_an_activation_without_a_kernel_is_refused_by_name() -> None:
    with pytest.raises(Mistake, match="Cubed has no known limit of infinite width"):
        ntkexp.infinite_kernel((Dense(features=4), Cubed(), Dense(features=1)), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("spec", "x", "words"),
    [
        ([{"layer": "Dence"}], VECTORS, r"layers\[0\]: there is no layer 'Dence'; did you mean 'Dense'\?"),
        ([{"layer": 3}], VECTORS, r"layers\[0\]: there is no layer '3'; there are Abs, AvgPool, "),
        ([{"features": 3}], VECTORS, r"layers\[0\] is no layer; write"),
        ("[", VECTORS, "layers is no JSON"),
        ("{}", VECTORS, "layers is no list of layers"),
        ([], VECTORS, "a network without layers"),
        ([{"layer": "Dense"}], VECTORS, r"layers\[0\] \(Dense\): features is missing; its keys are features, W_std"),
        ([DENSE | {"W_sdt": 1}], VECTORS, r"layers\[0\]: Dense has no key 'W_sdt'; .* did you mean 'W_std'\?"),
        ([DENSE | {"W_std": -1.0}], VECTORS, r"W_std=-1\.0: it takes a number > 0"),
        ([DENSE | {"b_std": -1.0}], VECTORS, r"b_std=-1\.0: it takes a number ≥ 0"),
        ([DENSE | {"W_std": torch.ones(2)}], VECTORS, "a scale is one number"),
        ([DENSE | {"param": "nkt"}], VECTORS, r"param='nkt': Input should be 'ntk', 'standard' or 'mean_field'"),
        ([DENSE | {"param": "mean_field"}], VECTORS, "mean-field parametrisation has no kernel"),
        ([DENSE], IMAGES, "put a Flatten before it"),
        ([CONV, FLATTEN, {"layer": "GlobalAvgPool"}, DENSE], IMAGES, r"was given \[64\]; leave it out"),
        ([CONV, FLATTEN, {"layer": "AvgPool"}, DENSE], IMAGES, r"was given \[64\]; put it before the Flatten"),
        ([CONV, RELU, DENSE], IMAGES, "put a Flatten before it"),
        ([CONV, RELU], IMAGES, r"the layers end in \[4, 4, 4\], an image; end them with Flatten or GlobalAvgPool"),
        ([CONV | {"window": 2}, FLATTEN], IMAGES, "must be odd"),
        ([CONV, {"layer": "AvgPool", "window": 5}, FLATTEN], IMAGES, "pooling window of 5 does not fit into"),
        ([CONV, {"layer": "AvgPool", "window": [2]}, FLATTEN], IMAGES, r"pooling window \[2\] does not fit"),
        ([CONV, {"layer": "MaxPool"}, FLATTEN], IMAGES, "MaxPool has no known limit"),
        ([CONV, {"layer": "BatchNorm"}, FLATTEN], IMAGES, "BatchNorm has no known limit"),
        ([DENSE, {"layer": "LayerNorm", "affine": True}], VECTORS, "a layer norm whose gain is trained"),
        ([RELU, DENSE], VECTORS, "ReLU has a limit of infinite width only after weights"),
        ([DENSE, RELU, RELU], VECTORS, "ReLU has a limit of infinite width only after weights"),
        ([CONV, FLATTEN, RELU], IMAGES, "ReLU has a limit of infinite width only after weights"),
        ([{"layer": "LayerNorm"}, DENSE], VECTORS, "LayerNorm has a limit of infinite width only after weights"),
        (
            [{"layer": "Residual", "branch": [DENSE]}],
            VECTORS,
            r"branches of a residual layer disagree: \[4\] and \[3\]",
        ),
        ([DENSE, {"layer": "Residual", "branch": [RELU]}], VECTORS, "one of its branches ends in weights"),
        (
            [DENSE, {"layer": "Residual", "branch": [{"layer": "RLU"}]}],
            VECTORS,
            r"layers\[1\]\.branch\[0\]: there is no",
        ),
        ([DENSE, BESIDE, RELU], VECTORS, "ReLU has no known limit .* right after a concatenation.*into the branches"),
        ([CONV, BESIDE, {"layer": "AvgPool"}, RELU, FLATTEN], IMAGES, "right after a concatenation"),
        ([CONV, BESIDE, FLATTEN, RELU], IMAGES, "right after a concatenation"),
        ([DENSE, BESIDE, {"layer": "LayerNorm"}, DENSE], VECTORS, "LayerNorm has no known limit"),
        ([beside([DENSE], []), DENSE], VECTORS, "channels of the inputs do not grow with width"),
        ([beside([CONV], [{"layer": "AvgPool", "window": 1}]), FLATTEN], IMAGES, "do not grow with width"),
        ([beside([CONV], [CONV | {"stride": 2}]), FLATTEN], IMAGES, r"differ in pixels: \[4, 4, 4\], \[4, 2, 2\]"),
        ([DENSE, beside([RELU]), DENSE], VECTORS, r"layers\[1\] \(Concatenation\): branches=.* at least 2"),
        ([DENSE, {"layer": "Concatenation", "branches": 2}], VECTORS, r"layers\[1\]\.branches is no list of branches"),
        ([DENSE, beside([], [{"layer": "RLU"}])], VECTORS, r"layers\[1\]\.branches\[1\]\[0\]: there is no"),
        ([DENSE, {"layer": "Generic", "fn": "relu"}], VECTORS, "fn=relu has a kink.*choose the layer ReLU"),
        ([DENSE, {"layer": "Generic", "fn": "tahn"}], VECTORS, "fn=tahn is none of .*did you mean 'tanh'"),
        (
            [DENSE],
            torch.ones(2, 3, dtype=torch.long),
            r"x1 is torch.int64 of shape \[2, 3\]; it takes floating numbers",
        ),
        ([DENSE], torch.ones(3), r"x1 is torch.float32 of shape \[3\]"),
        ([DENSE], torch.tensor([[1.0], [1e-17]]), "x1 is so small that its squares lose digits, in example 1; scale"),
        ([DENSE], 1e20 * VECTORS, "the NNGP kernel has entries beyond float32; lower W_std, or scale the inputs down"),
        ([DENSE], torch.tensor([[1.0], [torch.nan]]), "x1 has entries that are not finite, the first in example 1"),
    ],
)
def test_a_mistake_is_one_line(spec: Any, x: torch.Tensor, words: str) -> None:
    with pytest.raises(Mistake, match=words) as caught:
        ntkexp.infinite_kernel(spec, x)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("engine", ["torch", "fused"])
@pytest.mark.parametrize("name", ["Erf", "GELU", "Sin", "Cos"])
def test_variances_at_which_near_neighbours_are_one_are_refused(name: str, engine: Engine) -> None:
    """Kernels of equal points were off by 2 to 100 %, or infinite, where the points did not know to be equal."""
    x = 1e8 * torch.ones(2, 3, dtype=torch.float64)
    words = rf"{name}: variance 1e\+16 is too large for float64 to tell near neighbours apart; lower W_std"
    with pytest.raises(Mistake, match=words):
        ntkexp.infinite_kernel([DENSE, {"layer": name}, DENSE], x, x.clone(), engine=engine)
    with pytest.raises(Mistake, match=rf"{name}: .* float32 .*; or compute in float64"):
        ntkexp.infinite_kernel([DENSE, {"layer": name}, DENSE], 100 * VECTORS, engine=engine)


def test_sides_are_of_one_kind() -> None:
    with pytest.raises(Mistake, match=r"x1 has examples of shape \[3\] and torch.float32, x2 of \[4\]"):
        ntkexp.infinite_kernel([DENSE], VECTORS, torch.ones(2, 4))
    with pytest.raises(Mistake, match=r"torch.float32, x2 of \[3\] and torch.float64"):
        ntkexp.infinite_kernel([DENSE], VECTORS, VECTORS.double())


def test_memory_and_engine_are_checked() -> None:
    with pytest.raises(Mistake, match=r"memory_gb=0: it takes a number > 0"):
        ntkexp.infinite_kernel([DENSE], VECTORS, memory_gb=0)
    with pytest.raises(Mistake, match=r"needs .* GB, and a block may take 1e-06; raise memory_gb"):
        ntkexp.infinite_kernel([CONV, RELU, {"layer": "GlobalAvgPool"}], IMAGES, memory_gb=1e-6)
    net = network((Dense(features=1),), (3,))
    with pytest.raises(Mistake, match=r"engine=fussed is none of auto, torch, fused; did you mean 'fused'\?"):
        engine_of(cast("Engine", "fussed"), net, VECTORS, 1, 1.0, None)
