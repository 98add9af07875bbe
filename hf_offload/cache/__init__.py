"""Layers of a cache: their state, transactions, settings and statistics."""
