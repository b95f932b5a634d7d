"""Shardings and meshes that code names inside a step: they change no value, and its arrays keep their whole types."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
from jax._src import dispatch, pjit, shard_map, sharding_impls
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_NOWHERE = NamedSharding(AbstractMesh((), ()), P())
_NAME = "canonicalize_sharding"


def ignore_shardings(mesh_of_step: Callable[[], Mesh | None], note: Callable[[], None]) -> None:
    """Let JAX ignore shardings while `mesh_of_step()` has a mesh, which `jax.shard_map` takes, and call `note`.

    Under a mesh with Explicit axes JAX keeps a sharding in each type (no public way to leave it out); with Auto axes
    `jax.sharding.reshard` and ``out_sharding=`` are refused.
    """

    def ignores() -> bool:
        return mesh_of_step() is not None and not jax.sharding.get_abstract_mesh().manual_axes

    canonicalize, check_auto = sharding_impls.canonicalize_sharding, pjit.check_shardings_are_auto
    check_shard_map, type_put = shard_map._shmap_checks, dispatch.update_dp_aval

    @functools.wraps(canonicalize)
    def no_sharding(sharding: Any, api_name: str, *args: Any, **kwargs: Any) -> NamedSharding | None:
        if not isinstance(sharding, (P, NamedSharding)) or not ignores():
            return canonicalize(sharding, api_name, *args, **kwargs)
        if isinstance(sharding, P) or not sharding.mesh.empty:
            note()
        return _NOWHERE if api_name == "reshard" else None

    @functools.wraps(check_auto)
    def check_constraint(sharding: Any) -> None:
        if not ignores():
            return check_auto(sharding)
        return note()

    @functools.wraps(check_shard_map)
    def check_mesh(mesh: Any, *args: Any) -> Any:
        of_step = mesh_of_step() if ignores() else None
        if of_step is not None and (mesh is None or mesh.empty or mesh.shape_tuple == of_step.shape_tuple):
            mesh = of_step
        return check_shard_map(mesh, *args)

    @functools.wraps(type_put)
    def whole_type(aval: Any, place: Any) -> Any:
        put = type_put(aval, place)
        return put.update(sharding=aval.sharding) if put is not aval and ignores() else put

    pjit.check_shardings_are_auto = check_constraint
    shard_map._shmap_checks = check_mesh
    dispatch.update_dp_aval = whole_type
    for name, module in list(sys.modules.items()):  # each module of JAX has imported the function by its name
        if name.startswith("jax._src.") and getattr(module, _NAME, None) is canonicalize:
            setattr(module, _NAME, no_sharding)
