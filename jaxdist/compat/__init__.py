"""Every private or version-dependent touch of JAX, mpi4jax, grain and Python, with its reason; nothing else has any.

| where | what |
|---|---|
| `tracing`, `shardings` | what is being traced and its types; the shardings that it names |
| `jaxprs` | equations, and binding them anew |
| `compilation`, `devices` | the compiler; backends, devices that are not here, arrays |
| `distributed` | `jax.config`, `jax.distributed` |
| `processes` | what grain's workers share with their rank; how Python ends a process |
"""

# ruff: noqa: F403

from jaxdist.compat.compilation import *
from jaxdist.compat.devices import *
from jaxdist.compat.distributed import *
from jaxdist.compat.jaxprs import *
from jaxdist.compat.processes import *
from jaxdist.compat.shardings import *
from jaxdist.compat.tracing import *
