"""What several runs say together: estimates with intervals, power laws, paired comparisons."""
