"""Trials of a claim that are no training runs: a function of a seed gives rows of the claim's table."""

from typing import TYPE_CHECKING

from ntkexp.chapter import classes_of

if TYPE_CHECKING:
    from ntkexp.claim.trial.added_removals import AddedRemovals as AddedRemovals
    from ntkexp.claim.trial.after_kernel import AfterKernel as AfterKernel
    from ntkexp.claim.trial.base import AbstractTrial as AbstractTrial
    from ntkexp.claim.trial.convolutional_accuracy import ConvolutionalAccuracy as ConvolutionalAccuracy
    from ntkexp.claim.trial.datamodel_score import DatamodelScore as DatamodelScore
    from ntkexp.claim.trial.ensemble_beside_processes import EnsembleBesideProcesses as EnsembleBesideProcesses
    from ntkexp.claim.trial.finite_steps import FiniteSteps as FiniteSteps
    from ntkexp.claim.trial.first_kernels import FirstKernels as FirstKernels
    from ntkexp.claim.trial.first_outputs import FirstOutputs as FirstOutputs
    from ntkexp.claim.trial.fluctuations import Fluctuations as Fluctuations
    from ntkexp.claim.trial.kernel_movement import KernelMovement as KernelMovement
    from ntkexp.claim.trial.kernel_times import KernelTimes as KernelTimes
    from ntkexp.claim.trial.late_generalising import LateGeneralising as LateGeneralising
    from ntkexp.claim.trial.layer_products import LayerProducts as LayerProducts
    from ntkexp.claim.trial.left_out_kernel import LeftOutKernel as LeftOutKernel
    from ntkexp.claim.trial.limit_regression import LimitRegression as LimitRegression
    from ntkexp.claim.trial.other_runs import OtherRuns as OtherRuns
    from ntkexp.claim.trial.removal_scores import RemovalScores as RemovalScores
    from ntkexp.claim.trial.scalar_curve import ScalarCurve as ScalarCurve
    from ntkexp.claim.trial.side_by_side import SideBySide as SideBySide
    from ntkexp.claim.trial.silent_alignment import SilentAlignment as SilentAlignment
    from ntkexp.claim.trial.summed_outputs import SummedOutputs as SummedOutputs
    from ntkexp.claim.trial.training_beside_kernels import TrainingBesideKernels as TrainingBesideKernels
    from ntkexp.claim.trial.width_sweep import WidthSweep as WidthSweep
else:
    __getattr__ = classes_of(__name__)
