"""The head property predictor: a small network over the features of a head, and its file (Fluxion, section 5.2)."""

from __future__ import annotations

import functools
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from safetensors import safe_open
from torch import nn

from hf_offload.blocks.digests import DIGESTS
from hf_offload.fields import Field, check_tensors
from hf_offload.files import tensor_file
from hf_offload.files.fingerprint import unlikeness
from hf_offload.knobs import check_choice, check_flag, check_number, check_tokens, shown
from hf_offload.policies.fluxion.budgets import GRANULARITIES
from hf_offload.policies.fluxion.features import FEATURES, PromptStatistics
from hf_offload.policies.fluxion.kernels.predictor import Network, PromptArrays, pack_network

FORMAT = 5
"""Of the file: 4 had a checksum of another form."""

_PARTS = ("model", "features", "granularities", "digest", "sinks", "local", "predictors")
"""Required entries of a file's header."""
_TRAIN = "train it again with `hf-offload train-fluxion`"
WIDTH = 312
"""Nodes of each of the two hidden layers."""
LIMIT = 8.0
"""Standard deviations from the mean at which features are clipped, in training too."""


class HeadProperties(NamedTuple):
    """Predicted properties of heads: bgt(blk) = budget0 + slope · log₂ blk, clipped to [0, 1] (Eq. 1), and streaming.

    Args:
        budget0, slope: fp32 `[…]`, shares of the host's tokens.
        streaming: bool `[…]`, whether a head attends sinks and local tokens alone.
    """

    budget0: torch.Tensor
    slope: torch.Tensor
    streaming: torch.Tensor


class Predictor(Protocol):
    """A predictor of head properties, for one deviation τ."""

    @property
    def tau(self) -> float:
        """The deviation that budgets are for."""

    @property
    def digest(self) -> str:
        """The digest whose order of blocks budgets are for."""

    @property
    def sinks(self) -> int:
        """First tokens that are always attended."""

    @property
    def local(self) -> int:
        """Newest tokens that are always attended."""

    def network(self) -> Network:
        """Its network for compiled code, with the present weights."""


def check_predictor(predictor: Any) -> None:
    """Check a predictor's methods and settings.

    Raises:
        ValueError: it is no predictor, or a value is not allowed.
    """
    parts = ("tau", "digest", "sinks", "local", "network")
    lacking = [name for name in parts if not hasattr(predictor, name)]
    if lacking or isinstance(predictor, type):
        raise ValueError(
            f"predictor={shown(predictor)} is not a predictor; use the file that `hf-offload train-fluxion` wrote, or "
            "hf_offload.ConstantPredictor()"
        )
    check_number("tau", predictor.tau, "a deviation", above=0, below=1)
    check_choice("digest", predictor.digest, tuple(DIGESTS))
    check_tokens("sinks", predictor.sinks, least=0)
    check_tokens("local", predictor.local, least=0)


@dataclass(frozen=True)
class ConstantPredictor:
    """A predictor for `Fluxion` with the same budget for every head; the defaults are full attention.

    Args:
        budget0, slope: shares of the host's tokens that a head needs: budget0 + slope · log₂(tokens of a run), clipped
            to 0 … 1.
        streaming: True: all heads need only sinks and newest tokens.
        tau: deviation of the output, equal to `Fluxion(tau=...)`.
        digest: `"submean"`, `"quest"` or `"mean"`.
        sinks, local: first and newest tokens that are always attended.

    Raises:
        ValueError: a value that is not allowed.
    """

    budget0: float = 1.0
    slope: float = 0.0
    streaming: bool = False
    tau: float = 0.1
    digest: str = "submean"
    sinks: int = 64
    local: int = 256

    def __post_init__(self) -> None:
        check_number("budget0", self.budget0, "a share of the host's tokens", least=-1e6, most=1e6)
        check_number("slope", self.slope, "a share of the host's tokens", least=-1e6, most=1e6)
        check_flag("streaming", self.streaming)
        check_predictor(self)

    def network(self) -> Network:
        """A network without hidden nodes: its outputs are the biases."""
        bias = torch.tensor((self.budget0, self.slope, float(self.streaming)), dtype=torch.float32, device="cpu")
        count, none = len(FEATURES), bias[:0]
        layers = (bias.new_zeros(0, count), none), (bias.new_zeros(0, 0), none), (bias.new_zeros(3, 0), bias)
        zeros = bias.new_zeros(count)
        return pack_network((zeros, zeros, zeros, zeros), *layers, 0.5)


class HeadPredictor(nn.Module):
    """A feed-forward network: a backbone of two layers, and an output for each of the three properties.

    Args:
        tau: the deviation that it predicts budgets for.
        digest: the digest that they are for.
        sinks, local: first and newest tokens that are always attended.
        streaming_at: the probability from which a head counts as streaming.
    """

    offset: torch.Tensor
    inverse: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor

    def __init__(self, *, tau: float, digest: str, sinks: int, local: int, streaming_at: float = 0.9) -> None:
        super().__init__()
        check_number("streaming_at", streaming_at, "a probability", above=0, below=1)
        self.tau, self.digest, self.sinks, self.local = tau, digest, sinks, local
        self.streaming_at = streaming_at
        self._logit = float(torch.logit(torch.tensor(streaming_at, dtype=torch.float64, device="cpu")))
        options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        for name, start in (("offset", 0.0), ("inverse", 1.0), ("low", -LIMIT), ("high", LIMIT)):
            self.register_buffer(name, torch.full((len(FEATURES),), start, **options))
        self.first = nn.Linear(len(FEATURES), WIDTH, **options)
        self.second = nn.Linear(WIDTH, WIDTH, **options)
        self.outputs = nn.Linear(WIDTH, 3, **options)

    def standardise(self, features: torch.Tensor) -> None:
        """Take mean, deviation and range of every feature from those of the training set `[N, 41]`.

        Features are clipped to their range in training, because a network's outputs beyond it are arbitrary. So a
        longer context counts as long as the longest one of the training.
        """
        wide = features.double()
        mean, deviation = wide.mean(0), wide.std(0, unbiased=False)
        inverse = torch.where(deviation > 1e-6 * (1 + mean.abs()), 1 / deviation, 0.0)  # 0 for a constant feature
        self.inverse.copy_(inverse)
        self.offset.copy_(-mean * inverse)
        for end, extreme in ((self.low, features.amin(0)), (self.high, features.amax(0))):
            end.copy_(torch.addcmul(self.offset, extreme, self.inverse).clamp_(-LIMIT, LIMIT))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """budget0, slope and the logit of streaming, `[…, 3]`, from `[…, 41]`."""
        x = torch.addcmul(self.offset, features, self.inverse)
        x = torch.minimum(torch.maximum(x, self.low), self.high)
        for layer in (self.first, self.second):
            x = torch.relu_(nn.functional.linear(x, layer.weight, layer.bias))
        return nn.functional.linear(x, self.outputs.weight, self.outputs.bias)

    def predict(self, features: torch.Tensor) -> HeadProperties:
        """The properties `[…]` of heads from features `[…, 41]`, as `FEATURES` names them."""
        budget0, slope, logit = self.forward(features).unbind(-1)
        return HeadProperties(budget0, slope, logit > self._logit)

    def network(self) -> Network:
        """The network for compiled code, with the present weights."""
        first, second, outputs = ((layer.weight, layer.bias) for layer in (self.first, self.second, self.outputs))
        standard = (self.offset, self.inverse, self.low, self.high)
        return pack_network(standard, first, second, outputs, self._logit)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Mapping[str, Any], tau: float = 0.1) -> Self:
        """The predictor for one τ out of a file.

        Args:
            path: what `save_predictors` wrote.
            model: `files.fingerprint.likeness` of the model that it is to serve, which may compute in another dtype.
            tau: one of those that the file was trained for.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: no predictor, a damaged one, another model (with the difference), other features, or a τ that
                it was not trained for.
        """
        about, tensors = _file(path)
        with _whole(path):
            odd = unlikeness(about["model"], dict(model))
            names = {float(trained): str(trained) for trained in about["predictors"]}
        if odd is not None:
            raise ValueError(f"{path} was trained for another model: {odd}; train one for this model")
        if about["features"] != list(FEATURES):
            raise ValueError(f"{path} was trained on other features than this version has; {_TRAIN}")
        if about["granularities"] != list(GRANULARITIES):
            raise ValueError(f"{path} was trained for block sizes {shown(about['granularities'])}; {_TRAIN}")
        if tau not in names:
            trained = ", ".join(f"{value:g}" for value in sorted(names))
            raise ValueError(
                f"tau={tau:g} is none that {path} was trained for; use one of {trained}, or train it for more"
            )
        prefix = f"{names[tau]}/"
        weights = {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}
        with _whole(path):
            settings = about["predictors"][names[tau]]
            made = cls(tau=tau, digest=about["digest"], sinks=about["sinks"], local=about["local"], **settings)
            check_predictor(made)
            check_tensors("", weights, {n: Field(x.dtype, tuple(x.shape)) for n, x in made.state_dict().items()})
            made.load_state_dict(weights)
        if wrong := sorted(name for name, x in weights.items() if not x.isfinite().all()):
            raise ValueError(f"{path} holds values that are not finite ({wrong[0]}): its training failed; {_TRAIN}")
        return made.eval().requires_grad_(False)


@dataclass(frozen=True, eq=False)
class LayerPredictor:
    """A predictor's network with the statistics of one layer's prompt.

    Args:
        network: for all layers.
        statistics: of the layer's prompt.
    """

    network: Network
    statistics: PromptStatistics

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # immutable

    @functools.cached_property
    def prompt(self) -> PromptArrays:
        """The statistics for compiled code, in host memory."""
        return self.statistics.arrays


# --- files -----------------------------------------------------------------------------------------------------------


def save_predictors(
    path: str | os.PathLike[str],
    model: Mapping[str, Any],
    predictors: Mapping[float, HeadPredictor],
    summary: Mapping[str, Any],
) -> None:
    """Write the predictors of one training, one for each τ, to a file; an interruption leaves no half of it.

    Each τ has its own weights because the anchor's budgets, which are features, are for that τ, too.

    Args:
        path: the file.
        model: likeness of the model.
        predictors: by τ; they share digest, sinks and local tokens.
        summary: of the training, for `json`.

    Raises:
        ValueError: no predictors, or predictors that differ in what they share.
    """
    shared = {(one.digest, one.sinks, one.local) for one in predictors.values()}
    if len(shared) != 1:
        raise ValueError(f"{len(predictors)} predictors for {len(shared)} settings; a file holds those of one setting")
    digest, sinks, local = shared.pop()
    about = {
        "format": FORMAT, "model": dict(model), "features": FEATURES, "granularities": GRANULARITIES, "digest": digest,
        "sinks": sinks, "local": local, "summary": dict(summary),
        "predictors": {str(tau): {"streaming_at": one.streaming_at} for tau, one in predictors.items()},
    }  # fmt: skip
    tensors = {
        f"{tau}/{name}": tensor.detach().cpu().contiguous()
        for tau, one in predictors.items()
        for name, tensor in one.state_dict().items()
    }
    tensor_file.replace(Path(path), tensor_file.pack(json.dumps(about), tensors))


def read_about(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The header of a predictor's file: model, features, settings, summary.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no predictor, a damaged one, or one of another format.
    """
    return dict(_file(path)[0])


def _file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Header and tensors of a file, shared by all callers: read only."""
    name = os.fspath(path)
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"predictor={name!r}: there is no such file; write one with `hf-offload train-fluxion`"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"predictor={shown(name)} is no name of a file ({error}); name a predictor's file") from error
    if stat.S_ISDIR(status.st_mode):
        inside = os.path.join(name, "predictor.safetensors")
        raise ValueError(f"predictor={name!r} is a folder; name the file in it, such as {inside!r}")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"predictor={name!r} is a device or a pipe; name a predictor's file")
    return _read(name, (status.st_ino, status.st_mtime_ns, status.st_size))


@functools.lru_cache(maxsize=4)
def _read(path: str, stamp: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """`_file`, read once while the file's stamp is the same."""
    try:
        with safe_open(path, "pt") as file:  # maps it: it may be a whole model
            saved_format = json.loads((file.metadata() or {}).get("about", "{}")).get("format")
        contents = tensor_file.unpack(Path(path).read_bytes()) if saved_format == FORMAT else None
    except (*tensor_file.UNSOUND, OSError) as error:
        raise ValueError(f"{path} is no predictor, or a damaged one ({error}); {_TRAIN}") from error
    if saved_format is None:
        raise ValueError(f"{path} is no predictor; use a file that `hf-offload train-fluxion` wrote for this model")
    if contents is None:
        raise ValueError(
            f"{path} is no predictor of format {FORMAT}, it says {shown(saved_format)}; {_TRAIN}, into the same "
            "folder: the samples that are there serve again"
        )
    about, tensors, whole = contents
    if not whole:
        raise ValueError(f"{path} is damaged: it does not agree with its checksum; {_TRAIN}")
    if lacking := sorted({*_PARTS} - about.keys()):
        raise ValueError(f"{path} is not a whole predictor: it says nothing of {', '.join(lacking)}; {_TRAIN}")
    return about, tensors


@contextmanager
def _whole(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise ValueError in place of the errors that come of a header or tensors of another form than expected."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a whole predictor: {error}; {_TRAIN}") from error
