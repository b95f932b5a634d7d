"""Run exported steps without jaxdist: each FILE has the program, its arguments, what it is to return, and its mesh."""

import pickle
import sys
from pathlib import Path

import jax
import numpy as np

sys.modules["jaxdist"] = None  # type: ignore[assignment]  # an import of it fails

for name in sys.argv[1:]:
    program, leaves, want, axes = pickle.loads(Path(name).read_bytes())
    exported = jax.export.deserialize(program)
    mesh = jax.make_mesh((*axes.values(),), (*axes,), (jax.sharding.AxisType.Auto,) * len(axes))
    assert exported.nr_devices == mesh.size == 4
    got = exported.call(*jax.device_put(leaves, [*exported.in_shardings_jax(mesh)]))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)
assert not any(name.startswith("jaxdist.") for name in sys.modules)
