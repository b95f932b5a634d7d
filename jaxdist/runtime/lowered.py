"""A program that is about to be compiled, as JAX hands it to the compiler."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from jaxdist import compat

_JAXLIB = version("jaxlib").encode()


class LoweredProgram(NamedTuple):
    """What `jax.jit` compiles."""

    backend: Any  # for which
    module: ir.Module  # StableHLO
    devices: Any  # that it runs on
    options: Any  # of the compiler
    callbacks: Sequence[Any]  # functions of this process that it calls

    @property
    def name(self) -> str:
        """Of the program."""
        return ir.StringAttr(self.module.operation.attributes["sym_name"]).value

    def copy(self) -> LoweredProgram:
        """One whose module can be changed."""
        return self._replace(module=ir.Module.parse(_bytecode(self.module), self.module.context))

    def computation(self) -> bytes:
        """What it computes, not where in the sources that was written."""
        module = self.copy().module
        with module.context:
            PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
        return _bytecode(module)

    def content(self) -> list[bytes]:
        """All that the executable follows from, as far as program and compiler are concerned.

        Not the number of the device, if it runs on one.
        """
        options = compat.for_any_device(self.options).SerializeAsString()
        return [self.computation(), options, _JAXLIB, self.backend.platform_version.encode()]

    def load(self, executable: bytes) -> Any:
        """What another process has compiled, for the devices of this one."""
        return self.backend.deserialize_executable(executable, self.devices, self.options)


def _bytecode(module: ir.Module) -> bytes:
    out = io.BytesIO()
    module.operation.write_bytecode(out)
    return out.getvalue()
