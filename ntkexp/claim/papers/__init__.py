"""Trials, quantities and pictures for claims of papers.
Each file covers one paper or topic.

Claims name a class without its file, such as `ntkexp.claim.papers.LaterTask`. Python
code imports the class from its file, so this package has no list of classes for type
checkers."""

from ntkexp.naming import classes_of

__getattr__ = classes_of(__name__)
