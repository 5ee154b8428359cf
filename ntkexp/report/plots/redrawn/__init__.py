"""Figures of papers, drawn again in their own axes from tables, one file each."""
