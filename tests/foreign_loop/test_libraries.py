"""Loops of Lightning and Hugging Face are followed by a callback, and close as our own do."""

from __future__ import annotations

import sys
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ntkexp.foreign_loop.example_names import SeenCall
from ntkexp.foreign_loop.fingerprints import fingerprint
from ntkexp.foreign_loop.loop_breakdown import loop_without
from ntkexp.foreign_loop.trace import Trace, find_trace
from ntkexp.mistake import Mistake
from ntkexp.progress import Silent
from tests.foreign_loop.loops import fitted, missed, outputs_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # these libraries warn of their own code

EXACT, CLIPPED = 1e-12, 1e-4  # through clipping and AdamW, in float32
TOKENS = {"input_ids": torch.tensor([[1, 2, 3, 4, 5, 6], [3, 1, 4, 1, 5, 9]])}


@pytest.fixture
def transformers() -> Any:
    """The library, after ntkexp has put torchvision in order."""
    import ntkexp.huggingface  # noqa: F401, PLC0415  slow

    return import_module("transformers")


def by_lightning(
    folder: Path, kind: torch.dtype, options: dict[str, Any] | None = None, **settings: Any
) -> tuple[Trace, Tensor]:
    """Train as on the first page of Lightning; the trace, and the change at the queries."""
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
    start, seen = (
        outputs_of(module.net, queries),
        ntkexp.lightning.Follow(queries=queries, **options or {"model": "net"}),
    )
    with pytest.raises(Mistake, match="no training has begun"):
        _ = seen.trace
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        max_epochs=2, callbacks=[seen], accelerator="cpu", default_root_dir=folder, **quiet, **settings
    )
    trainer.fit(module, loader)
    assert len(seen.trace.steps) == 8
    assert not module.net._forward_hooks
    return seen.trace, outputs_of(module.net, queries) - start


CLIP = {"gradient_clip_val": 0.2}
LIGHTNING: dict[str, tuple[torch.dtype, dict[str, Any] | None, dict[str, Any], float]] = {
    "clipped": (torch.float64, None, CLIP, EXACT),
    "named": (torch.float64, {"model": "net", "ids": "dataset"}, {}, EXACT),
    # on a CPU Lightning takes bfloat16 for both
    "bf16": (torch.float32, None, CLIP | {"precision": "bf16-mixed"}, CLIPPED),
    "16": (torch.float32, None, CLIP | {"precision": "16-mixed"}, CLIPPED),
}


@pytest.mark.parametrize("case", LIGHTNING)
def test_lightning_is_followed(case: str, tmp_path: Path) -> None:
    kind, options, settings, bound = LIGHTNING[case]
    trace, change = by_lightning(tmp_path, kind, options, **settings)
    found = trace.attribute()
    assert missed(found, change, "rounding") <= bound
    assert (found["gradient_factor"].values.max() < 1) == ("gradient_clip_val" in settings)
    assert bool(found["casts_error"].values.max() > 0 if "casts_error" in found else False) == ("precision" in settings)
    if options is not None:
        assert sorted(map(int, trace.examples)) == list(range(16))


@pytest.mark.parametrize(
    ("kind", "options", "settings", "said"),
    [
        (torch.float64, {"ids": None}, {}, r"no forward of its own, .* that training_step calls, here model='net'"),
        (
            torch.float32,
            None,
            {"precision": "bf16-true"},
            r"'0\.weight' is in bfloat16, whose rounding errors are too large",
        ),
        (
            torch.float32,
            None,
            {"precision": "16-true"},
            r"'0\.weight' is in float16, whose rounding errors are too large",
        ),
    ],
)
def test_other_uses_of_lightning_are_refused(
    kind: torch.dtype, options: dict[str, Any] | None, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(Mistake, match=said):
        by_lightning(tmp_path, kind, options, **settings)


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_a_missing_library_is_asked_for_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = {"lightning": "ntkexp.lightning", "transformers": "ntkexp.huggingface"}[name]
    for loaded in [each for each in sys.modules if each.split(".")[0] == name] + [name]:
        monkeypatch.setitem(sys.modules, loaded, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    extra = module.removeprefix("ntkexp.")
    with pytest.raises(Mistake, match=rf"needs {name}, which cannot be imported .*: pip install 'ntkexp\[{extra}\]'"):
        import_module(module)


def test_a_compiled_model_is_followed_as_the_original() -> None:
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.randn(6, 3).double()
    fast: Any = torch.compile(net, backend="eager")
    start, optimizer = outputs_of(net, x), torch.optim.AdamW(net.parameters(), lr=0.1)
    trace = fitted(fast, optimizer, lambda _: fast(x).square().sum(), 3, queries=x)
    assert missed(trace.attribute(), outputs_of(net, x) - start, "rounding") <= EXACT


# --- Trainer.


def texts(labels: bool = False) -> list[dict[str, Tensor]]:
    return [{"input_ids": text, "labels": text.sum() % 3 if labels else text} for text in torch.randint(11, (12, 6))]


def gpt2(transformers: Any, layers: int = 1, **still: float) -> Any:
    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 16, "n_layer": layers, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **still))


def bert(transformers: Any, layers: int = 2) -> Any:
    sizes = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": layers, "num_attention_heads": 2}
    still = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    more = {"num_labels": 3, "intermediate_size": 32, "max_position_embeddings": 8}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, **still, **more))


def by_trainer(
    model: Any, given: list[dict[str, Tensor]], folder: Path, options: dict[str, Any] | None = None, **settings: Any
) -> Trace:
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415  slow

    import ntkexp.huggingface  # noqa: PLC0415

    seen = ntkexp.huggingface.Follow(queries=TOKENS, output="logits", **(options or {}))
    arguments = TrainingArguments(
        **{"output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True, "learning_rate": 1e-2},
        **dict.fromkeys(("save_strategy", "logging_strategy"), "no"),
        **{"per_device_train_batch_size": 2, "max_steps": 6, "max_grad_norm": 0.5, **settings},
    )
    Trainer(model, arguments, train_dataset=given, callbacks=[seen]).train()
    assert len(seen.trace.steps) == 6
    assert not model._forward_hooks
    return seen.trace


def closes(model: Any, given: list[dict[str, Tensor]], folder: Path, *more: Any, **settings: Any) -> None:
    """Train, and compare the trace with the change of the model in float32."""
    before = deepcopy(model).eval().float()
    trace = by_trainer(model, given, folder, *more, **settings)
    after = deepcopy(before)
    after.load_state_dict(model.state_dict())
    with torch.no_grad():
        end = after(**TOKENS).logits
        change = (end - before(**TOKENS).logits).flatten(1)
    assert missed(trace.attribute(), change, "rounding") <= CLIPPED
    ours, known = trace.replayed(trace.steps.end, end.flatten(1))[0], trace.ends.end
    assert known is not None
    numbers = fingerprint(ours.outputs.reshape(*known.shape, -1))  # also under autocast, as attention is plain
    assert float((numbers - known).norm()) < 1e-5 * float(numbers.norm())


ACCUMULATED = {"gradient_accumulation_steps": 2}
TRAINED: dict[str, dict[str, Any]] = {
    "accumulated": ACCUMULATED | {"warmup_steps": 2},  # divides by the number of all words of two batches
    "checkpoints of activations": ACCUMULATED | {"gradient_checkpointing": True},  # masks are drawn twice
    "autocast": ACCUMULATED | {"bf16": True},  # inside the model's own forward
}


@pytest.mark.parametrize("case", TRAINED)
def test_trainer_with_a_language_model(case: str, transformers: Any, tmp_path: Path) -> None:
    """With the dropout that models come with, or without."""
    dropout = 0.1 * (case != "accumulated")
    model = gpt2(transformers, 2, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout))
    closes(model, texts(), tmp_path, **TRAINED[case])


def test_trainer_with_a_classifier_of_texts(transformers: Any, tmp_path: Path) -> None:
    """The momentum of the keys' bias is rounding."""
    closes(bert(transformers), texts(True), tmp_path, {"to": tmp_path / "trace", "every": 2}, weight_decay=0.1)


def test_trainer_trains_again_without_texts(transformers: Any, tmp_path: Path) -> None:
    given = texts(True)

    def loss(outputs: Tensor, call: SeenCall) -> Tensor:
        labels = call.kwargs["labels"]
        assert isinstance(labels, Tensor)
        return nn.functional.cross_entropy(outputs, labels, reduction="none")

    def train() -> None:
        torch.manual_seed(0)
        options = {"to": tmp_path / "trace", "loss": loss, "every": 2}
        by_trainer(bert(transformers, 1), given, tmp_path, options, weight_decay=0.1)

    train()
    found = loop_without(find_trace(tmp_path / "trace"), train, "renormalised", [0, 1, 2], [0, 1], Silent())
    assert np.abs(found.actual).min() > 1e-3
    assert found.closure < CLIPPED


@pytest.mark.others
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_trainer_with_adapters_over_a_short_base(transformers: Any, autocast: bool, tmp_path: Path) -> None:
    """As people train large models: a frozen base in bfloat16, adapters of peft in float32, with dropout."""
    import peft  # noqa: PLC0415  dev leaves it out

    lora = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(gpt2(transformers).bfloat16(), lora)
    closes(model, texts(), tmp_path, bf16=autocast, **ACCUMULATED)
