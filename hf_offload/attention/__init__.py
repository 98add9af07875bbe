"""The attention function, and what runs around it."""
