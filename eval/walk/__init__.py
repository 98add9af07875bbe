"""A walk over the model types of Transformers: tiny configs, the comparison of one type."""
