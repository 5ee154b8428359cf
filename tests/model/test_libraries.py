"""Unchanged models of other libraries, from a configuration or a folder, are trained exactly without a download."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ntkexp.experiment.identity import identity
from ntkexp.model import foreign
from ntkexp.model.foreign import EXTERNAL_KEYS
from ntkexp.run.setting import prepare
from tests.kernel.oracle import refused
from tests.run.small import ran, small
from tests.run.test_exactness import assert_exact

FEW = ("data.train=4", "data.query=2", "data.test=2", "steps=2", "model.width=8", "ladder.machine=[secant]")
SUMS = ("data=modular_addition", "data.modulus=3")
READING = ("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "features_only")

MODELS = {
    "gpt2 on tokens": ("model=huggingface", "model.name=gpt2", *SUMS),
    "bert on tokens": ("model=huggingface", "model.name=bert", *SUMS),
    "bert on rows": ("model=huggingface", "model.name=bert"),
    "gpt2 on features": ("model=huggingface", "model.name=gpt2", "data=circle"),
    "gpt2 on one-hot tokens": ("model=huggingface", "model.name=gpt2", *SUMS, "data.encoding=one_hot"),
    "a vision transformer of transformers": ("model=huggingface", "model.name=vit"),
    "a vision transformer of timm": ("model=timm", "model.name=vit_tiny_patch16_224"),
    "a residual network of timm": ("model=timm", "model.options={avg_down: false, act_layer: gelu}"),
}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is reached from here."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("nothing is downloaded")

    monkeypatch.setattr(socket.socket, "connect", refuse)


REPEATED = {
    "bert on rows",
    "gpt2 on features",
    "gpt2 on one-hot tokens",
    "a residual network of timm",
    "a vision transformer of timm",
    "a vision transformer of transformers",
}
"""Inputs and layers that others have as well."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in REPEATED)) for name in MODELS])
def test_a_model_is_trained_exactly(name: str) -> None:
    assert_exact(ran(*FEW, *MODELS[name]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT with its weights."""
    transformers = foreign.import_library("transformers", "huggingface")
    sizes = {"hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 7}
    configuration = transformers.BertConfig(**sizes, vocab_size=5, max_position_embeddings=9, pad_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = transformers.BertModel(configuration)
    place = tmp_path_factory.mktemp("bert")
    model.save_pretrained(place)
    return place


def weights(folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """The start of training."""
    model = ("model=huggingface", f"model.path={folder}", f"seed={seed}", *SUMS)
    return prepare(small(*FEW, *model)).problem.weights


def test_a_folder_gives_its_weights_whatever_the_seed(folder: Path) -> None:
    one, other = weights(folder), weights(folder, seed=1)
    body = [name for name in one if ".model." in name]
    assert body
    assert one[body[0]].shape == (5, 6)
    assert all(torch.equal(one[name], other[name]) for name in body)
    assert any(not torch.equal(one[name], other[name]) for name in one if name not in body)  # the readout


def test_a_folder_without_weights_has_them_drawn(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    one, same, other = weights(tmp_path), weights(tmp_path), weights(tmp_path, seed=1)
    table = next(name for name in one if "word_embeddings" in name)
    assert torch.equal(one[table], same[table])
    assert not torch.equal(one[table], other[table])


def test_the_files_of_a_folder_count(folder: Path, tmp_path: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    model = (*FEW, "model=huggingface", f"model.path={tmp_path}")
    found = []
    for width in (6, 6, 8):
        (tmp_path / "config.json").write_text(json.dumps(settings | {"hidden_size": width}))
        found.append(identity(small(*model)))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("model=huggingface", "model.name=gtp2"), r"transformers has no such model; did you mean 'gpt2'\?"),
        (("model=huggingface", "model.options={n_hed: 2}"), r"GPT2Config has no n_hed; did you mean 'n_head'\?"),
        (("model=huggingface", "model.options={n_head: 3}"), r"model\.name=gpt2: ValueError: .*divisible"),
        (
            ("model=huggingface", "model.options={num_hidden_layers: many}"),
            r"Error: Validation error for field .* got str",
        ),
        (("model=huggingface", "model.options=3"), r"it takes a mapping such as \{KEY: VALUE\}"),
        (("model=huggingface", "model.options={to_dict: 2}"), r"GPT2Config has no to_dict"),
        (("model=huggingface", "model.path=nowhere"), r"nowhere is not a folder with a config\.json"),
        (("model=huggingface", "model.name=t5"), r"model\.name=t5: ValueError: "),
        (("model=huggingface", "model.name=vit", *SUMS), r"takes numbers, and the data has tokens"),
        (("model=timm", "model.name=resnet10"), r"timm has no such model; did you mean 'resnet10t'\?"),
        (("model=timm", "model.options={stem_wdith: 2}"), r"has no stem_wdith; did you mean 'stem_width'\?"),
        *((("model=timm", f"model.options={{{key}: x}}"), rf"ResNet of timm has no {key}") for key in READING),
        (("model=timm", "data=circle"), r"model=timm takes images, and the data has examples of shape \[2\]"),
        (("model=timm", *SUMS), r"model=timm takes numbers, and the data has tokens"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(given: tuple[str, ...], words: str) -> None:
    with refused(words):
        prepare(small(*FEW, *given))


@pytest.fixture
def hostile(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a writer of a copy of the folder with more settings, and a module that leaves a mark."""

    def write(**further: object) -> Path:
        for file in folder.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        settings = json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(settings | further))
        imports = "from transformers import BertConfig as Config, BertModel as Net\n"
        (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n{imports}")
        return tmp_path

    return write


OWN = {"AutoConfig": "own.Config", "AutoModel": "own.Net"}
TELLING = {
    "code beside a model that is known": {"auto_map": OWN},
    "code of a model that is not": {"auto_map": OWN, "model_type": "owned"},
    "code of a part": {"text_config": {"auto_map": OWN}},
    "attention from elsewhere": {"_attn_implementation": "own/attention"},
    "weights from elsewhere": {"backbone": "own/backbone"},
    "kernels from elsewhere": {"quantization_config": {"quant_method": "own"}},
    "no model at all": {"model_type": "owned"},
}


@pytest.mark.parametrize("options", ["{}", "{trust_remote_code: true}"])
@pytest.mark.parametrize("telling", TELLING.values(), ids=TELLING)
def test_nothing_in_a_folder_is_run(telling: dict[str, object], options: str, hostile: Callable[..., Path]) -> None:
    place = hostile(**telling)
    with refused(r"would run code or read files|has no such model"):
        prepare(small(*FEW, "model=huggingface", f"model.path={place}", f"model.options={options}", *SUMS))
    assert not (place / "mark").exists()


@pytest.mark.parametrize("key", sorted(EXTERNAL_KEYS))
def test_no_option_reaches_elsewhere(key: str) -> None:
    with refused(f"model.options: '{key}' would run code or read files from elsewhere"):
        prepare(small(*FEW, "model=huggingface", f"model.options={{{key}: own/net}}", *SUMS))


def test_weights_outside_of_the_folder_are_not_read(hostile: Callable[..., Path]) -> None:
    place = hostile()
    (place / "model.safetensors").rename(place.parent / "outside.safetensors")
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    with refused(r'names "\.\./outside\.safetensors", which is not a file of that folder'):
        weights(place)


def test_an_adapter_is_refused(hostile: Callable[..., Path]) -> None:
    place = hostile()
    (place / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "own/base"}))
    with refused("holds an adapter without its model"):
        weights(place)


def test_a_folder_with_fewer_tokens_than_the_data_is_refused(folder: Path) -> None:
    with refused(r"knows 5 tokens, and the data has .* tokens below 7"):
        prepare(small(*FEW, "model=huggingface", f"model.path={folder}", *SUMS, "data.modulus=7"))


@pytest.mark.parametrize(("model", "package"), [("huggingface", "transformers"), ("timm", "timm")])
def test_a_library_that_is_missing_is_asked_for(model: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with refused(rf"needs {package}, .* pip install 'ntkexp\[{model}\]'"):
        prepare(small(*FEW, f"model={model}"))


def test_a_language_model_in_a_file_of_ones_own_is_trained_exactly(written: Callable[[str], Path]) -> None:
    """Its table of tokens is its readout."""
    file = written("""
        from transformers import GPT2Config, GPT2LMHeadModel

        class build(nn.Module):
            def __init__(self, vocabulary, width):
                super().__init__()
                sizes = {"n_embd": width, "n_layer": 1, "n_head": 2, "n_positions": 4}
                ends = {"bos_token_id": None, "eos_token_id": None}
                self.model = GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, **sizes, **ends))

            def forward(self, x):
                return self.model(input_ids=x).logits[:, -1]
        """)
    run = ran(*FEW, "model=module", f"model.path={file}", *SUMS, "loss=cross_entropy", trust=[str(file)])
    assert_exact(run)
