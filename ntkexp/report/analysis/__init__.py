"""Statistics over several runs: intervals, rank correlations, power laws, paired comparisons."""
