"""Networks from other sources: a user's `nn.Module`, models of timm,
and models of transformers.

Nothing is downloaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, get_type_hints

import torch
from jaxtyping import Float
from pydantic import Field, field_validator
from torch import Tensor, nn

from ntkexp.component import Count, Depth
from ntkexp.init import AbstractInit
from ntkexp.mistake import Mistake, nearest
from ntkexp.model.base import AbstractArchitecture, LearningTask
from ntkexp.model.foreign import (
    Option,
    adapt_module,
    files_imported,
    import_library,
    refuse_external_code,
    refuse_external_weights,
    refuse_irreproducible,
)
from ntkexp.model.transformer import at_each_position, fitting_patch, largest_divisor
from ntkexp.model.user_function import FunctionInFile
from ntkexp.records.atomic import read_object
from ntkexp.shapes import Shape


class Module(AbstractArchitecture):
    """Any `nn.Module` that a user's function builds.

    `path` is FILE.py:FUNCTION, or FILE.py if the function is called `build`. The file
    is run, so use only files that you trust.

        ntkexp train model=module model.path=my_net.py:build

    `build` is a function, or the class of the module. The package passes these
    arguments if the signature contains them; all other parameters need defaults:

        shape        shape of an example, such as (1, 8, 8)
        outputs      number of outputs that the data and the loss require
        width        model.width
        vocabulary   number of tokens; 0 if the data are numbers
        seed         an integer below 2³² that depends on the run's `seed`

    `build` runs in double precision, with torch's global generator seeded by `seed`, so
    that `nn.init` is reproducible. The module maps [example, *shape] (tokens as int64)
    to [example, outputs], or to [example] for one output. It runs in evaluation mode:
    dropout has no effect, and batch norm uses its stored statistics. Only the form of
    the output (alpha, antisymmetric, centred) is taken from `init`. If the file, or a
    file that it imports from its folder, changes, a run counts as a different run."""

    remedy = "look at how the module draws its weights, and how it treats the data"

    path: str

    @field_validator("path")
    @classmethod
    def check_path(cls, path: str) -> str:
        if not FunctionInFile(path, "").is_well_formed:
            raise Mistake("it takes FILE.py:FUNCTION, such as my_net.py:build")
        return path

    @property
    def setting(self) -> str:
        return f"model.path={self.path}"

    @property
    def function(self) -> FunctionInFile:
        return FunctionInFile(self.path, self.setting)

    def code(self) -> tuple[Path, ...]:
        return (self.function.file,)

    def files(self) -> tuple[Path, ...]:
        return files_imported(self.function.file)

    def network(
        self, init: AbstractInit, task: LearningTask, generator: torch.Generator
    ) -> nn.Module:
        build = self.function.load()
        file = self.function.file
        seed = generator.initial_seed()
        arguments = self.arguments(build, task, seed)

        def make() -> nn.Module:
            network = build(**arguments)
            if not isinstance(network, nn.Module):
                raise Mistake(
                    f"{self.setting} returns a {type(network).__name__}; let it return an nn.Module"
                )
            return network

        # Build two networks with the same seed, and raise if their weights differ.
        network = adapt_module(make, task, seed, self.setting, file)
        again = adapt_module(make, task, seed, self.setting, file)
        refuse_irreproducible(self.setting, network, again)
        return network

    def arguments(
        self, build: Callable[..., object], task: LearningTask, seed: int
    ) -> dict[str, Any]:
        """Return the arguments whose names occur in the signature of `build`. Raise if
        `build` needs another argument."""
        available: dict[str, Any] = {
            "shape": task.shape,
            "outputs": task.outputs,
            "width": self.width,
            "seed": seed,
            "vocabulary": task.vocabulary,
        }
        variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        arguments: dict[str, Any] = {}
        for parameter in inspect.signature(build).parameters.values():
            if parameter.name in available:
                arguments[parameter.name] = available[parameter.name]
            elif (
                parameter.default is parameter.empty and parameter.kind not in variadic
            ):
                raise Mistake(
                    f"{self.setting} needs an argument '{parameter.name}', which is none of "
                    f"{', '.join(available)}; give it a default"
                )
        return arguments


class Timm(AbstractArchitecture):
    """Image models of the library timm with random weights; nothing is downloaded.

    `name` is the name of a timm model, which draws its own weights.

        ntkexp train model=timm model.name=vit_tiny_patch16_224 model.width=32

    The model is built for the size and channels of the images. `width`, `depth` and
    `heads` set its size if its class has such settings. `width` is the number of
    channels of a transformer, or in the first stage of a ResNet or ConvNeXt; later
    stages double it. `depth` is the number of blocks of a transformer without stages.
    `options` are further settings of the model's class. They override `width`, `depth`
    and `heads`, and cannot name files or addresses."""

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
            raise Mistake(
                f"model=timm takes images, and {task.description}; choose model=mlp"
            )
        make = partial(self.build, import_library("timm", "timm"), task)
        return adapt_module(
            make, task, generator.initial_seed(), f"model.name={self.name}"
        )

    def build(self, timm: Any, task: LearningTask) -> nn.Module:
        if not timm.is_model(self.name):
            hint = nearest(self.name, timm.list_models())
            advice = hint or "; timm.list_models() lists them"
            raise Mistake(f"model.name={self.name}: timm has no such model{advice}")
        with torch.device("meta"):  # find the class without allocating weights
            kind = type(timm.create_model(self.name))
        names = constructor_settings(kind)
        for key in self.options:
            if key not in names:
                raise Mistake(
                    f"model.options: {kind.__name__} of timm has no {key}{nearest(key, names)}"
                )
        sizes = self.sizes(task, set(inspect.signature(kind).parameters))
        model: nn.Module = timm.create_model(
            self.name,
            num_classes=task.outputs,
            in_chans=task.shape[0],
            **(sizes | self.options),
        )
        return model

    def sizes(
        self, task: LearningTask, names: set[str]
    ) -> dict[str, int | tuple[int, ...]]:
        """Return width, depth and heads under timm's names,
        for the settings that the model's class has."""
        stages = tuple(self.width * 2**stage for stage in range(4))
        sizes: dict[str, int | tuple[int, ...]] = {
            "channels": stages,
            "stem_width": max(4, self.width // 2),
            "dims": stages,
            "embed_dim": self.width,
        }
        if "depth" in names:
            sizes |= {
                "depth": self.depth,
                "num_heads": largest_divisor(self.heads, self.width),
            }
        if "img_size" in names:
            sizes |= {
                "img_size": task.shape[1:],
                "patch_size": fitting_patch(4, task.shape),
            }
        return {key: value for key, value in sizes.items() if key in names}


def constructor_settings(kind: type[nn.Module]) -> set[str]:
    """Return the settings of a timm class: the arguments of the class and of its
    parents, and the fields of the argument `cfg`.

    >>> sorted(constructor_settings(nn.Flatten))
    ['end_dim', 'start_dim']
    """
    names: set[str] = set()
    for parent in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        parameters = list(inspect.signature(parent).parameters.values())
        names |= {
            parameter.name
            for parameter in parameters
            if parameter.kind != parameter.VAR_KEYWORD
        }
        config_type = get_type_hints(vars(parent).get("__init__", parent)).get("cfg")
        if is_dataclass(config_type):
            names |= {field.name for field in fields(config_type)}
        if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
            break
    return names - {"cfg"}


# --- Models of transformers, without their heads: conversion of inputs, and readout


class Body(nn.Module):
    """A model without its head. It returns the vector at the last position, or the mean
    vector."""

    def __init__(
        self, model: nn.Module, entrance: nn.Module, key: str, last: bool
    ) -> None:
        super().__init__()
        self.entrance = entrance
        self.model = model
        self.key = key
        self.last = last

    def forward(self, x: Tensor) -> Float[Tensor, "example width"]:
        hidden: Tensor = self.model(**{self.key: self.entrance(x)}).last_hidden_state
        if hidden.dim() == 4:  # a convolutional model returns pixels
            return hidden.flatten(2).mean(2)
        return hidden[:, -1] if self.last else hidden.mean(1)


class DenseByRow(nn.Module):
    """A dense layer applied to each row of an example."""

    def __init__(self, dense: nn.Module) -> None:
        super().__init__()
        self.dense = dense

    def forward(
        self, x: Float[Tensor, " example *shape"]
    ) -> Float[Tensor, "example position width"]:
        return at_each_position(
            self.dense, x.reshape(len(x), *rows_of_example(x.shape[1:]))
        )


def rows_of_example(shape: Shape) -> tuple[int, int]:
    """Return the numbers of positions and of features per position of an example.

    Each row of an image, with all channels, is a position. In other examples, the first
    axis counts positions.

    >>> rows_of_example((3, 8, 4)), rows_of_example((5, 7)), rows_of_example((6,))
    ((8, 12), (5, 7), (6, 1))
    """
    positions = shape[-2] if len(shape) > 2 else shape[0]
    return positions, prod(shape) // positions


class Huggingface(AbstractArchitecture):
    """Models of the library transformers, by type or from a folder;
    nothing is downloaded.

        ntkexp train model=huggingface model.name=llama data=modular_addition
        ntkexp train model=huggingface model.path=my_model data=text data.path=book.txt

    `name` is a model type as in config.json (gpt2, bert, llama, vit, …). `width`,
    `depth` and `heads` set the size of the model. Its number of heads is the largest
    number ≤ `heads` that divides `width`. `path` is a folder with config.json and,
    optionally, weights. The model returns a vector for each position, and a dense layer
    with the scales of `init` computes the outputs:

        data            input of the model                       readout
        tokens          its own embedding table                  the last position
        images          pixels, for an image model               the mean over positions
        anything else   a dense embedding of each row            the mean over positions

    Padding, begin and end tokens are disabled. `options` sets more entries of the
    model's configuration. It overrides `width`, `depth`, `heads` and config.json. No
    code in the folder is run, and no file outside it is read."""

    width: Count = 32
    depth: Depth = 1
    heads: Depth = 4
    name: str = "gpt2"
    path: Path | None = None
    options: dict[str, Option] = Field({})

    @property
    def setting(self) -> str:
        """The configuration key that chooses the model, with its value."""
        return (
            f"model.name={self.name}"
            if self.path is None
            else f"model.path={self.path}"
        )

    def files(self) -> tuple[Path, ...]:
        if self.path is None:
            return ()
        folder = self.path.expanduser()
        if not (folder / "config.json").is_file():
            raise Mistake(
                f"{self.setting} is not a folder with a config.json; model.name builds one without "
                "a folder"
            )
        kinds = {".json", ".safetensors", ".bin"}
        return tuple(sorted(file for file in folder.iterdir() if file.suffix in kinds))

    def network(
        self, init: AbstractInit, task: LearningTask, generator: torch.Generator
    ) -> nn.Module:
        make = partial(self.build, init, task, generator)
        return adapt_module(make, task, generator.initial_seed(), self.setting)

    def build(
        self, init: AbstractInit, task: LearningTask, generator: torch.Generator
    ) -> nn.Module:
        with quiet_library(
            import_library("transformers", "huggingface")
        ) as transformers:
            model = self.model(transformers, task).double().eval()
        body = Body(
            model,
            *self.input_layer(model, init, task, generator),
            last=task.vocabulary > 0,
        )
        sample = task.sample()
        features = body(sample.long() if task.vocabulary else sample).shape[1]
        return nn.Sequential(
            body, init.readout(task.outputs).build((features,), generator)
        )

    def model(self, transformers: Any, task: LearningTask) -> Any:
        """Build a model of the type `name`, or the model in the folder `path`. No code
        in the folder is run."""
        if self.path is not None:
            return self.model_of_folder(transformers, self.path.expanduser(), task)
        kind = self.configuration_class(transformers, "model.name", self.name)
        default = kind()
        sizes: dict[str, Any] = {}
        for key, size in self.sizes(task).items():
            if hasattr(default, key):  # some models lack a size, or name it differently
                sizes[kind.attribute_map.get(key, key)] = size
        configuration = kind(**(sizes | self.library_options(kind)))
        return transformers.AutoModel.from_config(
            configuration, trust_remote_code=False
        )

    def model_of_folder(
        self, transformers: Any, folder: Path, task: LearningTask
    ) -> Any:
        files = self.files()
        fields = read_object(folder / "config.json")
        refuse_external_code(fields, self.setting)
        kind = self.configuration_class(
            transformers, f"{self.setting}: 'model_type'", str(fields.get("model_type"))
        )
        configuration = kind.from_dict(fields | self.library_options(kind))
        refuse_external_weights(files, self.setting)
        if task.vocabulary > getattr(configuration, "vocab_size", task.vocabulary):
            raise Mistake(
                f"{self.setting} knows {configuration.vocab_size} tokens, and {task.description}"
            )
        if all(file.suffix == ".json" for file in files):
            return transformers.AutoModel.from_config(
                configuration, trust_remote_code=False
            )
        return transformers.AutoModel.from_pretrained(
            folder,
            config=configuration,
            local_files_only=True,
            trust_remote_code=False,
            weights_only=True,
        )

    def configuration_class(self, transformers: Any, key: str, name: str) -> Any:
        """Return the library's configuration class for a model type."""
        names = list(transformers.CONFIG_MAPPING.keys())
        if name not in names:
            raise Mistake(
                f"{key}={name}: transformers has no such model{nearest(name, names)}"
            )
        return transformers.CONFIG_MAPPING[name]

    def library_options(self, kind: Any) -> dict[str, Option]:
        """Return `options` under the names of this configuration class.
        Raise for unknown names."""
        refuse_external_code(self.options, "model.options")
        names = {key for key in vars(kind()) if not key.startswith("_")} | set(
            kind.attribute_map
        )
        for key in self.options:
            if key not in names and not key.endswith("_implementation"):
                raise Mistake(
                    f"model.options: {kind.__name__} has no {key}{nearest(key, names)}"
                )
        return {
            kind.attribute_map.get(key, key): option
            for key, option in self.options.items()
        }

    def sizes(self, task: LearningTask) -> dict[str, Option | tuple[int, ...]]:
        """Return width, depth, heads and data sizes under the names in configurations
        of transformers."""
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

    def input_layer(
        self,
        model: Any,
        init: AbstractInit,
        task: LearningTask,
        generator: torch.Generator,
    ) -> tuple[nn.Module, str]:
        """Return the module that converts inputs, and the name of the model's input."""
        if model.main_input_name == "pixel_values":
            task.refuse_tokens(f"{self.option} {self.setting}")
            return nn.Identity(), "pixel_values"
        if task.vocabulary:
            return nn.Identity(), "input_ids"
        features = rows_of_example(task.shape)[1]
        dense = init.dense(model.config.hidden_size).build((features,), generator)
        return DenseByRow(dense), "inputs_embeds"


@contextmanager
def quiet_library(transformers: Any) -> Iterator[Any]:
    """Suppress warnings and progress bars of the library in this context."""
    logging = transformers.logging
    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
