"""One self-contained page, and the same in Markdown, from runs and sweeps."""
