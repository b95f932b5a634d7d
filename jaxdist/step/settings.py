"""What a step was decorated with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jax.sharding import Mesh

from jaxdist.mesh import Sizes
from jaxdist.step.calling import Calling

Batch = int | str
Compression = Literal["bf16", "fp16"]
AUTO: Literal["auto"] = "auto"
COMPRESSIONS = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Settings:
    """What a step is decorated with: the arguments of `jaxdist.data_parallel`."""

    step: Callable[..., Any]  # the function
    calling: Calling  # how it is called
    batch: tuple[Batch, ...] | None  # which arguments are the batch, if the user has said so
    donate: bool  # whether state that the step returns is donated
    donated: frozenset[str]  # names of arguments that are
    check_finite: bool  # whether NaN and infinity in the result are errors
    check_every: int  # calls from one comparison of the devices' copies to the next; 0: none
    mesh: Mesh | Sizes | Literal["auto"] | None  # the devices, or the sizes of the axes of all of the job's
    layouts: Mapping[str, int | None] | None  # by a regular expression for the names of leaves of the state
    bucket_bytes: int | None  # of a message of gradients; None: by measurement
    compress: Compression | None  # how gradients travel

    def said(self) -> list[tuple[str, str]]:
        """Names and values of what decides which calls are made and what is sent, for other ranks."""
        mesh: Any = self.mesh
        if isinstance(mesh, Mesh):
            mesh = dict(mesh.shape), [device.id for device in mesh.devices.flat]
        values = {
            "batch_argnums": self.batch,
            "donate": self.donate,
            "donate_argnums": sorted(self.donated),
            "check_finite": self.check_finite,
            "check_every": self.check_every,
            "bucket_bytes": self.bucket_bytes,
            "compress": self.compress,
            "mesh": mesh,
            "layouts": self.layouts,
        }
        return [(f"option {name}", repr(value)) for name, value in values.items()]
