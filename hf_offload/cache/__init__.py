"""Storage: blocks, tables, digests, the resident set, statistics."""
