"""Check that all ranks trace and compile programs with the same versions, settings and ``XLA_FLAGS``."""

import os
import platform as machines
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
from jaxlib.version import __version__ as jaxlib_version

from jaxdist.extras import version
from jaxdist.machine import Platform

# Settings of JAX that affect the results of a program, or how it is compiled; a version of JAX may lack some.
_SETTINGS = (
    "jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable", "jax_random_seed_offset",
    "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion", "jax_disable_jit",
    "jax_debug_nans", "jax_debug_infs", "jax_disable_most_optimizations", "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort", "jax_memory_fitting_level", "jax_optimization_level", "jax_use_shardy_partitioner",
    "jax_enable_custom_prng", "jax_legacy_prng_key", "jax_softmax_custom_jvp",
)  # fmt: skip
# They change no program: where to write or find files, and a number of CPU devices, which `start` sets itself.
_HARMLESS = re.compile(r"dump|_dir$|^--xla_force_host_platform_device_count$")


def facts(platform: Platform) -> dict[str, str]:
    """Return the versions, settings and flags of this process, by name."""
    own = version("jaxdist") or "of a folder"
    found = {"jaxdist": own, "jax": jax.__version__, "jaxlib": jaxlib_version, **settings()}
    if platform == "tpu":
        found["libtpu"] = version("libtpu")
    flags = os.environ.get("XLA_FLAGS", ""), os.environ.get("LIBTPU_INIT_ARGS", "") * (platform == "tpu")
    for word in " ".join(flags).split():
        name, _, value = word.partition("=")
        if not _HARMLESS.search(name):
            found[name] = value
    return found


def settings() -> dict[str, str]:
    """The settings of JAX on which programs depend, with their values in this thread."""
    return {name: str(getattr(jax.config, name)) for name in _SETTINGS if hasattr(jax.config, name)}


def check_same(every: Sequence[Mapping[str, str]], who: Callable[[int], str]) -> None:
    """Refuse ranks that would make other programs of the same step."""
    first = every[0]
    for rank, other in enumerate(every):
        if names := [name for name in {**first, **other} if first.get(name) != other.get(name)]:
            differ = (f"{name}={first.get(name, 'unset')} / {name}={other.get(name, 'unset')}" for name in names)
            raise ValueError(
                f"{who(0)} and {who(rank)} would make other programs of the same step: {', '.join(differ)}. Install "
                "the same versions everywhere, and give every rank the same settings of JAX, before init, and the "
                "same XLA_FLAGS. (To other hosts mpirun passes variables on with -x, jaxdist run on its own. Without "
                "jax[cuda12] or a driver a rank computes on CPUs: JAX_PLATFORMS=cpu has all do that)"
            )


def check_processors(processors: Sequence[bytes], facts: Mapping[str, str], who: Callable[[int], str]) -> None:
    """Refuse ranks over gloo whose programs may send their messages in a different order."""
    # XLA orders collectives that do not depend on each other by properties of the processor. Between CPU processes
    # messages have no names: the first that one rank sends is the first that the other takes.
    other = next((rank for rank, found in enumerate(processors) if found != processors[0]), None)
    if other is not None and "--xla_cpu_max_isa" not in facts:
        raise ValueError(
            f"{who(0)} and {who(other)} have other processors ({_model(processors[0])} / {_model(processors[other])}), "
            "for which XLA may order the messages of a program otherwise. Set XLA_FLAGS=--xla_cpu_max_isa=AVX2 (or "
            "the oldest one's instruction set) on every rank, or take communicator 'mpi', whose messages have "
            "their own order"
        )


def processor() -> bytes:
    """Return the properties of this machine's processor that XLA may know."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return machines.platform().encode()
    names = ("vendor_id", "model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in first if line.startswith(names)).encode()


def _model(processor: bytes) -> str:
    found = re.search(r"model name\s*: *(.*)", processor.decode(errors="replace"))
    return found[1] if found else "no model name"
