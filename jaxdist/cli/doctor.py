"""What is missing or unfit on this machine, each with the command that fixes it."""

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from jaxdist.connectors import site
from jaxdist.launch.mpi import OVERSUBSCRIBE_ENV, ROOT_ENV, Mpirun, find_mpirun, mpi_library, python_probe

# Open MPI, MPICH and NCCL share buffers between the processes of a machine there.
_SHM_BYTES = 256 << 20


@dataclass(frozen=True)
class Finding:
    """One check: what was looked at, whether it is well, what was seen, what fixes it."""

    name: str
    ok: bool
    seen: str
    fix: str = ""


def versions() -> dict[str, str]:
    """Versions of what matters to a bug report; "" where it is not there."""
    names = ["jaxdist", "jax", "jaxlib", "flax", "optax", "grain", "orbax-checkpoint", "numpy", "mpi4py", "mpi4jax"]
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    found |= {name: _version(name) for name in names}
    library = mpi_library()
    mpirun, first = find_mpirun(), site.mpirun_on_path()
    found["MPI library of mpi4py"] = f"{library.version} ({library.path})" if library.version else ""
    found["mpirun of `jaxdist run`"] = f"{mpirun.version} ({mpirun.path})" if mpirun else ""
    found["mpirun first on PATH"] = str(first or "")
    found["CUDA plugin"] = _cuda_plugin()
    return found


def findings() -> list[Finding]:
    """All checks, the well ones too. Starts no JAX backend and no MPI in this process."""
    return [*_mpi(), *_gpu(), *_machine()]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _cuda_plugin() -> str:
    return _version("jax-cuda13-plugin") or _version("jax-cuda12-plugin")


def _mpi() -> Iterator[Finding]:
    mpirun = find_mpirun()
    library = mpi_library()
    seen = str(mpirun.path) if mpirun else "none in this environment or on PATH"
    yield Finding("mpirun", mpirun is not None, seen, site.install())
    installed = importlib.util.find_spec("mpi4py") is not None
    load = site.install() if not installed or mpirun is None else site.how_to_load(mpirun.path)
    yield Finding("mpi4py", not library.problem, library.problem or f"{library.version}, {library.path}", load)
    if mpirun is not None and not library.problem:
        same = mpirun.fits(library)
        seen = "the same MPI" if same else f"{mpirun.path} is {mpirun.version}, mpi4py loads {library.version}"
        yield Finding("mpirun and mpi4py", same, seen, load)
    first = site.mpirun_on_path()
    if mpirun is not None and first is not None and not first.samefile(mpirun.path):
        yield Finding(
            "mpirun on PATH",
            False,
            f"plain `mpirun` is {first}, `jaxdist run` takes {mpirun.path}",
            f"export PATH={mpirun.path.parent}:$PATH  (to use {first} instead: {site.how_to_load(first)})",
        )
    if not installed or not library.problem:  # it would fail for the same reason
        yield _mpi4jax(library.path)
    if mpirun is not None:
        yield from _open_mpi_settings(mpirun)


def _mpi4jax(library: str) -> Finding:
    if importlib.util.find_spec("mpi4jax") is None:
        return Finding("mpi4jax", False, "not installed: communicator mpi is not available", site.install())
    # Its compiled part may have been built against another MPI or JAX; ask in another process.
    done = python_probe("import mpi4jax")
    if done is None or done.returncode != 0:
        lines = done.stderr.strip().splitlines() if done else ["no answer within two minutes"]
        errors = [line for line in lines if re.match(r"\w+Error: ", line)]  # what follows it is advice, of many lines
        return Finding(
            "mpi4jax",
            False,
            f"installed, but does not import: {([*lines, *errors] or ['it says nothing'])[-1]}",
            site.rebuild_mpi4jax(library),
        )
    return Finding("mpi4jax", True, _version("mpi4jax"))


def _open_mpi_settings(mpirun: Mpirun) -> Iterator[Finding]:
    """What `jaxdist run` sets and a plain mpirun does not."""
    wanted = mpirun.environment()
    if not wanted:
        return
    # People export `:oversubscribe`, too.
    has = {name for name, value in wanted.items() if os.environ.get(name, "").endswith(value.rpartition(":")[2])}
    refused = [
        *(["to start as root"] if ROOT_ENV.keys() & wanted.keys() - has else []),
        *(["more ranks than cores"] if OVERSUBSCRIBE_ENV.keys() & wanted.keys() - has else []),
    ]
    yield Finding(
        "plain mpirun",
        not refused,
        f"Open MPI refuses {' and '.join(refused)} (`jaxdist run` does not need this)" if refused else "can start jobs",
        "export " + " ".join(f"{name}={value}" for name, value in wanted.items() if name not in has),
    )


def _gpu() -> Iterator[Finding]:
    present = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    if not present:
        yield Finding("GPU", True, "no NVIDIA driver here: CPU")
        return
    plugin = _cuda_plugin()
    yield Finding(
        "GPU",
        bool(plugin),
        f"CUDA plugin {plugin}" if plugin else "an NVIDIA driver, but no CUDA plugin for JAX",
        "pip install 'jaxdist[cuda12]'",
    )


def _machine() -> Iterator[Finding]:
    shm = Path("/dev/shm")
    if shm.is_dir():
        size = os.statvfs(shm)
        total = size.f_frsize * size.f_blocks
        yield Finding(
            "/dev/shm",
            total >= _SHM_BYTES,
            f"{total >> 20} MiB",
            "docker run --shm-size=1g … (or mount -o remount,size=1g /dev/shm)",
        )
