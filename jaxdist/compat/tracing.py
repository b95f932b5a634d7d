"""What is being traced, and under which types and settings."""

import contextlib
import functools
import operator
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src import named_sharding as _named_sharding
from jax._src import shard_map as _shard_map
from jax._src.lax import lax as _lax
from jax._src.lax import parallel as _parallel

A = ParamSpec("A")
R = TypeVar("R")

# The replicated -> varying cast of shard_map's types (jax 0.10: `jax.lax.pcast` binds it, but the primitive
# itself has no public name), and the two public collectives whose types tie them together.
pvary_p = _core.pvary_p
psum_invariant_p = _parallel.psum_invariant_p
all_gather_invariant_p = _parallel.all_gather_invariant_p
reduce_scatter_p = _parallel.reduce_scatter_p
shard_map_p = _shard_map.shard_map_p


def other_collectives() -> tuple[Any, ...]:
    """Primitives that name an axis and have no public name in every version."""
    names = ("pgather_p", "pbroadcast_p", "ragged_all_to_all_p", "psend_p", "precv_p", "all_gather_reduced_p",
             "preduced_p")  # fmt: skip
    return tuple(p for name in names if (p := getattr(_parallel, name, None)) is not None)


def is_invariant(x: Any, axis: str) -> bool:
    """Whether the types of a shard_map with check_vma=True say that a value is the same along an axis (private)."""
    return bool(_config._check_vma.value) and axis not in jax.typeof(x).mat.varying  # pyright: ignore


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


def under_no_mesh(function: Callable[A, R]) -> Callable[A, R]:
    """A function that runs as if `jax.set_mesh` had not been called; under tracing, where none can be set, as it is."""
    # The axes keep their names: a step may name them in `jax.lax.with_sharding_constraint`, as under the older `with
    # mesh:`, which sets no types of what is traced.

    @functools.wraps(function)
    def call(*args: A.args, **kwargs: A.kwargs) -> R:
        if (mesh := _set_mesh()) is None:
            return function(*args, **kwargs)
        token = _left.set(mesh)
        try:
            with jax.set_mesh(None), _naming(jax.sharding.Mesh(mesh.devices, mesh.axis_names)):  # pyright: ignore
                return function(*args, **kwargs)
        finally:
            _left.reset(token)

    return call


_left: ContextVar[jax.sharding.Mesh | None] = ContextVar("jaxdist_left_mesh", default=None)


def mesh_of_user() -> jax.sharding.Mesh | None:
    """The mesh that the user has set with `jax.set_mesh`, also in a function that runs `under_no_mesh`."""
    return _left.get() or _set_mesh()


def _set_mesh() -> jax.sharding.Mesh | None:
    if jax.sharding.get_abstract_mesh().empty or not _core.trace_state_clean():
        return None
    return jax.sharding.get_mesh()


@contextlib.contextmanager
def _naming(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """``with mesh:``, which warns that it is deprecated; `jax.set_mesh` would set types."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        mesh.__enter__()
    try:
        yield
    finally:
        mesh.__exit__(None, None, None)


def stands_for_arrays(kind: type, type_of: Callable[[Any], Any]) -> None:
    """Let JAX take values of a class as their `__jax_array__()`, of type `type_of(x)`, in all that takes arrays."""
    # `jax.numpy` alone asks for `__jax_array__`; `jax.jit`, `jax.grad` and `jax.lax` look here (no public way).
    _core.pytype_aval_mappings[kind] = type_of
    _dtypes.register_canonicalize_value_handler(kind, operator.methodcaller("__jax_array__"))


class UnevenSharding(jax.sharding.NamedSharding):
    """The sharding of a value in shards with a padded end: `jax.jit`, which has no such shards, takes it as none."""

    __class__ = property(lambda self: _named_sharding.UnspecifiedValue)  # type: ignore[assignment]  # for `isinstance`


def with_weak_type(x: Any, weak_type: bool) -> Any:
    """`x` typed as a Python number is, or not (shard_map drops weak types; no public cast makes one)."""
    return _lax._convert_element_type(x, x.dtype, weak_type=weak_type) if weak_type else x


def is_pmapped(function: Any) -> bool:
    """Whether `jax.pmap` made it (what it returns is a plain function, of jax._src.pmap)."""
    return getattr(function, "__globals__", {}).get("__name__") == "jax._src.pmap"
