"""Describe an experiment, identify it by a digest, and build its data and network.

The files in reading order:

experiment    all settings of a run, as a value
parent        the weights of another run, from which a run starts
identity      the digest of an experiment, which names its run folder
problem       the data and the network of an experiment
"""

from typing import TYPE_CHECKING

from ntkexp.naming import classes_of

if TYPE_CHECKING:
    from ntkexp.experiment.experiment import Experiment as Experiment
else:
    __getattr__ = classes_of(__name__)
