"""The comparison of one model type: `HybridCache` against eager attention over Transformers' own cache."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
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


@dataclass
class Outcome:
    """What became of one model type.

    Attributes:
        status: "exact", "exact by stock fallback", "refused", "not run", "wrong" or "error".
        message: what the user is told, or why it was not run.
        layers: layers of the cache; held: those whose blocks HybridCache has.
        error: the largest difference of logits, relative to the largest logit; control: with tokens left out.
        oracle: "eager", or "full forward" where Transformers' own cache differs from that.
    """

    model_type: str
    status: str
    message: str = ""
    model: str = ""
    layers: int = 0
    held: int = 0
    error: float | None = None
    control: float | None = None
    oracle: str = ""
    details: dict[str, float] = field(default_factory=dict)


class Models:
    """The same random weights under eager attention and under ours."""

    def __init__(self, model_type: str) -> None:
        self.kind = model_class(model_type)
        self.config = tiny_config(model_type)
        text = self.config.get_text_config(decoder=True)
        if not isinstance(self.config, self.kind.config_class) and isinstance(text, self.kind.config_class):
            self.config = text
        self.eager = self._build("eager")

    def ours(self) -> PreTrainedModel:
        """The model under `hybrid_sparse`, with `fast_linear`; a ValueError where Transformers cannot load it so."""
        try:
            model = self._build("hybrid_sparse")
        except KeyError as error:
            told = f"Transformers cannot load it with attn_implementation='hybrid_sparse': {tell(error)}"
            raise ValueError(told) from error
        model.load_state_dict(self.eager.state_dict())
        hf_offload.fast_linear(model)
        return model

    def _build(self, attention: str) -> PreTrainedModel:
        torch.manual_seed(0)
        model = self.kind._from_config(self.config, attn_implementation=attention).eval().float()
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


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask `[B, PROMPT + CHUNK + STEPS]`, the later rows padded on the left."""
    ids = torch.randint(3, 150, (ROWS, PROMPT + CHUNK + STEPS), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    for row in range(1, ROWS):
        mask[row, : 9 * row] = 0
    return ids.masked_fill(mask == 0, 0), mask


def forward(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, cache: Any, start: int, stop: int) -> Any:
    """Logits `[B, stop - start, V]` of some of the tokens, with the positions that left padding gives them."""
    known = inspect.signature(model.forward).parameters
    extra: dict[str, Any] = {}
    if "position_ids" in known:
        extra["position_ids"] = (mask[:, :stop].cumsum(-1) - 1).clamp(min=0)[:, start:]
    if cache is None:
        extra["use_cache"] = False
    else:
        extra |= {"past_key_values": cache, "use_cache": True}
    return model(input_ids=ids[:, start:stop], attention_mask=mask[:, :stop], **extra).logits.float()


def pieces(model: PreTrainedModel, make: Callable[[], Any]) -> tuple[torch.Tensor, Any]:
    """Logits of prompt, chunk and single tokens, in one tensor, and the cache that they went through."""
    ids, mask = inputs()
    cache = make()
    cuts = [0, PROMPT, *range(PROMPT + CHUNK, PROMPT + CHUNK + STEPS + 1)]
    logits = [forward(model, ids, mask, cache, a, b) for a, b in itertools.pairwise(cuts)]
    return torch.cat(logits, 1), cache


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference of logits of tokens that are no padding, relative to the largest of them."""
    valid = inputs()[1].bool()
    got, want = got[valid], want[valid]
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got - want).abs().max() / want.abs().max().clamp(min=1))


def generated(model: PreTrainedModel, cache: Any, **knobs: Any) -> torch.Tensor:
    """Tokens that `generate()` gives for the prompt."""
    ids, mask = (x[:, :PROMPT] for x in inputs())
    return model.generate(
        input_ids=ids, attention_mask=mask, past_key_values=cache, max_new_tokens=STEPS, do_sample=False, **knobs
    )


BEAMS = {"greedy": {}, "beam": {"num_beams": 3}}


@torch.no_grad()
def compare(model_type: str) -> dict[str, Any]:
    """Run one model type with all kinds of caches."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    result = Outcome(model_type, "not run")
    try:
        models = Models(model_type)
        result.model = models.kind.__name__
        wanted = stock(models, result)
    except Exception as error:
        result.message = tell(error)
        if result.model:  # no oracle is needed to see that a type is refused
            result.message = f"with Transformers' own cache: {tell(error)}"
            _try(lambda: hf_offload.HybridCache(models.ours(), "full"), result)
        return asdict(result)
    _try(lambda: _ours(models, wanted, result), result)
    return asdict(result)


def _try(work: Callable[[], Any], result: Outcome) -> None:
    """Do something, and note what it raises: a ValueError is what a user is told of a type that is refused."""
    try:
        work()
    except ValueError as error:
        result.status, result.message = "refused", tell(error)
    except Exception as error:
        result.status, result.message = "error", tell(error)


def tell(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def stock(models: Models, result: Outcome) -> dict[str, torch.Tensor]:
    """What eager attention over Transformers' own cache gives, and a full forward."""
    ids, mask = inputs()
    model = models.eager

    def make() -> Any:
        return DynamicCache(config=models.config)

    wanted = {"eager": pieces(model, make)[0], "full forward": forward(model, ids, mask, None, 0, ids.shape[1])}
    for name, knobs in BEAMS.items():
        wanted[name] = generated(model, make(), **knobs)
    result.details["stock"] = difference(wanted["eager"], wanted["full forward"])
    return wanted


def _ours(models: Models, wanted: dict[str, torch.Tensor], result: Outcome) -> None:
    model = models.ours()
    told: list[str] = []
    worst, tokens_differ = 0.0, []

    def make(policy: str, knobs: dict[str, Any]) -> Any:
        return hf_offload.HybridCache(model, policy, **SMALL, **knobs)

    for name, given in CACHES.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got, cache = pieces(model, partial(make, *given))
        told += [str(w.message) for w in caught if "HybridCache" in str(w.message)]
        errors = {oracle: difference(got, wanted[oracle]) for oracle in ("eager", "full forward")}
        result.oracle = min(errors, key=errors.__getitem__) if errors["eager"] > TOLERANCE else "eager"
        result.details[name] = errors[result.oracle]
        worst = max(worst, errors[result.oracle])
        result.layers = len(cache.layers)
        result.held = sum(isinstance(layer, HybridLayer) and layer.past > 0 for layer in cache.layers)
        for mode, options in BEAMS.items() if name.startswith("scout") else ():
            if not torch.equal(generated(model, make(*given), **options), wanted[mode]):
                tokens_differ.append(f"{mode} ({name})")
    result.error = worst
    if result.held:
        result.control = difference(pieces(model, partial(make, *NARROW))[0], wanted[result.oracle])
    result.status, result.message = "exact", " ".join(dict.fromkeys(told))
    if worst > TOLERANCE or tokens_differ:
        result.status = "wrong"
        result.message = f"logits differ by {worst:.2g}; tokens differ: {', '.join(tokens_differ) or 'none'}"
    elif not result.held:
        result.status = "exact by stock fallback"
    elif result.control is not None and result.control < 100 * TOLERANCE:
        result.status, result.message = "not run", "the tiny model hardly sees its context"
