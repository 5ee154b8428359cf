"""Claims of papers: stated before they are measured, then judged beside a control."""
