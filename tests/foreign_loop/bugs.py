"""Loops with a planted bug, which the docstring names, and the result of following them.

If the steps are valid, they are recorded: the parts add up to the change of training with the bug. Otherwise the loop
is refused with a message.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.foreign_loop.loops import Body, Loop, plain


def on_gradients(change: Callable[[Loop, list[Tensor]], object]) -> Body:
    """Return a step whose gradients are changed before the optimizer takes them."""

    @wraps(change)
    def body(given: Loop, batch: Tensor) -> None:
        given.zero()
        given.back(batch)
        change(given, [weight.grad for weight in given.model.parameters() if weight.grad is not None])
        given.step()

    return body


def clipped_after(given: Loop, batch: Tensor) -> None:
    """Gradients are clipped after the step."""
    plain(given, batch)
    clip_grad_norm_(given.model.parameters(), 0.1)


@on_gradients
def clipped_in_part(given: Loop, _: list[Tensor]) -> None:
    """Clipping is given some of the parameters."""
    clip_grad_norm_(given.model[0].parameters(), 0.01)


@on_gradients
def normalised(_: Loop, gradients: list[Tensor]) -> None:
    """Gradients are scaled to one length, up or down, where clipping only shortens them."""
    torch._foreach_div_(gradients, nn.utils.get_total_norm(gradients) / 50)


def never_zeroed(given: Loop, batch: Tensor) -> None:
    """`zero_grad` is forgotten."""
    given.back(batch)
    given.step()


def shifted_labels(given: Loop, batch: Tensor) -> None:
    """Labels are shifted by one example."""
    given.zero()
    nn.functional.cross_entropy(given.model(given.x[batch]), given.y[batch.roll(1)]).backward()  # type: ignore[no-untyped-call]
    given.step()


def wrong_divisor(given: Loop, batch: Tensor) -> None:
    """Accumulated losses are not divided by their number."""
    given.zero()
    for part in torch.split(batch, 2):
        given.back(part)
    given.step()


def doubled_step(given: Loop, batch: Tensor) -> None:
    """`step` is called twice."""
    plain(given, batch)
    given.step()


def frozen_half_way(given: Loop, batch: Tensor) -> None:
    """A layer is frozen half-way, and its momentum moves it on."""
    given.model[0].requires_grad_(given.done < 4)
    plain(given, batch)


def repeated_examples(given: Loop, batch: Tensor) -> None:
    """A batch holds examples twice."""
    plain(given, batch[[0, 0, 1, 1]])


def clamped(given: Loop, batch: Tensor) -> None:
    """Weights are clamped after the step."""
    plain(given, batch)
    with torch.no_grad():
        given.model[0].get_parameter("weight").clamp_(-0.3, 0.3)


def decayed_twice(given: Loop, batch: Tensor) -> None:
    """Weights decay once more, by hand."""
    plain(given, batch)
    with torch.no_grad():
        given.model[2].get_parameter("weight").mul_(0.99)


def average_copied_back(given: Loop, batch: Tensor) -> None:
    """An average of the weights is copied back."""
    plain(given, batch)
    if given.done == 3:
        given.model.load_state_dict({name: weight / 2 for name, weight in given.model.state_dict().items()})


def frozen_layer_moves(given: Loop, batch: Tensor) -> None:
    """A frozen layer is moved by hand."""
    given.model[0].requires_grad_(False)
    plain(given, batch)
    with torch.no_grad():
        given.model[0].get_parameter("weight").add_(0.01)


def add_noise(given: Loop, gradients: list[Tensor], size: float) -> None:
    for gradient in gradients:
        gradient.add_(torch.randn(gradient.shape, generator=torch.Generator().manual_seed(given.done)), alpha=size)


@on_gradients
def noisy(given: Loop, gradients: list[Tensor]) -> None:
    """Noise is added to gradients."""
    add_noise(given, gradients, 1e-3)


@on_gradients
def clipped_by_value(given: Loop, _: list[Tensor]) -> None:
    """Gradients are clipped element by element."""
    clip_grad_value_(given.model.parameters(), 0.01)


@on_gradients
def noisy_and_clipped(given: Loop, gradients: list[Tensor]) -> None:
    """Noise is added to gradients, and they are clipped element by element."""
    add_noise(given, gradients, 1e-9)
    clip_grad_value_(given.model.parameters(), 0.01)


@on_gradients
def clipped_to_two_bounds(_: Loop, gradients: list[Tensor]) -> None:
    """Elements of one layer are clipped to one bound above zero, and to another below."""
    gradients[2].clamp_(-0.01, 0.02)


@on_gradients
def turned_at_the_bound(given: Loop, gradients: list[Tensor]) -> None:
    """Gradients are clipped element by element, and one clipped element gets the wrong sign."""
    clip_grad_value_(given.model.parameters(), 0.01)
    gradients[2].view(-1)[gradients[2].abs().argmax()] *= -1


@on_gradients
def with_a_penalty(given: Loop, _: list[Tensor]) -> None:
    """A penalty on weights is added to the loss."""
    sum(weight.square().sum() for weight in given.model.parameters()).backward()  # type: ignore[union-attr]


def exchanged(given: Loop, batch: Tensor) -> None:
    """A layer without weights is exchanged for another while the loop is followed."""
    given.model[3] = nn.Dropout(0.5)
    plain(given, batch)


def warmer(given: Loop, batch: Tensor) -> None:
    """Outputs are divided by a temperature that is changed half-way, in a hook."""
    if given.done == 0:
        given.model[4].register_forward_hook(lambda *seen: seen[2] / (1.0 if given.done < 4 else 2.0))
    plain(given, batch)


def scheduled_twice(given: Loop, batch: Tensor) -> None:
    """The scheduler steps twice."""
    plain(given, batch)
    for _ in range(2):
        for group in given.optimizers[0].param_groups:
            group["lr"] *= 0.9


def skipped_step_counted(given: Loop, batch: Tensor) -> None:
    """A step is skipped, and the scheduler counts it."""
    given.zero()
    given.back(batch)
    if given.done % 3:
        given.step()
    given.optimizers[0].param_groups[0]["lr"] *= 0.8


def backward_twice(given: Loop, batch: Tensor) -> None:
    """`backward` is called twice on one loss."""
    given.zero()
    loss = nn.functional.cross_entropy(given.model(given.x[batch]), given.y[batch])
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]
    given.step()


def ascended(given: Loop, batch: Tensor) -> None:
    """The loss has the wrong sign."""
    given.zero()
    given.back(batch, -1.0)
    given.step()


@on_gradients
def zeroed_before_the_step(given: Loop, _: list[Tensor]) -> None:
    """Gradients are set to zero before the step, which continues by momentum and decay."""
    if given.done > 4:
        given.zero(set_to_none=False)


def half_a_batch_lost(given: Loop, batch: Tensor) -> None:
    """The gradient of the first half is thrown away."""
    for half in torch.split(batch, 3):
        given.zero()
        given.back(half)
    given.step()


def momentum_forgotten(given: Loop, batch: Tensor) -> None:
    """The optimizer's memory is cleared half-way."""
    plain(given, batch)
    if given.done == 4:
        for state in given.optimizers[0].state.values():
            state["momentum_buffer"].zero_()


def written_past_pytorch(given: Loop, batch: Tensor) -> None:
    """Weights are clamped by way of `.data`."""
    plain(given, batch)
    given.model[0].get_parameter("weight").data.clamp_(-0.3, 0.3)


def randomly_masked(given: Loop, batch: Tensor) -> None:
    """Features are dropped at random by a function, not by a layer."""
    mask = torch.rand(8, generator=torch.Generator().manual_seed(given.done)).double() * 2
    hook = given.model[1].register_forward_hook(lambda *seen: seen[2] * mask)
    plain(given, batch)
    hook.remove()


def given_back_late(given: Loop, batch: Tensor) -> None:
    """A parameter is removed from the optimizer, and added again half-way."""
    if given.done == 0:
        given.optimizers[0].param_groups[0]["params"].pop()
    if given.done == 4:
        given.optimizers[0].add_param_group({"params": [given.model[4].get_parameter("bias")]})
    plain(given, batch)


def loss_of_a_stale_graph(given: Loop, batch: Tensor) -> None:
    """The loss of the batch before is differentiated again, after the step."""
    kept, given.stale = given.stale, nn.functional.cross_entropy(given.model(given.x[batch]), given.y[batch])
    given.zero()
    (given.stale if kept is None else given.stale + kept).backward(retain_graph=True)  # type: ignore[no-untyped-call]
    given.step()


def hooks_that_multiply(given: Loop, batch: Tensor) -> None:
    """Hooks divide one gradient by three, and double another one."""
    if not given.done:
        one, other = (given.model.get_parameter(name) for name in ("2.weight", "4.weight"))
        one.register_hook(lambda gradient: gradient / 3)  # type: ignore[no-untyped-call]
        other.register_post_accumulate_grad_hook(doubled)  # type: ignore[no-untyped-call]
    plain(given, batch)


def doubled(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad *= 2


def hook_that_bends(given: Loop, batch: Tensor) -> None:
    """A gradient becomes its signs."""
    if not given.done:
        given.model.get_parameter("2.weight").register_hook(torch.sign)  # type: ignore[no-untyped-call]
    plain(given, batch)


RECORDED: tuple[Body, ...] = (
    hooks_that_multiply,
    clipped_after,
    clipped_in_part,
    clipped_by_value,
    normalised,
    never_zeroed,
    shifted_labels,
    wrong_divisor,
    doubled_step,
    frozen_half_way,
    repeated_examples,
    scheduled_twice,
    skipped_step_counted,
    backward_twice,
    ascended,
    zeroed_before_the_step,
    half_a_batch_lost,
    given_back_late,
)
OUTPUTS = "at the same weights, the model returned other outputs in the loop"
OTHERWISE, GRADIENT = (
    "was changed by something other than the optimizer",
    "the optimizer's gradient is not the gradient",
)
RULE = "does not follow its optimizer's rule"
REFUSED: tuple[tuple[Body, int, str, str], ...] = (
    (clamped, 1, "0.weight", OTHERWISE),
    (decayed_twice, 1, "2.weight", OTHERWISE),
    (average_copied_back, 4, "0.weight", OTHERWISE),
    (frozen_layer_moves, 1, "0.weight", OTHERWISE),
    (written_past_pytorch, 1, "0.weight", OTHERWISE),
    (momentum_forgotten, 5, "0.weight", RULE),
    (noisy, 0, "", GRADIENT),
    (noisy_and_clipped, 0, "", GRADIENT),
    (clipped_to_two_bounds, 0, "", GRADIENT),
    (turned_at_the_bound, 0, "", GRADIENT),
    (with_a_penalty, 0, "", GRADIENT),
    (randomly_masked, 0, "", GRADIENT),
    (exchanged, 0, "", GRADIENT),
    (hook_that_bends, 0, "", GRADIENT),
    (warmer, 7, "", OUTPUTS),
)
"""The step, tensor and reason in the message; any tensor if the name is empty."""
