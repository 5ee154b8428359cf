"""A loop is carried out, as people write loops, with what is planted in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from ntkexp.foreign_loop.example_names import digests
from tests.torture.loop.made import EXAMPLES, Loop, Plant
from tests.torture.loop.oracle import Oracle

STEPS = 6


@dataclass(frozen=True)
class Planted:
    """A plant in the model is planted before step `when`; one `between` backward and step at that step and, if
    `always`, at all later ones. What it multiplies is true, if it is recorded as that, where `multiplies`."""

    plant: Plant | None
    when: int
    between: bool
    always: bool
    multiplies: bool

    def at(self, step: int) -> bool:
        """Whether it is planted between backward and step."""
        return self.between and (step == self.when or (self.always and step > self.when))


def clipped(loop: Loop, step: int) -> None:
    """Clipping, as this loop does it."""
    weights = loop.weights
    if loop.clip == "all":
        clip_grad_norm_(weights, 0.5, error_if_nonfinite=True)
    elif loop.clip == "apart":
        for weight in weights:
            clip_grad_norm_([weight], 0.2)
    elif loop.clip == "part":
        clip_grad_norm_(weights[: max(1, len(weights) // 2)], 0.2)
    elif loop.clip == "once" and step == 2:
        clip_grad_norm_(weights, 0.1)


def trained(loop: Loop, planted: Planted, oracle: Oracle | None) -> None:
    """Carry the loop out."""
    order = torch.Generator().manual_seed(5)
    for step in range(STEPS + 1):
        if planted.plant is not None and not planted.between and step == planted.when:
            planted.plant(loop)
        if step == STEPS:
            return
        batch = torch.randperm(EXAMPLES, generator=order)[: 6 + step % 2]
        for optimizer in loop.optimizers:
            optimizer.zero_grad()
            if loop.schedule:
                optimizer.param_groups[0]["lr"] *= 0.8
        for piece in batch.chunk(loop.pieces):
            back(loop, piece, oracle)
        factors = multiplied(loop, planted, step)
        start = {name: weight.detach().clone() for name, weight in loop.net.named_parameters()}
        for optimizer in loop.optimizers:
            if loop.scaler is not None and heard(optimizer):
                loop.scaler.step(optimizer)
            else:
                optimizer.step()
        if oracle is not None:
            oracle.step(start, factors, [dict(optimizer.param_groups[0]) for optimizer in loop.optimizers])
        if loop.scaler is not None and any(map(heard, loop.optimizers)):
            loop.scaler.update()


def heard(optimizer: torch.optim.Optimizer) -> bool:
    """Whether there are gradients, without which PyTorch's scaler takes no part in a step."""
    return any(weight.grad is not None for weight in optimizer.param_groups[0]["params"])


def back(loop: Loop, piece: Tensor, oracle: Oracle | None) -> None:
    """One call and its way back."""
    with torch.autocast("cpu", torch.bfloat16) if loop.casts else torch.enable_grad():
        outputs = loop.net(loop.x[piece])
    loss = (outputs - loop.y[piece]).square().mean() / loop.pieces
    if not loss.requires_grad:  # all was frozen
        return
    if oracle is not None:
        oracle.back(outputs, loss, digests(loop.x[piece]))
    (loss if loop.scaler is None else loop.scaler.scale(loss)).backward()


def multiplied(loop: Loop, planted: Planted, step: int) -> dict[str, float]:
    """Clip and plant; what gradients were multiplied with in truth, each parameter's."""
    rounded = 1.0  # a scale that is no power of two is taken back in float32
    if loop.scaler is not None:
        scale = loop.scaler.get_scale()
        rounded = float(torch.tensor(scale).double().reciprocal().float()) * scale
        for optimizer in filter(heard, loop.optimizers):
            loop.scaler.unscale_(optimizer)
    before = gradients(loop)
    clipped(loop, step)
    held = gradients(loop)
    factors = {name: rounded * share(before[name], held[name]) for name in held}
    if planted.plant is not None and planted.at(step):
        planted.plant(loop)
        for name, now in gradients(loop).items():
            if planted.multiplies and (now.numel() == 1 or "cut" not in loop.past["planted"]):
                factors[name] *= share(held[name], now)
    return factors


def gradients(loop: Loop) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in loop.net.named_parameters() if weight.grad is not None}


def share(was: Tensor, now: Tensor) -> float:
    square = float((was * was).sum())
    return float((was * now).sum()) / square if square else 0.0
