"""The commands, a file each: the function with the name of its file. What is slow to import waits for its call."""
