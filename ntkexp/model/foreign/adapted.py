"""A module that was not written for this program, made to take what the data gives and to give what the loss takes.

    tokens → whole numbers        outputs [example] → [example, 1]        tensors it makes → of its inputs' dtype

Before training it is tried on a few examples, so that what does not fit is said in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.mistake import Mistake
from ntkexp.model.foreign.error_line import one_line
from ntkexp.model.functional import hooked, training_modes
from ntkexp.model.learning_task import LearningTask


class Adapted(nn.Module):
    """A module stands between data and loss."""

    def __init__(self, module: nn.Module, tokens: bool) -> None:
        super().__init__()
        self.module, self.tokens = module, tokens

    def forward(self, x: Float[Tensor, "example *shape"]) -> Float[Tensor, "example out"]:
        outputs = self.answer(x)
        assert isinstance(outputs, Tensor)  # it was tried
        return outputs[:, None] if outputs.dim() == 1 else outputs

    def answer(self, x: Float[Tensor, "example *shape"]) -> object:
        """Give whatever the module itself returns."""
        with making(x.dtype):
            return self.module(x.long() if self.tokens else x)


def adapted(
    make: Callable[[], nn.Module], task: LearningTask, seed: int, given: str, file: Path | None = None
) -> Adapted:
    """The module that is made, in double precision and evaluation mode, tried."""
    with seeded(seed), making(torch.float64), one_line(given, file):
        module = Adapted(with_whole_gradients(make().double().eval()), tokens=task.vocabulary > 0)
        with one_line(f"{given}: {task.said}, and the module says", file):
            refuse_unfit(given, module, task)
    return module


def with_whole_gradients(module: nn.Module) -> nn.Module:
    """The module, whose tables give gradients of all their rows: the same numbers, which can be differentiated again.

    >>> with_whole_gradients(nn.Embedding(3, 2, sparse=True)).sparse
    False
    """
    for layer in module.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            layer.sparse = False
    return module


@contextmanager
def making(dtype: torch.dtype) -> Iterator[None]:
    """Tensors are made in this dtype where nothing is said of it, such as the first state of a recurrent network."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's own generator starts at this seed, and is put back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def refuse_unfit(given: str, module: Adapted, task: LearningTask) -> None:
    """Try the module on examples that are made up."""
    refuse_untrainable(given, module.module)
    if reasons := list(training_modes(module.module)):
        raise Mistake(f"{given}: {reasons[0]}, even after module.eval(); each output must depend on its own example")
    x = task.sample()
    outputs = module.answer(x)
    refuse_shape(given, outputs, task)
    assert isinstance(outputs, Tensor)
    if not torch.equal(x, task.sample()):
        raise Mistake(f"{given}: the module overwrites its inputs; let it work on a copy, such as x = x.clone()")
    if not outputs.requires_grad:
        raise Mistake(f"{given}: no output depends on a trained parameter; is there a detach, or no_grad?")
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(outputs.sum(), weights, allow_unused=True)
    if any(each is not None and each.is_sparse for each in gradients):
        raise Mistake(f"{given}: there is a sparse gradient; call F.embedding and F.embedding_bag with sparse=False")
    if not torch.equal(module(x).nan_to_num(), module(x).nan_to_num()):
        raise Mistake(
            f"{given}: the module gives other outputs when it is called again, in evaluation mode; is there a dropout "
            "without training=self.training?"
        )


def refuse_untrainable(given: str, module: nn.Module) -> None:
    """There has to be something to train, of real numbers."""
    weights = dict(module.named_parameters())
    if not any(weight.requires_grad for weight in weights.values()):
        why = f"none of its {len(weights)} parameters requires gradients" if weights else "it has no parameters"
        raise Mistake(f"{given}: the module has nothing to train: {why}")
    if unreal := [name for name, weight in weights.items() if weight.is_complex()]:
        raise Mistake(f"{given}: the parameter '{unreal[0]}' is complex; take its real and imaginary part instead")
    if (name := next(hooked(module), None)) is not None:
        raise Mistake(
            f"{given}: the parameter '{name}' has a hook, which a run would not call: it trains by derivatives; build "
            "the module without it"
        )


def refuse_shape(given: str, outputs: object, task: LearningTask) -> None:
    """The outputs have to be those that the data asks for."""
    if not isinstance(outputs, Tensor):
        raise Mistake(
            f"{given}: the module returns a {type(outputs).__name__}; let it return one tensor, [examples, outputs]"
        )
    shape, wanted = list(outputs.shape), [2, task.outputs]
    if wanted not in (shape, [*shape, 1]):
        raise Mistake(
            f"{given}: the module gives outputs of shape {shape} for 2 examples, and {wanted} is expected: data and "
            f"loss ask for {task.outputs} for each example"
        )
    if not outputs.is_floating_point():
        raise Mistake(f"{given}: the module gives {outputs.dtype}, and real numbers are expected")


def refuse_chance(given: str, module: Adapted, again: Adapted) -> None:
    """Two modules of the same seed have to be the same."""
    first, second = module.module.state_dict(), again.module.state_dict()
    if first.keys() != second.keys():
        raise Mistake(f"{given} builds another module when it is called again with the same seed")
    for name, value in first.items():
        if isinstance(value, Tensor) and not torch.equal(value.nan_to_num(), second[name].nan_to_num()):
            raise Mistake(
                f"{given} draws another '{name}' when it is called again with the same seed; draw it by torch, which "
                "is seeded, or from the argument seed"
            )
