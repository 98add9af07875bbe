"""Long contexts for Hugging Face Transformers: a few KV blocks on the GPU, the rest in host memory, attended together.

Importing registers `attn_implementation="hybrid_sparse"` with Transformers and does nothing else.
"""

from hf_offload.attention.interface import register as _register
from hf_offload.cache.stats import Stats
from hf_offload.cpu.thread_pool import WorkerError
from hf_offload.enable import disable, enable, enabled
from hf_offload.fast_linear import LinearHandle, fast_linear
from hf_offload.fields import Field
from hf_offload.hybrid_cache import HybridCache
from hf_offload.policies.base import LayerState, Partial, Plan, Policy, Requirements
from hf_offload.policies.fluxion.predictor import ConstantPredictor
from hf_offload.policies.registry import (
    H2O,
    HGCA,
    FixedHybrid,
    Fluxion,
    Full,
    InfiniGen,
    Quest,
    Scout,
    Window,
    register_policy,
)
from hf_offload.prefix_store import PrefixStore
from hf_offload.tools.assets import demo_text, hide_number, load_demo_model

_register()

__version__ = "0.1.0"
__all__ = [
    "H2O",
    "HGCA",
    "ConstantPredictor",
    "Field",
    "FixedHybrid",
    "Fluxion",
    "Full",
    "HybridCache",
    "InfiniGen",
    "LayerState",
    "LinearHandle",
    "Partial",
    "Plan",
    "Policy",
    "PrefixStore",
    "Quest",
    "Requirements",
    "Scout",
    "Stats",
    "Window",
    "WorkerError",
    "__version__",
    "demo_text",
    "disable",
    "enable",
    "enabled",
    "fast_linear",
    "hide_number",
    "load_demo_model",
    "register_policy",
]
