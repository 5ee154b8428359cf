"""The kernel of each layer from what goes forwards and backwards through it, beside the one from autograd:

    ⟨∂f/∂W, ∂f′/∂W⟩ = gain² Σ_pq ⟨g_p, g′_q⟩ ⟨b_p, b′_q⟩     summed over all pairs of pixels p, q; one pixel, if dense

b_p is the patch that the weight is multiplied with at pixel p, g_p the derivative of f by what comes out there. Biases
are patches of their shift (Arora et al. 2019, section 3).

    error       ‖products − autograd‖/‖autograd‖ of a layer       share    of the layer in the trace of the whole kernel
    unpaired    the error of ⟨g, g′⟩⟨b, b′⟩ with pixels left in one long vector, which is no kernel of a convolution
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.component import Count
from ntkexp.data.base import AbstractSource
from ntkexp.init.base import AbstractInit
from ntkexp.layer.affine_module import Affine, Convolution
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractArchitecture
from ntkexp.records.sweep import Level
from ntkexp.stream import stream


class LayerProducts(AbstractTrial):
    """A network of one output, drawn by the seed, is read at so many points of the data."""

    model: AbstractArchitecture
    init: AbstractInit
    data: AbstractSource
    points: Count = 8

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        x = self.data.split(seed).train.inputs[: self.points]
        module = self.model.module(self.init, tuple(x.shape[1:]), 1, stream("weights", seed)).eval()
        layers = {name: part for name, part in module.named_modules() if isinstance(part, Affine | Convolution)}
        if not layers:
            raise Mistake(f"trial.model: {self.model.option} has no dense or convolutional layer; choose mlp or cnn")
        seen = through(module, layers, x)
        own = {name: autograd(module, name, x) for name in layers}
        whole = sum(float(kernel.trace()) for kernel in own.values())
        return [
            {
                "layer": name,
                "kind": type(layer).__name__.lower(),
                "error": missed(paired(layer, *seen[name]), own[name]),
                "unpaired": missed(unpaired(layer, *seen[name]), own[name]),
                "share": float(own[name].trace()) / whole,
            }
            for name, layer in layers.items()
        ]


def through(module: nn.Module, layers: Mapping[str, nn.Module], x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """What went into each layer, and the derivative of the output by what came out of it."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = [
        layer.register_forward_hook(lambda _, given, z, name=name: seen.update({name: (given[0], z)}))
        for name, layer in layers.items()
    ]
    outputs = module(x)
    for hook in hooks:
        hook.remove()
    gradients = torch.autograd.grad(outputs.sum(), [z for _, z in seen.values()])
    return {name: (given.detach(), g) for (name, (given, _)), g in zip(seen.items(), gradients, strict=True)}


def autograd(module: nn.Module, layer: str, x: Tensor) -> Float[Tensor, "example example"]:
    """The kernel of the parameters of one layer, by a gradient for every example."""
    parameters = list(module.get_submodule(layer).parameters())
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(module(one).sum(), parameters)])
        for one in torch.split(x, 1)
    ]
    jacobian = torch.stack(rows)
    return jacobian @ jacobian.t()


def paired(layer: nn.Module, given: Tensor, g: Tensor) -> Float[Tensor, "example example"]:
    """Σ_pq ⟨g_p, g′_q⟩ ⟨b_p, b′_q⟩."""
    patches, signals = per_pixel(layer, given, g)
    left = torch.einsum("ipc,jqc->ijpq", signals, signals)
    return (left * torch.einsum("ipd,jqd->ijpq", patches, patches)).sum((2, 3))


def unpaired(layer: nn.Module, given: Tensor, g: Tensor) -> Float[Tensor, "example example"]:
    """⟨g, g′⟩ ⟨b, b′⟩ of whole layers."""
    patches, signals = (part.flatten(1) for part in per_pixel(layer, given, g))
    return (signals @ signals.t()) * (patches @ patches.t())


def per_pixel(layer: nn.Module, given: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The patches [example, pixel, entry], with an entry for the bias, and the signals [example, pixel, feature]."""
    if isinstance(layer, Affine):
        patches, signals = layer.gain * given[:, None], g[:, None]
    elif isinstance(layer, Convolution) and given.dim() == 4:
        padded = nn.functional.pad(layer.gain * given, layer.borders, layer.mode)
        window = tuple(layer.weight.shape[2:])
        patches = nn.functional.unfold(padded, window, stride=layer.stride).transpose(1, 2)
        signals = g.flatten(2).transpose(1, 2)
    else:
        raise Mistake("trial.data: convolutions are read on images of two axes; choose data=digits")
    if layer.bias is not None:
        patches = torch.cat([patches, torch.full_like(patches[..., :1], layer.shift)], 2)
    return patches, signals


def missed(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖/‖expected‖."""
    return float((found - expected).norm() / expected.norm())
