"""Pictures of a run: one file per picture in `figures/`, each answering one question, which is its title."""

import logging

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # without a home it would say where it keeps its cache instead
