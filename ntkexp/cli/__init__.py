"""The command line. Nothing heavy is imported before a command needs it: `ntkexp --help` knows no torch."""
