"""The name of the argument by which transformers' modules take a cache, which changed in 5.24."""

from __future__ import annotations

import warnings
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from typing import Any

import torch

OLD, NEW = "past_key_values", "cache"


def _installed_name() -> str:
    """The name in the installed transformers; without one, no module is patched that has it."""
    try:
        release = version("transformers").split(".")[:2]
    except PackageNotFoundError:
        return OLD
    return NEW if [*map(int, release)] >= [5, 24] else OLD


CACHE = _installed_name()


def takes_cache(forward: Any) -> Any:
    """A forward whose argument `past_key_values` has the name of the installed transformers.

    The old name is then taken as theirs take it until 5.40: with a warning, and not beside the new.
    """
    if CACHE == OLD:  # a `cache` is another thing there: continuous batching hands it to attention
        return forward

    @wraps(forward)
    def renamed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if OLD in kwargs and not torch.compiler.is_compiling():
            name = f"{type(self).__name__}.forward"
            message = f"`{OLD}` is deprecated for `{name}`. Use `{CACHE}` instead."
            warnings.warn(message, FutureWarning, stacklevel=2)
        if CACHE in kwargs:
            kwargs[OLD] = kwargs.pop(CACHE)
        return forward(self, *args, **kwargs)

    theirs = signature(forward)
    parameters = [p.replace(name=CACHE) if p.name == OLD else p for p in theirs.parameters.values()]
    vars(renamed)["__signature__"] = theirs.replace(parameters=parameters)
    return renamed


def update(cache: Any, k: Any, v: Any, layer: int, kwargs: dict[str, Any]) -> Any:
    """The keys and values of a layer's cache and k and v, (batch, heads, tokens, head_dim).

    Args:
        cache: of transformers.
        k: the new tokens' keys.
        v: their values.
        layer: its index.
        kwargs: what attention is told; from 5.24 on the cache of continuous batching changes it.
    """
    options = {"kwargs": kwargs} if CACHE == NEW else {}
    return cache.update(k, v, layer, **options)
