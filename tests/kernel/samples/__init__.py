"""A sample for every rule: a function of two tensors [example, 6] that both change, in which the operation occurs."""

from tests.kernel.samples.algebra import ALGEBRA
from tests.kernel.samples.arranged import ARRANGED
from tests.kernel.samples.base import Sample
from tests.kernel.samples.chosen import CHOSEN
from tests.kernel.samples.complex_numbers import COMPLEX_SAMPLES as COMPLEX_SAMPLES
from tests.kernel.samples.curved import CURVED
from tests.kernel.samples.layered import LAYERED
from tests.kernel.samples.paired import PAIRED
from tests.kernel.samples.plain import PLAIN

SAMPLES: dict[str, Sample] = PLAIN | ARRANGED | CURVED | LAYERED | CHOSEN | PAIRED | ALGEBRA
