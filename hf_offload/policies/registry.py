"""Registry of policies by name."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

from hf_offload.policies.base import Policy
from hf_offload.policies.fluxion.fixed_hybrid import FixedHybrid
from hf_offload.policies.fluxion.policy import Fluxion
from hf_offload.policies.full import Full
from hf_offload.policies.h2o import H2O
from hf_offload.policies.hgca.policy import HGCA
from hf_offload.policies.infinigen import InfiniGen
from hf_offload.policies.quest import Quest
from hf_offload.policies.scout import Scout
from hf_offload.policies.window import Window

POLICIES: dict[str, type[Policy]] = {
    "fixed_hybrid": FixedHybrid,
    "fluxion": Fluxion,
    "full": Full,
    "h2o": H2O,
    "hgca": HGCA,
    "infinigen": InfiniGen,
    "quest": Quest,
    "scout": Scout,
    "window": Window,
}
ALIASES = {"sparse_fetch": "quest"}
"""Former names of policies."""


def register_policy(cls: type[Policy]) -> type[Policy]:
    """Register a policy of your own under its `name`, for `HybridCache`, `enable` and `HybridCache.load`.

    It works as a class decorator. A saved cache holds the name of its policy, so `load` needs the policy registered.

    Args:
        cls: a frozen dataclass that derives from `Policy`, with a lower-case `name`.

    Returns:
        The class.

    Raises:
        TypeError: not a frozen dataclass that derives from `Policy`.
        ValueError: `name` is not a lower-case identifier, or belongs to another policy.
    """
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise TypeError(f"{cls!r} is no class that derives from hf_offload.Policy")
    parameters = cls.__dict__.get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise TypeError(f"{cls.__name__} is not a frozen dataclass; decorate it with @dataclass(frozen=True)")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name.isidentifier() or name != name.lower():
        raise ValueError(f"{cls.__name__}.name={name!r} is no lower-case identifier like 'newest_blocks'")
    taken = POLICIES.get(ALIASES.get(name, name))
    redefinition = taken is not None and (taken.__module__, taken.__qualname__) == (cls.__module__, cls.__qualname__)
    if taken is not None and not redefinition:  # a notebook cell run again redefines its class
        raise ValueError(f"name={name!r} belongs to {taken.__module__}.{taken.__qualname__}; choose another name")
    POLICIES[name] = cls
    return cls


def make_policy(policy: str | Policy, knobs: dict[str, Any]) -> Policy:
    """Return a policy by name with its knobs, or the given instance.

    Raises:
        ValueError: an unknown name or knob, a wrong value, or knobs beside an instance.
        TypeError: neither a name nor a `Policy`.
    """
    if isinstance(policy, Policy):
        if knobs:
            raise ValueError(f"{', '.join(sorted(knobs))}: knobs belong into {type(policy).__name__}(...) itself")
        return policy
    kinds = [(cls.__module__, cls.__qualname__) for cls in type(policy).__mro__]
    if (Policy.__module__, Policy.__qualname__) in kinds:
        raise TypeError(
            f"this {type(policy).__name__} is of an earlier import: hf_offload was imported again; make a new policy"
        )
    if not isinstance(policy, str):
        raise TypeError(f"policy must be a name or a Policy instance, not {type(policy).__name__}")
    policy = ALIASES.get(policy, policy)
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r} is unknown; use one of {', '.join(sorted(POLICIES))}")
    cls = POLICIES[policy]
    allowed = [field.name for field in dataclasses.fields(cls) if field.init]
    unknown = sorted(set(knobs) - set(inspect.signature(cls).parameters))
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: not a knob of policy {policy!r} or of HybridCache; "
            f"{policy!r} has {', '.join(allowed) or 'none of its own'}"
        )
    return cls(**knobs)


def describe_policy(policy: Policy) -> dict[str, Any]:
    """Return name and knobs of a policy as values for `json`.

    Raises:
        ValueError: the policy is not registered, or JSON cannot represent a knob.
    """
    if POLICIES.get(policy.name) is not type(policy):
        raise ValueError(
            f"{type(policy).__name__} is not registered, so that it cannot be saved by name; call "
            f"hf_offload.register_policy({type(policy).__name__})"
        )
    knobs = {part.name: getattr(policy, part.name) for part in dataclasses.fields(policy) if part.init}
    for name, knob in knobs.items():
        if dataclasses.is_dataclass(knob) and not isinstance(knob, type):
            knobs[name] = knob = dataclasses.asdict(knob)
        if not isinstance(knob, str | float | int | tuple | dict | Path | None):
            raise ValueError(
                f"{name}={type(knob).__name__}(...) cannot be saved as text; make the policy with its file's path"
            )
    return {"name": policy.name, "knobs": {k: str(v) if isinstance(v, Path) else v for k, v in knobs.items()}}


def saved_policy(saved: dict[str, Any]) -> Policy:
    """Return the policy of a description by `describe_policy`.

    Raises:
        ValueError: the policy is not registered, or a knob's value is not allowed.
    """
    return make_policy(saved["name"], saved["knobs"])


__all__ = [
    "ALIASES",
    "H2O",
    "HGCA",
    "POLICIES",
    "FixedHybrid",
    "Fluxion",
    "Full",
    "InfiniGen",
    "Policy",
    "Quest",
    "Scout",
    "Window",
    "describe_policy",
    "make_policy",
    "register_policy",
    "saved_policy",
]
