"""The format of a kernel file: its arrays, its tiles, what it is of."""
