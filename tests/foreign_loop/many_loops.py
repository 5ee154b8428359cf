"""Training loops as users write them, each in a few lines, for the table in docs/loops.md.

Each loop is written from the pages docs/follow*.md alone. It returns the attribution, whose parts must add up to
the change of the outputs. `python -m tests.foreign_loop.many_loops` writes the table.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  as users write it
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import ntkexp
from ntkexp.foreign_loop.trace import Trace
from ntkexp.model.foreign import load_torchvision
from ntkexp.report.scores import Attribution
from ntkexp.report.tables import format_markdown, tabulate
from ntkexp.text import short

PAGE = Path(__file__).parents[2] / "docs" / "loops.md"
STEPS = 4
DTYPES = (torch.float64, torch.float32)
NO_EXAMPLE = ("decay", "rounding", "statistics", "jumps", "coupling", "outside")
"""The parts of the change that no example caused."""


@dataclass(frozen=True)
class LoopCase:
    name: str
    optimizer: str
    run: Callable[[], Attribution]


CASES: list[LoopCase] = []


def case(optimizer: str) -> Callable[[Callable[[], Attribution]], Callable[[], Attribution]]:
    """Add a loop to the table. Its docstring is its name."""

    def add(run: Callable[[], Attribution]) -> Callable[[], Attribution]:
        CASES.append(LoopCase((run.__doc__ or "").strip().rstrip("."), optimizer, run))
        return run

    return add


def miss_of(found: Attribution) -> float:
    """Return the distance of the sum of all parts from the change, relative to the change."""
    total = found["contribution"].sum("example")
    for name in NO_EXAMPLE:
        if name in found:
            total = total + found[name]
    change = found["change"].to_numpy()
    return float(np.linalg.norm(total.to_numpy() - change) / np.linalg.norm(change))


def fit(
    model: nn.Module,
    optimizer: Optimizer,
    queries: object,
    step: Callable[[], Any],
    after: Callable[[], None] = lambda: None,
    **options: object,
) -> Attribution:
    """Follow an ordinary loop: `step` returns the loss of the next batch."""
    with ntkexp.follow(model, optimizer, queries=queries, **options) as trace:  # type: ignore[arg-type]
        for _ in range(STEPS):
            optimizer.zero_grad()
            step().backward()
            optimizer.step()
            after()
    return trace.attribute(quiet=True)


def mlp(inputs: int = 3, outputs: int = 2, width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))


def rows(count: int = 8, size: int = 3) -> Tensor:
    return torch.randn(count, size)


def classes(count: int = 8, of: int = 2) -> Tensor:
    return torch.randint(of, (count,))


def images(count: int = 4, channels: int = 1, side: int = 8) -> Tensor:
    return torch.randn(count, channels, side, side)


# --- Supervised learning


@case("AdamW")
def classifier() -> Attribution:
    """MLP, cross-entropy."""
    model, x, y = mlp(), rows(), classes()
    optimizer = AdamW(model.parameters(), lr=0.01)
    return fit(model, optimizer, rows(2), lambda: F.cross_entropy(model(x), y))


@case("SGD, momentum")
def label_smoothing() -> Attribution:
    """MLP, label smoothing."""
    model, x, y = mlp(), rows(), classes()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return fit(model, optimizer, rows(2), lambda: F.cross_entropy(model(x), y, label_smoothing=0.1))


@case("Adam")
def focal_loss() -> Attribution:
    """MLP, focal loss."""
    model, x, y = mlp(), rows(), classes()
    optimizer = Adam(model.parameters(), lr=0.01)

    def step() -> Any:
        loss = F.cross_entropy(model(x), y, reduction="none")
        return ((1 - (-loss).exp()).square() * loss).mean()

    return fit(model, optimizer, rows(2), step)


@case("AdamW")
def class_weights() -> Attribution:
    """MLP, class weights and ignored targets."""
    model, x, y = mlp(), rows(), classes()
    y[0] = -100
    optimizer = AdamW(model.parameters(), lr=0.01)
    weight = torch.tensor([1.0, 3.0])
    return fit(model, optimizer, rows(2), lambda: F.cross_entropy(model(x), y, weight=weight))


@case("NAdam")
def mixup() -> Attribution:
    """Mixup of inputs and labels."""
    model, x, y = mlp(), rows(), F.one_hot(classes(), 2).to(torch.get_default_dtype())
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)

    def step() -> Any:
        share, order = torch.rand(()), torch.randperm(len(x))
        mixed = share * x + (1 - share) * x[order]
        return F.cross_entropy(model(mixed), share * y + (1 - share) * y[order])

    return fit(model, optimizer, rows(2), step)


@case("Rprop")
def huber() -> Attribution:
    """Regression, Huber loss."""
    model, x, y = mlp(outputs=1), rows(), rows(size=1)
    return fit(model, torch.optim.Rprop(model.parameters()), rows(2), lambda: F.huber_loss(model(x), y))


@case("Adamax")
def quantiles() -> Attribution:
    """Regression, three quantiles."""
    model, x, y = mlp(outputs=3), rows(), rows(size=1)
    levels = torch.tensor([0.1, 0.5, 0.9])

    def step() -> Any:
        gap = y - model(x)
        return torch.maximum(levels * gap, (levels - 1) * gap).mean()

    return fit(model, torch.optim.Adamax(model.parameters(), lr=0.01), rows(2), step)


class MeanAndVariance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(outputs=4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, scale = self.body(x).chunk(2, dim=1)
        return mean, scale


@case("AdamW")
def heteroscedastic() -> Attribution:
    """Mean and variance as two outputs, Gaussian likelihood."""
    model, x, y = MeanAndVariance(), rows(), rows(size=2)
    optimizer = AdamW(model.parameters(), lr=0.01)

    def step() -> Any:
        mean, scale = model(x)
        return F.gaussian_nll_loss(mean, y, F.softplus(scale))

    return fit(model, optimizer, rows(2), step, output=0)


@case("Adam")
def cox() -> Attribution:
    """Survival analysis, partial likelihood of the batch."""
    model, x = mlp(outputs=1), rows()

    def step() -> Any:
        risk = model(x)[:, 0]
        return (risk.logcumsumexp(0) - risk).mean()

    return fit(model, Adam(model.parameters(), lr=0.01), rows(2), step)


@case("RMSprop")
def ranking() -> Attribution:
    """Ranking, all pairs of a batch."""
    model, x, y = mlp(outputs=1), rows(), rows(size=1)

    def step() -> Any:
        score = model(x)
        return F.softplus(-(score - score.T) * (y - y.T).sign()).mean()

    return fit(model, RMSprop(model.parameters(), lr=0.01), rows(2), step)


@case("AdamW")
def multi_task() -> Attribution:
    """Two heads, two losses."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 8)
            self.label, self.value = nn.Linear(8, 3), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.body(x).tanh()
            return {"label": self.label(h), "value": self.value(h)}

    model, x, y, z = Heads(), rows(), classes(of=3), rows(size=1)

    def step() -> Any:
        out = model(x)
        return F.cross_entropy(out["label"], y) + 0.3 * F.mse_loss(out["value"], z)

    return fit(model, AdamW(model.parameters(), lr=0.01), rows(2), step, output="label")


@case("AdamW")
def distillation() -> Attribution:
    """Distillation from a frozen teacher."""
    teacher, model, x = mlp(), mlp(width=4), rows()

    def step() -> Any:
        with torch.no_grad():
            wanted = teacher(x).softmax(1)
        return F.kl_div(model(x).log_softmax(1), wanted, reduction="batchmean")

    return fit(model, AdamW(model.parameters(), lr=0.01), rows(2), step)


# --- Networks


@case("SGD, Nesterov")
def convolutions() -> Attribution:
    """CNN with max pooling."""
    model = nn.Sequential(*(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)), nn.Flatten(), nn.Linear(48, 2))
    x, y = images(), classes(4)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    return fit(model, optimizer, images(2), lambda: F.cross_entropy(model(x), y))


@case("AdamW")
def batch_norm() -> Attribution:
    """CNN with BatchNorm in training mode."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)), nn.Flatten(), nn.Linear(3, 2)
    )
    x, y = images(), classes(4)
    return fit(model, AdamW(model.parameters(), lr=0.01), images(2), lambda: F.cross_entropy(model(x), y))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 2, 3, padding=1), nn.GroupNorm(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.norm(self.first(x)).relu()
        return x + changed


@case("SGD, cosine schedule")
def residual() -> Attribution:
    """ResNet with GroupNorm, cosine schedule."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), Residual(), Residual(), nn.Flatten(), nn.Linear(72, 2))
    x, y = images(), classes(4)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    return fit(model, optimizer, images(2), lambda: F.cross_entropy(model(x), y), schedule.step)


@case("Adam")
def unet() -> Attribution:
    """UNet for segmentation."""

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.deep = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 4, 3, padding=1)
            self.up, self.out = nn.ConvTranspose2d(4, 2, 2, stride=2), nn.Conv2d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            skip = self.down(x).relu()
            up = self.up(self.deep(F.max_pool2d(skip, 2)).relu())
            out: Tensor = self.out(torch.cat([skip, up], dim=1))
            return out

    model, x, y = UNet(), images(), torch.randint(2, (4, 8, 8))
    return fit(model, Adam(model.parameters(), lr=0.01), images(1), lambda: F.cross_entropy(model(x), y))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells, self.out = kind(3, 5, batch_first=True), nn.Linear(5, 2)  # type: ignore[call-arg, arg-type]

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.cells(x)
        out: Tensor = self.out(states[:, -1])
        return out


@case("RMSprop, clipping by norm")
def lstm() -> Attribution:
    """LSTM, gradients clipped by norm."""
    model, x, y = Recurrent(nn.LSTM), torch.randn(6, 4, 3), classes(6)
    optimizer = RMSprop(model.parameters(), lr=0.01)
    with ntkexp.follow(model, optimizer, queries=torch.randn(2, 4, 3)) as trace:
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    return trace.attribute(quiet=True)


@case("Adam")
def packed() -> Attribution:
    """GRU over packed sequences."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.out = nn.GRU(3, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            seq = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            _, last = self.cells(seq)
            out: Tensor = self.out(last[0])
            return out

    model, x, y = Packed(), torch.randn(5, 4, 3), classes(5)
    lengths = torch.tensor([2, 4, 1, 3, 4])
    queries = (torch.randn(2, 4, 3), torch.tensor([3, 2]))
    optimizer = Adam(model.parameters(), lr=0.01)
    return fit(model, optimizer, queries, lambda: F.cross_entropy(model(x, lengths), y))


class Language(nn.Module):
    """A small language model with tied embeddings and causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        mask = torch.full((length, length), -math.inf).triu(1)
        h = self.words(ids) + self.places(torch.arange(length))
        return F.linear(self.block(h, src_mask=mask), self.words.weight)


@case("AdamW")
def language_model() -> Attribution:
    """Causal language model, tied embeddings, dropout."""
    model, ids = Language(), torch.randint(11, (5, 6))

    def step() -> Any:
        return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def log_probability(outputs: Tensor, call: object) -> Tensor:
        return outputs.log_softmax(-1)[:, -2].gather(1, ids[:2, -1:])[:, 0]

    return fit(model, AdamW(model.parameters(), lr=0.01), ids[:2], step, measure=log_probability)


@case("AdamW, two rates")
def masked_language_model() -> Attribution:
    """Masked language model, two learning rates."""
    model, ids = Language(), torch.randint(10, (5, 6))
    groups: list[dict[str, Any]] = [
        {"params": model.block.parameters()},
        {"params": model.words.parameters(), "lr": 0.001},
    ]
    optimizer = AdamW([*groups, {"params": model.places.parameters(), "lr": 0.002}], lr=0.01)

    def step() -> Any:
        mask = torch.rand(ids.shape) < 0.3
        mask[:, 0] = True
        return F.cross_entropy(model(ids.masked_fill(mask, 10))[mask], ids[mask])

    return fit(model, optimizer, ids[:1], step, measure=lambda outputs, call: outputs[:, 0, 0])


@case("Adam")
def sequence_to_sequence() -> Attribution:
    """Encoder and decoder with teacher forcing."""

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(7, 5)
            self.encoder, self.decoder = nn.GRU(5, 6, batch_first=True), nn.GRU(5, 6, batch_first=True)
            self.out = nn.Linear(6, 7)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            _, state = self.encoder(self.words(source))
            states, _ = self.decoder(self.words(target), state)
            out: Tensor = self.out(states)
            return out

    model, source, target = Translator(), torch.randint(7, (4, 5)), torch.randint(7, (4, 4))

    def step() -> Any:
        return F.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())

    queries = (source[:1], target[:1, :-1])
    return fit(model, Adam(model.parameters(), lr=0.01), queries, step, measure=lambda f, call: f[:, 0, 0])


@case("SGD")
def ctc() -> Attribution:
    """Connectionist temporal classification."""
    model, x = nn.Sequential(nn.Conv1d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv1d(6, 5, 1)), torch.randn(4, 3, 8)
    targets = torch.randint(1, 5, (4, 3))

    def step() -> Any:
        log_probs = model(x).log_softmax(1).permute(2, 0, 1)
        return F.ctc_loss(log_probs, targets, torch.full((4,), 8), torch.full((4,), 3))

    return fit(model, SGD(model.parameters(), lr=0.05), x[:1], step, measure=lambda f, call: f[:, 0, 0])


@case("Adagrad")
def bag_of_words() -> Attribution:
    """Bag of words."""
    model = nn.Sequential(nn.EmbeddingBag(20, 4), nn.Linear(4, 2))
    ids, y = torch.randint(20, (6, 5)), classes(6)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    return fit(model, optimizer, ids[:2], lambda: F.cross_entropy(model(ids), y))


@case("Adam")
def deep_sets() -> Attribution:
    """Sets, summed over their elements."""

    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each, self.all = mlp(outputs=6), mlp(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.all(self.each(x).sum(1))
            return out

    model, x, y = Sets(), torch.randn(6, 4, 3), rows(6, 1)
    return fit(model, Adam(model.parameters(), lr=0.01), x[:2], lambda: F.mse_loss(model(x), y))


@case("Adam")
def mixture_of_experts() -> Attribution:
    """Mixture of experts, top 1 of 3."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(3, 3), nn.ModuleList(mlp(outputs=1) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            weight, chosen = self.router(x).softmax(1).topk(1)
            every = torch.stack([expert(x) for expert in self.experts], dim=1)[..., 0]
            return weight * every.gather(1, chosen)  # type: ignore[no-any-return]

    model, x, y = Experts(), rows(), rows(size=1)
    return fit(model, Adam(model.parameters(), lr=0.05), rows(2), lambda: F.mse_loss(model(x), y))


@case("Adam")
def neural_ode() -> Attribution:
    """Neural ODE with Runge-Kutta steps."""

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                middle = x + 0.1 * self.field(x)
                x = x + 0.2 * self.field(middle)
            return x

    model, x = Flow(), rows(size=2)
    return fit(model, Adam(model.parameters(), lr=0.01), x[:2], lambda: F.mse_loss(model(x), -x))


@case("Adam")
def weight_norm() -> Attribution:
    """Weight normalization."""
    model, x, y = (
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 1)),
        rows(),
        rows(size=1),
    )
    return fit(model, Adam(model.parameters(), lr=0.01), rows(2), lambda: F.mse_loss(model(x), y))


@case("AdamW")
def low_rank_adapters() -> Attribution:
    """LoRA on a frozen base."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.zeros(8, 2))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.base(x) + x @ self.a.T @ self.b.T
            return out

    model, x, y = nn.Sequential(Adapted(nn.Linear(3, 8)), nn.ReLU(), nn.Linear(8, 2)), rows(), classes()
    optimizer = AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=0.01)
    return fit(model, optimizer, rows(2), lambda: F.cross_entropy(model(x), y))


@case("SGD")
def hypernetwork() -> Attribution:
    """Hypernetwork."""

    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = mlp(2, 6)

        def forward(self, task: Tensor, x: Tensor) -> Tensor:
            matrix = self.weights(task).unflatten(1, (2, 3))
            return (matrix @ x[..., None])[..., 0]  # type: ignore[no-any-return]

    model, task, x, y = Hyper(), rows(size=2), rows(), rows(size=2)
    return fit(model, SGD(model.parameters(), lr=0.05), (task[:2], x[:2]), lambda: F.mse_loss(model(task, x), y))


# --- Generative models


@case("Adam")
def autoencoder() -> Attribution:
    """Denoising autoencoder."""
    model, x = mlp(3, 3, 2), rows()
    step = lambda: F.mse_loss(model(x + 0.1 * torch.randn_like(x)), x)  # noqa: E731
    return fit(model, Adam(model.parameters(), lr=0.01), rows(2), step)


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(3, 4), mlp(2, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encoder(x).chunk(2, dim=1)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return self.decoder(mean + noise * (log_var / 2).exp()), mean, log_var


@case("Adam")
def variational() -> Attribution:
    """Variational autoencoder."""
    model, x = Variational(), rows()

    def step() -> Any:
        again, mean, log_var = model(x)
        return F.mse_loss(again, x) + 0.1 * (mean.square() + log_var.exp() - log_var - 1).mean()

    return fit(model, Adam(model.parameters(), lr=0.01), rows(2), step, output=0)


@case("Adam")
def discretized() -> Attribution:
    """VQ-VAE with straight-through gradients."""

    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = mlp(3, 2), mlp(2, 3)
            self.codes = nn.Parameter(torch.randn(4, 2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            z = self.encoder(x)
            code = self.codes[(z[:, None] - self.codes).square().sum(2).argmin(1)]
            return self.decoder(z + (code - z).detach()), z, code

    model, x = Quantized(), rows()

    def step() -> Any:
        again, z, code = model(x)
        return F.mse_loss(again, x) + F.mse_loss(z.detach(), code) + 0.25 * F.mse_loss(z, code.detach())

    return fit(model, Adam(model.parameters(), lr=0.01), rows(2), step, output=0)


@case("Adam, two of them")
def adversarial() -> Attribution:
    """GAN: the discriminator is followed."""
    maker, judge, real = mlp(2, 3), mlp(3, 1), rows()
    first, second = Adam(maker.parameters(), lr=0.01), Adam(judge.parameters(), lr=0.01)
    with ntkexp.follow(judge, second, queries=rows(2)) as trace:
        for _ in range(STEPS):
            fake = maker(rows(size=2))
            second.zero_grad()
            (F.softplus(-judge(real)) + F.softplus(judge(fake.detach()))).mean().backward()  # type: ignore[no-untyped-call]
            second.step()
            first.zero_grad()
            F.softplus(-judge(fake)).mean().backward()  # type: ignore[no-untyped-call]
            first.step()
    return trace.attribute(quiet=True)


@case("AdamW")
def diffusion() -> Attribution:
    """Diffusion: a network that predicts noise."""
    model, x = mlp(4, 3), rows()

    def step() -> Any:
        time, noise = torch.rand(len(x), 1), torch.randn_like(x)
        noisy = (1 - time).sqrt() * x + time.sqrt() * noise
        return F.mse_loss(model(torch.cat([noisy, time], dim=1)), noise)

    return fit(model, AdamW(model.parameters(), lr=0.01), rows(2, 4), step)


@case("Adam")
def coupling_flow() -> Attribution:
    """Normalizing flow with coupling layers."""

    class Coupling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(mlp(1, 2) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            a, b = x.chunk(2, dim=1)
            log_volume = torch.zeros_like(a)
            for part in self.parts:
                scale, shift = part(a).chunk(2, dim=1)
                a, b = b * scale.tanh().exp() + shift, a
                log_volume = log_volume + scale.tanh()
            return (log_volume - (a.square() + b.square()) / 2)[:, 0]

    model, x = Coupling(), rows(size=2)
    return fit(model, Adam(model.parameters(), lr=0.01), x[:2], lambda: -model(x).mean())


@case("SGD")
def energy_based() -> Attribution:
    """Energy-based model, contrastive divergence with given negatives."""
    model, x, y = mlp(outputs=1), rows(), rows()
    return fit(model, SGD(model.parameters(), lr=0.05), rows(2), lambda: model(x).mean() - model(y).mean())


@case("Adam")
def categorical_relaxation() -> Attribution:
    """Gumbel-softmax with hard samples."""

    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits, self.out = mlp(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            logits = self.logits(x)
            code = F.gumbel_softmax(logits, hard=True) if self.training else logits.softmax(1)
            out: Tensor = self.out(code)
            return out

    model, x, y = Choosing(), rows(), classes()
    return fit(model, Adam(model.parameters(), lr=0.01), rows(2), lambda: F.cross_entropy(model(x), y))


# --- Self-supervised learning


@case("SGD, momentum")
def contrastive() -> Attribution:
    """SimCLR: two views, all pairs of a batch."""
    model, x = mlp(outputs=4), rows()

    def step() -> Any:
        views = [F.normalize(model(x + 0.1 * torch.randn_like(x))) for _ in range(2)]
        return F.cross_entropy(views[0] @ views[1].T / 0.5, torch.arange(len(x)))

    return fit(model, SGD(model.parameters(), lr=0.1, momentum=0.9), rows(2), step)


@case("SGD")
def stop_gradient() -> Attribution:
    """SimSiam: a predictor and a stopped gradient."""

    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = mlp(outputs=4), mlp(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.body(x)
            return self.head(z), z.detach()

    model, x = Siamese(), rows()

    def step() -> Any:
        (p, _), (_, z) = model(x + 0.1 * torch.randn_like(x)), model(x + 0.1 * torch.randn_like(x))
        return -F.cosine_similarity(p, z).mean()

    return fit(model, SGD(model.parameters(), lr=0.05), rows(2), step, output=0)


@case("AdamW")
def momentum_teacher() -> Attribution:
    """BYOL: a teacher that is an average of the student."""
    model, head, x = mlp(outputs=4), mlp(4, 4), rows()
    both = nn.Sequential(model, head)
    teacher = copy.deepcopy(model)

    def step() -> Any:
        with torch.no_grad():
            wanted = teacher(x + 0.1 * torch.randn_like(x))
        return -F.cosine_similarity(both(x + 0.1 * torch.randn_like(x)), wanted).mean()

    def after() -> None:
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)

    return fit(both, AdamW(both.parameters(), lr=0.01), rows(2), step, after)


@case("Adam")
def triplets() -> Attribution:
    """Triplet loss, three calls in a step."""
    model, a, b, c = mlp(outputs=4), rows(), rows(), rows()
    step = lambda: F.triplet_margin_loss(model(a), model(b), model(c))  # noqa: E731
    return fit(model, Adam(model.parameters(), lr=0.01), rows(2), step)


@case("AdamW")
def two_encoders() -> Attribution:
    """CLIP: two encoders and a temperature."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text, self.scale = mlp(3, 4), mlp(5, 4), nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            return F.normalize(self.image(x)) * self.scale.exp(), F.normalize(self.text(t))

    model, x, t = Pair(), rows(), rows(size=5)

    def step() -> Any:
        image, text = model(x, t)
        logits = image @ text.T
        place = torch.arange(len(x))
        return (F.cross_entropy(logits, place) + F.cross_entropy(logits.T, place)) / 2

    return fit(model, AdamW(model.parameters(), lr=0.01), (x[:2], t[:2]), step, output=0)


# --- Reinforcement learning and preferences


@case("Adam")
def policy_gradient() -> Attribution:
    """REINFORCE with given rewards."""
    model, x, reward = mlp(), rows(), torch.randn(8)

    def step() -> Any:
        log_p = model(x).log_softmax(1)
        action = log_p.detach().exp().multinomial(1)
        return -(log_p.gather(1, action)[:, 0] * reward).mean()

    return fit(model, Adam(model.parameters(), lr=0.01), rows(2), step)


@case("Adam")
def clipped_policy() -> Attribution:
    """PPO: actor and critic, clipped ratio."""

    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.actor, self.critic = nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(x).tanh()
            return self.actor(h), self.critic(h)[:, 0]

    model, x, action, gain = ActorCritic(), rows(), classes(), torch.randn(8)
    before = model(x)[0].log_softmax(1).gather(1, action[:, None])[:, 0].detach()

    def step() -> Any:
        logits, value = model(x)
        ratio = (logits.log_softmax(1).gather(1, action[:, None])[:, 0] - before).exp()
        policy = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        return -policy.mean() + 0.5 * (value - gain).square().mean()

    return fit(model, Adam(model.parameters(), lr=0.01), rows(2), step, output=0)


@case("RMSprop")
def temporal_difference() -> Attribution:
    """Q-learning with a target network."""
    model, x, after_x, action, reward = mlp(), rows(), rows(), classes(), torch.randn(8)
    target = copy.deepcopy(model)

    def step() -> Any:
        with torch.no_grad():
            wanted = reward + 0.9 * target(after_x).amax(1)
        return F.smooth_l1_loss(model(x).gather(1, action[:, None])[:, 0], wanted)

    return fit(model, RMSprop(model.parameters(), lr=0.01), rows(2), step)


@case("AdamW")
def preferences() -> Attribution:
    """DPO: preferred and rejected answers, a frozen reference."""
    model = mlp(outputs=5)
    reference, x, good, bad = copy.deepcopy(model), rows(), classes(of=5), classes(of=5)

    def log_ratio(answers: Tensor) -> Tensor:
        with torch.no_grad():
            known = reference(x).log_softmax(1).gather(1, answers[:, None])
        return model(x).log_softmax(1).gather(1, answers[:, None]) - known  # type: ignore[no-any-return]

    step = lambda: F.softplus(-0.5 * (log_ratio(good) - log_ratio(bad))).mean()  # noqa: E731
    return fit(model, AdamW(model.parameters(), lr=0.01), rows(2), step)


# --- Losses through derivatives, and graphs


def examples_of(model: nn.Module, optimizer: Optimizer, queries: object, step: Callable[[Trace], Any]) -> Attribution:
    """Follow a loop whose loss uses `trace.losses`."""
    with ntkexp.follow(model, optimizer, queries=queries) as trace:  # type: ignore[arg-type]
        for _ in range(STEPS):
            optimizer.zero_grad()
            step(trace).backward()
            optimizer.step()
    return trace.attribute(quiet=True)


@case("Adam")
def differential_equation() -> Attribution:
    """Physics-informed network."""
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    points = torch.rand(6, 1)

    def residuals(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope + x).square()[:, 0]

    optimizer = Adam(model.parameters(), lr=0.01)
    return examples_of(model, optimizer, points[:2], lambda trace: trace.losses(residuals, points).mean())


@case("Adam")
def gradient_penalty() -> Attribution:
    """Gradient penalty of a critic."""
    model, x, y = mlp(outputs=1), rows(), rows()

    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square()  # type: ignore[no-any-return]

    step = lambda trace: (model(x) - model(y)).mean() + trace.losses(penalty, (x + y) / 2).mean()  # noqa: E731
    return examples_of(model, Adam(model.parameters(), lr=0.01), rows(2), step)


@case("Adam")
def meta_learning() -> Attribution:
    """MAML: one inner step by a functional call."""
    model, x, y = mlp(outputs=1), torch.randn(4, 6, 3), torch.randn(4, 6, 1)

    def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        weights = dict(model.named_parameters())
        each = []
        for task_x, task_y in zip(x, y, strict=True):
            inner = F.mse_loss(model(task_x[:3]), task_y[:3])
            slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            moved = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
            each.append(F.mse_loss(torch.func.functional_call(model, moved, (task_x[3:],)), task_y[3:]))
        return torch.stack(each)

    optimizer = Adam(model.parameters(), lr=0.01)
    return examples_of(model, optimizer, rows(2), lambda trace: trace.losses(losses, x, y).mean())


class GraphNetwork(nn.Module):
    """Node classes of graphs [graph, node, feature] with adjacency [graph, node, node]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        out: Tensor = adjacency @ self.second((adjacency @ self.first(x)).relu())
        return out


@case("Adam")
def node_classes() -> Attribution:
    """Graph network, a loss for each node."""
    model, x, y = GraphNetwork(), torch.randn(1, 6, 3), classes(6)
    adjacency = (torch.rand(1, 6, 6) < 0.5).to(x) / 3

    def losses(model: nn.Module, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x, adjacency)[0], y, reduction="none")

    with ntkexp.follow(
        model, optimizer := Adam(model.parameters(), lr=0.01), queries=(x, adjacency), ids=lambda call: range(6)
    ) as trace:
        for _ in range(STEPS):
            optimizer.zero_grad()
            trace.losses(losses, y).mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return trace.attribute(quiet=True)


@case("Adam")
def graph_classes() -> Attribution:
    """Graph network, a class for each graph."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nodes = GraphNetwork()

        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            out: Tensor = self.nodes(x, adjacency).mean(1)
            return out

    model, x, y = Whole(), torch.randn(5, 4, 3), classes(5)
    adjacency = (torch.rand(5, 4, 4) < 0.5).to(x)
    queries = (x[:2], adjacency[:2])
    return fit(model, Adam(model.parameters(), lr=0.01), queries, lambda: F.cross_entropy(model(x, adjacency), y))


# --- Training tricks


@case("AdamW, accumulation")
def accumulation() -> Attribution:
    """Gradient accumulation over two halves."""
    model, x, y = mlp(), rows(), classes()
    optimizer = AdamW(model.parameters(), lr=0.01)
    with ntkexp.follow(model, optimizer, queries=rows(2)) as trace:
        for _ in range(STEPS):
            for half in (slice(0, 4), slice(4, 8)):
                (F.cross_entropy(model(x[half]), y[half]) / 2).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return trace.attribute(quiet=True)


@case("SGD, clipping by value")
def clipped_by_value() -> Attribution:
    """Gradients clipped by value."""
    model, x, y = mlp(), rows(), classes()
    optimizer = SGD(model.parameters(), lr=0.1)
    with ntkexp.follow(model, optimizer, queries=rows(2)) as trace:
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_value_(model.parameters(), 0.02)
            optimizer.step()
    return trace.attribute(quiet=True)


@case("Adam, by parameter")
def optimizer_per_parameter() -> Attribution:
    """One optimizer for each parameter."""
    model, x, y = mlp(), rows(), classes()
    optimizers = [Adam([weight], lr=0.01) for weight in model.parameters()]
    with ntkexp.follow(model, optimizers, queries=rows(2)) as trace:
        for _ in range(STEPS):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.step()
    return trace.attribute(quiet=True)


@case("SGD, average loaded")
def average_of_weights() -> Attribution:
    """Averaged weights, loaded at the end."""
    model, x, y = mlp(), rows(), classes()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    with ntkexp.follow(model, optimizer, queries=rows(2)) as trace:
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            average.update_parameters(model)
        model.load_state_dict(average.module.state_dict())
    return trace.attribute(quiet=True)


@case("AdamW, one-cycle schedule")
def one_cycle() -> Attribution:
    """One-cycle schedule that also moves β₁."""
    model, x, y = mlp(), rows(), classes()
    optimizer = AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=STEPS + 1)
    return fit(model, optimizer, rows(2), lambda: F.cross_entropy(model(x), y), schedule.step)


@case("SGD, maximized")
def maximized() -> Attribution:
    """A reward that is maximized."""
    model, x = mlp(outputs=1), rows()
    optimizer = SGD(model.parameters(), lr=0.05, maximize=True)
    return fit(model, optimizer, rows(2), lambda: -model(x).square().mean())


@case("Adam, AMSGrad")
def dropout() -> Attribution:
    """Dropout, AMSGrad."""
    model, x, y = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2)), rows(), classes()
    optimizer = Adam(model.parameters(), lr=0.01, amsgrad=True)
    return fit(model, optimizer, rows(2), lambda: F.cross_entropy(model(x), y))


@case("Adafactor")
def adafactor() -> Attribution:
    """MLP, Adafactor."""
    model, x, y = mlp(), rows(), classes()
    return fit(model, torch.optim.Adafactor(model.parameters(), lr=0.05), rows(2), lambda: F.cross_entropy(model(x), y))


@case("Muon and AdamW")
def muon() -> Attribution:
    """Muon for matrices, AdamW for the rest."""
    model, x, y = mlp(), rows(), classes()
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    optimizers = [torch.optim.Muon(matrices, lr=0.01), AdamW(vectors, lr=0.01)]
    with ntkexp.follow(model, optimizers, queries=rows(2)) as trace:
        for _ in range(STEPS):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.step()
    return trace.attribute(quiet=True)


@case("Lion")
def lion() -> Attribution:
    """MLP, Lion of timm."""
    load_torchvision()
    from timm.optim.lion import Lion  # noqa: PLC0415  slow to import

    model, x, y = mlp(), rows(), classes()
    return fit(model, Lion(model.parameters(), lr=0.01), rows(2), lambda: F.cross_entropy(model(x), y))


@case("LAMB")
def lamb() -> Attribution:
    """MLP, LAMB of timm."""
    load_torchvision()
    from timm.optim.lamb import Lamb  # noqa: PLC0415  slow to import

    model, x, y = mlp(), rows(), classes()
    return fit(model, Lamb(model.parameters(), lr=0.01), rows(2), lambda: F.cross_entropy(model(x), y))


# --- The table


def measured(loop: LoopCase, dtype: torch.dtype) -> Attribution:
    """Run a loop in a dtype, with fixed random numbers."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    try:
        return loop.run()
    finally:
        torch.set_default_dtype(usual)


def page() -> str:
    """Return docs/loops.md."""
    lines = []
    for loop in CASES:
        misses = [short(miss_of(measured(loop, dtype))) for dtype in DTYPES]
        lines.append((loop.name, loop.optimizer, *misses))
    table = format_markdown(tabulate(["loop", "optimizer", "float64", "float32"], lines, ["float64", "float32"]))
    return (
        f"# {len(CASES)} loops that are followed\n\nEach loop has {STEPS} steps. The table shows the distance of the "
        "sum of all parts from the change of the outputs,\nrelative to the change. "
        "`python -m tests.foreign_loop.many_loops` writes it.\n\n"
        f"{table}"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
