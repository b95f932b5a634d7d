"""What each rank traces and compiles its programs with, which must be the same: versions, settings, ``XLA_FLAGS``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import jax
from jaxlib.version import __version__ as jaxlib_version

# Settings of JAX on which it depends what a program computes, or how it is compiled; as far as a version has them.
_SETTINGS = (
    "jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable", "jax_random_seed_offset",
    "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion", "jax_disable_jit",
    "jax_debug_nans", "jax_debug_infs", "jax_disable_most_optimizations", "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort", "jax_memory_fitting_level", "jax_optimization_level", "jax_use_shardy_partitioner",
    "jax_enable_custom_prng", "jax_legacy_prng_key", "jax_softmax_custom_jvp",
)  # fmt: skip
_SAME_VALUE = {"": "true", "1": "true", "true": "true", "0": "false", "false": "false"}
# They change no program: where to write or find files, and devices of which a process of several uses one.
_HARMLESS = re.compile(r"dump|_dir$|^--xla_force_host_platform_device_count$")


class Compiler(NamedTuple):
    """What makes the programs of a rank."""

    versions: dict[str, str]  # of packages
    settings: dict[str, str]  # of JAX, as far as programs depend on them
    flags: dict[str, str]  # of XLA, likewise


def compiler_of(xla_flags: str) -> Compiler:
    """That of this process."""
    versions = {"jaxdist": _version("jaxdist"), "jax": jax.__version__, "jaxlib": jaxlib_version}
    return Compiler(versions, settings(), flags_of(xla_flags))


def settings() -> dict[str, str]:
    """The settings of JAX on which programs depend, as they are now in this thread."""
    return {name: str(getattr(jax.config, name)) for name in _SETTINGS if hasattr(jax.config, name)}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a folder on PYTHONPATH
        return "of a folder"


def flags_of(xla_flags: str) -> dict[str, str]:
    """The flags on which programs depend, each with what XLA reads as its value: the last.

    Source: ``ParseFlagsFromEnvAndDieIfUnknown`` in xla/parse_flags_from_env.cc
    """
    if xla_flags and not xla_flags.lstrip().startswith("-"):
        try:
            xla_flags = Path(xla_flags).read_text()
        except OSError as error:  # XLA would end the process
            raise ValueError(
                f"XLA_FLAGS={xla_flags!r} does not begin with a flag (--xla_...), so XLA takes it for the name of a "
                f"file: {error.strerror}"
            ) from None
    try:
        words = shlex.split(xla_flags)
    except ValueError:  # a quotation mark without its other
        words = xla_flags.split()
    found: dict[str, str] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name.startswith("-") and not _HARMLESS.search(name):
            found[name] = _SAME_VALUE.get(value.lower(), value)
    return dict(sorted(found.items()))


def check_same(compilers: Sequence[Compiler], who: Callable[[int], str]) -> None:
    """Refuse ranks that would make other programs of the same step."""
    first = compilers[0]
    for rank, other in enumerate(compilers):
        if other == first:
            continue
        both = f"{who(0)} and {who(rank)}"
        if changed := _differences(first.versions, other.versions):
            raise ValueError(
                f"{both} have other versions: {changed}. Programs of one step would differ: install the same everywhere"
            )
        if changed := _differences(first.settings, other.settings):
            raise ValueError(
                f"{both} have other settings of JAX: {changed}. Set them to the same on every rank: in the script, "
                "before jaxdist.init, or by variables of these names in capitals (mpirun passes one on to other hosts "
                "with -x, jaxdist run by itself)"
            )
        raise ValueError(
            f"{both} have other XLA_FLAGS: {_differences(first.flags, other.flags)}. Programs that are compiled in "
            "another way round in another way and send their messages in another order. Set the variable to the same "
            "on every rank; mpirun passes it on to other hosts with -x XLA_FLAGS, jaxdist run by itself"
        )


def check_processors(processors: Sequence[bytes], flags: Mapping[str, str], who: Callable[[int], str]) -> None:
    """Refuse ranks over gloo whose programs may send their messages in another order.

    XLA orders collectives that do not depend on each other by what it knows of the processor. Between CPU processes
    messages have no names: the first that one rank sends is the first that the other takes.
    """
    other = next((rank for rank, found in enumerate(processors) if found != processors[0]), None)
    if other is not None and "--xla_cpu_max_isa" not in flags:
        raise ValueError(
            f"{who(0)} and {who(other)} have other processors ({_model(processors[0])} / {_model(processors[other])}), "
            "for which XLA may order the messages of a program otherwise. Set XLA_FLAGS=--xla_cpu_max_isa=AVX2 (or "
            "what the oldest of them has) on every rank, or take communicator 'mpi', whose messages have an order of "
            "their own"
        )


def _model(processor: bytes) -> str:
    found = re.search(r"model name\s*: *(.*)", processor.decode(errors="replace"))
    return found[1] if found else "no model name"


def _differences(first: dict[str, str], other: dict[str, str]) -> str:
    def shown(given: dict[str, str], name: str) -> str:
        if name not in given:
            return f"{name} is not set"
        return f"{name}={given[name]}"

    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    return ", ".join(f"{shown(first, name)} / {shown(other, name)}" for name in names)
