"""An OpenAI-compatible server on a `PrefixStore`: `hf-offload serve`."""
