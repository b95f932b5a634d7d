"""Connect the processes of a mesh of several axes."""

import functools
import itertools

from jax.sharding import Mesh

from jaxdist.agreement.every_rank import Part, on_every_rank
from jaxdist.device_map import DeviceMap
from jaxdist.mesh import along, axes_of_mesh, passes
from jaxdist.runtime import gloo
from jaxdist.runtime.context import Context


@functools.cache
def connect(context: Context, mesh: Mesh) -> None:
    """Connect the processes of a mesh along its axes, now that all are here. Every rank calls it."""
    ranks, names = DeviceMap.of(mesh).processes, [axis.name for axis in passes(mesh)]
    if context.size == 1 or (len(names) < 2 and list(mesh.devices.flat) == context.devices):
        return
    said = f"{dict(mesh.shape)} over the ranks {', '.join(map(str, ranks))}"
    on_every_rank(context, "parallel", lambda: Part(None, (("mesh", said),)))
    if set(ranks) != set(range(context.size)):
        raise ValueError(f"mesh={said}: the job has {context.size} ranks, and a step runs on all of them")
    for chosen in (some for k in range(1, len(names) + 1) for some in itertools.combinations(names, k)):
        if context.communicator == "mpi":
            from jaxdist.communicators.mpi_groups import of_group

            of_group(ranks, along(axes_of_mesh(mesh), chosen))
        elif mesh.devices.flat[0].platform == "cpu":
            gloo.connect(mesh, chosen)
