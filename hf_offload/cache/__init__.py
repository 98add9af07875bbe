"""Storage of K and V: layers, blocks, digests, resident sets, transactions, saved caches, statistics."""
