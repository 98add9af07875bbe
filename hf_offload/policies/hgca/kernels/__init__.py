"""HGCA's compiled kernels: moving averages, weights of an append's queries, selection and compaction of tokens."""
