"""`trace.losses`: losses that use derivatives of the model or other weights, and losses of the nodes of a graph.

    f_T − f_0 = Σ contributions + decay + rounding
    contribution of example i = Σ_steps J̄ Δθᵢ,    J̄ = ∫ J ds over the step, Δθᵢ from ∇_θ ℓᵢ

The second law has an oracle, `tests.foreign_loop.account`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import ntkexp
from ntkexp.cli.main import run as command
from ntkexp.foreign_loop.trace import Trace, find_trace, load_trace
from ntkexp.mistake import Mistake
from tests.foreign_loop.account import Account
from tests.foreign_loop.loops import apart, same_parts

STEPS, EXAMPLES = 4, 5
EXACT = 1e-12  # sums of 5 examples over 4 steps, relative to the change
CLOSE = 1e-10  # contributions by two formulas; Adam divides by roots of gradients

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")  # which torch.func.jvp calls

Batch: TypeAlias = tuple[Any, ...]
Losses: TypeAlias = Callable[..., Any]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# --- Models. With `nn.Identity`, outputs are quadratic in the weights, so that the secant Jacobian is J̄ to rounding.


class Features(nn.Module):
    """Fixed waves of the inputs, and two trained layers."""

    def __init__(self, activation: nn.Module, outputs: int = 1) -> None:
        super().__init__()
        self.register_buffer("waves", torch.linspace(-1.5, 1.5, 12, dtype=torch.float64).reshape(2, 6))
        self.layers = nn.Sequential(nn.Linear(6, 4), activation, nn.Linear(4, outputs)).double()

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.layers((x @ self.get_buffer("waves") + 0.3).sin())
        return answer


class Messages(nn.Module):
    """Two layers, between whose nodes messages pass along edges; the inputs are one graph after another."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 4).double(), nn.Linear(4, 3).double()
        self.activation = activation

    def nodes(self, x: Tensor, edges: Tensor) -> Tensor:
        hidden = self.activation(self.received(self.first(x), edges))
        return self.received(self.second(hidden), edges)

    def received(self, x: Tensor, edges: Tensor) -> Tensor:
        return x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return torch.stack([self.nodes(*graph) for graph in zip(x, edges, strict=True)])


# --- Losses of examples. The first input of each is the names of the rows.


def residual(model: nn.Module, rows: Tensor, x: Tensor) -> Any:
    """(u″ + u − 1)², the residual of an equation."""
    x = x.clone().requires_grad_()
    u = model(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return (second[:, 0] + u[:, 0] - 1).square()


def residual_by_func(model: nn.Module, rows: Tensor, x: Tensor) -> Any:
    """Compute the loss by transforms of functions."""
    weights: dict[str, Tensor] = dict(model.named_parameters())

    def u(point: Tensor) -> Tensor:
        answer: Tensor = functional_call(model, weights, (point[None],))
        return answer[0, 0]

    second = torch.vmap(torch.func.hessian(u))(x)[:, 0, 0]
    return (second + torch.vmap(u)(x) - 1).square()


def slope_by_jvp(model: nn.Module, rows: Tensor, x: Tensor) -> Any:
    slope = torch.func.jvp(model, (x,), (torch.ones_like(x),))[1]
    return (slope[:, 0] - 1).square()


def critic(model: nn.Module, rows: Tensor, real: Tensor, fake: Tensor) -> Any:
    """A Wasserstein critic with a penalty on its slope, at random points between."""
    share = torch.rand(len(real), 1, dtype=torch.float64)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return (model(fake) - model(real))[:, 0] + 10 * (slope.norm(dim=1) - 1).square()


def at_halves(model: nn.Module, rows: Tensor, x: Tensor) -> Any:
    """Compute the loss at other weights, half of which change."""
    weights = {name: (weight + weight.detach()) / 2 for name, weight in model.named_parameters()}
    answer: Tensor = functional_call(model, weights, (x,))
    return (answer[:, 0] - 1).square()


def after_a_step(model: nn.Module, rows: Tensor, x: Tensor, y: Tensor) -> Any:
    """MAML: the loss of each task after a step on its support set."""
    weights: dict[str, Tensor] = dict(model.named_parameters())
    losses = []
    for support, query in zip(x, y, strict=True):
        inner = functional_call(model, weights, (support,)).square().mean()
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: weights[name] - 0.1 * slope for name, slope in zip(weights, slopes, strict=True)}
        losses.append((functional_call(model, fast, (query,)) - 1).square().mean())
    return torch.stack(losses)


def contrast(model: nn.Module, rows: Tensor, x: Tensor, view: Tensor) -> Any:
    """Each example is a negative of all others."""
    similarity = model(x) @ model(view).T
    return functional.cross_entropy(similarity, torch.arange(len(x)), reduction="none")


def of_nodes(model: nn.Module, rows: Tensor, x: Tensor, edges: Tensor, labels: Tensor) -> Any:
    return functional.cross_entropy(model(x[None], edges[None])[0], labels, reduction="none")


@dataclass(frozen=True)
class Case:
    model: Callable[[nn.Module], nn.Module]
    losses: Losses
    batch: Callable[[Tensor], Batch]  # of some rows
    queries: Any


X, Y = torch.linspace(-2, 2, 40, dtype=torch.float64).reshape(2, -1, 2).sin().unbind()
TASKS = torch.linspace(-2, 2, 80, dtype=torch.float64).reshape(10, 4, 2).cos()
EDGES = torch.tensor([[0, 1, 2, 3, 0, 4], [1, 2, 3, 4, 2, 0]])
LABELS = torch.tensor([0, 1, 2, 1, 0])


def points(rows: Tensor) -> Batch:
    return (X[rows],)


def pairs(rows: Tensor) -> Batch:
    return (X[rows], Y[rows])


CASES = {
    "PINN": Case(Features, residual, points, X[:3]),
    "PINN by torch.func": Case(Features, residual_by_func, points, X[:3]),
    "jvp": Case(Features, slope_by_jvp, points, X[:3]),
    "gradient penalty": Case(Features, critic, pairs, X[:3]),
    "functional_call": Case(Features, at_halves, points, X[:3]),
    "MAML": Case(Features, after_a_step, lambda rows: (TASKS[rows], -TASKS[rows]), X[:3]),
    "contrast": Case(lambda activation: Features(activation, 3), contrast, pairs, X[:2]),
    "nodes": Case(Messages, of_nodes, lambda rows: (X[rows], EDGES, LABELS), (X[None, :4], EDGES[None, :, :3])),
}


# --- Loops.


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


OPTIMIZERS = (momentum, adamw)
Total: TypeAlias = Callable[[Tensor], Tensor]


def batch_of(case: Case, step: int) -> Batch:
    rows = torch.randperm(10, generator=torch.Generator().manual_seed(step))[:EXAMPLES]
    return (rows, *case.batch(rows))


def train(case: Case, model: nn.Module, optimizer: Any, losses: Losses, total: Total = Tensor.mean) -> None:
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        torch.autograd.backward(total(losses(case.losses, *batch_of(case, step))))
        optimizer.step()


def model_of(case: Case, activation: type[nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return case.model(activation())


def ids_of(call: Any) -> Any:
    """Names of rows, also of ordinary calls."""
    return call.args[0] if len(call.args) > 1 else [str(x) for x in call.args[0][:, 0].tolist()]


def followed(case: Case, maker: Any, activation: type[nn.Module] = nn.Tanh, **options: Any) -> Trace:
    model = model_of(case, activation)
    optimizer = maker(model)
    with ntkexp.follow(model, optimizer, queries=case.queries, ids=ids_of, **options) as trace:
        train(case, model, optimizer, trace.losses)
    return trace


def accounted(case: Case, maker: Any) -> tuple[Account, Tensor]:
    """Return the contributions and the change of a loop that is not followed, by the oracle."""
    model = model_of(case, nn.Identity)
    optimizer = maker(model)
    account = Account(model, optimizer, case.queries)

    def outputs() -> Tensor:
        answer: Tensor = functional_call(model, {}, case.queries)
        return answer.detach()

    def losses(function: Losses, rows: Tensor, *batch: Any) -> Any:
        each = function(model, rows, *batch)
        account.give(each / len(each), rows.tolist())
        return each

    start = outputs()
    train(case, model, optimizer, losses)
    return account, outputs() - start


# --- The laws.


def adds_up(found: Any) -> None:
    parts = found["contribution"].sum("example") + found["decay"] + found["rounding"]
    assert apart(parts, found["change"]) <= EXACT
    assert float(abs(found["change"]).max()) > 1e-3
    assert float(found["gradient_error"].max()) < 1e-15  # the same kernels on the same numbers


@pytest.mark.parametrize("name", CASES)
def test_parts_add_up_to_what_training_did(name: str) -> None:
    adds_up(followed(CASES[name], momentum).attribute(quiet=True))


@pytest.mark.parametrize("maker", OPTIMIZERS, ids=lambda maker: maker.__name__)
@pytest.mark.parametrize("name", CASES)
def test_contributions_are_those_of_an_independent_computation(name: str, maker: Any) -> None:
    account, change = accounted(CASES[name], maker)
    assert apart(sum(account.contributions.values()) + account.by_decay, change) <= EXACT  # of the oracle itself
    found = followed(CASES[name], maker, nn.Identity).attribute(quiet=True)
    adds_up(found)
    rows, parts = zip(*account.contributions.items(), strict=True)
    expected = torch.stack(parts, -1).reshape(-1, len(rows))
    ours = found["contribution"].sel(example=[str(row) for row in rows])
    assert apart(ours.values.reshape(-1, len(rows)), expected) <= CLOSE
    assert apart(found["decay"].values.flatten(), account.by_decay.flatten()) <= CLOSE


# --- Loops that do more.


def data(model: nn.Module, step: int) -> Any:
    """A loss of outputs, from an ordinary call of the model."""
    rows = batch_of(CASES["PINN"], step)[0]
    return (model(Y[rows]) - 1).square().mean()


def mixed(model: nn.Module, losses: Losses, step: int) -> None:
    """Boundary values by outputs, and the equation by its residual, in one loss with two calls."""
    torch.autograd.backward(data(model, step) + 0.1 * losses(residual, *batch_of(CASES["PINN"], step)).mean())


def accumulated(model: nn.Module, losses: Losses, step: int) -> None:
    """Call backward twice. The second pass has weights of examples."""
    torch.autograd.backward(losses(residual, *batch_of(CASES["PINN"], step)).mean())
    shares = torch.tensor([1, 0, 2, 0.5, 1], dtype=torch.float64)
    torch.autograd.backward(losses(critic, *batch_of(CASES["gradient penalty"], step + 9)) @ shares)


def clipped(model: nn.Module, losses: Losses, step: int) -> None:
    torch.autograd.backward(losses(residual, *batch_of(CASES["PINN"], step)).sum())
    clip_grad_norm_(model.parameters(), 0.5)


def beside_an_evaluation(model: nn.Module, losses: Losses, step: int) -> None:
    """Losses for a log are not recorded. The inputs require gradients, like inputs from the model."""
    with torch.no_grad():
        losses(slope_by_jvp, *batch_of(CASES["jvp"], step))
    torch.autograd.backward(losses(residual, *batch_of(CASES["PINN"], step)).mean())


def slope_at(model: nn.Module, rows: Tensor, x: Tensor) -> Any:
    (found,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (found[:, 0] - 1).square()


def needing_gradients(model: nn.Module, losses: Losses, step: int) -> None:
    """The batch itself requires gradients."""
    rows = batch_of(CASES["PINN"], step)[0]
    torch.autograd.backward(losses(slope_at, rows, X[rows].clone().requires_grad_()).mean())


BODIES = (mixed, accumulated, clipped, beside_an_evaluation, needing_gradients)


def features() -> nn.Module:
    torch.manual_seed(7)
    return Features(nn.Tanh())


def dropping() -> nn.Module:
    torch.manual_seed(7)
    model = Features(nn.Tanh())
    model.layers.insert(1, nn.Dropout(0.3))
    return model


def carried_out(body: Any, model: nn.Module, **options: Any) -> Trace:
    optimizer = adamw(model)
    with ntkexp.follow(model, optimizer, queries=X[:3], ids=ids_of, **options) as trace:
        for step in range(STEPS):
            torch.manual_seed(step)
            optimizer.zero_grad()
            body(model, trace.losses, step)
            optimizer.step()
    return trace


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_parts_add_up_whatever_the_loop_does_with_losses(body: Any) -> None:
    model, plain = dropping(), dropping()
    adds_up(carried_out(body, model).attribute(quiet=True, by="module"))
    optimizer = adamw(plain)
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        body(plain, lambda losses, *batch: losses(plain, *batch), step)
        optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)  # following changes nothing


def test_a_measure_and_some_steps_are_explained_too() -> None:
    whole = carried_out(mixed, dropping(), measure=lambda outputs, call: outputs[:, 0].square())
    adds_up(whole.attribute(quiet=True))
    found = carried_out(mixed, dropping(), steps=range(1, 3)).attribute(quiet=True)
    parts = found["contribution"].sum("example") + found["decay"] + found["rounding"]
    assert apart(parts + found["carried"] + found["other_steps"], found["change"]) <= EXACT


def test_groups_of_gradients_change_nothing() -> None:
    """Little memory splits the examples of a call into groups, whose gradients are computed again and again."""
    trace = followed(CASES["contrast"], adamw)
    whole, groups = trace.attribute(quiet=True), trace.attribute(quiet=True, memory_gb=2e-4)
    assert apart(groups["contribution"].values, whole["contribution"].values) <= EXACT


def shared(model: nn.Module, rows: Tensor, x: Tensor, count: int) -> Any:
    """Each loss is divided by the number of rows that the function receives."""
    return squares(model, x) / len(x)


def ring(model: nn.Module, rows: Tensor, x: Tensor, edges: Tensor) -> Any:
    return model(x + x[edges])[:, 0].square()


MANY = torch.linspace(-2, 2, 140, dtype=torch.float64).reshape(70, 2).sin()
LARGE: dict[str, tuple[Losses, Batch]] = {
    "PINN": (residual, (MANY,)),
    "contrast": (contrast, (MANY, MANY.flip(0))),
    "neighbours": (lambda model, rows, x: squares(model, x + x.roll(1, 0) / 9), (MANY,)),
    "edges": (ring, (MANY, torch.arange(70).roll(3).repeat(2)[:70])),
    "more edges than nodes": (
        lambda model, rows, x, edges: ring(model, rows, x, edges[:70]),
        (MANY, torch.arange(71) % 70),
    ),
    "shares": (shared, (MANY, 70)),
}


@pytest.mark.parametrize("name", LARGE)
def test_batches_are_split_where_their_examples_are_independent(name: str) -> None:
    """A random number forbids it, because it is drawn for the whole batch."""
    losses, batch = LARGE[name]
    sizes = list[int]()

    def counted(model: nn.Module, rows: Tensor, *batch: Any) -> Any:
        sizes.append(len(rows))
        return losses(model, rows, *batch)

    def whole(model: nn.Module, *batch: Any) -> Any:
        return losses(model, *batch) + 0 * torch.rand(())

    ours, theirs = (carried_out(once(function, torch.arange(70), *batch), features()) for function in (counted, whole))
    found, expected = (trace.attribute(quiet=True)["contribution"] for trace in (ours, theirs))
    assert list(found["example"].values) == list(expected["example"].values)
    assert apart(found.values, expected.values) <= EXACT
    assert (sizes.count(70 % 32) > 1) == (name == "PINN")  # the others are split at most once, to compare


def test_names_are_digests_of_the_rows() -> None:
    """Edges belong to the whole batch, so that nodes have the same names in another graph."""
    case = CASES["nodes"]
    model = model_of(case, nn.Tanh)
    optimizer = momentum(model)
    with ntkexp.follow(model, optimizer, queries=case.queries) as trace:
        for edges in (EDGES, EDGES.flip(0)):
            optimizer.zero_grad()
            torch.autograd.backward(trace.losses(of_nodes, torch.arange(5), X[:5], edges, LABELS).mean())
            optimizer.step()
    found = trace.attribute(quiet=True)
    assert found.sizes["example"] == len(LABELS)
    adds_up(found)


# --- Refusals.


def unfollowed(body: Any, model: nn.Module | None = None, **options: Any) -> Callable[[], object]:
    """Follow a loop, and attribute it."""
    return lambda: carried_out(body, model or Features(nn.Tanh()), **options).attribute(quiet=True)


def once(losses: Losses, *batch: object) -> Any:
    """A loop whose loss is the mean of these losses."""

    def body(model: nn.Module, recorded: Losses, step: int) -> None:
        torch.autograd.backward(recorded(losses, *batch).mean())

    return body


def changing(model: nn.Module, losses: Losses, step: int) -> None:
    """The function reads a number that changes."""
    now = [step]

    def scaled(model: nn.Module, x: Tensor) -> Any:
        return model(x)[:, 0].square() * (1 + now[0])

    torch.autograd.backward(losses(scaled, X[:5]).mean())
    now[0] += 1


def of_another_model(model: nn.Module, losses: Losses, step: int) -> None:
    torch.autograd.backward(losses(lambda _, x: model(x)[:, 0].square(), X[:5]).mean())


def with_a_penalty(model: nn.Module, losses: Losses, step: int) -> None:
    penalty = sum(weight.square().sum() for weight in model.parameters())
    torch.autograd.backward(losses(slope_by_jvp, X[:5], X[:5]).mean() + penalty)


def of_other_losses(model: nn.Module, losses: Losses, step: int) -> None:
    """The loop descends on something else than the losses."""
    losses(residual, X[:5], X[:5])
    torch.autograd.backward(residual(model, X[:5], X[:5]).abs().mean())


def under_autocast(model: nn.Module, losses: Losses, step: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        torch.autograd.backward(losses(slope_by_jvp, X[:5], X[:5]).mean())


def by_derivatives(model: nn.Module, losses: Losses, step: int) -> None:
    torch.autograd.backward(residual(model, X[:5], X[:5]).mean())


def by_a_penalty(model: nn.Module, losses: Losses, step: int) -> None:
    torch.autograd.backward(critic(model, X[:5], X[:5], Y[:5]).mean())


def by_transforms(model: nn.Module, losses: Losses, step: int) -> None:
    torch.autograd.backward(residual_by_func(model, X[:5], X[:5]).mean())


def at_other_weights(model: nn.Module, losses: Losses, step: int) -> None:
    torch.autograd.backward(at_halves(model, X[:5], X[:5]).mean())


def transformed(model: nn.Module, losses: Losses, step: int) -> None:
    torch.func.vmap(lambda x: losses(squares, x))(X[:4].reshape(2, 2, 2))


def normed() -> nn.Module:
    model = Features(nn.Tanh())
    model.layers.insert(1, nn.BatchNorm1d(4).double())
    return model


def squares(model: nn.Module, x: Tensor, *_: object) -> Any:
    answer: Tensor = model(x)
    return answer[:, 0].square()


def attributed(**options: Any) -> Callable[[], object]:
    return lambda: carried_out(once(squares, X[:5]), Features(nn.Tanh())).attribute(quiet=True, **options)


def after_the_loop() -> None:
    carried_out(once(squares, X[:5]), Features(nn.Tanh())).losses(squares, X[:5])


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    # loops that trace.losses would let through
    "create_graph": (unfollowed(by_derivatives), r"step 0: .*create_graph=True\); let a function return one loss"),
    "gradient penalty": (unfollowed(by_a_penalty), r"step 0: .*create_graph=True\); let a function return one loss"),
    "torch.func": (
        unfollowed(by_transforms),
        r"step 0: .*loss through torch.func .* trace.losses\(function, \*batch\)",
    ),
    "other weights": (unfollowed(at_other_weights), r"step 0: .*'layers.0.weight'.*MAML.*trace.losses\(function"),
    "nodes as queries": (
        lambda: followed(replace(CASES["nodes"], queries=(X[:5], EDGES)), momentum),
        r"queries=: the tensors of \[5, 2\], \[2, 6\] differ .*x\[None\], edges\[None\]\), and call trace.losses",
    ),
    # wrong losses
    "another loss": (unfollowed(of_other_losses), r"step 0: the optimizer's gradient is not .*create_graph=True"),
    "a penalty": (unfollowed(with_a_penalty), r"step 0: .* Does the loss have other terms besides these losses\?"),
    "another model": (unfollowed(of_another_model), r"step 0: .* use the model that it is given"),
    "a number that changes": (
        unfollowed(changing),
        r"step 3: .* other losses in the loop .* numbers that do not change\?$",
    ),
    "a mean": (unfollowed(once(lambda model, x: model(x).mean(), X)), r"a tensor of shape \[\]; return one loss for"),
    "no tensor": (unfollowed(once(lambda model, x: None, X)), "the function returns a NoneType; return one loss"),
    "fewer losses": (
        unfollowed(once(lambda model, x: squares(model, x)[:2], X[:5])),
        "2 losses, but no tensor of the batch has 2 rows",
    ),
    "an object": (unfollowed(once(squares, X[:5], object())), "the batch holds a object; give tensors and numbers"),
    # combinations
    "BatchNorm": (unfollowed(once(squares, X[:5]), normed()), r"step 0: .*BatchNorm in training mode"),
    "autocast": (unfollowed(under_autocast), "step 0: trace.losses: losses under autocast cannot be followed"),
    "a transform": (unfollowed(transformed), r"step 0: trace.losses was called inside a transform of torch.func"),
    "effects": (attributed(effects=True), "effects need losses that are functions of the outputs"),
    "positions": (attributed(positions=True), "positions=True: trace.losses returns one loss for each example"),
    "after the loop": (after_the_loop, "call it inside the loop, while the loop is followed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_cause_and_the_way_out(case: str) -> None:
    act, said = REFUSED[case]
    with pytest.raises(Mistake, match=said):
        act()


# --- In a folder.


@pytest.mark.parametrize("name", ["gradient penalty", "MAML", "nodes"])
def test_a_trace_on_disk_has_the_same_contributions(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    ours, theirs = followed(case, adamw, to=tmp_path / "run", every=3), followed(case, adamw)
    same_parts(ours, theirs)
    later = load_trace(find_trace(tmp_path / "run"), model_of(case, nn.Tanh), losses=[case.losses])
    same_parts(later, theirs)


def test_a_batch_that_requires_gradients_does_so_from_a_folder(tmp_path: Path) -> None:
    adds_up(carried_out(needing_gradients, Features(nn.Tanh()), to=tmp_path / "run").attribute(quiet=True))


def test_a_folder_needs_the_functions_of_the_loop(tmp_path: Path) -> None:
    case = CASES["PINN"]
    followed(case, momentum, to=tmp_path / "run")
    for losses, said in (
        ([], "the loop passed the function 'residual' to trace.losses"),
        ([renamed()], "returned other losses in the loop"),
    ):
        later = load_trace(find_trace(tmp_path / "run"), model_of(case, nn.Tanh), losses=losses)
        with pytest.raises(Mistake, match=said):
            later.attribute(quiet=True)


def renamed() -> Losses:
    """A multiple of the losses under the same name, whose gradients look clipped."""

    def doubled(model: nn.Module, rows: Tensor, x: Tensor) -> Any:
        return 2 * residual(model, rows, x)

    doubled.__name__ = residual.__name__
    return doubled


def of_a_new_function(model: nn.Module, losses: Losses, step: int) -> None:
    torch.autograd.backward(losses(lambda model, x: 2 * squares(model, x), X[:5]).mean())


def test_a_folder_takes_one_function_of_each_name(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match=r"two functions have the name '<lambda>'.* define each function once"):
        unfollowed(of_a_new_function, to=tmp_path / "run")()


@pytest.mark.slow
def test_a_later_process_gives_the_functions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "from tests.foreign_loop.test_example_losses import CASES, Features, followed, momentum, residual\n"
        "def build(): return Features(nn.Tanh())\n"
        "def again(): followed(CASES['PINN'], momentum)\n"
    )
    monkeypatch.chdir(tmp_path)
    followed(CASES["PINN"], momentum, to="run")
    words = ["attribute", "run", "--model=mine.py:build", "--trust=mine.py"]
    assert command(words) == 2
    assert "--losses=: the loop passed the function 'residual'" in capsys.readouterr().err
    assert command([*words, "--losses=mine.py:residual"]) == 0
    assert command(["explain", "run", "--query=0", "--without=top:1", "--again=mine.py:again", "--trust=mine.py"]) == 2
    assert "again=: examples cannot be left out" in capsys.readouterr().err
