"""Pictures of claims: of the rows as they were judged, or as the paper drew them, in its axes and order."""

from typing import TYPE_CHECKING

from ntkexp.chapter import classes_of

if TYPE_CHECKING:
    from ntkexp.claim.picture.accuracy_table import AccuracyTable as AccuracyTable
    from ntkexp.claim.picture.base import AbstractPicture as AbstractPicture
    from ntkexp.claim.picture.change_by_width import ChangeByWidth as ChangeByWidth
    from ntkexp.claim.picture.interpolation_peak import InterpolationPeak as InterpolationPeak
    from ntkexp.claim.picture.judged_rows import JudgedRows as JudgedRows
    from ntkexp.claim.picture.published_number import PublishedNumber as PublishedNumber
    from ntkexp.claim.picture.scalar_step import ScalarStep as ScalarStep
    from ntkexp.claim.picture.scalar_training import ScalarTraining as ScalarTraining
else:
    __getattr__ = classes_of(__name__)
