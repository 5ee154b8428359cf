"""Error messages for values in a configuration.

The module describes the values that a field accepts, reports pydantic's errors in one
line, and lists the names that other libraries use for keys and options.

>>> from pydantic import PositiveInt
>>> allowed(PositiveInt | None)
'a whole number > 0, or null'
>>> allowed(Literal["mean", "sum"])
"'mean' or 'sum'"
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ntkexp.component import Component
from ntkexp.config.plain_yaml import spell_value
from ntkexp.mistake import Mistake, nearest

WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    NoneType: "null",
    None: "null",
}


def allowed(kind: Any, limits: Iterable[object] = ()) -> str:
    """Describe the values of a type in words. `limits` are its constraints,
    such as `Gt(0)`."""
    parts = get_args(kind)
    match get_origin(kind):
        case origin if origin is Annotated:
            return allowed(parts[0], (*parts[1:], *limits))
        case origin if origin in {Union, UnionType}:
            return ", or ".join(
                allowed(part, limits if part is not NoneType else ()) for part in parts
            )
        case origin if origin is Literal:
            return " or ".join(f"'{part}'" for part in parts)
        case origin if origin is dict:
            return f"a mapping such as {{KEY: VALUE}}, each VALUE {allowed(parts[1])}"
        case origin if origin in {tuple, list}:
            return f"a list{list_length(parts, limits)}, each {allowed(parts[0])}"
    name = WORDS.get(kind, str(kind))
    if isinstance(kind, type) and issubclass(kind, Component):
        name = f"a component of kind {kind.__name__}"
    return f"{name} {' and '.join(bounds(limits))}".rstrip()


def list_length(parts: tuple[Any, ...], limits: Iterable[object]) -> str:
    """Describe the allowed length of a list. Return "" if any length is allowed.

    `parts` are the type arguments of the list.
    """
    if len(parts) > 1 and ... not in parts:
        return f" of {len(parts)}"
    least = [limit.min_length for limit in flat(limits) if isinstance(limit, MinLen)]
    return "".join(f" of at least {length}" for length in least)


def bounds(limits: Iterable[object]) -> Iterator[str]:
    """Yield the numeric bounds of a field as text, such as "> 0".
    Skip its other constraints."""
    for limit in flat(limits):
        match limit:
            case Gt():
                yield f"> {limit.gt}"
            case Ge():
                yield f"≥ {limit.ge}"
            case Lt():
                yield f"< {limit.lt}"
            case Le():
                yield f"≤ {limit.le}"


def flat(limits: Iterable[object]) -> Iterator[object]:
    """Yield all constraints, including those inside a pydantic `Field`."""
    for limit in limits:
        if isinstance(limit, FieldInfo):
            yield from flat(limit.metadata)
        else:
            yield limit


def accepted_values(field: FieldInfo) -> str:
    return allowed(field.annotation, field.metadata)


def plain_types(kind: Any) -> tuple[Any, ...]:
    """Return the types inside a union or container, and the values of a literal.

    >>> plain_types(tuple[int, ...] | Literal["log"] | None)
    (<class 'int'>, 'log', <class 'NoneType'>)
    """
    match get_origin(kind):
        case None:
            return (kind,) if kind is not ... else ()
        case origin if origin is Annotated:
            return plain_types(get_args(kind)[0])
        case origin if origin is Literal:
            return get_args(kind)
    return tuple(plain for part in get_args(kind) for plain in plain_types(part))


def component_bases(kind: Any) -> tuple[type[Component], ...]:
    return tuple(
        plain
        for plain in plain_types(kind)
        if isinstance(plain, type) and issubclass(plain, Component)
    )


def is_text(kind: Any) -> bool:
    """Return True if a field accepts only text or a path,
    so that values need no quotes."""
    return set(plain_types(kind)) <= {str, Path, NoneType}


def may_be_text(kind: Any) -> bool:
    """Return True if a field accepts text or a path. It may accept other types too."""
    return bool(
        {str, Path} & {plain for plain in plain_types(kind) if isinstance(plain, type)}
    )


def is_list(kind: Any) -> bool:
    """Return True if a field accepts a list."""
    origin = get_origin(kind)
    if origin in {tuple, list}:
        return True
    return origin in {Union, UnionType, Annotated} and any(
        is_list(part) for part in get_args(kind)
    )


# --- Report pydantic's first error in one line: key, value, accepted values,
# nearest spelling.


def refusal(
    error: ValidationError, kind: type[Component], key: str, values: Mapping[str, Any]
) -> Mistake:
    """Convert a validation error of a component to a `Mistake`.

    `key` is the key of the component. `values` holds the values of its fields,
    as the user wrote them."""
    first = error.errors()[0]
    # if a key is missing, report an unknown key first: it may be the misspelled key
    unknown = [other for other in error.errors() if other["type"] == "extra_forbidden"]
    if first["type"] == "missing" and unknown:
        first = unknown[0]
    reason = ""
    if first["type"] == "value_error":
        reason = str(first.get("ctx", {}).get("error", ""))
    # pydantic's error concerns several fields, and its message names them
    if not first["loc"]:
        return Mistake(reason or f"{key}: {first['msg']}".removeprefix(": "))
    name = str(first["loc"][0])
    full_key = f"{key}.{name}".removeprefix(".")
    if first["type"] == "extra_forbidden":
        keys = [f"{key}.{other}".removeprefix(".") for other in kind.model_fields]
        key_list = f"its keys are {', '.join(keys)}" if keys else "it has none"
        hint = nearest(full_key, keys)
        return Mistake(f"{full_key}: {kind.__name__} has no such key; {key_list}{hint}")
    field = kind.model_fields[name]
    if first["type"] == "missing":
        return Mistake(f"{full_key} is missing; it takes {accepted_values(field)}")
    value = values.get(name)
    names = [plain for plain in plain_types(field.annotation) if isinstance(plain, str)]
    reason = reason or f"it takes {accepted_values(field)}{nearest(str(value), names)}"
    return Mistake(f"{full_key}={spell_value(value)}: {reason}")


# --- Names that papers and other libraries use for keys and options.
#
# These names are not accepted. An error message suggests the name
# that this package uses.


KEYS: Mapping[str, str] = {
    name: our_key
    for our_key, names in {
        "data.query": "probe",
        "path.queries": "probes",
        "path.substeps": "pieces",
        "path.quadrature_points": "nodes",
        "optimizer.step_size": "lr learning_rate eta step_length",
        "optimizer.batch": "batch_size bs minibatch mini_batch batchsize",
        "optimizer.weight_decay": "wd l2 l2_reg regularisation regularization",
        "optimizer.clip_norm": "grad_clip clip max_norm max_grad_norm gradient_clip_val",
        "optimizer.betas": "beta1 beta2 beta",
        "optimizer": "opt optim solver",
        "optimizer=momentum": "sgd_momentum heavy_ball",
        "optimizer=nesterov": "nesterov",
        "optimizer=adam": "adam",
        "optimizer=sgd": "sgd",
        "schedule": "scheduler lr_schedule lr_scheduler",
        "schedule.warm_up": "warmup warmup_steps",
        "steps": "epochs epoch n_epochs num_epochs iterations iters n_iter max_iter max_iters num_iterations updates",
        "model": "net network arch architecture",
        "model.width": "hidden hidden_dim hidden_size hidden_units units neurons channels d_model n_hidden",
        "model.depth": "n_layers num_layers hidden_layers",
        "model.activation": "nonlinearity act activation_function phi",
        "model.activation=relu": "relu",
        "model.activation=tanh": "tanh",
        "model.kernel": "kernel_size filter_size",
        "init.W_std": "sigma_w w_std weight_std",
        "init.b_std": "sigma_b bias_std",
        "loss": "criterion objective loss_fn",
        "data": "dataset data_set task",
        "data.train": "n_train num_train train_size n_samples train_samples",
        "data.test": "n_test num_test test_size",
        "data.path": "csv file filename data_file",
        "data.target": "label label_column target_column y",
        "seed": "random_seed random_state rng",
        "dtype": "precision",
        "device": "gpu cuda",
        "threads": "n_threads num_threads n_jobs",
    }.items()
    for name in names.split()
}
"""Map the last part of a foreign key, in lower case,
to this package's key or KEY=VALUE."""

OPTIONS: Mapping[str, Mapping[str, str]] = {
    group: {name: our_key for our_key, names in table.items() for name in names.split()}
    for group, table in {
        "loss": {
            "squared": "mse l2 square squared_error mean_squared_error quadratic mseloss ls",
            "cross_entropy": "ce xent nll softmax crossentropy crossentropyloss categorical_crossentropy",
            "logistic": "bce binary_cross_entropy binary_crossentropy logloss sigmoid bcewithlogitsloss",
            "hinge": "svm",
        },
        "model": {
            "mlp": "fc fcn dense fully_connected feedforward feed_forward",
            "cnn": "conv convnet lenet vgg",
            "transformer": "gpt vit attention",
            "huggingface": "hf gpt2 bert",
            "module": "torch pytorch custom",
        },
        "optimizer": {
            "momentum": "sgd_momentum sgdm heavy_ball",
            "nesterov": "nag",
            "gd": "full_batch gradient_descent batch_gd",
            "flow": "gradient_flow ode",
        },
        "data": {
            "cifar10": "cifar cifar_10",
            "fashion_mnist": "fmnist fashionmnist",
            "table": "csv parquet pandas",
        },
        "init": {
            "ntk": "ntk_parametrisation lecun",
            "standard": "sp kaiming he pytorch",
            "mean_field": "mup mf",
        },
        "schedule": {
            "constant": "none fixed",
            "cosine": "cos cosine_annealing",
            "step": "multistep steplr",
        },
    }.items()
}
"""For each group, map a foreign name, in lower case, to this package's option."""
