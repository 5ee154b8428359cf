"""Diagnostics of the tangent kernel K between the training examples."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from ntkexp.diagnostics.base import AbstractDiagnostic, Measured, TrainingState, Value
from ntkexp.statistics import (
    Spectrum,
    alignment,
    averaged,
    centred,
    label_alignment,
    spectrum,
)


class KernelVelocity(AbstractDiagnostic):
    """The speed and the rotation of the tangent kernel (Fort et al. 2020).

        velocity = (1 − cos(K_s, K_r)) / (s − r)
        rotation = 1 − ‖U_0ᵀ U_s‖² / k

    K_s is the kernel at step s, and K_r the latest earlier stored kernel, at step r.
    The columns of U_s are the first k eigenvectors of K_s. The rotation is 0 if they
    span the same space as the columns of U_0 (before training). It is 1 if the two
    spaces are orthogonal."""

    needs_kernel: ClassVar[bool] = True

    top: int = Field(10, ge=1, le=1000)
    """The number k of eigenvectors."""

    def measure(self, state: TrainingState) -> Measured:
        assert state.kernel is not None
        assert state.start_kernel is not None
        velocity = None
        if state.earlier is not None:
            cosine = alignment(state.kernel, state.earlier.kernel)
            velocity = (1 - cosine) / (state.step - state.earlier.step)
        before = spectrum(state.start_kernel).modes[:, : self.top]
        now = spectrum(state.kernel).modes[:, : self.top]
        overlap = float((before.mH @ now).square().sum()) / before.shape[1]
        return {"velocity": velocity, "rotation": max(0.0, 1 - overlap)}


class LayerAlignment(AbstractDiagnostic):
    """The alignment of each layer's part of the tangent kernel.

        K = Σ_layer K_layer
        labels.LAYER = CKA(K_layer, y yᵀ)
        start.LAYER  = CKA(K_layer, K_layer before training)

    CKA is the alignment (cosine) of centred kernels.
    The kernels are first averaged over outputs."""

    needs_kernel: ClassVar[bool] = True

    def measure(self, state: TrainingState) -> Measured:
        values: dict[str, Value] = {}
        for layer, parameters in state.layers.items():
            now = state.kernel_of(parameters)
            before = state.start_kernel_of(parameters)
            values[f"labels.{layer}"] = label_alignment(now, state.targets)
            values[f"start.{layer}"] = alignment(
                centred(averaged(now)), centred(averaged(before))
            )
        return values


class LayerKernels(AbstractDiagnostic):
    """The part of the tangent kernel that comes from each layer, as an array.

        K = Σ_layer K_layer          between training examples, [train, out, train, out]

    For other groups of parameters, write a function of your own that calls
    `state.kernel_of(parameters)`."""

    needs_kernel: ClassVar[bool] = True

    def measure(self, state: TrainingState) -> Measured:
        return {
            layer: state.kernel_of(parameters)
            for layer, parameters in state.layers.items()
        }


class Eigenfunctions(AbstractDiagnostic):
    """The first eigenvalues and eigenfunctions of the tangent kernel.

        Σ_j K(x_i, x_j) φ_k(x_j) = λ_k φ_k(x_i)          at the training examples, ‖φ_k‖ = 1
        φ_k(x) = Σ_j K(x, x_j) φ_k(x_j) / λ_k            at the queries

    The array `values` contains the eigenvalues λ_k. The array `functions` [mode, point,
    out] contains φ_k at the training examples, then at the queries. The sign of φ_k
    makes the entry of the largest magnitude at the training examples positive."""

    needs_kernel: ClassVar[bool] = True

    top: int = Field(10, ge=1, le=1000)
    """The number of eigenfunctions."""

    def measure(self, state: TrainingState) -> Measured:
        assert state.kernel is not None
        assert state.query_kernel is not None
        modes = positive(spectrum(state.kernel), self.top)
        train = modes.modes.mT.reshape(-1, *state.outputs.shape)
        # the Nyström extension to the queries; NaN for eigenvalues that are zero
        rows = state.query_kernel.flatten(2).flatten(0, 1)
        extended = (rows @ modes.modes / modes.values).mT
        queries = extended.reshape(len(modes.values), -1, state.outputs.shape[1])
        return {"values": modes.values, "functions": torch.cat([train, queries], dim=1)}


def positive(modes: Spectrum, top: int) -> Spectrum:
    """Return the first eigenvectors. Choose their signs so that the entry of the
    largest magnitude is positive.

    >>> positive(Spectrum(torch.ones(1), torch.tensor([[-1.0], [0.5]])), 1).modes.flatten()
    tensor([ 1.0000, -0.5000])
    """
    vectors = modes.modes[:, :top]
    largest = vectors.abs().argmax(0, keepdim=True)
    return Spectrum(modes.values[:top], vectors * vectors.gather(0, largest).sign())
