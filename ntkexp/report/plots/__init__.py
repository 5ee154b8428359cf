"""Pictures of a run: one file per picture in `figures/`, each answering one question, which is its title."""
