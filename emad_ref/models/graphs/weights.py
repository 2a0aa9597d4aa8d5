"""Where a module's parameters lie: what a graph reads by address, looked up again before every replay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

Place = tuple[dict[str, Any], str]  # a module's table of parameters, and a name in it


def places_of(parts: Iterable[nn.Module]) -> list[Place]:
    """Of every parameter of some modules."""
    return [
        (module._parameters, name)
        for part in parts
        for module in part.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def addresses(places: Iterable[Place]) -> tuple[int, ...]:
    """Where they lie now: another number where a parameter was put in another's place, or got other data."""
    return tuple([table[name].data_ptr() for table, name in places])


def plain(parts: Sequence[Any]) -> bool:
    """Whether these are modules that do what their class does, nothing hung on them; the last one multiplies."""
    if not all(isinstance(part, nn.Module) for part in parts) or type(parts[-1]) is not nn.Linear:
        return False
    return not any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        for part in parts
        for module in part.modules()
    )
