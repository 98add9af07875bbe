"""Tools beside the cache."""
