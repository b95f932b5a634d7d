"""A placed step, compiled: lowered for its communicator, and called on global arrays."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist import compat
from jaxdist.agreement.calls import Traced
from jaxdist.communicators import compiler_options, lowering
from jaxdist.ir.interpreter import Interpreter
from jaxdist.ir.primitives import FETCHED
from jaxdist.placements.layouts import HOST, Layout, Padded, layout_of, sharding
from jaxdist.step.passes import spec_of
from jaxdist.step.placed import PlacedStep
from jaxdist.step.signature import constants_back, has_constants, picker

_AHEAD = 4
"""Calls after which a program waits for its results on virtual devices.

XLA starts programs on the threads that run them. Once 32 are under way on a device it waits there for one to end, which
has no thread to run on where there are as many threads as devices, and after a minute XLA ends the process. Other
programs count as well.
"""


class Program:
    """The function ``(state leaves, batch leaves) -> step's result, findings`` on global arrays, for arguments of one
    type, compiled."""

    def __init__(self, placed: PlacedStep, donate: Collection[int], name: str = "step"):
        self.placed = placed
        self.donated = [i for i in placed.signature.state if i in donate]  # leaves whose memory it may take
        numbered = list(enumerate(placed.signature.state))
        self._order = [k for k, i in numbered if i in donate], [k for k, i in numbered if i not in donate]
        self._pick = picker(self._order[0]), picker(self._order[1])
        self.virtual = placed.mesh.devices.flat[0].platform == "cpu" and len(placed.mesh.local_devices) > 1
        self._calls = 0
        self._has_constants = has_constants(placed.step.tree)
        self._padded_results: list[tuple[int, Layout]] = []
        run = functools.partial(self._run)
        run.__name__ = name  # type: ignore[attr-defined]
        mesh = placed.mesh
        state, batch = ([sharding(mesh, how) for how in held] for held in (placed.state, placed.batch))
        self._jitted = jax.jit(
            run,
            in_shardings=(*([state[k] for k in ks] for ks in self._order), batch),
            out_shardings=placed.result_shardings(),
            donate_argnums=(0,) if self.donated else (),
            compiler_options=compiler_options(mesh) or None,
        )

    @functools.cached_property
    def traced(self) -> Traced:
        """The program of a device and the step that it is of, which ranks compare."""
        return Traced(self.placed.emitted[0], self.placed.step.jaxpr)

    def taken(self, state: Sequence[Any]) -> list[Any]:
        """The arrays among the leaves of the state whose memory it may take."""
        return list(self._pick[0](state))

    def __call__(self, state: Sequence[Any], batch: Sequence[Any]) -> tuple[Any, Any]:
        """Run it."""
        args = list(self._pick[0](state)), list(self._pick[1](state)), batch
        outs, found = self._jitted(*args), None
        self._calls += 1
        if self.virtual and self._calls % _AHEAD == 0:
            jax.block_until_ready(outs)
        step = self.placed.step
        if step.checked:
            *outs, found = outs
        for i, how in self._padded_results:
            outs[i] = Padded(outs[i], how)
        result = jax.tree.unflatten(step.tree, outs)
        return constants_back(result) if self._has_constants else result, found

    def lower(self) -> jax.stages.Lowered:
        """Lower it, like ``jax.jit(f).lower``."""
        placed = self.placed
        given, kept = ([placed.signature.state[k] for k in ks] for ks in self._order)
        args = [[placed.held[i] for i in at] for at in (given, kept, placed.signature.batch)]
        lowered = self._jitted.lower(*args)
        # Arguments in the host's memory that do not say so (see `compat.say_on_host`).
        held = [(placed.held[i], placed.layouts[i]) for i in (*given, *kept)]
        away = [k for k, (x, how) in enumerate(held) if how and how.host and x.sharding.memory_kind != HOST]
        if away:
            compat.say_on_host(lowered, away, HOST)
        return lowered

    def _run(self, given_up: Sequence[Any], kept: Sequence[Any], batch: Sequence[Any]) -> Any:
        placed = self.placed
        step, signature, mesh = placed.step, placed.signature, placed.mesh
        args: list[Any] = [None] * len(placed.avals)
        for k, x in zip([*self._order[0], *self._order[1]], [*given_up, *kept], strict=True):
            args[signature.state[k]] = x
        for i, x in zip(signature.batch, batch, strict=True):
            args[i] = x

        def results(outs: Sequence[Any]) -> list[Any]:
            # A counter that came as a Python number goes out as one came in, or the next call would compile anew.
            weak = [aval.weak_type for aval in step.jaxpr.out_avals]
            outs = [compat.with_weak_type(x, w) for x, w in zip(outs, weak, strict=True)]
            host = jax.memory.Space.Host
            return [jax.device_put(x, host) if k and k.host else x for x, k in zip(outs, placed.results, strict=True)]

        closed, found = placed.emitted
        if mesh.size == 1:
            return results(Interpreter(FETCHED).run(closed, *args))
        outs = [one.placed.outs for one in found]
        specs = tuple(spec_of(found, ps) for ps in zip(*(one.ins for one in found), strict=True))
        out_specs = [spec_of(found, ps) for ps in zip(*outs, strict=True)]

        def local(zero: Any, *xs: Any) -> list[Any]:
            if not any(x.size for x in xs):  # XLA can't divide a program all of whose arguments are empty
                xs = lax.optimization_barrier((zero, *xs))[1:]
            return lowering(placed.communicator, placed.over).run(closed, *xs)

        made = jax.shard_map(
            local, mesh=placed.over, in_specs=(P(), *specs), out_specs=out_specs, check_vma=False,
        )(0, *args)  # fmt: skip
        self._padded_results = [
            (i, how) for i, p in enumerate(outs[-1])
            if (how := placed.results[i] or layout_of(p, found[-1].infer.axis)) is not None and not how.is_plain
        ]  # fmt: skip
        return results(made)
