"""Claims of papers: each says beforehand what would support it, is run, measured, and judged beside a control."""
