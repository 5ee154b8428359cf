"""Self-contained HTML pages of runs, sweeps, claims and explanations, and reports in Markdown."""
