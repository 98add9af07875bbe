"""What a layer foresees: a predictor, with what it knows of the layer's prompt."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Self

import torch

from hf_offload.policies.fluxion.features import PromptStatistics, step_features
from hf_offload.policies.fluxion.kernels.network import Network
from hf_offload.policies.fluxion.kernels.predict import Known
from hf_offload.policies.fluxion.partials import Partial
from hf_offload.policies.fluxion.predictor import HeadProperties, Predictor


class Foresight:
    """Tells what each head needs of the host at a step.

    Args:
        predictor: for all layers.
        network: the same for compiled code.
        statistics: of the layer's prompt.
        skip_streaming: whether heads may stream; False: none is said to.
    """

    def __init__(
        self, predictor: Predictor, network: Network, statistics: PromptStatistics, *, skip_streaming: bool
    ) -> None:
        self.predictor, self.network, self.statistics = predictor, network, statistics
        self.skip_streaming = skip_streaming

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # nobody writes into it

    @cached_property
    def known(self) -> Known:
        """The statistics for compiled code; they are in host memory."""
        given = self.statistics
        tensors = (given.fixed, given.directions, given.half_variance)
        return Known(*(tensor.contiguous().numpy() for tensor in tensors))

    def properties(self, query: torch.Tensor, sinks: Partial, newest: Partial, lengths: torch.Tensor) -> HeadProperties:
        """The needs, where these tensors are; arguments as in `step_features`."""
        found = self.predictor.predict(step_features(self.statistics, query, sinks, newest, lengths))
        return found if self.skip_streaming else found._replace(streaming=torch.zeros_like(found.streaming))
