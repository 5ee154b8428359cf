"""The kinds of cases. In each file `play(luck, stage)` draws a case, runs its commands and judges them."""
