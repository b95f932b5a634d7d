"""`jaxdist.communicators.xla`: what becomes of a reduction between CPU processes, here of virtual devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxdist.communicators import xla
from jaxdist.ir.primitives import all_reduce_p


def test_rules_of_ones_own_are_not_for_groups() -> None:
    def refused(x: Any, **_: Any) -> Any:
        raise AssertionError("called for a group")

    def local(x: Any) -> Any:
        def move(x: Any) -> Any:
            groups = ((0, 1), (2, 3), (4, 5), (6, 7))
            parts = jax.lax.all_to_all(x, "data", 0, 0, tiled=True, axis_index_groups=groups)
            return all_reduce_p.bind(parts, axes=("group",), wire=None)

        closed = jax.make_jaxpr(move, axis_env=[("data", 8), ("group", 1)])(x)
        rules = {"all_to_all": refused, "all_reduce": refused}
        return xla.XlaLowering().with_rules(rules).run(closed, x)[0]

    mesh = Mesh(np.asarray(jax.devices())[None], ("group", "data"))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    x = jnp.arange(16.0)
    np.testing.assert_array_equal(jax.jit(mapped)(x), x.reshape(4, 2, 2).swapaxes(1, 2).reshape(-1))
