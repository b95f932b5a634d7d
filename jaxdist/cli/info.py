"""`jaxdist info`: ranks of a job, versions, and missing packages with commands to install them."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from jaxdist.connectors import site
from jaxdist.errors import in_words
from jaxdist.extras import libtpu_problem, version
from jaxdist.launch.mpi import family_of, find_mpirun, run_outside

_PACKAGES = (
    "jaxdist", "jax", "jaxlib", "numpy", "optax", "flax", "grain", "orbax-checkpoint", "mpi4py", "mpi4jax", "libtpu",
)  # fmt: skip
# Without jaxdist, which would import JAX; and without MPI_Init.
_ASK_MPI4PY = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version().splitlines()[0].rstrip(chr(0)))"
)


class Check(NamedTuple):
    """A check: whether it passed, the finding, and how to fix it."""

    name: str
    ok: bool
    seen: str
    fix: str = ""


def info(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False) -> None:
    """Show ranks, devices, the communicator, versions, and missing packages.

    It also works as a rank of a job: `srun jaxdist info`.
    """
    # Import here, since `jaxdist run` does not need these.
    from jaxdist.collectives.public import barrier
    from jaxdist.runtime.context import init

    try:
        ctx = init()
    except (ValueError, RuntimeError, ImportError) as error:
        _write({"problem": in_words(error), "job": {}, "ranks": []}, as_json)  # perhaps a package is missing
        raise typer.Exit(1) from None
    devices, cores = [f"{d.device_kind}:{d.id}" for d in ctx.local_devices], len(os.sched_getaffinity(0))
    own = {"rank": ctx.rank, "host": socket.gethostname(), "pid": os.getpid(), "cores": cores, "devices": devices}
    ranks = ctx.control.exchange("jaxdist info", own)
    if ctx.is_root:
        kind = ctx.kind  # its speeds weigh communication against computation
        rates = f"{kind.link / 1e9:.3g} GB/s within a host, {kind.network / 1e9:.3g} GB/s between hosts"
        job = {"processes": ctx.size, "devices": ctx.num_devices}
        job |= {"connector": ctx.connector.name, "communicator": str(ctx.communicator)}
        job |= {"assumed": f"{kind.name}, {kind.flops / 1e9:.4g} GFLOP/s, {rates}"}
        _write({"problem": "", "job": job, "ranks": ranks}, as_json)
    barrier()  # test that arrays can be sent, or raise


def versions() -> dict[str, str]:
    """Return versions that matter in a bug report, by name, or "" if not installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    found |= {name: version(name) for name in _PACKAGES}
    found["CUDA plugin"] = version("jax-cuda13-plugin") or version("jax-cuda12-plugin")
    return found


def checks() -> Iterator[Check]:
    """Yield checks of this machine, without a JAX backend or MPI in this process."""
    mpirun, asked = find_mpirun(), run_outside([sys.executable, "-c", _ASK_MPI4PY], 120)
    yield Check("mpirun", mpirun is not None, f"{mpirun.version}, {mpirun.path}" if mpirun else "none", site.install())
    load = site.LOAD if mpirun and version("mpi4py") else site.install()
    works, library = asked is not None and asked.returncode == 0, _last_line(asked)
    yield Check("mpi4py", works, library, load)
    if mpirun and works:
        same = family_of(library) in (mpirun.family, "unknown")
        seen = "the same MPI" if same else f"mpirun is {mpirun.version}, mpi4py loads {library}"
        yield Check("mpirun and mpi4py", same, seen, load)
        yield _mpi4jax()
    if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists():
        plugin = versions()["CUDA plugin"]
        yield Check("GPU", bool(plugin), plugin or "no CUDA plugin for JAX", "pip install 'jaxdist[cuda12]'")
    if libtpu := version("libtpu"):
        problem = libtpu_problem()
        yield Check("libtpu", not problem, problem or libtpu, "pip install 'jaxdist[tpu]'")
    if (shm := Path("/dev/shm")).is_dir():  # Open MPI, MPICH and NCCL share buffers there
        size = os.statvfs(shm).f_frsize * os.statvfs(shm).f_blocks
        fix = "docker run --shm-size=1g … (or mount -o remount,size=1g /dev/shm)"
        yield Check("/dev/shm", size >= 256 << 20, f"{size >> 20} MiB", fix)


def show(checked: Iterable[Check]) -> None:
    """Print a line per check, and one with the fix if it failed."""
    for one in checked:
        print(f"{'ok ' if one.ok else 'fix'} {one.name}: {one.seen}" + f"\n      {one.fix}" * (not one.ok))


def _last_line(done: "subprocess.CompletedProcess[str] | None") -> str:
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines() if done else []
    return lines[-1] if lines else "no answer"


def _mpi4jax() -> Check:
    if not (found := version("mpi4jax")):
        return Check("mpi4jax", False, "not installed: communicator mpi is not available", site.install())
    # Its compiled part may be for a different MPI or JAX: test it in a new process.
    done = run_outside([sys.executable, "-c", "import mpi4jax"], 120)
    if done is not None and done.returncode == 0:
        return Check("mpi4jax", True, found)
    return Check("mpi4jax", False, f"installed, but does not import: {_last_line(done)}", site.rebuild_mpi4jax())


def _write(report: dict[str, Any], as_json: bool) -> None:
    found, checked = versions(), list(checks())
    if as_json:
        print(json.dumps({**report, "versions": found, "findings": [one._asdict() for one in checked]}, indent=2))
        return
    if report["problem"]:
        print(f"jaxdist.init failed: {report['problem']}")
    else:
        print("\n".join(f"{name}: {x}" for name, x in report["job"].items()))
    for one in report["ranks"]:
        print("rank {rank} on {host}, pid {pid}: {cores} cores, ".format(**one) + ", ".join(one["devices"]))
    print(", ".join(f"{name} {number or 'not installed'}" for name, number in found.items()))
    show(checked)
