"""The command line. Heavy modules are imported only when a command needs them: `ntkexp --help`
imports no torch.
"""
