"""KV blocks: pool, store, formats, resident set, digests, padding, tiles."""
