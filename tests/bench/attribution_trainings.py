"""What is trained in the attribution bench: by name, the words of each training, its sizes, and what is asked of it.

TWO_DIGITS    networks that tell two digits apart; for `one run` and `fresh seeds`
TSLOO         protocol of arXiv:2605.18814: an MLP 784-16-16-10 that sees images of 28 × 28 pixels once
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from torch import Tensor
from torch.nn.functional import interpolate

from ntkexp.data.images import Digits
from tests.bench.attribution_asked import AbstractAsked, OneOutput, OwnLoss
from tests.bench.attribution_case import Case, Size

SEEDS = 3
Words: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Training:
    """One row of the tables, from any seed."""

    name: str
    words: Words
    size: Size
    asked: AbstractAsked

    def case(self, seed: int) -> Case:
        """From this seed."""
        return Case(self.words, self.size, self.asked, seed)


class Network(NamedTuple):
    """What learns, and by which step sizes, which leave a loss near 0.12 after 40 of them."""

    words: Words
    sgd: float
    momentum: float
    adam: float
    far: float | None = None  # by Adam for twice as many steps; so large that effects fail, which was tried out

    @property
    def optimizers(self) -> dict[str, tuple[Words, int]]:
        """Every optimizer in words, and how many times as many steps it takes."""
        found: dict[str, tuple[Words, int]] = {
            "SGD": (("optimizer=sgd", f"optimizer.step_size={self.sgd}"), 1),
            "momentum": (("optimizer=momentum", f"optimizer.step_size={self.momentum}"), 1),
            "Adam": (("optimizer=adam", f"optimizer.step_size={self.adam}"), 1),
            "AdamW": (("optimizer=adamw", f"optimizer.step_size={self.adam}", "optimizer.weight_decay=1"), 1),
        }
        if self.far is not None:
            found["far"] = (("optimizer=adam", f"optimizer.step_size={self.far}"), 2)
        return found


MLP, CNN = ("model=mlp", "model.width=32"), ("model=cnn", "model.width=8")
NETWORKS = {
    "MLP, tanh": Network((*MLP, "model.activation=tanh"), sgd=0.3, momentum=0.03, adam=0.003, far=0.01),
    "MLP, relu": Network((*MLP, "model.activation=relu"), sgd=0.3, momentum=0.03, adam=0.003, far=0.01),
    "CNN, tanh": Network((*CNN, "model.activation=tanh"), sgd=0.3, momentum=0.03, adam=0.006),
    "CNN, relu": Network((*CNN, "model.activation=relu"), sgd=0.3, momentum=0.03, adam=0.006),
    "transformer": Network(("model=transformer", "model.width=8"), sgd=0.1, momentum=0.02, adam=0.007),
}
BRIEF = ("MLP, relu, SGD", "CNN, tanh, momentum", "transformer, AdamW")  # the trainings of `--quick`
FEW = Size(train=60, read=12, steps=40, batch=16, groups=32, alone=60, fresh=100)
QUICK = Size(train=12, read=3, steps=3, batch=16, groups=4, alone=12, fresh=4)


def two_digits(*, quick: bool) -> list[Training]:
    """Every network by every optimizer, or by few."""
    size, found = QUICK if quick else FEW, list[Training]()
    for network, kind in NETWORKS.items():
        for optimizer, (words, longer) in kind.optimizers.items():
            name = f"{network}, {optimizer}"
            if not quick or name in BRIEF:
                steps = size._replace(steps=size.steps * longer)
                every = ("data=digits", *kind.words, *words)
                found.append(Training(name, every, steps, OneOutput()))
    return found


STANDARD = ("init=standard", "init.W_std=0.57735")  # the variance of PyTorch's own start
ADAMW = ("optimizer=adamw", "optimizer.betas=[0.9,0.95]", "optimizer.weight_decay=0")
IMAGES = ("data=mnist", "data.classes=all", "data.standardise=none")  # between 0 and 1
ONCE = Size(train=960, read=30, steps=15, batch=64, groups=0, alone=200, fresh=0)
PAPER = Size(train=6000, read=500, steps=94, batch=64, groups=0, alone=200, fresh=0)
QUICK_ONCE = Size(train=64, read=3, steps=2, batch=32, groups=0, alone=8, fresh=0)


def tsloo(images: Path, size: Size, step_sizes: Sequence[float] = (1e-3, 1e-4, 1e-5)) -> list[Training]:
    """Both activations with every step size, on images in this folder."""
    found = []
    for step in step_sizes:
        for activation in ("tanh", "relu"):
            network = ("model=mlp", "model.width=16", "model.depth=2", f"model.activation={activation}", *STANDARD)
            rest = ("loss=cross_entropy", *ADAMW, f"optimizer.step_size={step}", *IMAGES, f"data.path={images}")
            found.append(Training(f"{activation}, {step:.0e}", (*network, *rest), size, OwnLoss()))
    return found


def enlarged_digits(folder: Path) -> Path:
    """This folder, with the digits of 8 × 8 pixels made 28 × 28 smoothly, in MNIST's format."""
    images, labels = folder / "train-images-idx3-ubyte", folder / "train-labels-idx1-ubyte"
    if not (images.exists() and labels.exists()):
        pictures, classes = Digits(classes="all").pictures()
        large = interpolate(pictures.double() * (255 / Digits.white), size=(28, 28), mode="bilinear")
        folder.mkdir(parents=True, exist_ok=True)
        images.write_bytes(idx(large[:, 0].round()))
        labels.write_bytes(idx(classes))
    return folder


def idx(numbers: Tensor) -> bytes:
    """An array of bytes in MNIST's format.

    >>> import torch
    >>> idx(torch.tensor([7, 9])).hex(" ")
    '00 00 08 01 00 00 00 02 07 09'
    """
    head = bytes([0, 0, 8, numbers.dim()]) + b"".join(length.to_bytes(4, "big") for length in numbers.shape)
    return head + numbers.byte().numpy().tobytes()
