"""Unchanged networks of libraries, small and with random weights: kernels and steps through them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from warnings import catch_warnings, simplefilter

import pytest
import torch
from torch import Tensor, nn

from ntkexp.kernel.record.casts import Casts
from ntkexp.library import reader_of, tangent_kernel
from ntkexp.model.foreign import load_torchvision
from tests.kernel import oracle
from tests.kernel.networks import Formula
from tests.kernel.oracle import agree, applied, refused

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # libraries have warnings themselves

CLOSED = 1e-11  # of Δf: rounding of Δf at a hundredth of the weights, far below any part that could be missing
TEXT = {
    **{"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24},
    **{"max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
}
GPT2 = {
    **{"vocab_size": 11, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0},
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class Given:
    """A network, its inputs, and the output that is read."""

    module: nn.Module
    inputs: dict[str, object]
    output: str | None
    casts: Casts = "keep"


def of_one_tensor(given: Given) -> nn.Module:
    """Return the same network as a function of one tensor, for the oracle."""
    constants = {name: value for name, value in given.inputs.items() if not isinstance(value, Tensor)}
    names = [name for name in given.inputs if name not in constants]

    def forward(x: Tensor, module: nn.Module) -> Tensor:
        answer = module(**dict(zip(names, x.unbind(1), strict=True)), **constants)
        outputs: Tensor = answer if given.output is None else answer[given.output]
        return outputs

    return Formula(forward, module=given.module)


def settled(module: nn.Module) -> nn.Module:
    """Convert to double precision and evaluation, with other statistics and gains than the initial ones."""
    generator = torch.Generator().manual_seed(0)
    module = module.double().eval()
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
        for name, buffer in module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.add_(torch.rand(buffer.shape, generator=generator, dtype=torch.float64))
    return module


def text(name: str, settings: dict[str, Any], casts: Casts = "keep") -> Given:
    """Return a model of Hugging Face, from its configuration."""
    load_torchvision()
    library = import_module("transformers")
    kind = name.removesuffix("LMHeadModel").removesuffix("ForCausalLM").removesuffix("ForSequenceClassification")
    module = getattr(library, name)(getattr(library, f"{kind}Config")(**settings))
    tokens = torch.tensor([[2, 3, 4, 10], [5, 5, 1, 0], [9, 2, 7, 3]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]])
    return Given(settled(module), {"input_ids": tokens, "attention_mask": mask, "return_dict": True}, "logits", casts)


def image(name: str, **settings: Any) -> Given:
    """Return a model of timm, without a download."""
    load_torchvision()
    module = import_module("timm").create_model(name, pretrained=False, num_classes=3, **settings)
    x = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Given(settled(module), {"x": x}, None)


GROUPED = TEXT | {"num_key_value_heads": 1}
MODELS: dict[str, Callable[[], Given]] = {
    "GPT-2": lambda: text("GPT2LMHeadModel", GPT2),
    "BERT": lambda: text("BertForSequenceClassification", TEXT),
    "Llama": lambda: text("LlamaForCausalLM", GROUPED, "ignore"),
    "Gemma 2": lambda: text("Gemma2ForCausalLM", GROUPED | {"head_dim": 8}, "ignore"),
    "ResNet": lambda: image("resnet10t", channels=(4, 6, 8, 8), stem_width=4),
    "ViT": lambda: image("vit_tiny_patch16_224", img_size=32, embed_dim=16, depth=2, num_heads=2),
}


@pytest.fixture(scope="module", params=MODELS)
def given(request: pytest.FixtureRequest) -> Given:
    with catch_warnings():
        simplefilter("ignore")
        return MODELS[request.param]()


def test_the_tangent_kernel_is_that_of_jacobians_by_example(given: Given) -> None:
    """The oracle keeps the casts, which cost single precision."""
    x = torch.stack([value for value in given.inputs.values() if isinstance(value, Tensor)], 1)
    expected = oracle.tangent(of_one_tensor(given), x, x)
    chosen = torch.arange(0, expected.shape[1], 5)
    expected = expected[:, chosen][:, :, :, chosen]
    single = given.casts == "ignore"
    with pytest.warns(UserWarning, match="the error of a kernel is 1e-07") if single else nullcontext():
        found = tangent_kernel(given.module, given.inputs, output=given.output, outputs=chosen.tolist())
    agree(found, expected, 100 * torch.finfo(torch.float32 if single else torch.float64).eps)


@pytest.mark.parametrize("size", [1e-2, 0.3])
def test_the_push_and_the_reverse_close(given: Given, size: float) -> None:
    reader, own = reader_of(given.module, given.output, given.casts)
    generator = torch.Generator().manual_seed(2)
    end = {
        name: weight + size * weight.std(correction=0) * torch.randn(weight.shape, generator=generator).double()
        for name, weight in own.items()
    }
    start, after = reader.record(own, given.inputs), reader.record(end, given.inputs)
    chosen = range(0, start.outputs.shape[1], 5)
    reading, change = reader.secant(start, after, chosen), after.outputs - start.outputs
    assert (reading.jvp - change).norm() <= CLOSED * change.norm()
    found = applied(reading.jacobian, {name: end[name] - own[name] for name in own})
    assert (found - change[:, list(chosen)]).norm() <= CLOSED * change.norm()


def test_a_mixture_whose_routing_changes_is_refused_by_name() -> None:
    settings = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 1, "experts_implementation": "eager"}
    given = text("MixtralForCausalLM", settings, "ignore")
    reader, own = reader_of(given.module, given.output, given.casts)
    end = {name: weight.flip(0) for name, weight in own.items()}
    with refused(r"different (ways|operations) at the two ends of a step"):
        reader.secant(reader.record(own, given.inputs), reader.record(end, given.inputs))
