"""What is being traced, and under which types and settings."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src.lax import lax as _lax
from jax._src.lax import parallel as _parallel

# The replicated -> varying cast of shard_map's types (jax 0.10: `jax.lax.pcast` binds it, but the primitive
# itself has no public name), and the two public collectives whose types tie them together.
pvary_p = _core.pvary_p
psum_invariant_p = _parallel.psum_invariant_p
all_gather_invariant_p = _parallel.all_gather_invariant_p
reduce_scatter_p = _parallel.reduce_scatter_p


def other_collectives() -> tuple[Any, ...]:
    """Primitives that name an axis and have no public name in every version."""
    names = (
        "pgather_p",
        "pbroadcast_p",
        "ragged_all_to_all_p",
        "psend_p",
        "precv_p",
        "all_gather_reduced_p",
        "preduced_p",
    )
    return tuple(p for name in names if (p := getattr(_parallel, name, None)) is not None)


def checking_types() -> bool:
    """Whether the trace under way is a shard_map with check_vma=True (no public query)."""
    return bool(_config._check_vma.value)


def varying_axes(aval: Any) -> frozenset[str]:
    """Mesh axes over which a value of this type differs (0.10: `aval.mat.varying`; before: `aval.vma`)."""
    manual = getattr(aval, "mat", None)
    return manual.varying if manual is not None else getattr(aval, "vma", frozenset())


def manual_axes() -> frozenset[str]:
    """Mesh axes of the ``shard_map`` under whose trace the code runs."""
    mesh = jax.sharding.get_abstract_mesh()
    return frozenset() if mesh.empty else frozenset(mesh.manual_axes)


def trace_settings() -> Any:
    """The settings of JAX that a trace depends on, the threefry generator's among them (no public query)."""
    return _config.trace_context()


def trace_state_clean() -> bool:
    """Whether nothing is being traced (no public query)."""
    return _core.trace_state_clean()


def with_weak_type(x: Any, weak_type: bool) -> Any:
    """`x` typed as a Python number is, or not (shard_map drops weak types; no public cast makes one)."""
    return _lax._convert_element_type(x, x.dtype, weak_type=weak_type) if weak_type else x


def is_pmapped(function: Any) -> bool:
    """Whether `jax.pmap` made it (what it returns is a plain function, of jax._src.pmap)."""
    return getattr(function, "__globals__", {}).get("__name__") == "jax._src.pmap"
