"""Where jobs run: on this machine, or on others that share a folder with it."""
