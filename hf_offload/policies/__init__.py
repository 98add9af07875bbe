"""Policies by name: one file a method."""

from __future__ import annotations

import dataclasses
from typing import Any

from hf_offload.policies.base import Plan, Policy, Selection
from hf_offload.policies.full import Full
from hf_offload.policies.scout import Scout
from hf_offload.policies.window import Window

POLICIES: dict[str, type[Policy]] = {"full": Full, "scout": Scout, "window": Window}


def make_policy(policy: str | Policy, knobs: dict[str, Any]) -> Policy:
    """The policy of a name with its knobs, or the instance that is given.

    Raises:
        ValueError: an unknown name or knob, a wrong value, or knobs beside an instance.
        TypeError: neither a name nor a policy.
    """
    if isinstance(policy, Policy):
        if knobs:
            raise ValueError(f"{', '.join(sorted(knobs))}: knobs belong into {type(policy).__name__}(...) itself")
        return policy
    if not isinstance(policy, str):
        raise TypeError(f"policy must be a name or a Policy instance, not {type(policy).__name__}")
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r} is unknown; use one of {', '.join(sorted(POLICIES))}")
    cls = POLICIES[policy]
    allowed = [field.name for field in dataclasses.fields(cls)]
    unknown = sorted(set(knobs) - set(allowed))
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: not a knob of policy {policy!r} or of HybridCache; "
            f"{policy!r} has {', '.join(allowed) or 'none of its own'}"
        )
    return cls(**knobs)


__all__ = ["POLICIES", "Full", "Plan", "Policy", "Scout", "Selection", "Window", "make_policy"]
