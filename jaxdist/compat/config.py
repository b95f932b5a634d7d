"""JAX's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax


def settings() -> dict[str, Any]:
    """All of `jax.config`, by name. (`values` is there in jax 0.10-0.12, and documented nowhere.)"""
    return dict(jax.config.values)


def use_settings(wanted: Mapping[str, Any]) -> None:
    """Make `jax.config` what it was in another process, as far as this one's differs."""
    mine = settings()
    for name, value in wanted.items():
        if name in mine and mine[name] != value:
            jax.config.update(name, value)


def platforms_asked() -> str | None:
    """JAX_PLATFORMS, or what the script set; the attribute is there but typed nowhere."""
    return jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
