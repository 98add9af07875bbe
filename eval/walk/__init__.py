"""Tiny configs for every model type of Transformers."""
