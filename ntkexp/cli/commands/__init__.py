"""The commands, a file each: its arguments, and a few lines that import what it does when it is called."""
