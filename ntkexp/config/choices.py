"""The YAML files of a configuration as plain data: where they lie, how they are parsed, what can be chosen, what a
shell offers to complete, and how a configuration is shown.

YAML text → plain data: mappings, lists, texts, numbers. Whatever else a text may hold is a YAML error with its line.

A date is a text, as it is to Hydra, whose files these are.

>>> parsed("a: [1, 2020-13-45]")
{'a': [1, '2020-13-45']}
>>> parsed("a: !!int 1x")
Traceback (most recent call last):
yaml.constructor.ConstructorError: '1x' is no int
  in "<unicode string>", line 1, column 4:
    a: !!int 1x
       ^

A value as it would be written on the command line.

>>> spelled([1, None, "a"]), spelled(True), spelled("x")
('[1, null, a]', 'true', 'x')

What can be chosen: groups (folders), their options (files) and the keys of each, read from YAML alone.

Completion and advice ask here, without Hydra and without importing a component.

>>> from ntkexp.config.choices import folders
>>> choices = Choices(folders(None))
>>> choices.options("init"), choices.keys("optimizer", "sgd")["optimizer.batch"]
(['mean_field', 'ntk', 'standard'], 32)

What a shell offers in place of an unfinished word: groups and keys, then their options and values.

It answers while somebody waits, so it reads YAML and imports no component.

>>> from ntkexp.config.choices import folders
>>> complete([], "model.wi", Choices(folders(None)))
['model.width=', 'model.width=512']
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from reprlib import repr as brief
from typing import TYPE_CHECKING, Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from ntkexp.mistake import Mistake, WrongArgument, nearest, refuse_special

if TYPE_CHECKING:
    from ntkexp.config.compose import Resolved


# --- Where the YAML files lie: those that come with the package, and before them those of the user.


LAYOUT = "it takes a folder of YAML files laid out like configs/, such as DIR/model/NAME.yaml"


def folders(config_dir: Path | None) -> tuple[Path, ...]:
    """List the folders to look in; the first that has a file wins."""
    return (shipped(),) if config_dir is None else (checked(config_dir.expanduser()), shipped())


def shipped() -> Path:
    """Find the package's own: inside it once installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside, beside = package / "configs", package.parent / "configs"
    return inside if inside.is_dir() else beside


def checked(folder: Path) -> Path:
    """Find the user's folder as an absolute path, or refuse it."""
    given = f"config_dir={folder}"
    if not folder.exists():
        beside = [str(other) for other in folder.parent.glob("*/")] if folder.parent.is_dir() else []
        raise WrongArgument(f"{given}: there is no such folder; {LAYOUT}{nearest(str(folder), beside)}", "config_dir")
    if not folder.is_dir():
        raise WrongArgument(f"{given} is a file; {LAYOUT}", "config_dir")
    if not any(folder.glob("*.yaml")) and not any(folder.glob("*/*.yaml")):
        raise WrongArgument(f"{given} holds no YAML file; {LAYOUT}", "config_dir")
    for file in [*folder.glob("*.yaml"), *folder.glob("*/*.yaml")]:
        if file.exists():  # Hydra opens whatever has the name
            refuse_special(file, str(file), sys.maxsize)
    return folder.resolve()


DEEPEST = 50
MOST = 100_000
"""Entries, an anchor's counted wherever they are referred to: who copies what is here must not run out of memory."""

LETTER = 10  # entries that a letter of a text with ${…} counts as: a slow grammar looks at each

DATE = "tag:yaml.org,2002:timestamp"
PLAIN = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}
"""What values are: sets, dates, bytes and pairs, which tags can ask for, are in no JSON that a run leaves."""


class Loader(yaml.SafeLoader):
    """Knows no dates, and says of a value that is none where it stands."""

    yaml_implicit_resolvers = {  # noqa: RUF012  as its base declares it
        key: [(tag, pattern) for tag, pattern in resolvers if tag != DATE]
        for key, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1  # goes down by calls, of which there cannot be many
        if self.depth > DEEPEST:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise ComposerError(None, None, f"more than {DEEPEST} lists and mappings lie in each other", mark)
        found = super().compose_node(parent, index)
        self.depth -= 1
        return found

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag not in PLAIN:
            kind = str(node.tag).replace("tag:yaml.org,2002:", "!!")
            advice = "write it as text, a number, a list or KEY: VALUE lines"
            raise ConstructorError(None, None, f"{kind} is no kind of value here; {advice}", node.start_mark)
        try:
            found = super().construct_object(node, deep)
            refuse_halves(found)
            return found
        except (ValueError, ArithmeticError, AttributeError, LookupError, TypeError):
            kind, shown = str(node.tag).rpartition(":")[2], brief(node.value)
            raise ConstructorError(None, None, f"{shown} is no {kind}", node.start_mark) from None


def parsed(text: str) -> Any:
    """Parse the one document in a text; None if there is none."""
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        refuse_growth(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def refuse_halves(value: object) -> None:
    """Half a character, which YAML can spell, is in no file that can be written."""
    if isinstance(value, str):
        value.encode()


def refuse_growth(root: yaml.Node) -> None:
    """An anchor stands for a copy, and a few of them in each other for more copies than there is memory."""
    known: dict[int, tuple[int, int]] = {}

    def extent(node: yaml.Node) -> tuple[int, int]:
        """How many entries a node has with all copies, and how deep it is."""
        if id(node) not in known:
            known[id(node)] = MOST + 1, 0  # until it is known, lest a node in itself be followed for ever
            parts = [extent(child) for child in children(node)]
            known[id(node)] = (
                own(node) + sum(part[0] for part in parts),
                1 + max((part[1] for part in parts), default=0),
            )
        entries, depth = known[id(node)]
        if entries > MOST or depth > DEEPEST:
            found = f"{MOST} entries" if entries > MOST else f"{DEEPEST} levels"
            raise ComposerError(None, None, f"its anchors and ${{…}} make more than {found} of it", node.start_mark)
        return entries, depth

    extent(root)


def own(node: yaml.Node) -> int:
    """What a node counts by itself."""
    return 1 + (LETTER * len(node.value) if isinstance(node, yaml.ScalarNode) and "${" in node.value else 0)


def children(node: yaml.Node) -> list[yaml.Node]:
    """What a list or mapping holds."""
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def spelled(value: object) -> str:
    """Spell a value as YAML on one line, and text as it stands."""
    if isinstance(value, str):
        return value
    text = str(yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True))
    return text.removesuffix("\n...\n").strip()


NO_CHOICES = frozenset({"claim", "study", "sweep"})
"""Folders of YAML that describe something else than a part of an experiment."""

LARGEST = 1 << 24
"""Bytes of a YAML file."""


@dataclass(frozen=True)
class Choices:
    """Options lie in some folders; a file in an earlier folder hides its namesakes in later ones."""

    folders: tuple[Path, ...]

    def groups(self) -> list[str]:
        """List the folders with an option in them."""
        return sorted({file.parent.name for folder in self.folders for file in folder.glob("*/*.yaml")} - NO_CHOICES)

    def options(self, group: str) -> list[str]:
        """List the options of a group."""
        files = (file for folder in self.folders for file in (folder / group).glob("*.yaml"))
        return sorted({file.stem for file in files if file.is_file()})

    def file(self, group: str, option: str) -> Path:
        """Find the file of an option."""
        if option not in self.options(group):
            known = ", ".join(self.options(group))
            hint = nearest(option, self.options(group))
            raise Mistake(f"'{option}' is no option of {group}; choose from {known}{hint}")
        return next(file for folder in self.folders if (file := folder / group / f"{option}.yaml").is_file())

    def root(self) -> Path:
        """The file in which everything is put together."""
        return next(file for folder in self.folders if (file := folder / "config.yaml").is_file())

    def keys(self, group: str, option: str) -> dict[str, Any]:
        """Find the dotted keys of an option, with their values."""
        return dict(dotted(read(self.file(group, option)), f"{group}."))

    def common(self) -> dict[str, Any]:
        """Find the dotted keys that belong to no group, with their values."""
        values = {key: value for key, value in read(self.root()).items() if key != "defaults"}
        return dict(dotted(values, ""))

    def defaults(self) -> dict[str, str]:
        """The option of each group where nothing else is asked for."""
        entries = read(self.root()).get("defaults", [])
        if not isinstance(entries, list):
            raise Mistake(f"{self.root()}: 'defaults' takes a list, such as '- model: mlp'")
        pairs = [pair for entry in entries if isinstance(entry, dict) for pair in entry.items()]
        return {str(group).split()[-1].lstrip("/"): option for group, option in pairs if isinstance(option, str)}


def read(file: Path) -> dict[str, Any]:
    """A YAML file, which must be a mapping."""
    try:
        refuse_special(file, str(file), LARGEST)
        found = deepcopy(known(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise Mistake(f"{file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise unparsed(error, file) from None
    if not isinstance(found, dict | None):
        raise Mistake(f"{file} holds no KEY: VALUE lines; write such as 'width: 64'")
    return found or {}


@lru_cache(maxsize=1000)
def known(text: str) -> Any:
    """What a text says, parsed once: a list of all choices reads the same few files again and again."""
    return parsed(text)


def unparsed(error: yaml.YAMLError | UnicodeDecodeError, file: Path) -> Mistake:
    """What is wrong with a YAML file, and where."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return Mistake(f"{file} cannot be read as YAML: it is not plain text in UTF-8")
    mark = error.problem_mark or error.context_mark
    where = f", line {mark.line + 1}" if mark else ""
    return Mistake(f"{file}{where} cannot be read as YAML: {error.problem or error.context}")


def dotted(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Go through the leaves of a tree.

    >>> dict(dotted({"a": {"b": 1, "c": [2]}}, ""))
    {'a.b': 1, 'a.c': [2]}
    """
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{key}.")
        elif key != "_target_":
            yield f"{prefix}{key}", value


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
        "init": {"ntk": "ntk_parametrisation lecun", "standard": "sp kaiming he pytorch", "mean_field": "mup mf"},
        "schedule": {"constant": "none fixed", "cosine": "cos cosine_annealing", "step": "multistep steplr"},
    }.items()
}
"""By their groups, in small letters: the option that is meant."""


def complete(words: Sequence[str], unfinished: str, choices: Choices) -> list[str]:
    """The words that may stand in place of the unfinished one, given those before it."""
    *before, begun = rejoined(words)
    chosen = choices.defaults() | {
        group: option
        for group, _, option in (word.partition("=") for word in before)
        if option in choices.options(group)
    }
    known = choices.common() | {
        key: value for group, option in chosen.items() for key, value in choices.keys(group, option).items()
    }
    if begun.removesuffix("=") not in {*known, *chosen}:
        begun = ""
    found = [
        word for word in offered(begun + unfinished, chosen, known, choices) if word.startswith(begun + unfinished)
    ]
    return [word.removeprefix(begun) for word in found]


def rejoined(words: Sequence[str]) -> list[str]:
    """Words as they were typed, and last what of the unfinished one comes before an '='.

    bash splits a word at '=' and hands over its parts, others the whole; of `model=` bash drops the '=' itself.

    >>> rejoined(["data", "=", "table", "model", "="]), rejoined(["data=table"]), rejoined(["model"])
    (['data=table', 'model='], ['data=table', ''], ['model='])
    """
    typed: list[str] = []
    for word in words:
        if typed and (word == "=" or typed[-1].endswith("=")):
            typed[-1] += word
        else:
            typed.append(word)
    if typed and typed[-1].endswith("="):
        return typed
    if typed and "=" not in typed[-1]:
        return [*typed[:-1], f"{typed[-1]}="]
    return [*typed, ""]


def offered(text: str, chosen: Mapping[str, str], known: Mapping[str, Any], choices: Choices) -> list[str]:
    """Keys; or values, once there is an '=', and where a single key is left: a shell then ends the word only there."""
    key, equals, value = text.partition("=")
    if equals:
        return [f"{key}={option}" for option in values(key, value, chosen, known, choices)]
    keys = [word for word in (*chosen, *known) if word.startswith(key)]
    default = (
        [f"{keys[0]}={option}" for option in values(keys[0], "", chosen, known, choices)] if len(keys) == 1 else []
    )
    return [*(f"{word}=" for word in keys), *default]


def values(
    key: str, value: str, chosen: Mapping[str, str], known: Mapping[str, Any], choices: Choices
) -> Iterator[str]:
    """Offer the options of a group, the names of a list, or the default."""
    names = choices.options(key.rsplit(".", maxsplit=1)[-1])
    if key in chosen:
        yield from choices.options(key)
    elif key in known and names and isinstance(known[key], list):
        started = value[: max(value.rfind(","), value.rfind("[")) + 1] or "["
        yield from (f"{started}{name}{end}" for name in names if name not in started for end in ("]", ","))
    elif isinstance(known.get(key), bool):
        yield from ("false", "true")
    elif known.get(key) not in (None, "???"):
        yield spelled(known[key]).replace(", ", ",")


# --- A configuration to read: as YAML that would bring it about again, and the tree of everything that can be chosen.


def shown(resolved: Resolved) -> str:
    """What would run: a `config.yaml` for a folder of the user's."""
    fields = resolved.experiment().fields()
    defaults = "".join(f"  - {group}: {resolved.chosen[group]}\n" for group in fields if group in resolved.chosen)
    return f"defaults:\n{defaults}  - _self_\n\n{as_yaml(completed(resolved.tree, fields))}"


def as_yaml(tree: Mapping[str, Any], indent: str = "") -> str:
    """Plain data in its own order, a line per key.

    >>> print(as_yaml({"a": {"b": [1, None], "c": "x: y"}}), end="")
    a:
      b: [1, null]
      c: 'x: y'
    """
    return "".join(
        f"{indent}{key}:\n{as_yaml(item, indent + '  ')}"
        if isinstance(item, dict) and item
        else f"{indent}{key}: {on_one_line(item)}\n"
        for key, item in tree.items()
    )


def on_one_line(value: object) -> str:
    """YAML of a value."""
    listed = str(yaml.safe_dump([value], default_flow_style=True, width=float("inf"), allow_unicode=True))
    return listed.strip()[1:-1]


def completed(tree: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """The tree as the user wrote it, with the fields that only a class has a default for."""
    return {
        key: completed(item, fields.get(key, {})) if isinstance(item, dict) else item
        for key, item in (fields | tree).items()
    }


def tree(choices: Choices) -> str:
    """Show every group and option with its keys, and last what belongs to none."""
    defaults = choices.defaults()
    blocks = [
        block(
            f"{title(group, option, choices)}{' (default)' * (defaults.get(group) == option)}",
            choices.file(group, option),
        )
        for group in choices.groups()
        for option in choices.options(group)
    ]
    return "\n".join([*blocks, block("always", choices.root())])


def title(group: str, option: str, choices: Choices) -> str:
    """How an option is asked for: as a group's, or by its name in a list."""
    if group in choices.defaults():
        return f"{group}={option}"
    lists = [key for key in choices.common() if key.split(".")[-1] == group]
    return f"{(lists or [group])[0]}=[{option}]"


def block(head: str, file: Path) -> str:
    """A file with its comments, without what is no choice."""
    return "\n".join([head, *(f"    {line}" for line in lines(file))]) + "\n"


def lines(file: Path) -> Iterator[str]:
    """The lines of a file that hold keys and comments."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Mistake(f"{file} cannot be read as YAML: it is not UTF-8 text") from None
    within = False
    for line in text.splitlines():
        within = line.startswith("defaults:") or (within and line[:1] in " -")
        if line.strip() and not within and not line.lstrip().startswith("_target_:"):
            yield line
