"""What `hf_offload.gpu.seal` packs, unpacked."""

from __future__ import annotations

import torch

from hf_offload.gpu.seal import OFFSET, level_shifts


def unpack_codes(packed: torch.Tensor, S: int, D: int) -> torch.Tensor:
    """Undo `pack_codes`: uint8 [..., S * D / 2] to int8 [..., S, D], D a multiple of 8."""
    assert D % 8 == 0
    assert packed.shape[-1] * 2 == S * D
    outer = packed.shape[:-1]
    octets = packed.reshape(*outer, D // 8, S, 4).transpose(-3, -2)
    nibbles = torch.stack((octets & 15, octets >> 4), dim=-1)
    return (nibbles.to(torch.int8) - OFFSET).reshape(*outer, S, D)


def unpack_levels(packed: torch.Tensor) -> torch.Tensor:
    """Undo `pack_levels`: int8 [..., S, D]."""
    words = packed.transpose(-2, -1)[..., None, None, None]
    return (words >> level_shifts(packed.device).int() & 3).to(torch.int8).flatten(-4)


def unpack_halves(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Undo `pack_halves`: (high, low) float32."""
    low, high = packed.unsqueeze(-1).view(torch.bfloat16).float().unbind(-1)
    return high, low
