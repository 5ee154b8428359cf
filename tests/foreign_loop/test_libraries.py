"""Loops of Lightning and Hugging Face are followed by a callback, and close as our own do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ntkexp
from ntkexp.foreign_loop.example_names import SeenCall
from ntkexp.foreign_loop.loop_breakdown import loop_without
from ntkexp.foreign_loop.signatures import signature
from ntkexp.foreign_loop.store import replay
from ntkexp.foreign_loop.store.replay import FACTOR_UNITS
from ntkexp.foreign_loop.trace import Trace, find_trace
from ntkexp.mistake import Mistake
from ntkexp.progress import Silent

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # what these libraries say is not ours

EXACT, CLIPPED = 1e-12, 1e-4  # through clipping and AdamW, in float32
TOKENS = {"input_ids": torch.tensor([[1, 2, 3, 4, 5, 6], [3, 1, 4, 1, 5, 9]])}


def closes(trace: Trace, change: Tensor, bound: float) -> None:
    """Parts and decay add up to what training did to every query and output."""
    found = trace.attribute()
    explained = torch.from_numpy((found["contribution"].sum("example") + found["decay"] + found["rounding"]).values)
    assert change.norm() > 0
    assert (explained - change.flatten(1)).abs().max() <= bound * change.norm()


@pytest.fixture
def transformers() -> Any:
    """The library, after this one has put torchvision in order."""
    import ntkexp.huggingface  # noqa: F401, PLC0415  slow

    return import_module("transformers")


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        yield


def by_lightning(
    folder: Path, kind: torch.dtype, options: dict[str, Any] | None = None, **settings: Any
) -> tuple[Trace, Tensor]:
    """Train as the first page of Lightning has it; the trace, and what that changed at the queries."""
    import ntkexp.lightning  # noqa: PLC0415  slow; it puts torchvision in order

    lightning = import_module("lightning")

    class Classifier(lightning.LightningModule):  # type: ignore[name-defined, misc]
        """A network and its loss."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(kind)

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=8)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}

    x, queries, module = torch.randn(16, 4, dtype=kind), torch.randn(3, 4, dtype=kind), Classifier()
    loader = DataLoader(TensorDataset(x, torch.randint(3, (16,))), batch_size=4, shuffle=True)
    before, seen = deepcopy(module.net), ntkexp.lightning.Follow(queries=queries, **(options or {"model": "net"}))
    with pytest.raises(Mistake, match="no training has begun"):
        _ = seen.trace
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        max_epochs=2, callbacks=[seen], accelerator="cpu", default_root_dir=folder, **quiet, **settings
    )
    trainer.fit(module, loader)
    assert len(seen.trace.steps) == 8
    assert not module.net._forward_hooks
    with torch.no_grad():
        return seen.trace, module.net(queries) - before(queries)


def test_lightning_with_clipping_and_one_cycle(tmp_path: Path) -> None:
    trace, change = by_lightning(tmp_path, torch.float64, gradient_clip_val=0.2)
    closes(trace, change, EXACT)
    assert trace.attribute()["gradient_factor"].values.max() < 1  # it clips


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])  # on a CPU Lightning takes bfloat16 for both
def test_lightning_under_autocast(precision: str, tmp_path: Path) -> None:
    trace, change = by_lightning(tmp_path, torch.float32, precision=precision, gradient_clip_val=0.2)
    closes(trace, change, CLIPPED)
    assert trace.attribute()["casts_error"].values.max() > 0


def test_lightning_without_a_part_says_which_one_to_name(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match=r"no forward of its own, .* that training_step calls, here model='net'"):
        by_lightning(tmp_path, torch.float64, {"ids": None})


def test_lightning_with_names_of_its_data(tmp_path: Path) -> None:
    trace, change = by_lightning(tmp_path, torch.float64, {"model": "net", "ids": "dataset"})
    assert sorted(map(int, trace.examples)) == list(range(16))
    closes(trace, change, EXACT)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_lightning_with_short_weights_is_refused(precision: str, tmp_path: Path) -> None:
    with pytest.raises(Mistake, match=r"'0\.weight' is in b?float16, too coarse for any proof"):
        by_lightning(tmp_path, torch.float32, precision=precision)


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_a_missing_library_is_asked_for_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = {"lightning": "ntkexp.lightning", "transformers": "ntkexp.huggingface"}[name]
    for loaded in [each for each in sys.modules if each.split(".")[0] == name] + [name]:
        monkeypatch.setitem(sys.modules, loaded, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    extra = module.removeprefix("ntkexp.")
    with pytest.raises(Mistake, match=rf"needs {name}, which cannot be imported .*: pip install 'ntkexp\[{extra}\]'"):
        import_module(module)


def test_a_compiled_model_is_followed_as_it_was() -> None:
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.randn(6, 3).double()
    fast: Any = torch.compile(net, backend="eager")
    before = deepcopy(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    with ntkexp.follow(fast, optimizer, queries=x) as trace:
        for _ in range(3):
            optimizer.zero_grad()
            fast(x).square().sum().backward()
            optimizer.step()
    with torch.no_grad():
        closes(trace, net(x) - before(x), EXACT)


def test_trainer_with_a_language_model(transformers: Any, tmp_path: Path) -> None:
    """Two batches a step, whose divisor is the number of all their words, clipping and a warm-up."""
    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **still))
    texts = [{"input_ids": text, "labels": text} for text in torch.randint(11, (12, 6))]
    trained(model, texts, tmp_path, gradient_accumulation_steps=2, max_grad_norm=0.5, warmup_steps=2)


def test_trainer_with_the_dropout_that_models_come_with(transformers: Any, tmp_path: Path) -> None:
    """In embeddings, attention and residuals; with checkpoints of activations, whose masks are drawn twice."""
    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    assert model.config.resid_pdrop == model.config.attn_pdrop == 0.1
    texts = [{"input_ids": text, "labels": text} for text in torch.randint(11, (12, 6))]
    trained(model, texts, tmp_path, gradient_accumulation_steps=2, max_grad_norm=0.5, gradient_checkpointing=True)


def test_trainer_with_a_classifier_of_texts(transformers: Any, tmp_path: Path) -> None:
    sizes = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3}
    still = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    configuration = transformers.BertConfig(**sizes, **still, intermediate_size=32, max_position_embeddings=8)
    model = transformers.BertForSequenceClassification(configuration)
    texts = [{"input_ids": text, "labels": text.sum() % 3} for text in torch.randint(11, (12, 6))]
    options = {
        "to": tmp_path / "trace",
        "every": 2,
    }  # what is remembered of the keys' bias is rounding, and nothing else
    trained(model, texts, tmp_path, options, weight_decay=0.1, max_grad_norm=0.5)


def test_trainer_is_carried_out_again(transformers: Any, tmp_path: Path) -> None:
    """Without three of its texts, and what that changes is split over them."""
    sizes = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3}
    still = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    configuration = transformers.BertConfig(**sizes, **still, intermediate_size=32, max_position_embeddings=8)
    texts = [{"input_ids": text, "labels": text.sum() % 3} for text in torch.randint(11, (12, 6))]

    def loss(outputs: Tensor, call: SeenCall) -> Tensor:
        labels = call.kwargs["labels"]
        assert isinstance(labels, Tensor)
        return nn.functional.cross_entropy(outputs, labels, reduction="none")

    def train() -> None:
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification(configuration)
        options = {"to": tmp_path / "trace", "loss": loss, "every": 2}
        trained(model, texts, tmp_path, options, weight_decay=0.1, max_grad_norm=0.5, proves=False)

    train()
    found = loop_without(find_trace(tmp_path / "trace"), train, "renormalised", [0, 1, 2], [0, 1], Silent())
    assert np.abs(found.actual).min() > 1e-3
    assert found.closure < CLIPPED


@pytest.mark.parametrize("near", [FACTOR_UNITS, ()], ids=["to the bit", "to rounding"])
def test_trainer_under_autocast(
    near: tuple[int, ...], transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout and clipping; the library puts autocast into the model's own forward. Where steps that are taken
    again are not the loop's to the bit, casts round otherwise, and have room for that."""
    monkeypatch.setattr(replay, "FACTOR_UNITS", near)
    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    texts = [{"input_ids": text, "labels": text} for text in torch.randint(11, (12, 6))]
    trained(model, texts, tmp_path, gradient_accumulation_steps=2, max_grad_norm=0.5, bf16=True)


@pytest.mark.others
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_trainer_with_adapters_over_a_short_base(transformers: Any, autocast: bool, tmp_path: Path) -> None:
    """As people train large models: a frozen base in bfloat16, adapters of peft in float32, with dropout."""
    import peft  # noqa: PLC0415  dev leaves it out

    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).bfloat16()
    lora = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    texts = [{"input_ids": text, "labels": text} for text in torch.randint(11, (12, 6))]
    model = peft.get_peft_model(base, lora)
    trained(model, texts, tmp_path, bf16=autocast, gradient_accumulation_steps=2, max_grad_norm=0.5)


def trained(
    model: Any,
    texts: list[dict[str, Tensor]],
    folder: Path,
    options: dict[str, Any] | None = None,
    *,
    proves: bool = True,
    **settings: Any,
) -> None:
    """Train by the library, and compare the trace with what that did."""
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415  slow

    import ntkexp.huggingface  # noqa: PLC0415

    seen, before = ntkexp.huggingface.Follow(queries=TOKENS, output="logits", **(options or {})), deepcopy(model).eval()
    off = dict.fromkeys(("save_strategy", "logging_strategy"), "no")
    arguments = TrainingArguments(
        **{"output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True, "learning_rate": 1e-2},
        **off,
        **{"per_device_train_batch_size": 2, "max_steps": 6, **settings},
    )
    Trainer(model, arguments, train_dataset=texts, callbacks=[seen]).train()
    assert len(seen.trace.steps) == 6
    assert not model._forward_hooks
    if not proves:
        return
    before, after = before.float(), deepcopy(before).float()  # what is read of short weights are the same numbers
    after.load_state_dict(model.state_dict())
    with torch.no_grad():
        closes(seen.trace, after(**TOKENS).logits - before(**TOKENS).logits, CLIPPED)
    ours = seen.trace.replayed(seen.trace.steps.end, after(**TOKENS).logits.flatten(1))[0]
    assert seen.trace.ends.end is not None
    known = seen.trace.ends.end
    numbers = signature(ours.outputs.reshape(*known.shape, -1))  # also under autocast, as attention is plain
    assert float((numbers - known).norm()) < 1e-5 * float(numbers.norm())
