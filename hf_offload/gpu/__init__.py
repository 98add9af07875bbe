"""Device side: attention over resident slots."""
