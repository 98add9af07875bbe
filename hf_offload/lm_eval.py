"""The lm-eval model `hf_offload` (`tools.lm_eval`), under the name by which it is run and imported.

python -m hf_offload.lm_eval run --model hf_offload --tasks ruler --model_args pretrained=…,policy=scout,budget=2048
"""

from lm_eval.__main__ import cli_evaluate

from hf_offload.tools.lm_eval import HybridLM, split_knobs

__all__ = ["HybridLM", "split_knobs"]

if __name__ == "__main__":
    cli_evaluate()
