"""Networks of five kinds, small enough that a step of training takes milliseconds."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class LastState(nn.Module):
    """An LSTM, read at its last step."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.layer, self.readout = nn.LSTM(4, 16, batch_first=True), nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.readout(self.layer(x)[0][:, -1])
        return result


class Encoder(nn.Module):
    """One block of a transformer, read at the mean of its positions."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embedding, self.readout = nn.Linear(8, 32), nn.Linear(32, outputs)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.readout(self.block(self.embedding(x)).mean(1))
        return result


class Residual(nn.Module):
    """Two convolutions with group norms beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = (nn.GroupNorm(4, channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1))
        self.branch = nn.Sequential(*half, nn.GroupNorm(4, channels), nn.ReLU(), nn.Conv2d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.branch(x)
        return result


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def cnn(outputs: int, channels: int = 16, side: int = 8, depth: int = 2) -> nn.Module:
    layers: list[nn.Module] = []
    for before in (1, *[channels] * (depth - 1)):
        layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side * side, outputs))


def resnet(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), Residual(16), nn.Flatten(), nn.Linear(1024, outputs))


NETWORKS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (8,)),
    "cnn": (cnn, (1, 8, 8)),
    "resnet": (resnet, (1, 8, 8)),
    "transformer": (Encoder, (8, 8)),
    "lstm": (LastState, (8, 4)),
}
