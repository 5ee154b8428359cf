"""What a run folder holds, and how it is written and read, without torch."""
