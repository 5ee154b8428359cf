"""The functions as users call them: the weights that count, the arguments that are refused, threads and precision."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import inf, nan
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._ops import OpOverload

import ntkexp
from ntkexp import KernelMachine, infinite_kernel, load_run, secant_kernel, tangent_kernel
from ntkexp.foreign_loop.follow import follow
from ntkexp.kernel.read.plan import FEW_OPERATIONS, threads_for, work
from ntkexp.kernel.record.recorder import DispatchMode
from ntkexp.library import finite_step_kernel, reader_of
from tests.kernel import oracle
from tests.kernel.networks import Formula, own_weights, scaled
from tests.kernel.oracle import EPS, agree, normal, refused
from tests.kernel.problems import problem


def test_weights_may_be_given_in_part() -> None:
    given = problem("tanh")
    some = {name: weight for name, weight in given.end(0.5).items() if name.startswith("2.")}
    expected = oracle.tangent(given.module, given.x, given.x, some)
    agree(ntkexp.tangent_kernel(given.module, given.x, weights=some), expected, 100 * EPS)


def test_given_weights_need_not_require_gradients_to_count() -> None:
    """The module decides which weights are trained, not the mapping."""
    given = problem("tanh")
    expected = ntkexp.tangent_kernel(given.module, given.x)
    detached = own_weights(given.module)
    assert torch.equal(ntkexp.tangent_kernel(given.module, given.x, weights=detached), expected)
    given.module.get_parameter("0.weight").requires_grad_(False)
    attached = {name: weight.clone().requires_grad_() for name, weight in detached.items()}
    frozen = ntkexp.tangent_kernel(given.module, given.x)
    assert torch.equal(ntkexp.tangent_kernel(given.module, given.x, weights=attached), frozen)
    assert not torch.equal(frozen, expected)


def test_buffers_in_the_mapping_are_the_modules_business() -> None:
    given = problem("batch norm in evaluation")
    state = given.module.state_dict() | {"1.running_mean": torch.full((6,), 9.0, dtype=torch.float64)}
    expected = ntkexp.tangent_kernel(given.module, given.x)
    assert torch.equal(ntkexp.tangent_kernel(given.module, given.x, weights=state), expected)


def tied() -> nn.Module:
    """Return a network of one matrix with two names."""
    one, two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    two.weight = one.weight
    return Formula(lambda x, one, two: two(torch.tanh(one(x))), one=one, two=two).double()


SQUARE = torch.arange(9.0, dtype=torch.float64).view(3, 3) / 9


@pytest.mark.parametrize("names", [("one.weight", "two.weight"), ("two.weight",), ("one.weight",)])
def test_a_tied_weight_is_given_by_any_of_its_names(names: tuple[str, ...]) -> None:
    module, x = tied(), torch.eye(3, dtype=torch.float64)
    weights = {name: SQUARE.clone() for name in names}
    expected = oracle.tangent(module, x, x, {"one.weight": SQUARE})
    agree(ntkexp.tangent_kernel(module, x, weights=weights), expected, 100 * EPS)
    agree(ntkexp.secant_kernel(module, weights, weights, x, x), expected, 100 * EPS)
    own = ntkexp.tangent_kernel(module, x)
    assert torch.equal(ntkexp.tangent_kernel(module, x, weights=module.state_dict()), own)


@pytest.mark.parametrize("name", ["tanh", "convolution"])
def test_the_kernel_carries_no_graph(name: str) -> None:
    given = problem(name)
    assert not ntkexp.tangent_kernel(given.module, given.x).requires_grad


def of_tied(other: Tensor) -> object:
    weights = {"one.weight": SQUARE, "two.weight": other}
    return ntkexp.tangent_kernel(tied(), torch.eye(3, dtype=torch.float64), weights=weights)


def along(**ends: dict[str, Tensor]) -> object:
    given = problem("tanh")
    start, end = ends.get("start", {}), ends.get("end", {})
    return ntkexp.secant_kernel(given.module, start=start, end=end, queries=given.x, train=given.x)


def at(weights: dict[str, Tensor]) -> object:
    return ntkexp.tangent_kernel((given := problem("tanh")).module, given.x, weights=weights)


ONE_PARAMETER = r"weights\['one.weight'\] and weights\['two.weight'\] are the same parameter"
WEIGHTS: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "other numbers of a tied weight": (lambda: of_tied(2 * SQUARE), (ONE_PARAMETER,)),
    "another view of its memory": (lambda: of_tied(SQUARE.t()), (ONE_PARAMETER,)),
    "a misspelt name": (
        lambda: at({"0.wieght": torch.zeros(7, 3)}),
        (r"weights\['0.wieght'\]", "no such parameter", r"did you mean '0.weight'\?"),
    ),
    "another shape": (
        lambda: at({"0.weight": torch.zeros(3, 7)}),
        (r"weights\['0.weight'\]", r"\[3, 7\]", r"\[7, 3\]"),
    ),
    "a misspelt start": (
        lambda: along(start={"4.bais": torch.zeros(2)}),
        (r"start\['4\.bais'\].*did you mean '4\.bias'",),
    ),
    "a misspelt end": (lambda: along(end={"4.bais": torch.zeros(2)}), (r"end\['4\.bais'\].*did you mean '4\.bias'",)),
    "nothing to train": (
        lambda: ntkexp.tangent_kernel(problem("tanh").module.requires_grad_(False), problem("tanh").x),
        ("no parameter of the module requires gradients",),
    ),
    "an operation without a rule": (
        lambda: ntkexp.secant_kernel((given := problem("entropy")).module, {}, given.end(0.1), given.x, given.x),
        (r"aten\.special_entr",),
    ),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_that_do_not_fit_are_refused(kind: str) -> None:
    call, words = WEIGHTS[kind]
    with refused(*words):
        call()


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_that_nothing_depends_on(groups: int) -> None:
    """The share of a single class is 1 for every logit, so that no pixel belongs to any example."""
    layers = [nn.Conv1d(2, 2, 2, groups=groups), nn.Flatten(), nn.LayerNorm(6, elementwise_affine=False)]
    module = nn.Sequential(*layers, nn.Linear(6, 1), nn.LogSoftmax(1), nn.Linear(1, 2)).double()
    x = normal(3, 2, 4)
    agree(ntkexp.tangent_kernel(module, x), oracle.tangent(module, x, x), 100 * EPS)


def test_weights_may_lie_in_memory_in_any_order() -> None:
    """The softmax needs the difference rules, and the convolution is compared with autograd weight by weight."""
    module = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Softmax(1), nn.Flatten(), nn.Linear(12, 2)).double()
    x = normal(3, 2, 3, 3)
    expected = oracle.tangent(module, x, x)
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's own
    agree(ntkexp.tangent_kernel(module, x), expected, 100 * EPS)
    agree(ntkexp.tangent_kernel(module, x, sketch=4096).kernel, expected, 0.5)


def doubled(weight: Tensor) -> None:
    """Change a gradient after it was accumulated."""
    assert weight.grad is not None
    weight.grad *= 2


HOOKS = {
    "register_hook": lambda weight: weight.register_hook(torch.sign),
    "register_post_accumulate_grad_hook": lambda weight: weight.register_post_accumulate_grad_hook(doubled),
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_hooks_of_parameters_are_left_out_in_a_line(hook: Callable[[Tensor], Any]) -> None:
    """The kernel belongs to the function: it is the same with hooks, with hooks of frozen parameters, and without."""
    given = problem("tanh")
    x, end = given.x, given.end(0.5)
    start = own_weights(given.module)
    kernels = (
        partial(ntkexp.tangent_kernel, given.module, x),
        partial(ntkexp.secant_kernel, given.module, start, end, x, x),
    )
    plain = [kernel() for kernel in kernels]
    put_up = hook(given.module.get_parameter("2.weight"))
    for kernel, expected in zip(kernels, plain, strict=True):
        with pytest.warns(UserWarning, match=r"the parameter '2.weight' has a hook, which kernels ignore") as caught:
            found = kernel()
        assert torch.equal(found, expected)
        assert [Path(each.filename) for each in caught] == [Path(__file__)]
    put_up.remove()
    frozen = given.module.get_parameter("0.weight")
    hook(frozen)
    frozen.requires_grad_(False)
    ntkexp.tangent_kernel(given.module, x)  # a warning is an error here


def texts(kind: type[nn.Embedding | nn.EmbeddingBag], **settings: Any) -> nn.Module:
    """Return a network of a table of words, whose rows are averaged, or of bags."""
    more: dict[str, Any] = {"mode": "sum"} if kind is nn.EmbeddingBag else {}

    def forward(x: Tensor, table: nn.Module, last: nn.Module) -> Tensor:
        rows = table(x)
        outputs: Tensor = last(torch.tanh(rows.mean(1) if rows.dim() > 2 else rows))
        return outputs

    return Formula(forward, table=kind(5, 3, **more, **settings), last=nn.Linear(3, 2)).double()


WORDS = torch.tensor([[0, 1, 1], [2, 4, 0]])
TABLES = pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])


@TABLES
def test_a_table_with_sparse_gradients_has_the_kernels_of_one_without(kind: type[nn.Embedding]) -> None:
    sparse, plain = texts(kind, sparse=True), texts(kind)
    plain.load_state_dict(sparse.state_dict())
    start, end = own_weights(plain), scaled(plain, 1.3)
    assert torch.equal(ntkexp.tangent_kernel(sparse, WORDS), ntkexp.tangent_kernel(plain, WORDS))
    found, expected = (ntkexp.secant_kernel(module, start, end, WORDS, WORDS) for module in (sparse, plain))
    assert torch.equal(found, expected)


@TABLES
@pytest.mark.parametrize("x", [WORDS, torch.tensor([[0, 1], [2, 3]])], ids=["twice", "once"])
def test_a_gradient_divided_by_how_often_a_batch_has_a_row_is_refused(kind: type[nn.Embedding], x: Tensor) -> None:
    """Also if a batch has every row once, so that autograd gives the derivative. A frozen table has no gradient."""
    module = texts(kind, scale_grad_by_freq=True)
    own = own_weights(module)
    for kernel in (partial(ntkexp.tangent_kernel, module, x), partial(ntkexp.secant_kernel, module, own, own, x, x)):
        with refused(r"the gradient of 'table.weight' is divided by the frequency"):
            kernel()
    module.get_parameter("table.weight").requires_grad_(False)
    agree(ntkexp.tangent_kernel(module, x), oracle.tangent(module, x, x), 100 * EPS)


# Arguments that the functions of the library cannot take are refused in one line.


X = torch.arange(15.0, dtype=torch.float64).view(5, 3)
NET = nn.Linear(3, 2).double()
OWN = dict(NET.named_parameters())
DENSE = {"layer": "Dense", "features": 1}
SGD = torch.optim.SGD(NET.parameters())
CHAIN = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

INPUTS: dict[str, Any] = {
    "another rank": torch.ones(5, 2, 3, dtype=torch.float64),
    "another width": torch.ones(5, 4, dtype=torch.float64),
    "another dtype": X.float(),
    "no example": X[:0],
    "one number": X[0, 0],
    "not finite": X * nan,
    "array": X.numpy(),
    "lists": X.tolist(),
    "list of rows": list(X),
    "wrong name": {"z": X},
    "sparse": X.to_sparse(),
    "without numbers": X.to("meta"),
    "number": 3.0,
}

SIDES: dict[str, Callable[[Any], object]] = {
    "x2": lambda x: tangent_kernel(NET, X, x),
    "x2, sketched": lambda x: tangent_kernel(NET, X, x, sketch=8),
    "queries": lambda x: secant_kernel(NET, OWN, OWN, x, X),
    "train": lambda x: secant_kernel(NET, OWN, OWN, X, x),
    "x2, a finite step": lambda x: finite_step_kernel(NET, X, x, 0.1),
}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_that_do_not_fit_are_refused(side: str, kind: str) -> None:
    with refused():
        SIDES[side](INPUTS[kind])


def gives(answer: Callable[[Tensor], object]) -> nn.Module:
    """Return a module with a weight that gives this function of a layer's outputs."""
    return Formula(lambda x, layer: answer(layer(x)), layer=nn.Linear(3, 2).double())  # type: ignore[arg-type, return-value]


MODULES: dict[str, Any] = {
    "none": None,
    "a function": torch.tanh,
    "a class": nn.Linear,
    "not yet initialised": nn.LazyLinear(2),
    "wrapped": nn.DataParallel(NET),
    "outputs without gradients": gives(Tensor.detach),
    "outputs that are not finite": gives(lambda h: h * inf),
    "gradients that are not finite": gives(lambda h: (0 * h).sqrt()),
    "whole numbers": gives(lambda h: (h > 0).long()),
    "no outputs": gives(lambda h: h[:, :0]),
    "an error": gives(lambda h: h[:, 7]),
}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.filterwarnings("ignore:.*example by example")
def test_modules_without_a_kernel_are_refused(kind: str) -> None:
    with refused():
        tangent_kernel(MODULES[kind], X)


def inner(x1: Tensor, x2: Tensor) -> Tensor:
    return x1 @ x2.T


CALLS: dict[str, Callable[[], object]] = {
    "sketch": lambda: tangent_kernel(NET, X, sketch=10**5000),
    "step size": lambda: finite_step_kernel(NET, X, X, nan),
    "W_std": lambda: infinite_kernel([DENSE | {"W_std": 1e200}], X),
    "b_std": lambda: infinite_kernel([DENSE | {"b_std": 1e308}], X),
    "W_std of a module": lambda: infinite_kernel(CHAIN, X, W_std=1e200),
    "b_std of a module": lambda: infinite_kernel(CHAIN, X, b_std=nan),
    "W_std that is a word": lambda: infinite_kernel([DENSE | {"W_std": "wide"}], X),
    "inputs whose squares are not numbers": lambda: infinite_kernel(CHAIN, 1e200 * X),
    "sparse inputs": lambda: infinite_kernel(CHAIN, X.to_sparse()),
    "an array of words": lambda: infinite_kernel(CHAIN, np.array([["a"]])),
    "an array of integers": lambda: infinite_kernel(CHAIN, np.ones((2, 3), dtype=int)),
    "inputs without numbers": lambda: infinite_kernel(CHAIN, X.to("meta")),
    "seed": lambda: tangent_kernel(NET, X, sketch=8, seed=10**5000),
    "seed of draws": lambda: infinite_kernel(CHAIN, X, method="monte_carlo", seed=10**5000),
    "draws without end": lambda: infinite_kernel(CHAIN, X, method="monte_carlo", samples=10**5000),
    "draws of nothing": lambda: infinite_kernel(nn.Sequential(), X, method="monte_carlo"),
    "ridge": lambda: KernelMachine(inner, ridge="much"),  # type: ignore[arg-type]
    "time": lambda: KernelMachine(inner, time=-(10**5000)),
    "steps": lambda: KernelMachine(inner, steps=10**5000, step_size=0.1),
    "start": lambda: KernelMachine(inner, start=3.0),  # type: ignore[arg-type]
    "labels": lambda: KernelMachine(inner, classes=X.numpy()),  # type: ignore[arg-type]
    "targets": lambda: KernelMachine(inner).fit(X, X.to_sparse()),
    "memory_gb": lambda: infinite_kernel([DENSE], X, memory_gb=nan),
    "endless memory": lambda: infinite_kernel([DENSE], X, memory_gb=inf),
    "threads": lambda: infinite_kernel([DENSE], X, threads=0),
    "a run": lambda: load_run(None),  # type: ignore[arg-type]
    "following with no memory": lambda: follow(NET, SGD, queries=X, memory_gb=nan).__enter__(),
    "following into a number": lambda: follow(NET, SGD, queries=X, to=3).__enter__(),  # type: ignore[arg-type]
    "following no optimizer": lambda: follow(NET, NET, queries=X).__enter__(),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("argument", CALLS)
def test_arguments_that_cannot_be_are_refused(argument: str) -> None:
    with refused(r"^(?!.*Input should be an instance)"):
        CALLS[argument]()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["closed_form", "monte_carlo"])
def test_kernels_of_infinite_width_take_arrays(
    method: Literal["closed_form", "monte_carlo"], dtype: torch.dtype
) -> None:
    """Also those that are read-only, or run backwards in memory. The kernels have the dtype of the examples."""

    def kernels(*inputs: Any) -> tuple[Tensor, Tensor]:
        return infinite_kernel(CHAIN, *inputs, method=method, samples=2)

    x = X.to(dtype)
    fixed = x.numpy().copy()
    fixed.flags.writeable = False
    for found, expected in zip(kernels(fixed), kernels(x), strict=True):
        assert found.dtype == dtype
        assert torch.equal(found, expected)
    for found, expected in zip(kernels(x.numpy()[::-1], x), kernels(x.flip(0), x), strict=True):
        assert torch.equal(found, expected)


def test_sequences_of_other_lengths_have_a_kernel() -> None:
    """The number of axes and outputs has to agree, the lengths may differ."""
    layer = nn.Linear(3, 2).double()
    net = nn.Sequential(layer, nn.AdaptiveAvgPool2d((1, 2)), nn.Flatten())
    long, short = torch.ones(4, 7, 3, dtype=torch.float64), torch.ones(5, 2, 3, dtype=torch.float64)
    assert tangent_kernel(net, long, short).shape == (4, 2, 5, 2)


# Small kernels use one thread and large ones all; torch keeps its number of threads.


ALL = 3


@pytest.fixture
def several() -> Iterator[None]:
    """Let torch have several threads during a test."""
    before = torch.get_num_threads()
    torch.set_num_threads(ALL)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize(("operations", "threads"), [(0, 1), (FEW_OPERATIONS, 1), (2 * FEW_OPERATIONS, ALL)])
def test_threads_are_chosen_by_size_for_a_while(operations: float, threads: int) -> None:
    with threads_for(operations):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == ALL


@pytest.mark.usefixtures("several")
def test_products_are_counted() -> None:
    """Forward and C pull-backs of both sides, and the Gram of their results."""
    module, x = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double(), torch.ones(4, 3).double()
    convolution = nn.Conv1d(2, 3, 2).double()
    for net, given, numbers, forward in (
        (module, x, 5 + 2, 3 * 5 + 5 * 2),
        (convolution, torch.ones(4, 2, 6).double(), 3 * 5, 3 * 5 * 2 * 2),
    ):
        reader, weights = reader_of(net)
        tape = reader.record(weights, given)
        assert work(tape).of_kernel((4, 4), 2) == 2 * 3 * 4 * forward * 2 + 2 * 4 * 4 * 2**2 * numbers


# Kernels are computed in full precision for every setting of torch, and the setting stays.


PRECISIONS: tuple[Literal["high", "medium"], ...] = ("high", "medium")


@pytest.fixture(params=PRECISIONS)
def short(request: pytest.FixtureRequest) -> Iterator[str]:
    """A precision below float32: some processors then multiply in bfloat16, many GPUs in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


def kernels(module: nn.Module, x: Tensor) -> list[Tensor]:
    """A kernel by each function of the library."""
    spec: list[dict[str, Any]] = [DENSE, {"layer": "ReLU"}, DENSE]
    return [
        ntkexp.tangent_kernel(module, x),
        ntkexp.secant_kernel(module, own_weights(module), scaled(module, 1.1), x, x),
        *ntkexp.infinite_kernel(spec, x, engine="torch"),
    ]


def test_a_lower_precision_of_products_moves_no_bit(short: str) -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)), torch.randn(64, 64)
    found = kernels(module, x)
    assert torch.get_float32_matmul_precision() == short
    torch.set_float32_matmul_precision("highest")
    assert all(torch.equal(one, other) for one, other in zip(found, kernels(module, x), strict=True))


def test_inputs_may_have_no_features() -> None:
    """The kernel then comes from the bias alone; without a bias, it is refused."""
    x = torch.zeros(3, 0, dtype=torch.float64)
    with warnings.catch_warnings(action="ignore"):  # that nothing is drawn
        layer, unbiased = nn.Linear(0, 2).double(), nn.Linear(0, 2, bias=False).double()
    expected = torch.ones(3, 3, dtype=torch.float64)[:, None, :, None] * torch.eye(2)[None, :, None].double()
    assert torch.equal(ntkexp.tangent_kernel(layer, x), expected)
    assert torch.equal(ntkexp.secant_kernel(layer, {}, {"bias": torch.ones(2).double()}, x, x), expected)
    with refused("depend on no parameter"):
        ntkexp.tangent_kernel(unbiased, x)


def forward(setting: Callable[[], AbstractContextManager[object]]) -> nn.Module:
    """Return a convolution whose forward changes or reads torch's settings first."""

    def within(x: Tensor, layer: nn.Module) -> Tensor:
        with setting():
            outputs: Tensor = layer(x).flatten(1)
        return outputs

    return Formula(within, layer=nn.Conv1d(2, 3, 3))


@contextmanager
def reading() -> Iterator[None]:
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"
    yield


@contextmanager
def raising() -> Iterator[None]:
    """Allow TF32, as a module of another library may do for its own forward."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        torch.set_float32_matmul_precision("high")
        yield
        torch.set_float32_matmul_precision("highest")


SETTINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "flags": lambda: torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
    "reads": reading,
    "changes": raising,
}


def settings() -> tuple[object, ...]:
    """The settings by both of torch's interfaces."""
    kinds = attrgetter("cudnn.conv", "cudnn.rnn", "cuda.matmul")(torch.backends)
    older = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    return (*older, *(kind.fp32_precision for kind in kinds))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_module_may_use_torchs_older_settings_of_precision(name: str) -> None:
    torch.manual_seed(0)
    module, x = forward(SETTINGS[name]), torch.randn(4, 2, 6)
    plain = nn.Sequential(module.get_submodule("layer"), nn.Flatten())
    before = settings()
    found = ntkexp.tangent_kernel(module, x)
    assert settings() == before
    assert torch.equal(found, ntkexp.tangent_kernel(plain, x))
    assert ntkexp.secant_kernel(module, {}, scaled(module, 1.1), x, x).isfinite().all()


class ShortProducts(DispatchMode):
    """A simulated device that multiplies float32 numbers in 11 bits, always or where torch's settings allow it."""

    def __init__(self, *, obeys: bool) -> None:
        super().__init__()
        self.obeys = obeys

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in ("mm", "addmm", "bmm", "convolution"):
            kind = "cudnn.conv" if name == "convolution" else "cuda.matmul"
            if not (self.obeys and attrgetter(kind)(torch.backends).fp32_precision == "ieee"):
                args = [shorter(value) for value in args]
        return func(*args, **(kwargs or {}))


def shorter(value: Any) -> Any:
    """A float32 tensor rounded to 11 bits, as by TF32."""
    if not (isinstance(value, Tensor) and value.dtype == torch.float32):
        return value
    mantissa, exponent = torch.frexp(value)
    return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)


def test_a_device_that_shortens_products_is_refused() -> None:
    """Its kernels would be off by 1e-3. In double precision nothing is refused."""
    torch.manual_seed(0)
    dense, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(4, 8)
    weights = dict(dense.named_parameters())
    calls: list[Callable[[], object]] = [
        lambda: ntkexp.tangent_kernel(dense, x),
        lambda: ntkexp.TangentKernel(dense)(x),
        lambda: ntkexp.secant_kernel(dense, weights, {"0.bias": torch.ones(8)}, x, x),
        lambda: finite_step_kernel(dense, x, x, 0.1),
        lambda: ntkexp.infinite_kernel(dense, x),
        lambda: ntkexp.infinite_kernel(dense, x, method="monte_carlo", samples=2),
    ]
    for call in calls:
        with ShortProducts(obeys=False), refused(r"device cpu computes float32 .*module.double"):
            call()
    expected = ntkexp.tangent_kernel(dense.double(), x.double())
    with ShortProducts(obeys=False):
        assert torch.equal(ntkexp.tangent_kernel(dense, x.double()), expected)


def test_a_device_that_obeys_torchs_settings_gives_full_products(short: str) -> None:
    torch.manual_seed(0)
    images = nn.Sequential(nn.Unflatten(1, (2, 6)), nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(12, 1))
    x = torch.randn(4, 12)
    expected = kernels(images, x)
    with ShortProducts(obeys=True):
        found = kernels(images, x)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_module_that_allows_short_products_in_its_forward_is_refused_where_they_are_short() -> None:
    torch.manual_seed(0)
    module, x = forward(raising), torch.randn(4, 2, 6)
    with ShortProducts(obeys=True), refused(r"module lets torch compute float32 .*aten::convolution"):
        ntkexp.tangent_kernel(module, x)
