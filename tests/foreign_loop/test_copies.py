"""Copies of a followed module run as if it had never been followed, and their files need no ntkexp."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ntkexp
from ntkexp.foreign_loop.trace import Trace
from tests.foreign_loop.loops import fitted, missed

EXACT = 1e-12  # sums of 8 examples over 3 steps: some hundred roundings, relative to the change
ROWS = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3)

Copier = Callable[[nn.Module], Callable[[Tensor], Any]]


class Net(nn.Module):
    """Two layers; a module holds the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        readout: Tensor = self.head(self.body(x))
        return readout


def through_file(thing: Any) -> Any:
    """Save and load; the file names no class of ntkexp."""
    file = io.BytesIO()
    torch.save(thing, file)
    assert b"ntkexp" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_pickle(thing: Any, protocol: int = pickle.HIGHEST_PROTOCOL) -> Any:
    written = pickle.dumps(thing, protocol)
    assert b"ntkexp" not in written
    return pickle.loads(written)


def averaged(net: nn.Module, **how: Any) -> nn.Module:
    average = AveragedModel(net, **how)
    average.update_parameters(net)
    return average


def adapted(net: nn.Module) -> nn.Module:
    """A copy that takes a step, as the inner loop of first-order MAML does."""
    fast = copy.deepcopy(net)
    optimizer = torch.optim.SGD(fast.parameters(), 0.1)
    fast(ROWS).square().sum().backward()
    optimizer.step()
    return fast


def loaded(net: nn.Module, into: nn.Module) -> nn.Module:
    into.load_state_dict(net.state_dict())
    return into


def of_parts(net: nn.Module) -> nn.Module:
    return nn.Sequential(copy.deepcopy(net.get_submodule("body")), through_pickle(net.get_submodule("head")))


def functional(net: nn.Module) -> Callable[[Tensor], Any]:
    base, weights = copy.deepcopy(net), {name: weight.detach().clone() for name, weight in net.named_parameters()}
    return lambda x: torch.func.functional_call(base, weights, (x,))


def stacked(net: nn.Module) -> Callable[[Tensor], Any]:
    """An ensemble of copies, called at once."""
    base = copy.deepcopy(net)
    weights, _ = torch.func.stack_module_state([copy.deepcopy(net), through_pickle(net)])
    called = torch.vmap(lambda one, x: torch.func.functional_call(base, one, (x,)), (0, None))
    return lambda x: called(weights, x).sum(0)


def compiled(net: nn.Module, **options: Any) -> Callable[[Tensor], Any]:
    called: Callable[[Tensor], Any] = torch.compile(net, backend="eager", **options)
    return called


def compiled_in_place(net: nn.Module) -> nn.Module:
    twin = copy.deepcopy(net)
    twin.compile(backend="eager", fullgraph=True)
    return twin


def exported(net: nn.Module) -> Any:
    return torch.export.export(net, (ROWS,)).module()


def traced(net: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is on its way out
        return torch.jit.trace(net, ROWS)  # type: ignore[no-untyped-call]


def answer(net: nn.Module, answers: Any) -> None:
    """Train the module a little in another process, and send its outputs."""
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    net(ROWS).sum().backward()
    optimizer.step()
    answers.put(net(ROWS).detach().numpy())


def in_process(kind: str) -> Copier:
    """The outputs of the module in another process."""

    def copied(net: nn.Module) -> Callable[[Tensor], Tensor]:
        context: Any = multiprocessing.get_context(kind)
        answers = context.Queue()
        process = context.Process(target=answer, args=(net, answers))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads and a fork
            process.start()
        outputs = torch.from_numpy(answers.get(timeout=120))
        process.join()
        assert process.exitcode == 0
        return lambda x: outputs[: len(x)]

    return copied


WAYS: dict[str, Copier] = {
    "deepcopy": copy.deepcopy,
    "deepcopy of a parent": lambda net: copy.deepcopy(nn.Sequential(net)),
    "copy.copy": copy.copy,
    "pickle": through_pickle,
    "the oldest pickle": lambda net: through_pickle(net, 2),
    "torch.save": through_file,
    "state_dict": lambda net: loaded(net, Net().double()),
    "parts": of_parts,
    "first-order MAML": adapted,
    "AveragedModel": averaged,
    "an EMA": lambda net: averaged(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)),  # type: ignore[no-untyped-call]
    "functional_call of a copy": functional,
    "an ensemble": stacked,
    "torch.fx": torch.fx.symbolic_trace,
    "torch.jit.trace": traced,
    "torch.export": exported,
    "torch.export of a copy": lambda net: exported(copy.deepcopy(net)),
    "torch.compile of a copy": lambda net: compiled(copy.deepcopy(net), fullgraph=True),
    "compile() of a copy": compiled_in_place,
    "fork": in_process("fork"),
    "spawn": in_process("spawn"),
}
LONG = {"spawn", "torch.export of a copy", "torch.jit.trace", "compile() of a copy"}


def trained(copier: Copier, *, follows: bool) -> tuple[list[Tensor], Trace | None]:
    """Return the outputs of a copy during and after the loop that makes it, and the outputs of the module."""
    torch.manual_seed(0)
    net, outputs, twins = Net().double(), list[Tensor](), list[Callable[[Tensor], Any]]()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    with ntkexp.follow(net, optimizer, queries=ROWS[:2]) if follows else nullcontext() as trace:
        for step in range(3):
            optimizer.zero_grad()
            (net(ROWS) - 1).square().mean().backward()
            if step == 1:
                twins.append(copier(net))
                outputs.append(twins[0](ROWS).detach().clone())
            optimizer.step()
    assert not net._forward_hooks
    return [*outputs, twins[0](ROWS).detach(), net(ROWS).detach()], trace


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile reads outputs that way
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way in LONG)) for way in WAYS])
@pytest.mark.sample(10)
def test_a_copy_runs_as_if_the_module_was_never_followed(way: str) -> None:
    """The trace has the calls of the loop alone."""
    ours, trace = trained(WAYS[way], follows=True)
    theirs, _ = trained(WAYS[way], follows=False)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    assert trace is not None
    found = trace.attribute()
    assert found.sizes["example"] == len(ROWS)
    assert missed(found) <= EXACT


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile reads outputs that way
@pytest.mark.parametrize("before", [False, True], ids=["made inside", "made before"])
@pytest.mark.parametrize("view", [copy.copy, pytest.param(compiled, marks=pytest.mark.slow)])
def test_a_loop_may_train_through_a_view_of_the_model(view: Copier, before: bool) -> None:
    net = Net().double()
    views = [view(net)] if before else []

    def loss(_: int) -> Tensor:
        if not views:
            views.append(view(net))
        outputs: Tensor = views[0](ROWS)
        return (outputs - 1).square().mean()

    assert missed(fitted(net, torch.optim.SGD(net.parameters(), 0.1), loss, queries=ROWS[:2]).attribute()) <= EXACT


def test_the_best_model_can_be_saved_after_the_loop() -> None:
    kept = list[nn.Module]()

    def best(net: nn.Module) -> nn.Module:
        kept.append(copy.deepcopy(net))
        return kept[0]

    trained(best, follows=True)
    assert torch.equal(through_file(kept[0])(ROWS), kept[0](ROWS))


def test_outputs_can_be_saved_without_a_warning() -> None:
    """torch warns of hooks on a tensor, which it does not save."""
    net = Net().double()
    with ntkexp.follow(net, torch.optim.SGD(net.parameters(), 0.1), queries=ROWS):
        outputs = net(ROWS)
        assert torch.equal(through_file(outputs), outputs)


def test_a_copy_of_the_optimizer_is_not_followed() -> None:
    """It moves other tensors."""
    net = Net().double()
    optimizer = torch.optim.Adam(net.parameters(), 0.1)

    def loss(step: int) -> Tensor:
        for twin in [copy.deepcopy(optimizer), through_pickle(optimizer)] * step:
            twin.step()
        outputs: Tensor = net(ROWS)
        return outputs.square().sum()

    assert len(fitted(net, optimizer, loss, queries=ROWS).steps) == 2
