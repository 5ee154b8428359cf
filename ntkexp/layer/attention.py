"""Self-attention over the pixels of an image or the positions of a sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from ntkexp.component import MAX_COUNT, Count
from ntkexp.covariance.covariance import Covariance, Signal
from ntkexp.covariance.pairs import Pairs
from ntkexp.layer.base import AbstractLayer, NotNegative, Positive, detached_number
from ntkexp.mistake import Mistake
from ntkexp.shapes import Shape
from ntkexp.stream import normal


class SelfAttention(AbstractLayer):
    """Self-attention: at each pixel p, a sum of values over all pixels r. The weights
    A[p, r] are computed from products of queries and keys.

        f[p] = OV_std Σ_h W_h Σ_r A_h[p, r] V_h x[r] + b_std · b,    A_h = ζ(G_h)

        linear_scaling   G_h[p, r] = QK_std (Q_h x[p])·(Q_h x[r])/d     one matrix for queries and keys
        otherwise        G_h[p, r] = QK_std (Q_h x[p])·(K_h x[r])/√d    the usual scaling

    ζ is the softmax over r, or the identity. Each head h has d = features/heads
    channels. The weights W, V, Q and K are drawn from N(0, 1), and divided by the
    square root of the number of their inputs. W_h maps the channels of head h to the
    outputs.

    The kernels are the limits for many heads and large d (Hron et al. 2020, arXiv
    2006.10540; as in neural-tangents). With linear scaling, A(x) = ζ(QK_std K(x, x)),
    and

        K′ = OV_std² A(x) K A(x′)ᵀ + b_std²
        Θ′ = OV_std² A(x) Θ A(x′)ᵀ + 2 (K′ − b_std²) + b_std²

    With the usual scaling, only the identity has a closed form. With s = QK_std OV_std,

        K′ = s² ‖K‖² K + b_std²
        Θ′ = s² (2 ⟨K, Θ⟩ K + ‖K‖² (Θ + 4 K)) + b_std²

    where the norm and the inner product are sums over all pixel pairs. If the weights
    are `frozen`, Θ′ has only the terms with Θ.

    >>> SelfAttention(features=8).shape((3, 5))
    (8, 5)
    """

    features: int = Field(ge=1, le=100 * MAX_COUNT)
    heads: Count = 4
    QK_std: Positive = 1.0
    OV_std: Positive = 1.0
    b_std: NotNegative = 0.0
    attention: Literal["softmax", "identity"] = "softmax"
    linear_scaling: bool = True
    frozen: bool = False

    def shape(self, shape: Shape) -> Shape:
        if len(shape) == 1:
            raise Mistake(
                f"SelfAttention takes [channels, *pixels], and was given {list(shape)}; "
                "put it before the Flatten"
            )
        return (self.features, *shape[1:])

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        self.shape(shape)
        head_width = -(-self.features // self.heads)  # d = features/heads, rounded up

        def drawn(*sizes: int) -> nn.Parameter:
            return nn.Parameter(normal(generator, *sizes))

        head_shape = (self.heads, shape[0], head_width)
        query = drawn(*head_shape)
        value = drawn(*head_shape)
        out = drawn(self.heads * head_width, self.features)
        key = None
        if not self.linear_scaling:
            key = drawn(*head_shape)
        b_std = detached_number(self.b_std)
        bias = None
        if b_std > 0:
            bias = drawn(self.features)
        weights = AttentionWeights(query, key, value, out, bias)
        scales = (detached_number(self.QK_std), detached_number(self.OV_std), b_std)
        module = Attention(weights, scales, self.attention == "softmax")
        return module.requires_grad_(not self.frozen)

    def carry(self, signal: Signal) -> Signal:
        if not self.linear_scaling and self.attention == "softmax":
            raise Mistake(
                "SelfAttention with softmax has no known limit of infinite width unless "
                "linear_scaling=true; choose that, or attention=identity, or method='monte_carlo'"
            )
        return signal.after_weights()

    def input_pairs(self, output_pairs: Pairs, shape: Shape) -> Pairs:
        return Pairs.all(shape[1:])

    def input_self_pairs(self, output_pairs: Pairs | None, shape: Shape) -> Pairs:
        return Pairs.all(shape[1:])

    def push(self, covariance: Covariance, shape: Shape) -> Covariance:
        pairs = covariance.pairs
        K = pairs.as_matrix(covariance.nngp)
        Theta: Tensor | None = None
        if covariance.ntk is not None:
            Theta = pairs.as_matrix(covariance.ntk)
        b2 = self.b_std**2
        if self.linear_scaling:
            covariance, left, right = self.weights(covariance, K)

            def attended(values: Tensor) -> Tensor:
                # OV_std² A(x) values A(x′)ᵀ
                return self.OV_std**2 * (left @ values @ right.transpose(-1, -2))

            nngp = attended(K)
            if Theta is not None:
                Theta = attended(Theta)
            # the terms of Θ′ from the weights W and V; the term of Q vanishes as d grows
            source = 2 * nngp
        else:
            s2 = (self.QK_std * self.OV_std) ** 2
            norm = (K * K).sum((-2, -1), keepdim=True)
            nngp = s2 * norm * K
            if Theta is not None:
                inner = (K * Theta).sum((-2, -1), keepdim=True)
                Theta = s2 * (2 * inner * K + norm * Theta)
            # the terms of Θ′ from the weights W, V, Q and K
            source = 4 * nngp
        after = replace(covariance, nngp=pairs.from_matrix(nngp + b2))
        if Theta is None:
            return after
        if not self.frozen:
            Theta = Theta + source + b2
        return replace(after, ntk=pairs.from_matrix(Theta))

    def weights(
        self, covariance: Covariance, K: Tensor
    ) -> tuple[Covariance, Tensor, Tensor]:
        """Return the attention weights A(x) = ζ(QK_std K(x, x)) of the left and right
        examples.

        If `covariance` is K between each example and itself, compute the weights, and
        store them in `left`, where other layers store variances. If `covariance` is
        between left and right examples, read the stored weights."""
        if covariance.ntk is None:
            A = self.QK_std * K
            if self.attention == "softmax":
                A = A.softmax(-1)
            collected = replace(covariance, left=(*covariance.left, A))
            return collected, A, A
        entered = covariance.nonlinear_layers
        left = covariance.left[entered][:, None]
        right = covariance.right[entered][None]
        return replace(covariance, nonlinear_layers=entered + 1), left, right


@dataclass(frozen=True)
class AttentionWeights:
    """The weights of `SelfAttention`. If `key` is None,
    the queries are also the keys."""

    query: Float[nn.Parameter, "head channel width"]
    key: Float[nn.Parameter, "head channel width"] | None
    value: Float[nn.Parameter, "head channel width"]
    out: Float[nn.Parameter, "head_width feature"]
    bias: Float[nn.Parameter, " feature"] | None


class Attention(nn.Module):
    """The module of `SelfAttention`, with the scales QK_std, OV_std and b_std."""

    def __init__(
        self,
        weights: AttentionWeights,
        scales: tuple[float, float, float],
        softmax: bool,
    ) -> None:
        super().__init__()
        self.query = weights.query
        self.key = weights.key
        self.value = weights.value
        self.out = weights.out
        self.bias = weights.bias
        self.scales = scales
        self.softmax = softmax

    def forward(
        self, x: Float[Tensor, "example channel *pixel"]
    ) -> Float[Tensor, "example feature *pixel"]:
        QK_std, OV_std, b_std = self.scales
        _, channels, width = self.query.shape
        rows = x.flatten(2).transpose(1, 2).unsqueeze(1)  # [example, 1, pixel, channel]
        queries = rows @ self.query  # [example, head, pixel, width]
        values = rows @ self.value
        if self.key is None:
            keys = queries
            divisor = channels * width
        else:
            keys = rows @ self.key
            divisor = channels * width**0.5

        # A = ζ(G), and the heads Σ_r A[p, r] V x[r]
        A = queries @ keys.transpose(2, 3) * (QK_std / divisor)
        if self.softmax:
            A = A.softmax(3)
        heads = A @ values
        joined = heads.transpose(1, 2).flatten(2)  # [example, pixel, head · width]

        scale = OV_std / (self.out.shape[0] * channels) ** 0.5
        outputs = joined @ self.out * scale
        if self.bias is not None:
            outputs = outputs + b_std * self.bias
        image: Tensor = outputs.transpose(1, 2).reshape(len(x), -1, *x.shape[2:])
        return image
