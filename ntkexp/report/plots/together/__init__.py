"""The pictures of a sweep, one file each."""
