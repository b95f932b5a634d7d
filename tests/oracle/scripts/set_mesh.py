"""A mesh that is set for the whole process before jaxdist is imported, as an import of netket does."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

axis, kind = ("data", "Explicit") if sys.argv[1:] else ("S", "Auto")
jax.set_mesh(mesh := jax.make_mesh((4,), (axis,), (jax.sharding.AxisType[kind],)))

import jaxdist  # noqa: E402

jaxdist.init()
X = np.arange(24.0).reshape(8, 3) / 24
step = jaxdist.data_parallel(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w))
w = step(step(jnp.ones(3), X), X)
want = jnp.ones(3)
for _ in range(2):
    want -= 0.1 * jax.grad(lambda w: jnp.mean((X @ w) ** 2))(want)
np.testing.assert_allclose(w * 1.0, want, rtol=1e-12)
assert axis == "S" or w.sharding.mesh == mesh
