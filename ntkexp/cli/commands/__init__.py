"""The commands: the arguments of each, and a few lines that import what it does when it is called."""
