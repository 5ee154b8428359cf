"""Trials, quantities and pictures for claims of papers.
Each file covers one paper or topic."""

from typing import TYPE_CHECKING

from ntkexp.naming import classes_of

if TYPE_CHECKING:
    from ntkexp.claim.papers.convolutional_kernels import (
        AccuracyByExamples as AccuracyByExamples,
    )
    from ntkexp.claim.papers.convolutional_kernels import AccuracyTable as AccuracyTable
    from ntkexp.claim.papers.convolutional_kernels import (
        ConvolutionalAccuracy as ConvolutionalAccuracy,
    )
    from ntkexp.claim.papers.convolutional_kernels import KernelTimes as KernelTimes
    from ntkexp.claim.papers.convolutional_kernels import LayerProducts as LayerProducts
    from ntkexp.claim.papers.convolutional_kernels import LearningCurve as LearningCurve
    from ntkexp.claim.papers.convolutional_kernels import (
        LimitRegression as LimitRegression,
    )
    from ntkexp.claim.papers.convolutional_kernels import (
        ScrambledPixels as ScrambledPixels,
    )
    from ntkexp.claim.papers.double_descent import (
        InterpolationPeak as InterpolationPeak,
    )
    from ntkexp.claim.papers.double_descent import WidthSweep as WidthSweep
    from ntkexp.claim.papers.end_of_training import EndOfTraining as EndOfTraining
    from ntkexp.claim.papers.end_of_training import LinearModes as LinearModes
    from ntkexp.claim.papers.end_of_training import Operations as Operations
    from ntkexp.claim.papers.followed_loops import (
        GrokkingByComponent as GrokkingByComponent,
    )
    from ntkexp.claim.papers.followed_loops import (
        SubliminalLearning as SubliminalLearning,
    )
    from ntkexp.claim.papers.later_tasks import LaterTask as LaterTask
    from ntkexp.claim.papers.lazy_and_rich import AfterKernel as AfterKernel
    from ntkexp.claim.papers.lazy_and_rich import LateGeneralising as LateGeneralising
    from ntkexp.claim.papers.lazy_and_rich import SilentAlignment as SilentAlignment
    from ntkexp.claim.papers.leaving_out import AddedRemovals as AddedRemovals
    from ntkexp.claim.papers.leaving_out import DatamodelScore as DatamodelScore
    from ntkexp.claim.papers.leaving_out import LeftOutKernel as LeftOutKernel
    from ntkexp.claim.papers.leaving_out import OtherRuns as OtherRuns
    from ntkexp.claim.papers.leaving_out import RemovalScores as RemovalScores
    from ntkexp.claim.papers.path_kernel import EnoughExamples as EnoughExamples
    from ntkexp.claim.papers.path_kernel import KernelChange as KernelChange
    from ntkexp.claim.papers.path_kernel import MachineError as MachineError
    from ntkexp.claim.papers.path_kernel import MarginBound as MarginBound
    from ntkexp.claim.papers.path_kernel import PathFact as PathFact
    from ntkexp.claim.papers.path_kernel import StoredExamples as StoredExamples
    from ntkexp.claim.papers.path_kernel import SymmetryDefect as SymmetryDefect
    from ntkexp.claim.papers.path_kernel import TimeShare as TimeShare
    from ntkexp.claim.papers.path_kernel import WeightRank as WeightRank
    from ntkexp.claim.papers.scalar_functions import FiniteStepPeaks as FiniteStepPeaks
    from ntkexp.claim.papers.scalar_functions import FiniteSteps as FiniteSteps
    from ntkexp.claim.papers.scalar_functions import Reparametrised as Reparametrised
    from ntkexp.claim.papers.scalar_functions import ScalarCurve as ScalarCurve
    from ntkexp.claim.papers.scalar_functions import ScalarStep as ScalarStep
    from ntkexp.claim.papers.scalar_functions import ScalarTraining as ScalarTraining
    from ntkexp.claim.papers.wide_networks import Bottleneck as Bottleneck
    from ntkexp.claim.papers.wide_networks import ChangeByWidth as ChangeByWidth
    from ntkexp.claim.papers.wide_networks import (
        EnsembleBesideProcesses as EnsembleBesideProcesses,
    )
    from ntkexp.claim.papers.wide_networks import FirstKernels as FirstKernels
    from ntkexp.claim.papers.wide_networks import FirstOutputs as FirstOutputs
    from ntkexp.claim.papers.wide_networks import Fluctuations as Fluctuations
    from ntkexp.claim.papers.wide_networks import KernelMovement as KernelMovement
    from ntkexp.claim.papers.wide_networks import OutputsInTraining as OutputsInTraining
    from ntkexp.claim.papers.wide_networks import SummedOutputs as SummedOutputs
    from ntkexp.claim.papers.wide_networks import (
        TrainingBesideKernels as TrainingBesideKernels,
    )
else:
    __getattr__ = classes_of(__name__)
