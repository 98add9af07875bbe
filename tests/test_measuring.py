"""What `tune` and the evaluation scripts measure: divergence, bytes of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import prompt, tiny_model

from hf_offload.tools import measuring

TOKEN = 2 * 4 * 2 * 16 * 4  # K and V, layers, heads, channels, bytes


def test_divergence_by_hand() -> None:
    full = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log()
    mine = torch.tensor([[0.2, 0.6, 0.2], [0.1, 0.1, 0.8]]).log()
    kl, top = measuring.divergence(mine, full)
    want = 0.5 * torch.tensor(0.5 / 0.2).log() + 0.3 * torch.tensor(0.3 / 0.6).log()
    torch.testing.assert_close(kl, torch.stack([want, torch.tensor(0.0)]))
    assert top == 0.5


@pytest.mark.parametrize(
    ("policy", "options", "tokens"),
    [
        ("full", {"resident": 64}, 310 - 64),  # what is not resident
        ("window", {"budget": 128, "resident": 96}, 32),
        ("hgca", {"window": 64, "beta": 0.0}, 310 - 64),
    ],
)
def test_bytes_of_the_host(policy: str, options: dict[str, Any], tokens: int) -> None:
    """Around the middle of the steps 310 tokens are cached; blocks are whole."""
    model = tiny_model("llama")
    reading = measuring.read(model, prompt(1, 320)[0], 20)
    found = measuring.cost(model, policy, {"tier": "split", "block_size": 16, **options}, reading)
    assert found.host_bytes == pytest.approx(tokens * TOKEN, abs=24 * TOKEN)
    assert len(found.kl) == 20
    if policy in ("full", "hgca"):
        assert found.kl.max() < 1e-5
        assert found.top1 == 1
    one = measuring.cost(model, policy, {"block_size": 16, **options} | {"tier": "one"}, reading)
    assert one.host_bytes is None
    torch.testing.assert_close(one.kl, found.kl, atol=1e-4, rtol=1e-3)
