"""`ntkexp kernel …`: a kernel by itself."""
