"""HGCA's compiled kernels: moving averages, and the weights of an append's queries."""
