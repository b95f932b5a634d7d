"""Connect the processes of a mesh of several axes."""

import itertools

from jax.sharding import Mesh

from jaxdist.agreement.description import by_value, listed
from jaxdist.mesh import along, axes_of_mesh, passes, ranks_of
from jaxdist.runtime import gloo
from jaxdist.runtime.context import Context


class Meshes:
    """The meshes of a job whose processes are connected; one a context."""

    def __init__(self, context: Context):
        self._context = context
        self._connected: set[Mesh] = set()

    def connect(self, mesh: Mesh) -> None:
        """Connect the processes of a mesh along its axes, now that all are here. Every rank calls it."""
        ranks, names = ranks_of(mesh), [axis.name for axis in passes(mesh)]
        size = self._context.size
        in_order = list(mesh.devices.flat) == self._context.devices
        if size == 1 or mesh in self._connected or (len(names) < 2 and in_order):
            return
        said = f"mesh={dict(mesh.shape)} over the ranks {', '.join(map(str, ranks))}"
        meshes = by_value(self._context.control.exchange("the mesh of a step", said, self._context.timeout, said))
        if len(meshes) > 1:
            raise ValueError(f"the ranks use different meshes: {listed(meshes)}. Pass the same on every rank")
        if set(ranks) != set(range(size)):
            raise ValueError(f"{said}: the job has {size} ranks, and a step runs on all of them")
        for chosen in (some for k in range(1, len(names) + 1) for some in itertools.combinations(names, k)):
            if self._context.communicator == "mpi":
                from jaxdist.communicators.mpi_groups import of_group

                of_group(ranks, along(axes_of_mesh(mesh), chosen))
            elif mesh.devices.flat[0].platform == "cpu":
                gloo.connect(mesh, chosen)
        self._connected.add(mesh)
