"""What no followed optimizer moves stays as it was: frozen parameters, and buffers.

The trace asks a copy of the model, in which these are as they were when following began. A readout's bias that somebody
else moves changes no gradient, so that no other proof would show it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ntkexp.mistake import Mistake
from ntkexp.shapes import Weights


@dataclass
class Unmoved:
    """`copy` is the model as it was; `known` are tensors, and the writes to them, that are known to be as they were. A
    buffer may be assigned anew instead of written to.
    """

    model: nn.Module
    copy: nn.Module
    known: dict[str, tuple[Tensor, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.known.update((name, (tensor, tensor._version)) for name, tensor in named_tensors(self.model).items())

    def refuse_writes(self, step: int, moved: Container[str]) -> None:
        """Refuse what was written to and is not what it was, beside what is moved; that has to be where it was.

        >>> net = nn.Linear(2, 1)
        >>> unmoved = Unmoved(net, nn.Linear(2, 1))
        >>> unmoved.refuse_writes(0, set())
        >>> nn.init.zeros_(net.bias) is net.bias
        True
        >>> unmoved.refuse_writes(0, {"bias"})
        >>> unmoved.refuse_writes(0, set())
        Traceback (most recent call last):
        ntkexp.mistake.Mistake: step 0: 'bias', which no followed optimizer moves, was changed; follow what moves it too
        """
        found = named_tensors(self.model)
        for name, (tensor, _) in self.known.items():
            if name not in found or (name in moved and found[name] is not tensor):
                raise Mistake(
                    f"step {step}: '{name}' is no longer the tensor that it was when following began; write new values "
                    "into it, or follow from there on"
                )
        for name, tensor in found.items():
            if name in moved or self.knows(name, tensor):
                continue
            if name not in self.known or not torch.equal(tensor.detach(), named_tensors(self.copy)[name]):
                raise Mistake(
                    f"step {step}: '{name}', which no followed optimizer moves, was changed; follow what moves it too"
                )
            self.known[name] = tensor, tensor._version

    def otherwise(self, weights: Weights) -> Iterator[str]:
        """What is otherwise than in a trace that ends at these weights: tensors, and numbers that modules hold.

        >>> net = nn.Dropout(0.5)
        >>> unmoved, net.p = Unmoved(net, nn.Dropout(0.5)), 0.1
        >>> list(unmoved.otherwise({}))
        ['p']

        Also where a number of the class is another of this module's:

        >>> class Warm(nn.Module):
        ...     heat = 1.0
        >>> net = Warm()
        >>> unmoved, net.heat = Unmoved(net, Warm()), 2.0
        >>> list(unmoved.otherwise({}))
        ['heat']
        """
        now = named_tensors(self.model)
        for name, kept in {**named_tensors(self.copy), **weights}.items():
            if name not in now or not same_values(now[name].detach(), kept):
                yield name
        modules = dict(self.model.named_modules())
        for name, was in self.copy.named_modules():
            now_held = dict(settings(modules.get(name, was)))
            before = dict(settings(was)) | {key: getattr(was, key) for key in now_held if hasattr(type(was), key)}
            yield from (f"{name}.{key}".lstrip(".") for key, value in before.items() if now_held.get(key) != value)

    def knows(self, name: str, tensor: Tensor) -> bool:
        """Whether this very tensor was looked at, and not written to since."""
        known, count = self.known.get(name, (None, 0))
        return known is tensor and count == tensor._version


def same_values(now: Tensor, kept: Tensor) -> bool:
    """Whether a tensor holds what it held, wherever it lies by now.

    >>> same_values(torch.ones(1).half(), torch.ones(1)), same_values(torch.ones(2), torch.ones(1))
    (True, False)
    """
    return now.shape == kept.shape and torch.equal(now.to(kept), kept)


def settings(module: nn.Module) -> Iterator[tuple[str, object]]:
    """The numbers and words that a module holds, but its mode.

    >>> dict(settings(nn.Dropout(0.5)))
    {'p': 0.5, 'inplace': False}
    """
    for key, value in vars(module).items():
        if isinstance(value, bool | int | float | str) and key != "training" and not key.startswith("_"):
            yield key, value


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
