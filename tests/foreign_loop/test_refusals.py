"""Refusals of loops and arguments: each is one line that names the cause and a way out, and the ways out work."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntkexp
from ntkexp.foreign_loop.trace import Trace
from ntkexp.mistake import Mistake
from tests.foreign_loop import loops
from tests.foreign_loop.bugs import never_zeroed, with_a_penalty
from tests.foreign_loop.loops import Body, Loop, fitted, followed, loop, missed, momentum, plain, sgd

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3).sin()
EXACT = 1e-12  # sums of 8 examples over 4 steps, relative to the change


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def pictures() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))


class ActorCritic(nn.Module):
    """A policy and a value of each state."""

    def __init__(self, *, named: bool) -> None:
        super().__init__()
        self.both, self.named = network(), named

    def forward(self, x: Tensor) -> dict[str, Tensor] | tuple[Tensor, Tensor]:
        policy, value = self.both(x).split([2, 1], 1)
        return {"pi": policy, "v": value} if self.named else (policy, value)


def two_outputs(named: bool, output: object, *used: str) -> Trace:
    """A loop whose loss uses some outputs."""
    net = ActorCritic(named=named)

    def loss(_: int) -> Tensor:
        answer = net(X)
        policy, value = (answer["pi"], answer["v"]) if named else answer
        parts = {"pi": policy, "v": value}
        return torch.stack([(parts[name] - 1).square().mean() for name in used]).sum()

    return fitted(net, torch.optim.SGD(net.parameters(), 0.1), loss, queries=X[:2], output=output)


def asked(queries: Any, net: nn.Module | None = None) -> None:
    net = network() if net is None else net
    with ntkexp.follow(net, torch.optim.SGD(net.parameters(), 0.1), queries=queries):
        pass


def through_functional_call() -> None:
    """The inner step of MAML, whose gradients come back to the weights through others."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with ntkexp.follow(net, optimizer, queries=X[:2]):
        own = dict(net.named_parameters())
        inner = torch.autograd.grad(net(X).square().mean(), list(own.values()), create_graph=True)
        fast = {name: weight - 0.1 * slope for (name, weight), slope in zip(own.items(), inner, strict=True)}
        torch.func.functional_call(net, fast, (X,)).square().mean().backward()
        optimizer.step()


def through_a_copy() -> None:
    """First-order MAML: the gradient of a copy replaces the gradient of the model."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with ntkexp.follow(net, optimizer, queries=X[:2]):
        fast = deepcopy(net)
        fast(X).square().mean().backward()
        for weight, other in zip(net.parameters(), fast.parameters(), strict=True):
            weight.grad = other.grad
        optimizer.step()


def second_stage(*, first_trains: slice = slice(None), together: bool = False) -> Trace:
    """Adam, and then SGD, which is followed from the beginning or not."""
    net = network()
    adam, sgd = torch.optim.Adam(net[first_trains].parameters(), 0.01), torch.optim.SGD(net.parameters(), 0.1)
    with ntkexp.follow(net, [adam, sgd] if together else adam, queries=X[:2]) as trace:
        for step in range(4):
            now = adam if step < 2 else sgd
            net.zero_grad()
            (net(X) - 1).square().mean().backward()
            now.step()
    return trace


# --- Gradients of two losses, which the loop combines.


def two_losses(given: Loop, batch: Tensor) -> list[Tensor]:
    outputs, labels = given.model(given.x[batch]), given.y[batch]
    return [nn.functional.cross_entropy(outputs[k::2], labels[k::2]) for k in range(2)]


def pcgrad(given: Loop, batch: Tensor) -> None:
    """Subtract from each gradient its projection onto the other one, if they conflict."""
    weights = list(given.model.parameters())
    first, second = (
        torch.cat([part.flatten() for part in torch.autograd.grad(loss, weights, retain_graph=True)])
        for loss in two_losses(given, batch)
    )
    inner = (first @ second).clamp(max=0.0) if given.done else first @ second
    whole = first - inner / second.square().sum() * second + second - inner / first.square().sum() * first
    for weight, part in zip(weights, torch.split(whole, [weight.numel() for weight in weights]), strict=True):
        weight.grad = part.view_as(weight).clone()
    given.step()


def gradnorm(given: Loop, batch: Tensor) -> None:
    """Weigh two losses, and take the norms of their gradients afterwards, to find the weights of the next step."""
    losses = torch.stack(two_losses(given, batch))
    given.zero()
    (losses @ losses.new_tensor([2.0, 1.0])).backward(retain_graph=True)  # type: ignore[no-untyped-call]
    for loss in losses:
        torch.autograd.grad(loss, given.model[4].get_parameter("weight"), retain_graph=True)
    given.step()


# --- Loops that change something besides their weights.


def writing_past_the_count(given: Loop, batch: Tensor) -> None:
    """Change one element by the least amount, in a way that torch does not count."""
    plain(given, batch)
    row = given.model[0].get_parameter("weight").data[0]
    row[0] = torch.nextafter(row[0], torch.ones_like(row[0]))


def with_a_buffer() -> Loop:
    """The last layer's bias is a buffer, which changes no gradient."""
    given = loop(sgd)
    bias = given.model[4].get_parameter("bias")
    del given.model[4].bias
    given.model[4].register_buffer("bias", bias.detach().clone())
    return replace(given, optimizers=[torch.optim.SGD(given.model.parameters(), lr=0.1)])


def assigning_a_buffer(given: Loop, batch: Tensor) -> None:
    """The new tensor was written to as often as the old one: never."""
    plain(given, batch)
    given.model[4].bias = given.model[4].get_buffer("bias") + 0.1


def exchanging_weights(given: Loop, batch: Tensor) -> None:
    """The optimizer continues with a weight that the model no longer has; all gradients are scaled."""
    if given.done == 4:
        given.model[4].weight = nn.Parameter(1.1 * given.model[4].get_parameter("weight").detach())
    plain(given, batch)


def all_but_one(model: nn.Sequential) -> loops.Optimizers:
    return [torch.optim.SGD(list(model.parameters())[:-1], lr=0.1)]


def given_one_more(given: Loop, batch: Tensor) -> None:
    if given.done == 4:
        given.optimizers[0].add_param_group({"params": [given.model[4].get_parameter("bias")]})
    plain(given, batch)


def resetting(given: Loop, batch: Tensor) -> None:
    if given.done == 4:
        given.optimizers[0].state.clear()
    plain(given, batch)


def with_gradients_from_before() -> Trace:
    given = loop(sgd)
    given.back(torch.arange(3))
    return followed(given, never_zeroed)


def moved_by_hand(given: Loop, batch: Tensor) -> None:
    plain(given, batch)
    with torch.no_grad():
        given.model[4].get_parameter("bias").add_(0.1)


def ascending(undone: float) -> Body:
    """Take the gradient after an ascent, as SAM does, and undo the ascent up to a factor."""

    def body(given: Loop, batch: Tensor) -> None:
        weights = list[Tensor](given.model.parameters())
        given.zero()
        with torch.no_grad():
            torch._foreach_add_(weights, 0.01)
        given.back(batch)
        with torch.no_grad():
            torch._foreach_sub_(weights, 0.01 * undone)
        given.step()

    return body


def diverging(model: nn.Sequential) -> loops.Optimizers:
    return [torch.optim.SGD(model.parameters(), lr=1e200)]


# --- Models and optimizers that are not followed.


class SAM(torch.optim.SGD):
    """Has the name of the optimizer that takes gradients elsewhere, and wraps none."""


class MeanOfSquares(nn.Linear):
    """A model that returns its loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def overlapping() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    net[1].weight.data = net[0].weight.data
    return net


class Squeeze(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze()


def scripted(net: nn.Module) -> nn.Module:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        result: nn.Module = torch.jit.script(net)
    return result


class Flattened(nn.Linear):
    """A row of outputs for each position."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(0, 1)


class Lengths(nn.Linear):
    def forward(self, x: Tensor, lengths: list[int] | None = None) -> Tensor:
        return super().forward(x) * torch.tensor(lengths)[:, None]


class Dicts(nn.Linear):
    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch["x"])


class Counted(nn.Linear):
    """Counts its calls in a buffer."""

    calls: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(x)


class ByTurns(nn.Linear):
    """In training, every second call omits a layer, as by chance."""

    turn = iter(range(1000))  # copies of the model share it

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.more = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = super().forward(x)
        if self.training and next(self.turn) % 2:
            return outputs
        more: Tensor = self.more(x)
        return outputs + more


class Entropy(nn.Linear):
    """An operation without a secant rule."""

    def forward(self, x: Tensor) -> Tensor:
        entropy: Tensor = torch.special.entr(2 + super().forward(x).tanh())
        return entropy


def one_step(net: nn.Module, x: Tensor, queries: Tensor) -> None:
    fitted(net, torch.optim.SGD(net.parameters(), 0.1), lambda _: net(x).sum(), 1, queries=queries)


def inside(given: Loop, batch: Tensor) -> None:
    """Call a part of a part of the model."""
    given.zero()
    given.model[0][0](given.x[batch]).square().sum().backward()  # type: ignore[index]
    given.step()


def wrapped(given: Loop) -> Loop:
    first = nn.Sequential(given.model[0])
    return replace(given, model=nn.Sequential(first), optimizers=sgd(first))


def stepped() -> Loop:
    """A loop whose optimizer has taken a step."""
    given = loop(momentum)
    plain(given, next(loops.batches()))
    return given


def doing(body: Body, given: Loop | None = None) -> Callable[[], object]:
    return lambda: followed(loop(sgd) if given is None else given, body)


def giving(**options: Any) -> Callable[[], object]:
    return lambda: followed(loop(sgd), plain, **options)


def attributing(**options: Any) -> Callable[[], object]:
    return lambda: followed(loop(sgd), plain).attribute(**options)


def querying(queries: Tensor) -> Callable[[], object]:
    return lambda: followed(replace(loop(sgd), queries=queries), plain)


def moving(optimizers: loops.Maker) -> Callable[[], object]:
    return lambda: followed(loop(optimizers), plain)


UNFIT = "queries=: the model cannot be called with the queries"
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "outputs as a set": (
        lambda: two_outputs(True, {"pi", "v"}, "pi"),
        r"output=.* is a set; give the name or the index",
    ),
    "no output": (
        lambda: two_outputs(True, None, "pi"),
        r"the module gives a dict, not a tensor: .*name one with output=",
    ),
    "no outputs": (lambda: two_outputs(True, [], "pi"), r"output=\[\] names no output"),
    "one query": (lambda: asked(X[0]), r"need an axis of examples, also if there is only one: give x\[None\]"),
    "one input of a kernel": (
        lambda: ntkexp.tangent_kernel(network(), X[0]),
        r"\(one example is x\[None\]\)",
    ),
    "one image of a kernel": (lambda: ntkexp.tangent_kernel(pictures(), torch.ones(1, 4, 4)), r"^x1: .*x\[None\]"),
    "MAML": (through_functional_call, r"step 0: the model was called with another tensor in place of '0\.weight'"),
    "first-order MAML": (
        through_a_copy,
        r"step 0: model\(x\) was never called .*, or the loop called only a copy of the model",
    ),
    "stage two": (
        second_stage,
        r"step 2: '0\.weight' was updated by another optimizer \(SGD\).*follow\(model, \[first,",
    ),
    "stage two thaws": (lambda: second_stage(first_trains=slice(2, 3)), r"updated by another optimizer \(SGD\)"),
    # arguments
    "a missing keyword": (giving(ids="name"), "not called with a keyword of this name"),
    "too few names": (giving(ids=lambda call: ["a"]), "1 names for the 6 examples of a call"),
    "too few names of queries": (
        giving(ids=lambda call: range(6), measure=lambda outputs, call: outputs.sum(1)),
        "6 names for the 3 examples of a call; .* \\(the call is that of the queries, which ids= names too",
    ),
    "no names": (giving(ids=lambda call: None), "ids=: the names are a NoneType"),
    "one name for all": (
        giving(ids=lambda call: torch.tensor(1)),
        "ids=: there are 1 names for the 6 examples of a call",
    ),
    "a list of names": (giving(ids=["a"]), "ids= is a list"),
    "the name of a loss": (giving(loss="mean"), "loss= is a str"),
    "every no steps": (giving(every=0), "every=0"),
    "the name of a log": (giving(log="wandb"), "log= is a str; give a function of numbers and step"),
    "a missing output": (giving(output="logits"), "output='logits'"),
    "little memory": (giving(memory_gb=1e-5), "GB of the followed steps up to step 4; raise it"),
    "half a mean": (attributing(mean="half"), "mean='half': choose one of"),
    "all effects": (attributing(effects="all"), "effects='all': choose one of"),
    "memory of NaN": (attributing(memory_gb=float("nan")), "memory_gb=nan: it takes a number > 0"),
    "positions in words": (attributing(positions="yes"), "positions='yes': give True or False"),
    "a text that decodes": (attributing(decode="text"), "decode= is a str"),
    "queries of other lengths": (querying(torch.zeros(3, 5).double()), UNFIT),
    "queries in float32": (querying(torch.zeros(3, 4)), UNFIT),
    "no queries": (querying(torch.zeros(0, 4).double()), "queries=: there are none"),
    # optimizers
    "no optimizer": (moving(lambda model: []), "there is no optimizer"),
    "an optimizer twice": (moving(lambda model: 2 * sgd(model)), "in the list twice"),
    "another model's": (moving(lambda _: sgd(loop(sgd).model)), "SGD updates no parameter of the model; give"),
    "a begun optimizer": (lambda: followed(stepped(), plain), r"has taken steps already, .* or give steps=range\(n\)"),
    "SAM alone": (moving(lambda model: [SAM(model.parameters())]), "SAM computes gradients .* has no base_optimizer"),
    "divergence": (moving(diverging), r"step \d: '.*' is no longer finite, because training has diverged"),
    # loops
    "no step": (lambda: followed(loop(sgd), lambda given, batch: None).attribute(), "no step was followed"),
    "a penalty": (doing(with_a_penalty), "use weight_decay .* let the module return this output"),
    "PCGrad": (doing(pcgrad), "step 0: .* a call had 2 backward passes .*PCGrad and GradNorm combine gradients"),
    "GradNorm": (doing(gradnorm), "step 0: .* a call had 3 backward passes .* train with a weighted sum of the losses"),
    "an ascent that stays": (
        doing(ascending(0.0)),
        "step 0: '0.weight' was changed by .* an ascent of SAM that was not",
    ),
    "an ascent that nearly stays": (doing(ascending(1 + 1e-10)), "step 0: '0.weight' was changed by something other"),
    "an uncounted write": (
        doing(writing_past_the_count),
        r"step 1: '0\.weight' was changed by something other than the optimizer",
    ),
    "an assigned buffer": (
        lambda: followed(with_a_buffer(), assigning_a_buffer),
        r"step 1: the buffer '4\.bias' was changed, .* no longer the same function",
    ),
    "a counter in a buffer": (
        lambda: one_step(Counted(2, 1), torch.ones(4, 2), torch.zeros(1, 2)),
        "step 0: the buffer 'calls' was changed, .* keep it outside of the model",
    ),
    "gradients from before": (
        with_gradients_from_before,
        r"step 0: .* parameters had a gradient before following .* call optimizer\.zero_grad\(\) before",
    ),
    "a state that is reset": (
        lambda: followed(loop(momentum), resetting),
        r"step 4: '0\.weight' does not follow .* resets or loads this state, end follow before",
    ),
    "chance outside torch": (
        lambda: one_step(ByTurns(2, 1), torch.ones(4, 2), torch.zeros(1, 2)),
        "step 0: .* a replay of a call returned other outputs .* random numbers from numpy or Python",
    ),
    "an exchanged weight": (doing(exchanging_weights), r"step 4: '4\.weight' is no longer the tensor"),
    "an added parameter": (
        lambda: followed(loop(all_but_one), given_one_more, steps=2),
        "step 4: '4.bias' was added to the optimizer .* refused with steps=",
    ),
    "an added parameter, later": (
        lambda: followed(loop(all_but_one), given_one_more, steps=[6]),
        "step 6: '4.bias' was added to the optimizer .* refused with steps=",
    ),
    "a weight moved by hand": (
        lambda: followed(loop(all_but_one), moved_by_hand),
        "step 1: '4.bias' was changed, and no followed optimizer updates it",
    ),
    "a part of the model": (
        lambda: followed(wrapped(loop(sgd)), inside),
        "step 0: model.* was never called .* perhaps its part '0.0'",
    ),
    # models
    "one number": (
        lambda: one_step(MeanOfSquares(2, 1), torch.ones(4, 2), torch.zeros(1, 2)),
        "the model returns one number for all examples",
    ),
    "no axis for one example": (
        lambda: one_step(nn.Sequential(nn.Linear(2, 1), Squeeze()), torch.ones(4, 2), torch.zeros(3, 2)),
        r"If it returns x\.squeeze\(\), return x\.squeeze\(-1\)",
    ),
    "rows of positions": (
        lambda: one_step(Flattened(1, 2), torch.ones(4, 3, 1), torch.ones(2, 3, 1)),
        "queries=: the model returns 3 rows for one query; .* positions and views need axes of their own",
    ),
    "a list of lengths": (
        lambda: asked((X[:2], [1, 2]), Lengths(3, 1).double()),
        "queries=: the model returns 2 rows for one query; .* give a tensor in place of a list",
    ),
    "a dict of keywords": (
        lambda: asked({"x": X[:2]}, Dicts(3, 1).double()),
        r"queries=: .* if the model takes one dict as its input, give queries=\(\{…\},\)",
    ),
    "labels of queries": (
        lambda: asked((X[:2], X[:2])),
        "queries=: .* a list or tuple holds the arguments of one call, .* let a DataLoader yield no labels",
    ),
    "another precision": (lambda: asked(X[:2].float()), "queries=: .* give queries in the dtype of the batches"),
    "two parameters in one place": (
        lambda: asked(X[:2], overlapping()),
        r"'0\.weight' and '1\.weight' are two parameters in the same memory, .* tie them by one parameter",
    ),
    "a scripted model": (
        lambda: asked(X[:2], scripted(network())),
        "the model is a RecursiveScriptModule of torch.jit, .* follow the module from which it was made",
    ),
    "a lazy layer": (
        lambda: asked(X[:2], nn.LazyLinear(2)),
        "'weight' has no shape yet, because its layer is lazy; call the model on a batch",
    ),
    "no secant rule": (
        lambda: one_step(Entropy(3, 4), torch.ones(2, 3), torch.ones(1, 3)),
        r"no difference rule for the operation aten\.special_entr",
    ),
    "a sparse gradient": (
        lambda: one_step(nn.Embedding(5, 2, sparse=True), torch.tensor([0, 3]), torch.arange(3)),
        "step 0: the gradient of 'weight' is sparse",
    ),
    "a gradient by frequency": (
        lambda: one_step(nn.Embedding(5, 2, scale_grad_by_freq=True), torch.arange(2), torch.arange(3)),
        "the gradient of 'weight' is divided by the frequency of each row",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_the_cause_and_the_way_out(case: str) -> None:
    act, said = REFUSED[case]
    with pytest.raises(Mistake, match=said):
        act()


def test_other_shapes_of_queries_get_no_advice_that_does_not_help() -> None:
    with pytest.raises(Mistake, match="the model cannot be called with the queries") as refusal:
        asked(torch.zeros(3, 5, dtype=torch.float64))
    assert "axis of examples" not in str(refusal.value)


def test_the_ways_out_work() -> None:
    for trace in (two_outputs(True, "v", "v"), second_stage(together=True)):
        assert missed(trace.attribute()) <= EXACT
    asked(X[0][None])
