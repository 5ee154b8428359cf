"""Trials of a claim that are no training runs: a function of a seed gives rows of the claim's table."""

from typing import TYPE_CHECKING

from ntkexp.chapter import classes_of

if TYPE_CHECKING:
    from ntkexp.claim.trial.base import AbstractTrial as AbstractTrial
    from ntkexp.claim.trial.base import SideBySide as SideBySide
    from ntkexp.claim.trial.kernels import ConvolutionalAccuracy as ConvolutionalAccuracy
    from ntkexp.claim.trial.kernels import FiniteSteps as FiniteSteps
    from ntkexp.claim.trial.kernels import KernelTimes as KernelTimes
    from ntkexp.claim.trial.kernels import LayerProducts as LayerProducts
    from ntkexp.claim.trial.kernels import LimitRegression as LimitRegression
    from ntkexp.claim.trial.kernels import ScalarCurve as ScalarCurve
    from ntkexp.claim.trial.retraining import AddedRemovals as AddedRemovals
    from ntkexp.claim.trial.retraining import LeftOutKernel as LeftOutKernel
    from ntkexp.claim.trial.scaled import AfterKernel as AfterKernel
    from ntkexp.claim.trial.scores import DatamodelScore as DatamodelScore
    from ntkexp.claim.trial.scores import OtherRuns as OtherRuns
    from ntkexp.claim.trial.scores import RemovalScores as RemovalScores
    from ntkexp.claim.trial.timing import LateGeneralising as LateGeneralising
    from ntkexp.claim.trial.timing import SilentAlignment as SilentAlignment
    from ntkexp.claim.trial.width import EnsembleBesideProcesses as EnsembleBesideProcesses
    from ntkexp.claim.trial.width import FirstKernels as FirstKernels
    from ntkexp.claim.trial.width import FirstOutputs as FirstOutputs
    from ntkexp.claim.trial.width import Fluctuations as Fluctuations
    from ntkexp.claim.trial.width import KernelMovement as KernelMovement
    from ntkexp.claim.trial.width import SummedOutputs as SummedOutputs
    from ntkexp.claim.trial.width import TrainingBesideKernels as TrainingBesideKernels
    from ntkexp.claim.trial.width import WidthSweep as WidthSweep
else:
    __getattr__ = classes_of(__name__)
