"""What is tried, a file for each kind: `play(luck, stage)` draws one case, runs its commands and judges them."""
