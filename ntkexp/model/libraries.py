"""Networks that others wrote: any `nn.Module` built by a function of the user's, models of timm, and of transformers;
nothing is downloaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import torch
from jaxtyping import Float
from pydantic import Field, field_validator
from torch import Tensor, nn

from ntkexp.component import Count, Depth
from ntkexp.init import AbstractInit
from ntkexp.mistake import Mistake, nearest, nearest_file
from ntkexp.model.base import AbstractArchitecture, LearningTask
from ntkexp.model.foreign import (
    Option,
    adapt_module,
    files_imported,
    import_library,
    load_module,
    refuse_chance,
    refuse_elsewhere,
    refuse_parts_elsewhere,
)
from ntkexp.model.transformer import at_each_position, fitting_patch, largest_divisor
from ntkexp.records.atomic import read_object


class Module(AbstractArchitecture):
    """Any `nn.Module`, built by a function of the user's:

    `path` is FILE.py:FUNCTION, or FILE.py, of which the function is called build.

        ntkexp train model=module model.path=my_net.py:build      (and my_net.py has to be trusted)

    `build` is a function, or the class of the module itself. It is given those of these arguments that its
    signature names, and whatever else it takes needs a default:

        shape     of an example, such as (1, 8, 8)       outputs   how many the data and the loss ask for
        width     model.width                            vocabulary   how many tokens there are; 0: the data has numbers
        seed      a number below 2³², another for every `seed`: the start of the stream of the weights

    It runs with torch's own generator seeded, so that every `nn.init` inside is drawn from `seed`, and in double
    precision. The module then takes [example, *shape] (tokens as int64) and returns [example, outputs], or
    [example] if that is 1. It is run in evaluation: dropout does nothing, and batch norm keeps its statistics. Of
    `init`, only how the output is read (alpha, antisymmetric, centred) applies. The file, with the files beside it
    that it imports, belongs to the identity of a run; other files that it reads do not.
    """

    remedy: ClassVar[str] = (
        "look at how the module draws its weights, and what it does with the data"
    )

    path: str

    @field_validator("path")
    @classmethod
    def names_a_file(cls, path: str) -> str:
        file, _, function = file_and_function(path)
        if not file.endswith(".py") or not function.isidentifier():
            raise Mistake("it takes FILE.py:FUNCTION, such as my_net.py:build")
        return path

    @property
    def given(self) -> str:
        """The key with its value."""
        return f"model.path={self.path}"

    @property
    def file(self) -> Path:
        """The file, which has to be there."""
        file = Path(file_and_function(self.path)[0]).expanduser()
        if file.is_file():
            return file
        files = [str(other.relative_to(file.parent)) for other in file.parent.glob("*.py")]
        raise Mistake(
            f"{self.given}: there is no file {file} (seen from {Path.cwd()}){nearest_file(file.name, files)}"
        )

    def code(self) -> tuple[Path, ...]:
        return (self.file,)

    def files(self) -> tuple[Path, ...]:
        return files_imported(self.file)

    def network(
        self, init: AbstractInit, task: LearningTask, generator: torch.Generator
    ) -> nn.Module:
        build = find_function(
            load_module(self.file, self.given), file_and_function(self.path)[2], self.given
        )
        seed = generator.initial_seed()
        offered = {
            "shape": task.shape,
            "outputs": task.outputs,
            "width": self.width,
            "seed": seed,
            "vocabulary": task.vocabulary,
        }
        # Of these the function gets those that its signature names.
        parameters = inspect.signature(build).parameters.values()
        several = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        for parameter in parameters:
            if (
                parameter.name not in offered
                and parameter.default is parameter.empty
                and parameter.kind not in several
            ):
                raise Mistake(
                    f"{self.given} wants '{parameter.name}', and can be given {', '.join(offered)}; give it a default"
                )
        arguments = {
            parameter.name: offered[parameter.name]
            for parameter in parameters
            if parameter.name in offered
        }

        def make() -> nn.Module:
            made = build(**arguments)
            if not isinstance(made, nn.Module):
                raise Mistake(
                    f"{self.given} returns a {type(made).__name__}; let it return an nn.Module"
                )
            return made

        module, again = (adapt_module(make, task, seed, self.given, self.file) for _ in range(2))
        refuse_chance(self.given, module, again)
        return module


def file_and_function(path: str) -> tuple[str, str, str]:
    """A path as its file and its function.

    >>> file_and_function("a/my_net.py:Net"), file_and_function("my_net.py")
    (('a/my_net.py', ':', 'Net'), ('my_net.py', ':', 'build'))
    """
    return (path, ":", "build") if path.endswith(".py") else path.rpartition(":")


def find_function(module: object, name: str, given: str) -> Callable[..., object]:
    own = getattr(module, "__name__", "")
    functions = [
        key
        for key, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == own
    ]
    value: object = getattr(module, name, None)
    if value is None:
        there = f"it has {', '.join(functions)}" if functions else "it has no function"
        raise Mistake(
            f"{given}: there is no function {name} in the file; {there}{nearest(name, functions)}"
        )
    if isinstance(value, nn.Module):
        raise Mistake(
            f"{given}: {name} is a module, which no seed can draw again; name a function that builds it"
        )
    if not callable(value):
        raise Mistake(f"{given}: {name} is a {type(value).__name__}, and a function is expected")
    if inspect.iscoroutinefunction(value):
        raise Mistake(
            f"{given}: {name} is async, and nothing would await it; write `def` in place of `async def`"
        )
    return value


class Timm(AbstractArchitecture):
    """Models of images of the library timm, built from their definitions; nothing is downloaded.

    `name` is one of timm's; weights are drawn as the model itself draws them.

        ntkexp train model=timm model.name=vit_tiny_patch16_224 model.width=32

    A model is made for the images of the data, and as large as `width`, `depth` and `heads` say, as far as its
    class has such settings: `width` is the channels of a ResNet's or ConvNeXt's first stage (each later one
    doubles them) and of a transformer's tokens, `depth` the blocks of a transformer without stages. `options` go
    to the model and win over these; they are settings of its class, so that none can name a file or an address to
    read.
    """

    width: Count = 16
    depth: Depth = 1
    heads: Depth = 4
    name: str = "resnet10t"
    options: dict[str, Option] = Field({})

    def network(
        self, init: AbstractInit, task: LearningTask, generator: torch.Generator
    ) -> nn.Module:
        task.refuse_tokens(self.option)
        if len(task.shape) != 3:
            raise Mistake(f"model=timm takes images, and {task.description}; choose model=mlp")
        make = partial(self.build, import_library("timm", "timm"), task)
        return adapt_module(make, task, generator.initial_seed(), f"model.name={self.name}")

    def build(self, timm: Any, task: LearningTask) -> nn.Module:
        if not timm.is_model(self.name):
            hint = nearest(self.name, timm.list_models())
            raise Mistake(
                f"model.name={self.name}: timm has no such model{hint or '; timm.list_models() lists them'}"
            )
        with torch.device(
            "meta"
        ):  # to look at the class without making the weights of its usual size
            usual = timm.create_model(self.name)
        names = constructor_settings(type(usual))
        if strange := [key for key in self.options if key not in names]:
            kind = type(usual).__name__
            raise Mistake(
                f"model.options: {kind} of timm has no {strange[0]}{nearest(strange[0], names)}"
            )
        sizes = self.sizes(task, set(inspect.signature(type(usual)).parameters))
        model: nn.Module = timm.create_model(
            self.name, num_classes=task.outputs, in_chans=task.shape[0], **(sizes | self.options)
        )
        return model

    def sizes(self, task: LearningTask, names: set[str]) -> dict[str, int | tuple[int, ...]]:
        """The names that the classes of timm have for sizes, of those that this class knows."""
        stages = tuple(self.width * 2**stage for stage in range(4))
        sizes: dict[str, int | tuple[int, ...]] = {
            "channels": stages,
            "stem_width": max(4, self.width // 2),
            "dims": stages,
            "embed_dim": self.width,
        }
        if "depth" in names:
            sizes |= {"depth": self.depth, "num_heads": largest_divisor(self.heads, self.width)}
        if "img_size" in names:
            sizes |= {"img_size": task.shape[1:], "patch_size": fitting_patch(4, task.shape)}
        return {key: value for key, value in sizes.items() if key in names}


def constructor_settings(kind: type[nn.Module]) -> set[str]:
    """What a class of timm takes: its arguments, those it hands on, and entries of the description it is made of.

    >>> sorted(constructor_settings(nn.Flatten))
    ['end_dim', 'start_dim']
    """
    names: set[str] = set()
    for each in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        parameters = list(inspect.signature(each).parameters.values())
        names |= {
            parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD
        }
        described = get_type_hints(vars(each).get("__init__", each)).get("cfg")
        names |= {field.name for field in fields(described)} if is_dataclass(described) else set()
        if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
            break
    return names - {"cfg"}


# --- The body of a model of positions: what it is given for each, and how one vector is read of all.


class Body(nn.Module):
    """A model without its head, read at the last position or at the mean over positions."""

    def __init__(self, model: nn.Module, entrance: nn.Module, key: str, last: bool) -> None:
        super().__init__()
        self.entrance, self.model, self.key, self.last = entrance, model, key, last

    def forward(self, x: Tensor) -> Float[Tensor, "example width"]:
        hidden: Tensor = self.model(**{self.key: self.entrance(x)}).last_hidden_state
        if hidden.dim() == 4:  # a convolutional model's pixels
            return hidden.flatten(2).mean(2)
        return hidden[:, -1] if self.last else hidden.mean(1)


class DenseByRow(nn.Module):
    """One dense layer takes each row of an example."""

    def __init__(self, dense: nn.Module) -> None:
        super().__init__()
        self.dense = dense

    def forward(
        self, x: Float[Tensor, "example *shape"]
    ) -> Float[Tensor, "example position width"]:
        return at_each_position(self.dense, x.reshape(len(x), *rows_of_example(x.shape[1:])))


def rows_of_example(shape: tuple[int, ...]) -> tuple[int, int]:
    """The positions of an example, and the features of each: the rows of images with all channels, else the first
    axis.

    >>> rows_of_example((3, 8, 4)), rows_of_example((5, 7)), rows_of_example((6,))
    ((8, 12), (5, 7), (6, 1))
    """
    positions = shape[-2] if len(shape) > 2 else shape[0]
    return positions, prod(shape) // positions


class Huggingface(AbstractArchitecture):
    """Models of the library transformers, built from a configuration or read from a folder; nothing is downloaded.

    `width`, `depth` and `heads` are those of a model by name; heads are the most that divide the width.

        ntkexp train model=huggingface model.name=llama data=modular_addition
        ntkexp train model=huggingface model.path=my_model data=text data.path=book.txt

    `name` is a type of model as config.json names it (gpt2, bert, llama, vit, …), made as large as `width`, `depth` and
    `heads` say; a folder with config.json, and weights if it has some, is taken as it is. The body of the model gives a
    vector for each position, and a dense layer, drawn as `init` says, reads the outputs:

        tokens          its own table of tokens           the last position is read
        images, for a model of images, as they are        the mean over positions is read
        anything else   a dense layer for each row        the mean over positions is read

    Padding and signs for beginning and end are switched off, for every token is one. `options` are further entries
    of the configuration and win over all of these. No code of a folder is run, and nothing outside of it is read.
    """

    width: Count = 32
    depth: Depth = 1
    heads: Depth = 4
    name: str = "gpt2"
    path: Path | None = None
    options: dict[str, Option] = Field({})

    @property
    def given(self) -> str:
        """This key counts, with its value."""
        return f"model.name={self.name}" if self.path is None else f"model.path={self.path}"

    def files(self) -> tuple[Path, ...]:
        if self.path is None:
            return ()
        folder = self.path.expanduser()
        if not (folder / "config.json").is_file():
            raise Mistake(
                f"{self.given} is not a folder with a config.json; model.name builds one without a folder"
            )
        kinds = {".json", ".safetensors", ".bin"}
        return tuple(sorted(file for file in folder.iterdir() if file.suffix in kinds))

    def network(
        self, init: AbstractInit, task: LearningTask, generator: torch.Generator
    ) -> nn.Module:
        make = partial(self.build, init, task, generator)
        return adapt_module(make, task, generator.initial_seed(), self.given)

    def build(
        self, init: AbstractInit, task: LearningTask, generator: torch.Generator
    ) -> nn.Module:
        with quiet_library(import_library("transformers", "huggingface")) as transformers:
            model = self.model(transformers, task).double().eval()
        body = Body(model, *self.entrance(model, init, task, generator), last=task.vocabulary > 0)
        sample = task.sample()
        features = body(sample.long() if task.vocabulary else sample).shape[1]
        return nn.Sequential(body, init.readout(task.outputs).build((features,), generator))

    def model(self, transformers: Any, task: LearningTask) -> Any:
        """The model of the library, from the folder or of a name; it never runs code that a folder holds."""
        automatic = transformers.AutoModel
        if self.path is None:
            kind = self.kind_of(transformers, "model.name", self.name)
            usual, own = (
                kind(),
                kind.attribute_map,
            )  # some call our sizes otherwise, and some lack them
            sizes = {
                own.get(key, key): size
                for key, size in self.sizes(task).items()
                if hasattr(usual, key)
            }
            return automatic.from_config(
                kind(**(sizes | self.chosen(kind))), trust_remote_code=False
            )
        files = self.files()
        fields = read_object(self.path.expanduser() / "config.json")
        refuse_elsewhere(fields, self.given)
        kind = self.kind_of(
            transformers, f"{self.given}: 'model_type'", str(fields.get("model_type"))
        )
        configuration = kind.from_dict(fields | self.chosen(kind))
        refuse_parts_elsewhere(files, self.given)
        if task.vocabulary > getattr(configuration, "vocab_size", task.vocabulary):
            raise Mistake(
                f"{self.given} knows {configuration.vocab_size} tokens, and {task.description}"
            )
        if all(file.suffix == ".json" for file in files):
            return automatic.from_config(configuration, trust_remote_code=False)
        folder, safe = self.path.expanduser(), {"trust_remote_code": False, "weights_only": True}
        return automatic.from_pretrained(
            folder, config=configuration, local_files_only=True, **safe
        )

    def kind_of(self, transformers: Any, key: str, name: str) -> Any:
        """The library's own class of configurations of a name."""
        names = list(transformers.CONFIG_MAPPING.keys())
        if name not in names:
            raise Mistake(f"{key}={name}: transformers has no such model{nearest(name, names)}")
        return transformers.CONFIG_MAPPING[name]

    def chosen(self, kind: Any) -> dict[str, Option]:
        """The options as this configuration calls them: entries that it has, which are values and no methods."""
        refuse_elsewhere(self.options, "model.options")
        names = {key for key in vars(kind()) if not key.startswith("_")} | set(kind.attribute_map)
        if strange := [
            key for key in self.options if key not in names and not key.endswith("_implementation")
        ]:
            raise Mistake(
                f"model.options: {kind.__name__} has no {strange[0]}{nearest(strange[0], names)}"
            )
        return {kind.attribute_map.get(key, key): option for key, option in self.options.items()}

    def sizes(self, task: LearningTask) -> dict[str, Option | tuple[int, ...]]:
        """Our sizes under the names that configurations have for them."""
        heads = largest_divisor(self.heads, self.width)
        sizes: dict[str, Option | tuple[int, ...]] = {
            "vocab_size": max(task.vocabulary, 1),
            "hidden_size": self.width,
            "num_hidden_layers": self.depth,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "intermediate_size": 4 * self.width,
            "max_position_embeddings": rows_of_example(task.shape)[0],
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
            "use_cache": False,
        }
        if len(task.shape) == 3:
            side = fitting_patch(4, task.shape)
            sizes |= {
                "num_channels": task.shape[0],
                "image_size": task.shape[1:],
                "patch_size": side,
            }
        return sizes

    def entrance(
        self, model: Any, init: AbstractInit, task: LearningTask, generator: torch.Generator
    ) -> tuple[nn.Module, str]:
        """What comes before the model, and the name under which the model takes it."""
        if model.main_input_name == "pixel_values":
            task.refuse_tokens(f"{self.option} {self.given}")
            return nn.Identity(), "pixel_values"
        if task.vocabulary:
            return nn.Identity(), "input_ids"
        features = rows_of_example(task.shape)[1]
        return DenseByRow(
            init.dense(model.config.hidden_size).build((features,), generator)
        ), "inputs_embeds"


@contextmanager
def quiet_library(transformers: Any) -> Iterator[Any]:
    """The library is kept from its remarks and progress bars."""
    logging = transformers.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
