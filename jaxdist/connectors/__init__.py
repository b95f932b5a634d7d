"""Choose the connector: by name, by address, a user's own object, or the launcher's."""

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from jaxdist.connectors import engines, launchers, mpi, site, slurm, tcp
from jaxdist.connectors.base import Connector, Found

__all__ = ["VALID", "Connector", "choose", "connect"]

_MADE_BY: dict[str, Callable[[float], Found]] = {
    "mpi": mpi.connect,
    "slurm": slurm.connect,
    "jax.distributed": engines.jax_distributed,
    "kubeflow": engines.kubeflow,
    "ray": engines.ray,
    "tpu": engines.tpu,
    "local": lambda timeout: Found("local", 0, 1, 0, 1, lambda obj, root=0: obj),
}
VALID = ("auto", "env://", "tcp://host:port", *_MADE_BY)


def choose(env: Mapping[str, str] | None = None) -> str:
    """The connector that fits how this process was started."""
    # An MPI launcher comes before Slurm: inside an allocation it starts its daemons with srun, so the variables of a
    # Slurm step are set too. (`jaxdist.connectors.launchers` recognizes the PMI variables that srun itself sets.)
    env = os.environ if env is None else env
    if env.get("JAXDIST_CONNECTOR", "auto") != "auto":
        return env["JAXDIST_CONNECTOR"]
    launched = launchers.by_mpi(env)
    if launched is not None and launched.certain:
        return _mpi_or_complain(launched)
    if env.get("RANK") or env.get("WORLD_SIZE"):
        return "env://"
    if launched is not None:
        return _mpi_or_complain(launched)
    if (engine := engines.engine(env)) is not None:
        return engine
    step = slurm.step(env)
    if step is None and (tasks := slurm.tasks(env)) > 1:
        logging.getLogger("jaxdist").warning(
            "Slurm has given this job %d tasks, but this process was started without srun or mpirun: it is alone", tasks
        )
    return "slurm" if step is not None and step[1] > 1 else "local"


def connect(
    spec: str | Connector | Any = "auto", *, timeout: float = 300.0, rank: int | None = None, size: int | None = None
) -> Connector:
    """Make the connector that `spec` names, with everyone there, or check the object that it is."""
    if not isinstance(spec, str):
        if not isinstance(spec, Connector):
            raise TypeError(
                f"connector of type {type(spec).__name__}: expected an object with name, rank, size, local_rank, "
                "local_size and broadcast, as jaxdist.connectors.Connector has them"
            )
        if spec.size < 1 or not 0 <= spec.rank < spec.size:
            raise ValueError(f"connector {spec.name}: rank {spec.rank} of size {spec.size}")
        found, meant = spec, True
    else:
        meant = "local" in (spec, os.environ.get("JAXDIST_CONNECTOR"))
        name = choose() if spec == "auto" else spec
        if name == "env" or name.startswith(("env://", "tcp://")):
            found = tcp.connect(name, timeout, rank=rank, size=size)
        elif name not in _MADE_BY:
            raise ValueError(f"unknown connector {name!r}; valid: {', '.join(VALID)}, or an object")
        elif rank is not None or size is not None:
            raise ValueError(
                f"rank= and size= belong to connector 'tcp://host:port' or 'env://'; {name!r} finds them on its own"
            )
        else:
            found = _MADE_BY[name](timeout)
    if found.size == 1:
        _refuse_alone(found, meant)
    return found


def _refuse_alone(found: Connector, meant: bool) -> None:
    """Refuse to run alone if JAX or a launcher knows of other processes: each would train alone, as rank 0."""
    rank, size = engines.initialized()
    others = None if meant else launchers.several(os.environ)
    if size > 1:
        others = launchers.Launched("jax.distributed", rank, size, certain=True)
        fix = "Leave the connector out, which takes these numbers, or say where the processes meet: tcp://HOST:PORT"
    elif found.name == "mpi":
        fix = f"The launcher and the MPI library here ({site.loaded()}) are different MPIs: {site.LOAD}"
        if others is not None and others.by == "srun":
            fix = "Its MPI and the one here are different MPIs: take connector 'slurm', or start with `srun --mpi=pmix`"
    else:
        fix = "Unset what is left over from another launcher, or set JAXDIST_CONNECTOR=local if that is meant"
    if others is not None:
        raise RuntimeError(
            f"connector {found.name!r} finds this process alone, but {others.by} knows it as rank {others.rank} of "
            f"{others.size or 'several'}: each would train by itself. {fix}"
        )


def _mpi_or_complain(launched: launchers.Launched) -> str:
    if importlib.util.find_spec("mpi4py") is not None:
        return "mpi"
    if launched.size == 1:
        return "local"
    # Silently alone would mean N trainings of size 1, each writing the same checkpoint.
    raise ImportError(
        f"an MPI launcher ({launched.by}) started this process as one of {launched.size or 'several'}, but mpi4py is "
        f"not installed. Install: {site.install()}"
    )
