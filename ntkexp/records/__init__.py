"""The files of a run folder, and how they are written and read, without torch."""
