"""HGCA's kernels: moving averages of attention weights, choice and copies of the tokens that are retained."""
