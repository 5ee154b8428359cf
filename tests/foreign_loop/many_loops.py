"""Training loops as users write them, each in a few lines, for the table in docs/loops.md.

Each loop is written from the pages docs/follow*.md alone. It returns the attribution, whose parts must add up to
the change of the outputs. `python -m tests.foreign_loop.many_loops` writes the table.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  as users write it
from torch import Tensor, nn, optim
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop, lr_scheduler

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

Run: TypeAlias = Callable[[], Attribution]


@dataclass(frozen=True)
class LoopCase:
    name: str
    optimizer: str
    run: Run


def miss_of(found: Attribution) -> float:
    """Return the distance of the sum of all parts from the change, relative to the change."""
    total = found["contribution"].sum("example")
    for name in NO_EXAMPLE:
        if name in found:
            total = total + found[name]
    change = found["change"].to_numpy()
    return float(np.linalg.norm(total.to_numpy() - change) / np.linalg.norm(change))


def nothing(*_: object) -> None: ...


def fit(
    model: nn.Module,
    optimizers: Optimizer | list[Optimizer],
    queries: object,
    step: Callable[[Trace], Any],
    *,
    change: Callable[[nn.Module], object] = nothing,
    after: Callable[[], object] = nothing,
    **options: object,
) -> Attribution:
    """Follow an ordinary loop: `step` returns the loss of the next batch, and `change` changes its gradients."""
    with ntkexp.follow(model, optimizers, queries=queries, **options) as trace:  # type: ignore[arg-type]
        for _ in range(STEPS):
            model.zero_grad()
            step(trace).backward()
            change(model)
            for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                optimizer.step()
            after()
    return trace.attribute(quiet=True)


class Net(nn.Module):
    """A model with named parts. Its forward pass is a function of the parts and the inputs."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.way = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.way(self, *inputs)


def mlp(inputs: int = 3, outputs: int = 2, width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))


def rows(count: int = 8, size: int = 3) -> Tensor:
    return torch.randn(count, size)


def classes(count: int = 8, of: int = 2) -> Tensor:
    return torch.randint(of, (count,))


def images(count: int = 4, channels: int = 1, side: int = 8) -> Tensor:
    return torch.randn(count, channels, side, side)


def sequences(count: int = 6) -> Tensor:
    return torch.randn(count, 4, 3)


def graphs(count: int = 5) -> tuple[Tensor, Tensor]:
    """Draw nodes [graph, node, feature] and adjacency [graph, node, node]."""
    return torch.randn(count, 4, 3), (torch.rand(count, 4, 4) < 0.5).to(torch.get_default_dtype())


adam, adamw, sgd = partial(Adam, lr=0.01), partial(AdamW, lr=0.01), partial(SGD, lr=0.05)
one_output, two_classes = partial(mlp, outputs=1), partial(classes, 4)
one_number, two_numbers = partial(rows, size=1), partial(rows, size=2)


def supervised(
    optimizer: Callable[..., Optimizer],
    loss: Callable[[Any, Any], Any] = F.cross_entropy,
    model: Callable[[], nn.Module] = mlp,
    y: Callable[[], Any] = classes,
    x: Callable[..., Any] = rows,
    schedule: Callable[[Optimizer], Any] | None = None,
    **options: Any,
) -> Run:
    """Return a loop that descends on loss(model(x), y). `x` draws inputs, one tensor or several."""

    def run() -> Attribution:
        net, seen, targets = model(), x(), y()
        taken = optimizer(net.parameters())
        if schedule is not None:
            options["after"] = schedule(taken).step
        inputs = seen if isinstance(seen, tuple) else (seen,)
        return fit(net, taken, x(2), lambda _: loss(net(*inputs), targets), **options)

    return run


def first(outputs: Tensor, call: object) -> Tensor:
    """Return the first number of each example, as a measure."""
    return outputs[:, 0, 0]


# --- Supervised learning


def focal_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the mean of −(1 − p)² log p over the probabilities p of the labels."""
    loss = F.cross_entropy(outputs, y, reduction="none")
    return ((1 - (-loss).exp()).square() * loss).mean()


def weighted(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, weight=torch.tensor([1.0, 3.0]))


def some_ignored() -> Tensor:
    y = classes()
    y[0] = -100
    return y


def mixup() -> Attribution:
    model, x, y = mlp(), rows(), F.one_hot(classes(), 2).to(torch.get_default_dtype())

    def step(_: Trace) -> Any:
        share, order = torch.rand(()), torch.randperm(len(x))
        mixed = share * x + (1 - share) * x[order]
        return F.cross_entropy(model(mixed), share * y + (1 - share) * y[order])

    return fit(model, optim.NAdam(model.parameters(), lr=0.01), rows(2), step)


def pinball(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the mean of max(τ r, (τ − 1) r) over the quantiles τ, for r = y − f_τ."""
    levels, gap = torch.tensor([0.1, 0.5, 0.9]), y - outputs
    return torch.maximum(levels * gap, (levels - 1) * gap).mean()


def mean_and_variance() -> nn.Module:
    return Net(lambda net, x: tuple(net.body(x).chunk(2, dim=1)), body=mlp(outputs=4))


def likelihood(outputs: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    mean, scale = outputs
    return F.gaussian_nll_loss(mean, y, F.softplus(scale))


def cox(outputs: Tensor, _: Tensor) -> Tensor:
    """Return the mean of log Σ_{j ≤ i} exp f_j − f_i over events i, of which earlier rows live longer."""
    return (outputs.logcumsumexp(0) - outputs).mean()


def ranking(score: Tensor, y: Tensor) -> Tensor:
    """Return the mean of log(1 + exp(−(s_i − s_j) sign(y_i − y_j))) over pairs."""
    return F.softplus(-(score - score.T) * (y - y.T).sign()).mean()


def two_heads() -> nn.Module:
    def forward(net: Any, x: Tensor) -> dict[str, Tensor]:
        h = net.body(x).tanh()
        return {"label": net.label(h), "value": net.value(h)}

    return Net(forward, body=nn.Linear(3, 8), label=nn.Linear(8, 3), value=nn.Linear(8, 1))


def two_losses(outputs: dict[str, Tensor], y: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(outputs["label"], y[0]) + 0.3 * F.mse_loss(outputs["value"], y[1])


def distillation() -> Attribution:
    teacher, model, x = mlp(), mlp(width=4), rows()

    def step(_: Trace) -> Any:
        with torch.no_grad():
            wanted = teacher(x).softmax(1)
        return F.kl_div(model(x).log_softmax(1), wanted, reduction="batchmean")

    return fit(model, adamw(model.parameters()), rows(2), step)


# --- Networks


def convolutions() -> nn.Module:
    return nn.Sequential(*(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)), nn.Flatten(), nn.Linear(48, 2))


def batch_norm() -> nn.Module:
    layers = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3, 2))


def residual() -> nn.Module:
    def block() -> nn.Module:
        parts = {"conv": nn.Conv2d(2, 2, 3, padding=1), "norm": nn.GroupNorm(1, 2)}
        return Net(lambda net, x: x + net.norm(net.conv(x)).relu(), **parts)

    return nn.Sequential(nn.Conv2d(1, 2, 3), block(), block(), nn.Flatten(), nn.Linear(72, 2))


def unet() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Any:
        skip = net.down(x).relu()
        return net.out(torch.cat([skip, net.up(net.deep(F.max_pool2d(skip, 2)).relu())], dim=1))

    down, deep = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 4, 3, padding=1)
    return Net(forward, down=down, deep=deep, up=nn.ConvTranspose2d(4, 2, 2, stride=2), out=nn.Conv2d(4, 2, 1))


def lstm() -> nn.Module:
    return Net(
        lambda net, x: net.out(net.cells(x)[0][:, -1]), cells=nn.LSTM(3, 5, batch_first=True), out=nn.Linear(5, 2)
    )


def packed() -> nn.Module:
    def forward(net: Any, x: Tensor, lengths: Tensor) -> Any:
        rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return net.out(net.cells(rows)[1][0])

    return Net(forward, cells=nn.GRU(3, 5, batch_first=True), out=nn.Linear(5, 2))


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


def language_model() -> Attribution:
    model, ids = Language(), torch.randint(11, (5, 6))

    def step(_: Trace) -> Any:
        return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def log_probability(outputs: Tensor, call: object) -> Tensor:
        return outputs.log_softmax(-1)[:, -2].gather(1, ids[:2, -1:])[:, 0]

    return fit(model, adamw(model.parameters()), ids[:2], step, measure=log_probability)


def masked_language_model() -> Attribution:
    model, ids = Language(), torch.randint(10, (5, 6))
    rates = {model.block: 0.01, model.words: 0.001, model.places: 0.002}

    def step(_: Trace) -> Any:
        mask = torch.rand(ids.shape) < 0.3
        mask[:, 0] = True
        return F.cross_entropy(model(ids.masked_fill(mask, 10))[mask], ids[mask])

    groups = [{"params": part.parameters(), "lr": rate} for part, rate in rates.items()]
    return fit(model, AdamW(groups), ids[:1], step, measure=first)


def sequence_to_sequence() -> Attribution:
    def forward(net: Any, source: Tensor, target: Tensor) -> Any:
        _, state = net.encoder(net.words(source))
        return net.out(net.decoder(net.words(target), state)[0])

    cells = {name: nn.GRU(5, 6, batch_first=True) for name in ("encoder", "decoder")}
    model = Net(forward, words=nn.Embedding(7, 5), **cells, out=nn.Linear(6, 7))
    source, target = torch.randint(7, (4, 5)), torch.randint(7, (4, 4))

    def step(_: Trace) -> Any:
        return F.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())

    return fit(model, adam(model.parameters()), (source[:1], target[:1, :-1]), step, measure=first)


def ctc(outputs: Tensor, targets: Tensor) -> Tensor:
    log_probs = outputs.log_softmax(1).permute(2, 0, 1)
    return F.ctc_loss(log_probs, targets, torch.full((4,), 8), torch.full((4,), 3))


def experts() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Any:
        weight, chosen = net.router(x).softmax(1).topk(1)
        every = torch.stack([expert(x) for expert in net.experts], dim=1)[..., 0]
        return weight * every.gather(1, chosen)

    return Net(forward, router=nn.Linear(3, 3), experts=nn.ModuleList(one_output() for _ in range(3)))


def neural_ode() -> Attribution:
    def forward(net: Any, x: Tensor) -> Any:
        for _ in range(3):
            middle = x + 0.1 * net.field(x)
            x = x + 0.2 * net.field(middle)
        return x

    model = Net(forward, field=nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)))
    x = two_numbers()
    return fit(model, adam(model.parameters()), x[:2], lambda _: F.mse_loss(model(x), -x))


def low_rank() -> nn.Module:
    """Return LoRA: x W₀ᵀ + x Aᵀ Bᵀ. The optimizer receives the frozen W₀ too."""
    base = nn.Linear(3, 8).requires_grad_(False)
    a, b = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.zeros(8, 2))
    adapted = Net(lambda net, x: net.base(x) + x @ net.a.T @ net.b.T, base=base, a=a, b=b)
    return nn.Sequential(adapted, nn.ReLU(), nn.Linear(8, 2))


def hypernetwork() -> nn.Module:
    def forward(net: Any, task: Tensor, x: Tensor) -> Any:
        return (net.weights(task).unflatten(1, (2, 3)) @ x[..., None])[..., 0]

    return Net(forward, weights=mlp(2, 6))


# --- Generative models


def autoencoder() -> Attribution:
    model, x = mlp(3, 3, 2), rows()
    step = lambda _: F.mse_loss(model(x + 0.1 * torch.randn_like(x)), x)  # noqa: E731
    return fit(model, adam(model.parameters()), rows(2), step)


def variational() -> Attribution:
    def forward(net: Any, x: Tensor) -> Any:
        mean, log_var = net.encoder(x).chunk(2, dim=1)
        noise = torch.randn_like(mean) if net.training else torch.zeros_like(mean)
        return net.decoder(mean + noise * (log_var / 2).exp()), mean, log_var

    model, x = Net(forward, encoder=mlp(3, 4), decoder=mlp(2, 3)), rows()

    def step(_: Trace) -> Any:
        again, mean, log_var = model(x)
        return F.mse_loss(again, x) + 0.1 * (mean.square() + log_var.exp() - log_var - 1).mean()

    return fit(model, adam(model.parameters()), rows(2), step, output=0)


def discretized() -> Attribution:
    def forward(net: Any, x: Tensor) -> Any:
        z = net.encoder(x)
        code = net.codes[(z[:, None] - net.codes).square().sum(2).argmin(1)]
        return net.decoder(z + (code - z).detach()), z, code

    codes = nn.Parameter(torch.randn(4, 2))
    model, x = Net(forward, encoder=mlp(3, 2), decoder=mlp(2, 3), codes=codes), rows()

    def step(_: Trace) -> Any:
        again, z, code = model(x)
        return F.mse_loss(again, x) + F.mse_loss(z.detach(), code) + 0.25 * F.mse_loss(z, code.detach())

    return fit(model, adam(model.parameters()), rows(2), step, output=0)


def adversarial() -> Attribution:
    maker, judge, real = mlp(2, 3), one_output(), rows()
    optimizer = adam(maker.parameters())

    def step(_: Trace) -> Any:
        return (F.softplus(-judge(real)) + F.softplus(judge(maker(two_numbers()).detach()))).mean()

    def train_the_other() -> None:
        optimizer.zero_grad()
        F.softplus(-judge(maker(two_numbers()))).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return fit(judge, adam(judge.parameters()), rows(2), step, after=train_the_other)


def diffusion() -> Attribution:
    model, x = mlp(4, 3), rows()

    def step(_: Trace) -> Any:
        time, noise = torch.rand(len(x), 1), torch.randn_like(x)
        noisy = (1 - time).sqrt() * x + time.sqrt() * noise
        return F.mse_loss(model(torch.cat([noisy, time], dim=1)), noise)

    return fit(model, adamw(model.parameters()), rows(2, 4), step)


def coupling_flow() -> nn.Module:
    """Return log p(x) + const = −‖z‖²/2 + log |det ∂z/∂x|, for z of the flow (a, b) ↦ (b eˢ + t, a)."""

    def forward(net: Any, x: Tensor) -> Any:
        a, b = x.chunk(2, dim=1)
        log_volume = torch.zeros_like(a)
        for part in net.parts:
            scale, shift = part(a).chunk(2, dim=1)
            a, b = b * scale.tanh().exp() + shift, a
            log_volume = log_volume + scale.tanh()
        return (log_volume - (a.square() + b.square()) / 2)[:, 0]

    return Net(forward, parts=nn.ModuleList(mlp(1, 2) for _ in range(2)))


def energy_based() -> Attribution:
    model, x, y = one_output(), rows(), rows()
    return fit(model, sgd(model.parameters()), rows(2), lambda _: model(x).mean() - model(y).mean())


def gumbel() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Any:
        logits = net.logits(x)
        return net.out(F.gumbel_softmax(logits, hard=True) if net.training else logits.softmax(1))

    return Net(forward, logits=mlp(3, 4), out=nn.Linear(4, 2))


# --- Self-supervised learning


def seen_twice(model: nn.Module, x: Tensor) -> list[Any]:
    """Return the outputs of two noisy views."""
    return [model(x + 0.1 * torch.randn_like(x)) for _ in range(2)]


def contrastive() -> Attribution:
    model, x = mlp(outputs=4), rows()

    def step(_: Trace) -> Any:
        one, other = map(F.normalize, seen_twice(model, x))
        return F.cross_entropy(one @ other.T / 0.5, torch.arange(len(x)))

    return fit(model, SGD(model.parameters(), lr=0.1, momentum=0.9), rows(2), step)


def stop_gradient() -> Attribution:
    def forward(net: Any, x: Tensor) -> Any:
        z = net.body(x)
        return net.head(z), z.detach()

    model, x = Net(forward, body=mlp(outputs=4), head=mlp(4, 4)), rows()

    def step(_: Trace) -> Any:
        (p, _), (_, z) = seen_twice(model, x)
        return -F.cosine_similarity(p, z).mean()

    return fit(model, sgd(model.parameters()), rows(2), step, output=0)


def momentum_teacher() -> Attribution:
    model, x = mlp(outputs=4), rows()
    both, teacher = nn.Sequential(model, mlp(4, 4)), copy.deepcopy(model)

    def step(_: Trace) -> Any:
        with torch.no_grad():
            wanted = teacher(x + 0.1 * torch.randn_like(x))
        return -F.cosine_similarity(both(x + 0.1 * torch.randn_like(x)), wanted).mean()

    @torch.no_grad()
    def after() -> None:
        for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.1)

    return fit(both, adamw(both.parameters()), rows(2), step, after=after)


def triplets() -> Attribution:
    model, a, b, c = mlp(outputs=4), rows(), rows(), rows()
    step = lambda _: F.triplet_margin_loss(model(a), model(b), model(c))  # noqa: E731
    return fit(model, adam(model.parameters()), rows(2), step)


def two_encoders() -> nn.Module:
    def forward(net: Any, x: Tensor, t: Tensor) -> Any:
        return F.normalize(net.image(x)) * net.scale.exp(), F.normalize(net.text(t))

    return Net(forward, image=mlp(3, 4), text=mlp(5, 4), scale=nn.Parameter(torch.tensor(1.0)))


def both_ways(outputs: tuple[Tensor, Tensor], partner: Tensor) -> Tensor:
    logits = outputs[0] @ outputs[1].T
    return (F.cross_entropy(logits, partner) + F.cross_entropy(logits.T, partner)) / 2


# --- Reinforcement learning and preferences


def chosen(log_p: Tensor, action: Tensor) -> Tensor:
    """Select the numbers of these actions."""
    return log_p.gather(1, action[:, None])[:, 0]


def reinforce(outputs: Tensor, reward: Tensor) -> Tensor:
    log_p = outputs.log_softmax(1)
    return -(chosen(log_p, log_p.detach().exp().multinomial(1)[:, 0]) * reward).mean()


def clipped_policy() -> Attribution:
    def forward(net: Any, x: Tensor) -> Any:
        h = net.body(x).tanh()
        return net.actor(h), net.critic(h)[:, 0]

    model = Net(forward, body=nn.Linear(3, 8), actor=nn.Linear(8, 2), critic=nn.Linear(8, 1))
    x, action, gain = rows(), classes(), torch.randn(8)
    before = chosen(model(x)[0].log_softmax(1), action).detach()

    def step(_: Trace) -> Any:
        logits, value = model(x)
        ratio = (chosen(logits.log_softmax(1), action) - before).exp()
        policy = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        return -policy.mean() + 0.5 * (value - gain).square().mean()

    return fit(model, adam(model.parameters()), rows(2), step, output=0)


def temporal_difference() -> Attribution:
    model, x, later, action, reward = mlp(), rows(), rows(), classes(), torch.randn(8)
    target = copy.deepcopy(model)

    def step(_: Trace) -> Any:
        with torch.no_grad():
            wanted = reward + 0.9 * target(later).amax(1)
        return F.smooth_l1_loss(chosen(model(x), action), wanted)

    return fit(model, RMSprop(model.parameters(), lr=0.01), rows(2), step)


def preferences() -> Attribution:
    model, x, good, bad = mlp(outputs=5), rows(), classes(of=5), classes(of=5)
    reference = copy.deepcopy(model)

    def log_ratio(answers: Tensor) -> Tensor:
        with torch.no_grad():
            known = chosen(reference(x).log_softmax(1), answers)
        return chosen(model(x).log_softmax(1), answers) - known

    step = lambda _: F.softplus(-0.5 * (log_ratio(good) - log_ratio(bad))).mean()  # noqa: E731
    return fit(model, adamw(model.parameters()), rows(2), step)


# --- Losses through derivatives, and graphs


def slope_of(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inputs, and the derivatives of the outputs with respect to the inputs."""
    x = x.clone().requires_grad_()
    return x, torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]


def differential_equation() -> Attribution:
    model, points = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)), torch.rand(6, 1)

    def residuals(model: nn.Module, x: Tensor) -> Tensor:
        x, slope = slope_of(model, x)
        return (slope + x).square()[:, 0]

    return fit(model, adam(model.parameters()), points[:2], lambda trace: trace.losses(residuals, points).mean())


def gradient_penalty() -> Attribution:
    model, x, y = one_output(), rows(), rows()

    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        return (slope_of(model, x)[1].norm(dim=1) - 1).square()  # type: ignore[no-any-return]

    step = lambda trace: (model(x) - model(y)).mean() + trace.losses(penalty, (x + y) / 2).mean()  # noqa: E731
    return fit(model, adam(model.parameters()), rows(2), step)


def meta_learning() -> Attribution:
    model, x, y = one_output(), torch.randn(4, 6, 3), torch.randn(4, 6, 1)

    def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        weights = dict(model.named_parameters())
        each = []
        for task_x, task_y in zip(x, y, strict=True):
            inner = F.mse_loss(model(task_x[:3]), task_y[:3])
            slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            moved = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
            each.append(F.mse_loss(torch.func.functional_call(model, moved, (task_x[3:],)), task_y[3:]))
        return torch.stack(each)

    return fit(model, adam(model.parameters()), rows(2), lambda trace: trace.losses(losses, x, y).mean())


def graph_network(*, whole: bool) -> nn.Module:
    """Return outputs of nodes, or their mean over the graph."""

    def forward(net: Any, x: Tensor, adjacency: Tensor) -> Any:
        nodes = adjacency @ net.second((adjacency @ net.first(x)).relu())
        return nodes.mean(1) if whole else nodes

    return Net(forward, first=nn.Linear(3, 6), second=nn.Linear(6, 2))


def node_classes() -> Attribution:
    model, graph, y = graph_network(whole=False), graphs(1), classes(4)

    def losses(model: nn.Module, y: Tensor) -> Tensor:
        return F.cross_entropy(model(*graph)[0], y, reduction="none")

    step = lambda trace: trace.losses(losses, y).mean()  # noqa: E731
    return fit(model, adam(model.parameters()), graph, step, ids=lambda call: range(4))


# --- Training tricks


def accumulation() -> Attribution:
    model, x, y = mlp(), rows(), classes()

    def step(_: Trace) -> Any:
        (F.cross_entropy(model(x[:4]), y[:4]) / 2).backward()  # type: ignore[no-untyped-call]
        return F.cross_entropy(model(x[4:]), y[4:]) / 2

    return fit(model, adamw(model.parameters()), rows(2), step)


def several_optimizers(split: Callable[[nn.Module], list[Optimizer]]) -> Run:
    """Return a loop with several optimizers of one model."""

    def run() -> Attribution:
        model, x, y = mlp(), rows(), classes()
        return fit(model, split(model), rows(2), lambda _: F.cross_entropy(model(x), y))

    return run


def by_parameter(model: nn.Module) -> list[Optimizer]:
    return [adam([weight]) for weight in model.parameters()]


def by_axes(model: nn.Module) -> list[Optimizer]:
    matrices, vectors = ([w for w in model.parameters() if w.dim() == axes] for axes in (2, 1))
    return [optim.Muon(matrices, lr=0.01), adamw(vectors)]


def average_of_weights() -> Attribution:
    model, x, y = mlp(), rows(), classes()
    average = optim.swa_utils.AveragedModel(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    with ntkexp.follow(model, optimizer, queries=rows(2)) as trace:
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            average.update_parameters(model)
        model.load_state_dict(average.module.state_dict())
    return trace.attribute(quiet=True)


def of_timm(module: str, name: str) -> Callable[..., Optimizer]:
    """Return an optimizer of timm, which is imported when it is needed."""

    def optimizer(weights: Any) -> Optimizer:
        load_torchvision()
        found: Optimizer = getattr(import_module(f"timm.optim.{module}"), name)(weights, lr=0.01)
        return found

    return optimizer


# --- The table

CASES = [
    LoopCase("MLP, cross-entropy", "AdamW", supervised(adamw)),
    LoopCase(
        "MLP, label smoothing",
        "SGD, momentum",
        supervised(partial(SGD, lr=0.1, momentum=0.9), partial(F.cross_entropy, label_smoothing=0.1)),
    ),
    LoopCase("MLP, focal loss", "Adam", supervised(adam, focal_loss)),
    LoopCase("MLP, class weights and ignored targets", "AdamW", supervised(adamw, weighted, y=some_ignored)),
    LoopCase("Mixup of inputs and labels", "NAdam", mixup),
    LoopCase("Regression, Huber loss", "Rprop", supervised(optim.Rprop, F.huber_loss, one_output, one_number)),
    LoopCase(
        "Regression, three quantiles",
        "Adamax",
        supervised(partial(optim.Adamax, lr=0.01), pinball, partial(mlp, outputs=3), one_number),
    ),
    LoopCase(
        "Mean and variance as two outputs, Gaussian likelihood",
        "AdamW",
        supervised(adamw, likelihood, mean_and_variance, two_numbers, output=0),
    ),
    LoopCase("Survival analysis, partial likelihood of the batch", "Adam", supervised(adam, cox, one_output)),
    LoopCase(
        "Ranking, all pairs of a batch",
        "RMSprop",
        supervised(partial(RMSprop, lr=0.01), ranking, one_output, one_number),
    ),
    LoopCase(
        "Two heads, two losses",
        "AdamW",
        supervised(adamw, two_losses, two_heads, lambda: (classes(of=3), one_number()), output="label"),
    ),
    LoopCase("Distillation from a frozen teacher", "AdamW", distillation),
    LoopCase(
        "CNN with max pooling",
        "SGD, Nesterov",
        supervised(partial(sgd, momentum=0.9, nesterov=True), model=convolutions, y=two_classes, x=images),
    ),
    LoopCase(
        "CNN with BatchNorm in training mode", "AdamW", supervised(adamw, model=batch_norm, y=two_classes, x=images)
    ),
    LoopCase(
        "ResNet with GroupNorm, cosine schedule",
        "SGD, cosine schedule",
        supervised(
            partial(sgd, momentum=0.9),
            model=residual,
            y=two_classes,
            x=images,
            schedule=partial(lr_scheduler.CosineAnnealingLR, T_max=STEPS),
        ),
    ),
    LoopCase(
        "UNet for segmentation",
        "Adam",
        supervised(adam, model=unet, y=partial(torch.randint, 2, (4, 8, 8)), x=images),
    ),
    LoopCase(
        "LSTM, gradients clipped by norm",
        "RMSprop, clipping by norm",
        supervised(
            partial(RMSprop, lr=0.01),
            model=lstm,
            y=partial(classes, 6),
            x=sequences,
            change=lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.1),
        ),
    ),
    LoopCase(
        "GRU over packed sequences",
        "Adam",
        supervised(adam, model=packed, y=partial(classes, 6), x=lambda n=6: (sequences(n), torch.randint(1, 5, (n,)))),
    ),
    LoopCase("Causal language model, tied embeddings, dropout", "AdamW", language_model),
    LoopCase("Masked language model, two learning rates", "AdamW, two rates", masked_language_model),
    LoopCase("Encoder and decoder with teacher forcing", "Adam", sequence_to_sequence),
    LoopCase(
        "Connectionist temporal classification",
        "SGD",
        supervised(
            sgd,
            ctc,
            lambda: nn.Sequential(nn.Conv1d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv1d(6, 5, 1)),
            partial(torch.randint, 1, 5, (4, 3)),
            lambda n=4: torch.randn(n, 3, 8),
            measure=first,
        ),
    ),
    LoopCase(
        "Bag of words",
        "Adagrad",
        supervised(
            partial(optim.Adagrad, lr=0.1),
            model=lambda: nn.Sequential(nn.EmbeddingBag(20, 4), nn.Linear(4, 2)),
            x=lambda n=8: torch.randint(20, (n, 5)),
        ),
    ),
    LoopCase(
        "Sets, summed over their elements",
        "Adam",
        supervised(
            adam,
            F.mse_loss,
            lambda: Net(lambda net, x: net.all(net.each(x).sum(1)), each=mlp(outputs=6), all=mlp(6, 1)),
            partial(rows, 6, 1),
            sequences,
        ),
    ),
    LoopCase(
        "Mixture of experts, top 1 of 3",
        "Adam",
        supervised(partial(Adam, lr=0.05), F.mse_loss, experts, one_number),
    ),
    LoopCase("Neural ODE with Runge-Kutta steps", "Adam", neural_ode),
    LoopCase(
        "Weight normalization",
        "Adam",
        supervised(
            adam,
            F.mse_loss,
            lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 1)),
            one_number,
        ),
    ),
    LoopCase("LoRA on a frozen base", "AdamW", supervised(adamw, model=low_rank)),
    LoopCase(
        "Hypernetwork",
        "SGD",
        supervised(sgd, F.mse_loss, hypernetwork, two_numbers, lambda n=8: (rows(n, 2), rows(n))),
    ),
    LoopCase("Denoising autoencoder", "Adam", autoencoder),
    LoopCase("Variational autoencoder", "Adam", variational),
    LoopCase("VQ-VAE with straight-through gradients", "Adam", discretized),
    LoopCase("GAN: the discriminator is followed", "Adam, two of them", adversarial),
    LoopCase("Diffusion: a network that predicts noise", "AdamW", diffusion),
    LoopCase(
        "Normalizing flow with coupling layers",
        "Adam",
        supervised(adam, lambda f, _: -f.mean(), coupling_flow, x=partial(rows, size=2)),
    ),
    LoopCase("Energy-based model, contrastive divergence with given negatives", "SGD", energy_based),
    LoopCase("Gumbel-softmax with hard samples", "Adam", supervised(adam, model=gumbel)),
    LoopCase("SimCLR: two views, all pairs of a batch", "SGD, momentum", contrastive),
    LoopCase("SimSiam: a predictor and a stopped gradient", "SGD", stop_gradient),
    LoopCase("BYOL: a teacher that is an average of the student", "AdamW", momentum_teacher),
    LoopCase("Triplet loss, three calls in a step", "Adam", triplets),
    LoopCase(
        "CLIP: two encoders and a temperature",
        "AdamW",
        supervised(
            adamw, both_ways, two_encoders, partial(torch.arange, 8), lambda n=8: (rows(n), rows(n, 5)), output=0
        ),
    ),
    LoopCase("REINFORCE with given rewards", "Adam", supervised(adam, reinforce, y=partial(torch.randn, 8))),
    LoopCase("PPO: actor and critic, clipped ratio", "Adam", clipped_policy),
    LoopCase("Q-learning with a target network", "RMSprop", temporal_difference),
    LoopCase("DPO: preferred and rejected answers, a frozen reference", "AdamW", preferences),
    LoopCase("Physics-informed network", "Adam", differential_equation),
    LoopCase("Gradient penalty of a critic", "Adam", gradient_penalty),
    LoopCase("MAML: one inner step by a functional call", "Adam", meta_learning),
    LoopCase("Graph network, a loss for each node", "Adam", node_classes),
    LoopCase(
        "Graph network, a class for each graph",
        "Adam",
        supervised(adam, model=partial(graph_network, whole=True), y=partial(classes, 5), x=graphs),
    ),
    LoopCase("Gradient accumulation over two halves", "AdamW, accumulation", accumulation),
    LoopCase(
        "Gradients clipped by value",
        "SGD, clipping by value",
        supervised(partial(SGD, lr=0.1), change=lambda net: nn.utils.clip_grad_value_(net.parameters(), 0.02)),
    ),
    LoopCase("One optimizer for each parameter", "Adam, by parameter", several_optimizers(by_parameter)),
    LoopCase("Averaged weights, loaded at the end", "SGD, average loaded", average_of_weights),
    LoopCase(
        "One-cycle schedule that also moves β₁",
        "AdamW, one-cycle schedule",
        supervised(adamw, schedule=partial(lr_scheduler.OneCycleLR, max_lr=0.02, total_steps=STEPS + 1)),
    ),
    LoopCase(
        "A reward that is maximized",
        "SGD, maximized",
        supervised(partial(sgd, maximize=True), lambda f, _: -f.square().mean(), one_output),
    ),
    LoopCase(
        "Dropout, AMSGrad",
        "Adam, AMSGrad",
        supervised(
            partial(adam, amsgrad=True),
            model=lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2)),
        ),
    ),
    LoopCase("MLP, Adafactor", "Adafactor", supervised(partial(optim.Adafactor, lr=0.05))),
    LoopCase("Muon for matrices, AdamW for the rest", "Muon and AdamW", several_optimizers(by_axes)),
    LoopCase("MLP, Lion of timm", "Lion", supervised(of_timm("lion", "Lion"))),
    LoopCase("MLP, LAMB of timm", "LAMB", supervised(of_timm("lamb", "Lamb"))),
]


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
