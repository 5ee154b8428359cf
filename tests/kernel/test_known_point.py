"""A program carries out what torch's own layers do, bit for bit, and nothing that changes their mind goes unseen."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from ntkexp import Mistake, tangent_kernel
from ntkexp.kernel.features.features import Features
from ntkexp.kernel.read.answers import Answers
from ntkexp.kernel.read.program_cache import TRIALS, Written
from ntkexp.kernel.record.recorder import DispatchMode
from ntkexp.library import point as chapter
from ntkexp.library.plain_module import LAYERS, plain_module
from ntkexp.library.torch_code import code_of
from tests.kernel import oracle
from tests.kernel.compare import agree

ROUNDING = 300 * torch.finfo(torch.float64).eps
CALLS = TRIALS + 2  # after which there is a program, and it is believed

POINTWISE = (
    *(nn.CELU, nn.ELU, nn.GELU, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU),
    *(nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Identity, nn.Dropout),
)
VECTORS: dict[str, Callable[[], list[nn.Module]]] = {
    **{kind.__name__: lambda kind=kind: [kind()] for kind in POINTWISE},  # type: ignore[misc]  # the kind of now
    **{kind.__name__: lambda kind=kind: [kind(1)] for kind in (nn.GLU, nn.LogSoftmax, nn.Softmax)},  # type: ignore[misc]  # the kind of now
    "LayerNorm": lambda: [nn.LayerNorm(6)],
    "GroupNorm": lambda: [nn.GroupNorm(2, 6)],
    "Conv1d": lambda: [nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 2, 2, padding=1), nn.Flatten()],
    "Conv2d": lambda: [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 2, 2), nn.Flatten()],
    "Conv3d": lambda: [nn.Unflatten(1, (1, 1, 2, 3)), nn.Conv3d(1, 2, (1, 2, 2)), nn.Flatten()],
    "AvgPool1d": lambda: [nn.Unflatten(1, (1, 6)), nn.AvgPool1d(2), nn.Flatten()],
    "MaxPool1d": lambda: [nn.Unflatten(1, (1, 6)), nn.MaxPool1d(2), nn.Flatten()],
    "AvgPool2d": lambda: [nn.Unflatten(1, (1, 2, 3)), nn.AvgPool2d(2), nn.Flatten()],
    "MaxPool2d": lambda: [nn.Unflatten(1, (1, 2, 3)), nn.MaxPool2d(2), nn.Flatten()],
    "AdaptiveAvgPool1d": lambda: [nn.Unflatten(1, (1, 6)), nn.AdaptiveAvgPool1d(2), nn.Flatten()],
    "AdaptiveAvgPool2d": lambda: [nn.Unflatten(1, (1, 2, 3)), nn.AdaptiveAvgPool2d(1), nn.Flatten()],
}


def network(between: list[nn.Module]) -> nn.Module:
    """Layers between two that have weights."""
    torch.manual_seed(0)
    with torch.no_grad():
        width = nn.Sequential(*between)(torch.ones(2, 6)).shape[1]
    return nn.Sequential(nn.Linear(3, 6), nn.Sequential(*between), nn.Linear(width, 2)).double().eval()


def points(count: int = 4) -> Tensor:
    """Other inputs every time."""
    return torch.randn(count, 3, dtype=torch.float64)


def moved(module: nn.Module) -> dict[str, Tensor]:
    """Other weights every time."""
    return {name: weight + 0.3 * torch.randn_like(weight) for name, weight in module.named_parameters()}


def programs(module: nn.Module) -> list[Written[Features] | None]:
    """Those that are kept of a module."""
    known = chapter.KNOWN[module].kept.values()
    return [written for each in known for written in each.programs.latest.kept.values()]


FAST = ("ReLU", "LayerNorm", "Conv2d", "MaxPool2d")
SOME = (*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in VECTORS if name not in FAST))


@pytest.mark.parametrize("name", SOME)
def test_a_program_has_the_bits_of_a_first_reading(name: str) -> None:
    module = network(VECTORS[name]())
    for _ in range(CALLS):
        weights, x = moved(module), points()
        found = tangent_kernel(module, x, weights=weights)
    assert torch.equal(found, tangent_kernel(deepcopy(module), x, weights=weights))
    (written,) = programs(module)
    assert written is not None
    assert written.trials == 0
    agree(found, oracle.tangent(module, x, x, weights), ROUNDING)


def test_tokens_are_numbers_like_others() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(5, 2, padding_idx=0), nn.Flatten(), nn.Linear(6, 1)).double()
    for _ in range(CALLS):
        x = torch.randint(0, 5, (4, 3))
        found = tangent_kernel(module, x)
    assert programs(module)[0] is not None
    agree(found, oracle.tangent(module, x, x), ROUNDING)


def test_every_layer_is_tried() -> None:
    tried = {type(layer) for make in VECTORS.values() for layer in make()}
    assert LAYERS - {nn.Embedding, nn.Linear} == tried


@pytest.mark.slow
def test_two_places_and_some_outputs_have_programs_of_their_own() -> None:
    module = network([nn.Tanh()])
    for _ in range(CALLS):
        x, y = points(4), points(3)
        found = tangent_kernel(module, x, y, outputs=[1])
        whole = tangent_kernel(module, x, y)
    agree(found[:, 0, :, 0], oracle.tangent(module, x, y)[:, 1, :, 1], ROUNDING)
    agree(whole, oracle.tangent(module, x, y), ROUNDING)
    assert len(programs(module)) == 4


class Doubled(nn.Tanh):
    """Somebody's own layer."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Halved(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def subject() -> nn.Sequential:
    """A module whose mind is changed."""
    torch.manual_seed(0)
    layers = (nn.Linear(3, 3), nn.Tanh(), nn.LayerNorm(3), nn.Linear(3, 3), nn.LeakyReLU(0.1), nn.Linear(3, 1))
    return nn.Sequential(*layers).double()


def another_forward(layer: Any) -> None:
    """A method on a layer itself."""
    layer.forward = torch.sin


def other_class(layer: nn.Module) -> None:
    """Somebody's own class, with torch's attributes."""
    layer.__class__ = Doubled


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda net: net[1].register_forward_hook(lambda _, __, z: 2 * z),
    "a hook before": lambda net: net[1].register_forward_pre_hook(lambda _, given: (2 * given[0],)),
    "a hook of the whole": lambda net: net.register_forward_hook(lambda _, __, z: z.sin()),
    "a method on a layer": lambda net: another_forward(net[1]),
    "a method on the whole": lambda net: setattr(net, "forward", lambda x: net[0](x).sin()),
    "a shared weight": lambda net: setattr(net[3], "weight", net[0].weight),
    "a shared layer": lambda net: net.__setitem__(3, net[0]),
    "a slope": lambda net: setattr(net[4], "negative_slope", 0.7),
    "an eps": lambda net: setattr(net[2], "eps", 0.5),
    "a layer of another kind": lambda net: net.__setitem__(1, nn.Sigmoid()),
    "one more layer": lambda net: net.append(nn.Tanh()),
    "one layer less": lambda net: net.pop(4),
    "a layer of somebody's own": lambda net: net.__setitem__(1, Doubled()),
    "a class of somebody's own": lambda net: other_class(net[1]),
    "a parametrization": lambda net: parametrize.register_parametrization(net[0], "weight", Halved()),
    "a norm of weights": lambda net: nn.utils.parametrizations.weight_norm(net[0]),
    "a frozen weight": lambda net: net[3].weight.requires_grad_(False),
    "no bias": lambda net: net[3].register_parameter("bias", None),
    "other numbers": lambda net: net[3].weight.data.mul_(2),
    "another weight": lambda net: setattr(net[3], "weight", nn.Parameter(torch.ones(3, 3, dtype=torch.float64))),
}


def tripled(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:  # noqa: A002  torch's names
    """What is put in the place of torch's code."""
    return 3 * input


def another_found(layer: nn.Linear, name: str) -> Any:
    """What is put in the place of Python's own look for an attribute."""
    found = object.__getattribute__(layer, name)
    return (lambda z: found(z).sin()) if name == "forward" else found


@contextmanager
def recoded() -> Iterator[None]:
    """Torch's function itself, with other code in it."""
    function = nn.functional.leaky_relu
    before, function.__code__ = function.__code__, tripled.__code__
    try:
        yield
    finally:
        function.__code__ = before


@contextmanager
def hooked() -> Iterator[None]:
    """Every layer with sin behind it."""
    handle = nn.modules.module.register_module_forward_hook(lambda _, __, z: z.sin())
    try:
        yield
    finally:
        handle.remove()


EVERYWHERE: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a hook of all layers": hooked,
    "a method of a class": lambda: mock.patch.object(nn.Tanh, "forward", lambda _, z: torch.sin(z)),
    "a method of all classes": lambda: mock.patch.object(nn.Module, "__call__", lambda self, z: self.forward(2 * z)),
    "a function of layers": lambda: mock.patch.object(nn.functional, "linear", lambda z, w, b: 2 * (z @ w.t()) + b),
    "a function of torch": lambda: mock.patch.object(torch, "tanh", torch.sin),
    "the code of a function": recoded,
    "how attributes are found": lambda: mock.patch.object(nn.Linear, "__getattribute__", another_found, create=True),
}


def asked(net: nn.Module, x: Tensor) -> Tensor:
    """The kernel, until there is a program of it."""
    for _ in range(CALLS):
        found = tangent_kernel(net, x)
    assert programs(net)[-1] is not None
    return found


@cache
def known() -> tuple[nn.Sequential, Tensor]:
    """A module of which there is a program, and where."""
    net, x = subject(), points()
    asked(net, x)
    return net, x


def in_its_place() -> tuple[nn.Sequential, Tensor, Tensor]:
    """Another of which the same is known, where, and its kernel by the program."""
    first, x = known()
    net = deepcopy(first)
    chapter.KNOWN[net] = Answers(chapter.LATEST, chapter.KNOWN[first].kept.copy())
    with mock.patch.object(chapter, "batches", side_effect=AssertionError):
        return net, x, tangent_kernel(net, x)


@pytest.mark.parametrize("name", CHANGES)
def test_a_module_that_changed_its_mind_is_asked(name: str) -> None:
    net, x, before = in_its_place()
    CHANGES[name](net)
    found = tangent_kernel(net, x)
    agree(found, oracle.tangent(net, x, x), ROUNDING)
    assert not torch.equal(found, before)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_all_modules_that_changed_their_mind_are_asked(name: str) -> None:
    net, x, before = in_its_place()
    with EVERYWHERE[name]():
        assert plain_module(net) is None
        found = tangent_kernel(net, x)
        agree(found, oracle.tangent(net, x, x), ROUNDING)
    assert not torch.equal(found, before)
    assert torch.equal(tangent_kernel(net, x), before)


def test_methods_that_libraries_put_beside_torchs_decide_nothing() -> None:
    net = subject()
    with mock.patch.object(nn.Module, "smart_apply", tripled, create=True):
        code_of.cache_clear()
        assert plain_module(net) is not None
    assert plain_module(net) is not None
    with mock.patch.object(nn.Module, "_call_impl", tripled):
        assert plain_module(net) is None


class Plain(TorchFunctionMode):
    """A mode that changes nothing, as far as anybody knows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Lower(DispatchMode):
    """The same, below autograd."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "around",
    [
        *(Plain, Lower, torch.inference_mode, lambda: torch.autocast("cpu")),
        lambda: saved_tensors_hooks(lambda value: 2 * value, lambda value: value),
    ],
    ids=["functions", "operations", "inference", "autocast", "saved tensors"],
)
def test_nothing_is_known_under_a_mode(around: Callable[[], AbstractContextManager[Any]]) -> None:
    net = subject()
    assert plain_module(net) is not None
    with around():
        assert plain_module(net) is None
    found: list[object] = []
    torch.vmap(lambda x: found.append(plain_module(net)) or x)(points())  # type: ignore[func-returns-value]  # it has none
    assert found == [None]


def test_what_gradients_pass_by_on_their_way_is_seen() -> None:
    net = subject()
    net[1].register_full_backward_hook(lambda *_: None)
    assert plain_module(net) is None


def test_what_is_no_layer_of_torchs_is_not_known() -> None:
    one, buffered = nn.Sequential(Doubled()), nn.Sequential(nn.Linear(1, 1))
    buffered[0].register_buffer("more", torch.ones(1))
    named, within = nn.Sequential(nn.Tanh()), nn.Sequential(nn.Sequential(nn.BatchNorm1d(3)))
    named[0].mind = "its own"  # type: ignore[assignment]  # an attribute that torch's has not
    odd = nn.Sequential(nn.LeakyReLU())
    odd[0].negative_slope = torch.tensor(0.1)
    for net in (one, buffered, named, within, odd):
        assert plain_module(net) is None
    assert plain_module(nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Tanh()))) is not None


def test_code_that_was_changed_before_anybody_asked_is_not_torchs() -> None:
    for change in list(EVERYWHERE.values())[1:4]:
        with change():
            assert code_of.__wrapped__(frozenset({nn.Tanh, nn.Linear})) is None
    assert code_of.__wrapped__(frozenset({nn.Tanh, nn.Linear})) is not None


def test_another_mode_or_precision_is_asked() -> None:
    net, x = network([nn.Dropout(0.5)]), points()
    asked(net, x)
    net.train()
    with pytest.raises(Mistake, match="random in training mode"):
        tangent_kernel(net, x)
    short = tangent_kernel(net.eval().float(), x.float())
    agree(short, oracle.tangent(net, x.float(), x.float()), 300 * torch.finfo(torch.float32).eps)


def test_what_is_kept_is_bounded_and_holds_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chapter, "LATEST", 2)
    net = subject()
    for count in (2, 3, 4):
        asked(net, points(count))
    assert len(chapter.KNOWN[net].kept) == 2
    assert all(written is not None and not any(map(is_large, written.program.constants)) for written in programs(net))
    weight, whole = weakref.ref(net[0].weight), weakref.ref(net)
    net[0].weight = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
    gc.collect()
    assert weight() is None
    del net
    gc.collect()
    assert whole() is None


def is_large(constant: Tensor) -> bool:
    """Whether it may be a weight, or have an example in each row; once stored numbers are counted."""
    return constant.untyped_storage().nbytes() > 8


@pytest.mark.slow
def test_a_table_of_many_outputs_is_read_in_the_ordinary_way() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 400)).double(), points(2)
    for _ in range(CALLS):
        tangent_kernel(net, x)
    assert programs(net) == [None]
