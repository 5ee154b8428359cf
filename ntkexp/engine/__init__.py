"""Where runs happen: on this machine, or on others that share a folder with it."""
