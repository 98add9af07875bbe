"""Caches as files."""
