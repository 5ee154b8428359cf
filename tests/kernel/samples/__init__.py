"""A sample for each rule: a function of two variable tensors [example, 6] that uses the operation."""

from tests.kernel.samples.base import CHOSEN, CURVED, LAYERED, PLAIN, Sample
from tests.kernel.samples.shaped import ALGEBRA, ARRANGED, COMPLEX_SAMPLES as COMPLEX_SAMPLES, PAIRED

SAMPLES: dict[str, Sample] = PLAIN | ARRANGED | CURVED | LAYERED | CHOSEN | PAIRED | ALGEBRA
