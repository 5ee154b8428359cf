"""Trials, quantities and pictures for claims of papers.
Each file covers one paper or topic."""

from typing import TYPE_CHECKING

from ntkexp.naming import classes_of

if TYPE_CHECKING:
    from ntkexp.claim.papers.account import (
        FiniteStepTerm as FiniteStepTerm,
        PartsAtTheEdge as PartsAtTheEdge,
        RisingSteps as RisingSteps,
        WidthDisagreement as WidthDisagreement,
    )
    from ntkexp.claim.papers.convolutional_kernels import (
        AccuracyByExamples as AccuracyByExamples,
        AccuracyTable as AccuracyTable,
        ConvolutionalAccuracy as ConvolutionalAccuracy,
        KernelOperations as KernelOperations,
        LayerProducts as LayerProducts,
        LearningCurve as LearningCurve,
        LimitRegression as LimitRegression,
        ScrambledPixels as ScrambledPixels,
    )
    from ntkexp.claim.papers.double_descent import (
        InterpolationPeak as InterpolationPeak,
        WidthSweep as WidthSweep,
    )
    from ntkexp.claim.papers.end_of_training import (
        EndOfTraining as EndOfTraining,
        LinearModes as LinearModes,
        Operations as Operations,
    )
    from ntkexp.claim.papers.followed_loops import (
        GrokkingByComponent as GrokkingByComponent,
        SubliminalLearning as SubliminalLearning,
    )
    from ntkexp.claim.papers.later_tasks import LaterTask as LaterTask
    from ntkexp.claim.papers.lazy_and_rich import (
        AccuracyByScale as AccuracyByScale,
        AfterKernel as AfterKernel,
        LateGeneralising as LateGeneralising,
        SilentAlignment as SilentAlignment,
    )
    from ntkexp.claim.papers.leaving_out import (
        AddedRemovals as AddedRemovals,
        DatamodelScore as DatamodelScore,
        ExactnessOfScores as ExactnessOfScores,
        LeftOutKernel as LeftOutKernel,
        OtherRuns as OtherRuns,
        RemovalScores as RemovalScores,
        ScoresByTraining as ScoresByTraining,
    )
    from ntkexp.claim.papers.needed_examples import RemovalByPhase as RemovalByPhase
    from ntkexp.claim.papers.path_kernel import (
        EnoughExamples as EnoughExamples,
        KernelChange as KernelChange,
        MachineError as MachineError,
        MarginBound as MarginBound,
        PathFact as PathFact,
        StoredExamples as StoredExamples,
        SymmetryDefect as SymmetryDefect,
        TimeShare as TimeShare,
        WeightRank as WeightRank,
    )
    from ntkexp.claim.papers.scalar_functions import (
        FiniteStepPeaks as FiniteStepPeaks,
        FiniteSteps as FiniteSteps,
        Reparametrised as Reparametrised,
        ScalarCurve as ScalarCurve,
        ScalarStep as ScalarStep,
        ScalarTraining as ScalarTraining,
    )
    from ntkexp.claim.papers.wide_networks import (
        AbstractEnsembles as AbstractEnsembles,
        Bottleneck as Bottleneck,
        ChangeByWidth as ChangeByWidth,
        EnsembleBesideProcesses as EnsembleBesideProcesses,
        FirstKernels as FirstKernels,
        FirstOutputs as FirstOutputs,
        Fluctuations as Fluctuations,
        KernelMovement as KernelMovement,
        OutputsInTraining as OutputsInTraining,
        SummedOutputs as SummedOutputs,
        TrainingBesideKernels as TrainingBesideKernels,
    )
else:
    __getattr__ = classes_of(__name__)
