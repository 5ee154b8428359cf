"""The command line. Commands import heavy modules only when needed,
so `ntkexp --help` is fast."""
