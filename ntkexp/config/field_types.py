"""What a component's fields take, in words, read off their types; why pydantic refused a value, in one line; and what
other libraries call our keys and options.

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
    """Spell a phrase for a type, with its range."""
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
            least = [
                f" of at least {limit.min_length}"
                for limit in flat(limits)
                if isinstance(limit, MinLen)
            ]
            count = f" of {len(parts)}" if len(parts) > 1 and ... not in parts else "".join(least)
            return f"a list{count}, each {allowed(parts[0])}"
    word = WORDS.get(kind, str(kind))
    if isinstance(kind, type) and issubclass(kind, Component):
        word = f"a component of kind {kind.__name__}"
    return f"{word} {' and '.join(bounds(limits))}".rstrip()


def bounds(limits: Iterable[object]) -> Iterator[str]:
    """The range that a field's constraints leave."""
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
    """Constraints, also those that are wrapped in pydantic's `Field`."""
    for limit in limits:
        if isinstance(limit, FieldInfo):
            yield from flat(limit.metadata)
        else:
            yield limit


def accepted_values(field: FieldInfo) -> str:
    return allowed(field.annotation, field.metadata)


def plain_types(kind: Any) -> tuple[Any, ...]:
    """The plain types that a type is made of.

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
    """Whether only text can be meant, so that a value needs no quotes."""
    return set(plain_types(kind)) <= {str, Path, NoneType}


def may_be_text(kind: Any) -> bool:
    """Whether text is among what can be meant."""
    return bool({str, Path} & {plain for plain in plain_types(kind) if isinstance(plain, type)})


def is_list(kind: Any) -> bool:
    """Whether a list is among what can be meant."""
    origin = get_origin(kind)
    if origin in {tuple, list}:
        return True
    return origin in {Union, UnionType, Annotated} and any(is_list(part) for part in get_args(kind))


# --- Why pydantic refused a component, in one line: the key, the value, what is allowed, the nearest spelling.


def refusal(
    error: ValidationError, kind: type[Component], key: str, given: Mapping[str, Any]
) -> Mistake:
    """The first thing that is wrong with a component."""
    first = error.errors()[0]
    if first["type"] == "missing":  # perhaps it is there, and misspelled
        first = next(
            (other for other in error.errors() if other["type"] == "extra_forbidden"), first
        )
    reason = str(first.get("ctx", {}).get("error", "")) if first["type"] == "value_error" else ""
    if not first["loc"]:
        return Mistake(
            reason or f"{key}: {first['msg']}".removeprefix(": ")
        )  # a component's own words name its keys
    name = str(first["loc"][0])
    whole = f"{key}.{name}".removeprefix(".")
    if first["type"] == "extra_forbidden":
        keys = [f"{key}.{other}".removeprefix(".") for other in kind.model_fields]
        those = f"its keys are {', '.join(keys)}" if keys else "it has none"
        return Mistake(f"{whole}: {kind.__name__} has no such key; {those}{nearest(whole, keys)}")
    field = kind.model_fields[name]
    if first["type"] == "missing":
        return Mistake(f"{whole} is missing; it takes {accepted_values(field)}")
    value = given.get(name)
    words = [plain for plain in plain_types(field.annotation) if isinstance(plain, str)]
    reason = reason or f"it takes {accepted_values(field)}{nearest(str(value), words)}"
    return Mistake(f"{whole}={spell_value(value)}: {reason}")


# --- What others call our keys and options: the words of papers and of other libraries, with ours.
#
# They are accepted nowhere: one experiment has one spelling, and a message names it.


KEYS: Mapping[str, str] = {
    name: ours
    for ours, names in {
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
"""By the last part of a key, in small letters: the key that is meant, or the key with its value."""

OPTIONS: Mapping[str, Mapping[str, str]] = {
    group: {name: ours for ours, names in table.items() for name in names.split()}
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
"""By their groups, in small letters: the option that is meant."""
