"""Compile with little work, for tests whose programs run for milliseconds: what is computed stays the same."""

import contextlib
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import jax
import pytest
from jax._src import compiler

# XLA ends a process that names a flag it does not know.
OPTIONS: dict[str, Any] = {"xla_cpu_parallel_codegen_split_count": 1}
"""Programs are small: to divide their compilation costs more than it saves."""
if tuple(map(int, version("jaxlib").split(".")[:2])) <= (0, 10):
    OPTIONS["xla_cpu_use_fusion_emitters"] = False  # without them each fusion takes a third of the time
_FLAGS = [f"--{name}={str(value).lower()}" for name, value in OPTIONS.items()]
XLA_FLAGS = " ".join(["--xla_backend_optimization_level=0", *_FLAGS])  # the same for processes that a test starts


_original = compiler.get_compile_options


def _get_compile_options(*args: Any, **kwargs: Any) -> Any:
    kwargs["env_options_overrides"] = {**OPTIONS, **(kwargs.get("env_options_overrides") or {})}
    return _original(*args, **kwargs)


@contextlib.contextmanager
def compilation(quick: bool = True) -> Iterator[None]:
    """Within it programs are compiled quickly, or else as a user's are. Last bits may differ between the two."""
    before = jax.config.read("jax_disable_most_optimizations")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", _get_compile_options if quick else _original)
        jax.config.update("jax_disable_most_optimizations", quick)
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", before)
