"""Long contexts for Hugging Face Transformers: a few KV blocks on the GPU, the rest in host memory, attended together.

Importing registers `attn_implementation="hybrid_sparse"` with Transformers and does nothing else.
"""

from hf_offload.attention.function import register as _register
from hf_offload.enable import disable, enable, enabled
from hf_offload.hybrid_cache import HybridCache
from hf_offload.policies import Full, Policy, Scout, Window

_register()

__version__ = "0.1.0"
__all__ = ["Full", "HybridCache", "Policy", "Scout", "Window", "__version__", "disable", "enable", "enabled"]
