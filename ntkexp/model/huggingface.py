"""Models of the library transformers, built from a configuration or read from a folder; nothing is downloaded.

    ntkexp train model=huggingface model.name=llama data=modular_addition
    ntkexp train model=huggingface model.path=my_model data=text data.path=book.txt

`name` is a type of model as config.json names it (gpt2, bert, llama, vit, …), made as large as `width`, `depth` and
`heads` say; a folder with config.json, and weights if it has some, is taken as it is. The body of the model gives a
vector for each position, and a dense layer, drawn as `init` says, reads the outputs:

    tokens          its own table of tokens           the last position is read
    images, for a model of images, as they are        the mean over positions is read
    anything else   a dense layer for each row        the mean over positions is read

Padding and signs for beginning and end are switched off, for every token is one. `options` are further entries of the
configuration and win over all of these. No code of a folder is run, and nothing outside of it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import nn

from ntkexp.component import Count, Depth
from ntkexp.init.base import AbstractInit
from ntkexp.mistake import Mistake, nearest
from ntkexp.model.base import AbstractArchitecture
from ntkexp.model.foreign.adapted import adapted
from ntkexp.model.foreign.body import Body, DenseByRow, rows
from ntkexp.model.foreign.optional_library import Option, library
from ntkexp.model.foreign.remote_options import refuse_elsewhere, refuse_parts_elsewhere
from ntkexp.model.learning_task import LearningTask
from ntkexp.model.transformer import dividing, fitting
from ntkexp.records.json_file import read_object


class Huggingface(AbstractArchitecture):
    """`width`, `depth` and `heads` are those of a model by name; heads are the most that divide the width."""

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
        """Find the configuration and the weights."""
        if self.path is None:
            return ()
        folder = self.path.expanduser()
        if not (folder / "config.json").is_file():
            raise Mistake(f"{self.given} is no folder with a config.json; model.name builds one without a folder")
        kinds = {".json", ".safetensors", ".bin"}
        return tuple(sorted(file for file in folder.iterdir() if file.suffix in kinds))

    def network(self, init: AbstractInit, task: LearningTask, generator: torch.Generator) -> nn.Module:
        make = partial(self.build, init, task, generator)
        return adapted(make, task, generator.initial_seed(), self.given)

    def build(self, init: AbstractInit, task: LearningTask, generator: torch.Generator) -> nn.Module:
        """Build the body of a model between the data and a readout."""
        with quiet(library("transformers", "huggingface")) as transformers:
            model = self.model(transformers, task).double().eval()
        body = Body(model, *self.entrance(model, init, task, generator), last=task.vocabulary > 0)
        sample = task.sample()
        features = body(sample.long() if task.vocabulary else sample).shape[1]
        return nn.Sequential(body, init.readout(task.outputs).build((features,), generator))

    def model(self, transformers: Any, task: LearningTask) -> Any:
        """Make the model of the library, from the folder or of a name; it never runs code that a folder holds."""
        automatic = transformers.AutoModel
        if self.path is None:
            return automatic.from_config(self.configuration(transformers, task), trust_remote_code=False)
        configuration, files = self.read(transformers), self.files()
        refuse_parts_elsewhere(files, self.given)
        if task.vocabulary > getattr(configuration, "vocab_size", task.vocabulary):
            raise Mistake(f"{self.given} knows {configuration.vocab_size} tokens, and {task.said}")
        if all(file.suffix == ".json" for file in files):
            return automatic.from_config(configuration, trust_remote_code=False)
        folder, safe = self.path.expanduser(), {"trust_remote_code": False, "weights_only": True}
        return automatic.from_pretrained(folder, config=configuration, local_files_only=True, **safe)

    def read(self, transformers: Any) -> Any:
        """Read the configuration that is in the folder, with the options."""
        assert self.path is not None
        self.files()
        fields = read_object(self.path.expanduser() / "config.json")
        refuse_elsewhere(fields, self.given)
        kind = self.kind_of(transformers, f"{self.given}: 'model_type'", str(fields.get("model_type")))
        return kind.from_dict(fields | self.chosen(kind))

    def configuration(self, transformers: Any, task: LearningTask) -> Any:
        """Make a configuration of this name, with those of our sizes that it has, and the options."""
        kind = self.kind_of(transformers, "model.name", self.name)
        usual, own = kind(), kind.attribute_map  # some call them otherwise
        sizes = {own.get(key, key): size for key, size in self.sizes(task).items() if hasattr(usual, key)}
        return kind(**(sizes | self.chosen(kind)))

    def kind_of(self, transformers: Any, key: str, name: str) -> Any:
        """Find the library's own class of configurations of a name."""
        known = list(transformers.CONFIG_MAPPING.keys())
        if name not in known:
            raise Mistake(f"{key}={name}: transformers has no such model{nearest(name, known)}")
        return transformers.CONFIG_MAPPING[name]

    def chosen(self, kind: Any) -> dict[str, Option]:
        """Check the options, as this configuration calls them: entries that it has, which are values and no methods."""
        refuse_elsewhere(self.options, "model.options")
        known = {key for key in vars(kind()) if not key.startswith("_")} | set(kind.attribute_map)
        if strange := [key for key in self.options if key not in known and not key.endswith("_implementation")]:
            raise Mistake(f"model.options: {kind.__name__} has no {strange[0]}{nearest(strange[0], known)}")
        return {kind.attribute_map.get(key, key): option for key, option in self.options.items()}

    def sizes(self, task: LearningTask) -> dict[str, Option | tuple[int, ...]]:
        """Name the sizes of a model as configurations do, and put ours in their place."""
        heads = dividing(self.heads, self.width)
        found: dict[str, Option | tuple[int, ...]] = {
            "vocab_size": max(task.vocabulary, 1),
            "hidden_size": self.width,
            "num_hidden_layers": self.depth,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "intermediate_size": 4 * self.width,
            "max_position_embeddings": rows(task.shape)[0],
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
            "use_cache": False,
        }
        if len(task.shape) == 3:
            side = fitting(4, task.shape)
            found |= {"num_channels": task.shape[0], "image_size": task.shape[1:], "patch_size": side}
        return found

    def entrance(
        self, model: Any, init: AbstractInit, task: LearningTask, generator: torch.Generator
    ) -> tuple[nn.Module, str]:
        """Make what comes before the model, and find under which name the model takes it."""
        if model.main_input_name == "pixel_values":
            task.refuse_tokens(f"{self.option} {self.given}")
            return nn.Identity(), "pixel_values"
        if task.vocabulary:
            return nn.Identity(), "input_ids"
        features = rows(task.shape)[1]
        return DenseByRow(init.dense(model.config.hidden_size).build((features,), generator)), "inputs_embeds"


@contextmanager
def quiet(transformers: Any) -> Iterator[Any]:
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
