"""The comparison of one model type: `HybridCache` against eager attention over Transformers' own cache."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

import hf_offload
from hf_offload.blocks import digests
from hf_offload.cache.layer import HybridLayer
from walk.configs import model_class, tiny_config

digests.STATISTICS_TOKENS = 16  # or prompts of so few tokens would be attended whole
PROMPT, CHUNK, STEPS, ROWS = 41, 13, 6, 3
BLOCK = 8
TOLERANCE = 1e-4
"""Of logits, relative to the largest: fp32, deep random models."""

SMALL: dict[str, Any] = {"block_size": BLOCK, "prefill_tile": 16}
SPLIT = {"tier": "split", "resident": 4 * BLOCK}
SCOUT = {"budget": 512, "sinks": 8, "recent": 0, "synchronous_layers": (0,)}
CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "full, split": ("full", SPLIT),
    "scout": ("scout", SCOUT),
    "scout, split": ("scout", SCOUT | SPLIT | {"lookahead": "select"}),
}
NARROW: tuple[str, dict[str, Any]] = ("window", {"budget": 24, "sinks": 8})
"""A cache that must give other logits; if it does not, the comparison sees nothing."""
SEARCHES: dict[str, dict[str, Any]] = {"greedy": {}, "beam": {"num_beams": 3}}


def build(model_type: str, attention: str) -> PreTrainedModel:
    """A model of a type with random weights, the same ones for each attention."""
    kind, config = model_class(model_type), tiny_config(model_type)
    text = config.get_text_config(decoder=True)
    if not isinstance(config, kind.config_class) and isinstance(text, kind.config_class):
        config = text
    torch.manual_seed(0)
    model: PreTrainedModel = kind._from_config(config, attn_implementation=attention).eval().float()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.15, generator=generator)
            else:
                spread = 0.2 if "norm" in name or "ln" in name else 0.1
                parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def build_ours(eager: PreTrainedModel, model_type: str) -> PreTrainedModel:
    """The model under `hybrid_sparse`, with `fast_linear`; a ValueError where Transformers cannot load it so."""
    try:
        model = build(model_type, "hybrid_sparse")
    except KeyError as error:
        told = f"Transformers cannot load it with attn_implementation='hybrid_sparse': {tell(error)}"
        raise ValueError(told) from error
    model.load_state_dict(eager.state_dict())
    hf_offload.fast_linear(model)
    return model


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask `[B, PROMPT + CHUNK + STEPS]`, the later rows padded on the left."""
    ids = torch.randint(3, 150, (ROWS, PROMPT + CHUNK + STEPS), generator=torch.Generator().manual_seed(2))
    mask = (torch.arange(ids.shape[1]) >= 9 * torch.arange(ROWS)[:, None]).long()
    return ids.masked_fill(mask == 0, 0), mask


def forward(model: PreTrainedModel, cache: Any, start: int, stop: int) -> torch.Tensor:
    """Logits `[B, stop - start, V]` of some of the tokens, with the positions that left padding gives them."""
    ids, mask = inputs()
    given: dict[str, Any] = {"use_cache": False} if cache is None else {"past_key_values": cache, "use_cache": True}
    if "position_ids" in inspect.signature(model.forward).parameters:
        given["position_ids"] = (mask[:, :stop].cumsum(-1) - 1).clamp(min=0)[:, start:]
    logits: torch.Tensor = model(input_ids=ids[:, start:stop], attention_mask=mask[:, :stop], **given).logits
    return logits.float()


def pieces(model: PreTrainedModel, cache: Any) -> torch.Tensor:
    """Logits of prompt, chunk and single tokens that go through a cache, in one tensor."""
    cuts = [0, PROMPT, *range(PROMPT + CHUNK, PROMPT + CHUNK + STEPS + 1)]
    return torch.cat([forward(model, cache, start, stop) for start, stop in itertools.pairwise(cuts)], 1)


def generated(model: PreTrainedModel, cache: Any, **knobs: Any) -> torch.Tensor:
    """Tokens that `generate()` gives for the prompt."""
    ids, mask = (x[:, :PROMPT] for x in inputs())
    return model.generate(
        input_ids=ids, attention_mask=mask, past_key_values=cache, max_new_tokens=STEPS, do_sample=False, **knobs
    )


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference of logits of tokens that are no padding, relative to the largest of them."""
    valid = inputs()[1].bool()
    if not bool(torch.isfinite(got[valid]).all()):
        return float("inf")
    return float((got[valid] - want[valid]).abs().max() / want[valid].abs().max().clamp(min=1))


def tell(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@torch.no_grad()
def compare(model_type: str) -> dict[str, Any]:
    """Run one model type with all kinds of caches.

    Returns:
        status: "exact", "exact by stock fallback", "refused", "not run", "wrong" or "error";
        message: what the user is told, or why it was not run;
        model: its class; layers: of the cache; held: those whose blocks HybridCache has;
        error: the largest difference of logits, relative to the largest logit; control: with tokens left out;
        oracle: "eager", or "full forward" where Transformers' own cache differs from that;
        details: the differences by cache.
    """
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    result: dict[str, Any] = {"model_type": model_type, "status": "not run", "message": "", "model": ""}
    result |= {"layers": 0, "held": 0, "error": None, "control": None, "oracle": "", "details": {}}

    def attempt(work: Callable[[], Any]) -> None:
        """Do something, and note what it raises: a ValueError is what a user is told of a type that is refused."""
        try:
            work()
        except Exception as error:
            result.update(status="refused" if isinstance(error, ValueError) else "error", message=tell(error))

    try:
        eager = build(model_type, "eager")
        result["model"] = type(eager).__name__
        wanted = {
            "eager": pieces(eager, DynamicCache(config=eager.config)),
            "full forward": forward(eager, None, 0, PROMPT + CHUNK + STEPS),
            **{mode: generated(eager, DynamicCache(config=eager.config), **knobs) for mode, knobs in SEARCHES.items()},
        }
    except Exception as error:
        result["message"] = tell(error)
        if result["model"]:  # no oracle is needed to see that a type is refused
            result["message"] = f"with Transformers' own cache: {tell(error)}"
            attempt(lambda: hf_offload.HybridCache(build_ours(eager, model_type), "full"))
        return result
    result["details"]["stock"] = difference(wanted["eager"], wanted["full forward"])
    attempt(lambda: result.update(compare_ours(build_ours(eager, model_type), wanted, result["details"])))
    return result


def compare_ours(model: PreTrainedModel, wanted: dict[str, torch.Tensor], details: dict[str, float]) -> dict[str, Any]:
    """The result for a model under `hybrid_sparse`."""
    told: list[str] = []
    worst, tokens_differ = 0.0, []
    oracle, layers, held = "eager", 0, 0

    def make(policy: str, knobs: dict[str, Any]) -> Any:
        return hf_offload.HybridCache(model, policy, **SMALL, **knobs)

    for name, given in CACHES.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cache = make(*given)
            got = pieces(model, cache)
        told += [str(w.message) for w in caught if "HybridCache" in str(w.message)]
        errors = {each: difference(got, wanted[each]) for each in ("eager", "full forward")}
        oracle = min(errors, key=errors.__getitem__) if errors["eager"] > TOLERANCE else "eager"
        details[name] = errors[oracle]
        worst = max(worst, errors[oracle])
        layers = len(cache.layers)
        held = sum(isinstance(layer, HybridLayer) and layer.past > 0 for layer in cache.layers)
        for mode, options in SEARCHES.items() if name.startswith("scout") else ():
            if not torch.equal(generated(model, make(*given), **options), wanted[mode]):
                tokens_differ.append(f"{mode} ({name})")
    control = difference(pieces(model, make(*NARROW)), wanted[oracle]) if held else None
    status, message = "exact" if held else "exact by stock fallback", " ".join(dict.fromkeys(told))
    if worst > TOLERANCE or tokens_differ:
        status = "wrong"
        message = f"logits differ by {worst:.2g}; tokens differ: {', '.join(tokens_differ) or 'none'}"
    elif control is not None and control < 100 * TOLERANCE:
        status, message = "not run", "the tiny model hardly sees its context"
    found = {"status": status, "message": message, "layers": layers, "held": held}
    return found | {"error": worst, "control": control, "oracle": oracle}
