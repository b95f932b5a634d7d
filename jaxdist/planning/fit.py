"""`fit`: the ZeRO level, the groups of devices and the mesh with which a step fits, in the least time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table

from jaxdist.machine import REACHED
from jaxdist.mesh import AXIS, Sizes
from jaxdist.planning.candidates import MOST, Candidate, Search, options, search
from jaxdist.planning.elsewhere import LEVELS, Elsewhere
from jaxdist.planning.memory import readable
from jaxdist.planning.report import FRACTION, STATE, Plan, duration
from jaxdist.planning.topology import Topology
from jaxdist.step.choice import said
from jaxdist.step.settings import AUTO
from jaxdist.text import text_of

_NOT_VARIED = "the number of microbatches and what jax.checkpoint recomputes are as the step has them"
_NAMED = 3
"""Candidates that a sentence names."""


@dataclass(frozen=True)
class Fit:
    """What `fit` has found; prints as a table."""

    plan: Plan  # of all candidates that were compiled: their bytes and collectives
    candidates: tuple[Candidate, ...]  # all that were considered, in the order of their meshes and levels
    chosen: Candidate | None  # that which fits and takes the least time; None: nothing fits
    why: str  # a sentence

    def to_json(self) -> str:
        """All figures (bytes, seconds, FLOPs) as a JSON object; ``"chosen"`` is an index into ``"candidates"``. Where
        ``"compiled"`` is false, peak and seconds are at least so many, and ``"fits"`` may be null."""
        figures = self.plan.figures()
        del figures["levels"]
        figures["candidates"] = [
            {
                **one.row.figures(), "compiled": one.compiled, "fits": one.fits, "missing": self._missing(one),
                "compute": one.compute, "state": one.state, "in_host": one.in_host, "between": one.between,
                "hidden": one.hidden, "mesh": one.mesh or None, "seconds": one.seconds, "code": one.code,
            }
            for one in self.candidates
        ]  # fmt: skip
        figures["reached"] = REACHED
        figures["chosen"] = None if self.chosen is None else self.candidates.index(self.chosen)
        figures["code"] = None if self.chosen is None else self.chosen.code
        figures["why"] = self.why
        return json.dumps(figures, indent=2)

    def __str__(self) -> str:
        kind, several = self.plan.topology.kind, self.plan.topology.hosts > 1
        wires = "in host, between: messages in and between hosts" if several else "wire: messages"
        times = (
            f"compute: {kind.flops * REACHED / 1e12:g} TFLOP/s, {REACHED:.0%} of the {kind.flops / 1e12:g} of a device "
            f"in bfloat16; state: read and written once, at {kind.bandwidth / 1e9:.0f} GB/s; "
            f"{wires}; "
            "hidden: those that run beside what is computed" + "; >: at least, not compiled" * (not self._all_compiled)
        )
        width = 120 + 32 * any(one.mesh for one in self.candidates)
        lines = [text_of(self.plan.headline, self._table(), width=width)]
        if self.chosen is not None:  # code is to be copied: in one line
            lines.append(f"chosen: {self.chosen.code or 'the step as it is written'}")
        return "\n".join([*lines, text_of(f"why: {self.why}", times, *self.plan.assumed, width=width)])

    def _missing(self, one: Candidate) -> int:
        return max(0, one.row.peak - self.plan.memory)

    @property
    def _shown(self) -> list[Candidate]:
        """All that were compiled, and the fastest of each mesh: there are many."""
        fastest: dict[str, Candidate] = {}
        for one in self.candidates:
            if one.mesh not in fastest or one.seconds < fastest[one.mesh].seconds:
                fastest[one.mesh] = one
        return [one for one in self.candidates if not one.mesh or one.compiled or one is fastest[one.mesh]]

    @property
    def _all_compiled(self) -> bool:
        return all(one.compiled for one in self.candidates)

    def _table(self) -> Table:
        several, shown = self.plan.topology.hosts > 1, self._shown
        seconds = sum(one.row.compile_seconds for one in self.candidates)
        count = sum(one.compiled for one in self.candidates)
        which = "" if self._all_compiled else f"{count} of them "
        table = Table(
            title=f"one step on one device, in ms ({len(self.candidates)} candidates, {which}compiled in {seconds:.0f} "
            f"s{'; the others: the fastest of each mesh' * (len(shown) < len(self.candidates))})"
        )
        meshes = any(one.mesh for one in self.candidates)
        for name in (*(["mesh"] if meshes else []), "level", *(["within"] if several else [])):
            table.add_column(name, no_wrap=name == "mesh")
        wires = ("in host", "between") if several else ("wire",)
        for name in ("peak", "fits", "compute", "state", *wires, "hidden", "step"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("")
        for one in shown:
            row, least = one.row, "" if one.compiled else "> "
            level = "as written" if row.level is None else str(row.level)
            within = [] if not several else ["all" if row.within is None else str(row.within)] if row.level else [""]
            fits = {True: "yes", False: f"lacks {least}{readable(self._missing(one))}", None: ""}[one.fits]
            times = (one.compute, one.state, one.in_host, *((one.between,) if several else ()), one.hidden)
            said = ["chosen"] * (one is self.chosen) + ["this step"] * (row.own and not meshes)
            table.add_row(
                *([one.mesh] if meshes else []), level, *within,
                least + readable(row.peak), fits,
                *(f"{1e3 * x:.2f}" for x in times), f"{least}{1e3 * one.seconds:.2f}", ", ".join(said),
            )  # fmt: skip
        return table


def fit(
    step: Callable[..., Any],
    *args: Any,
    topology: str | Topology,
    levels: Sequence[int] = LEVELS,
    mesh: Sizes | Literal["auto"] | None = None,
) -> Fit:
    """Find the ZeRO level and the groups of devices with which a step fits the memory and takes the least time.

    The step is compiled at each level, for state in shards over all devices and, with several hosts of several devices,
    for ``within="host"``: at most seven programs, and the step as it is written. Bytes and collectives are those of
    `plan`.

    ``mesh="auto"`` finds the mesh too, among those that divide the batch and keep the axes of the model and of
    sequences within a host. Then only candidates that may be the best are compiled, the fastest first, until nothing
    else can be faster, and at most ten; `why` says if others are left.

    The time of a step orders the candidates and is not what you will measure. It adds up FLOPs at a part of the data
    sheet's speed, the state, read and written once at the full speed of the memory, and messages at the full speed of
    the links, without those that the schedule hides. Without a schedule (see `plan`) nothing counts as hidden, which is
    unfair to what sends more.

    Args:
      step: decorated with `jaxdist.data_parallel` or `jaxdist.parallel`.
      *args: what the step would be called with, as for `plan`.
      topology: the devices, as for `plan`.
      levels: ZeRO levels to try.
      mesh: the sizes of the axes, as for `jaxdist.parallel`; "auto": the best are found; None: those that the step was
        decorated with.

    Returns:
      The candidates: ``print`` them, or take `chosen` (None: nothing fits), its ``code``, and ``to_json()``.

    Raises:
      TypeError: `step` is not a decorated step.
      ValueError: no such topology or level, or a mesh that the devices don't make.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist, optax
      >>> tx = jaxdist.zero(optax.adam(1e-3), level=0)
      >>> @jaxdist.data_parallel
      ... def step(w, opt_state, batch):
      ...     grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
      ...     updates, opt_state = tx.update(grads, opt_state, w)
      ...     return optax.apply_updates(w, updates), opt_state
      >>> w = jax.ShapeDtypeStruct((1000, 100), jnp.float32)
      >>> batch = jax.ShapeDtypeStruct((64, 1000), jnp.float32)
      >>> found = jaxdist.fit(step, w, jax.eval_shape(tx.init, w), batch, topology="4xcpu", levels=(1, 3))
      >>> [one.row.name for one in found.candidates], found.chosen.row.fits
      (['level 0', 'level 1', 'level 3'], True)
    """
    if mesh is None and getattr(step, "mesh", None) == AUTO:
        mesh = AUTO
    if mesh != AUTO:
        there = Elsewhere(step, args, topology, levels, mesh)
        among = options(there, mesh=said(there.mesh) if mesh else "")
        rows = [one.compile() for one in among]
        candidates = tuple(one for one, _ in rows)
        fitting = [one for one in candidates if one.row.fits]
        chosen = min(fitting, key=lambda one: (one.seconds, one.row.peak), default=None)
        found = Search(candidates, chosen, ())
        own = next(needs for one, needs in rows if one.row.own)
        activations = there.activations(own) if chosen is None else None
        there.note(_NOT_VARIED)
    else:
        there = Elsewhere(step, args, topology, levels, {AXIS: -1})
        among = [one for on in map(there.on, there.meshes()) for one in options(on, said(on.mesh))]
        if not among:
            raise ValueError(f"no mesh of {there.topology} divides the batch")
        found, activations = search([one for one in among if not one.there.repeats] or among), None
    if there.compiled_for != "cuda":
        there.note("no schedule is known: no message is taken to be hidden")
    plan = there.plan([one.row for one in found.candidates if one.compiled])
    return Fit(plan, found.candidates, found.chosen, _why(plan, found, activations))


def _why(plan: Plan, found: Search, activations: int | None) -> str:
    chosen, candidates = found.chosen, found.candidates
    left = ""
    if found.left:
        least = min(found.left, key=lambda one: one.seconds)
        left = (
            f"; after {MOST} compilations {len(found.left)} faster ones were not compiled, the fastest of them "
            f"{least.name} (at least {duration(least.seconds)}); expected to fit: {found.expected or 'none'} of them"
        )
    if chosen is None:
        return _nothing(plan, candidates, activations) + left
    if len(candidates) == 1:
        return f"{chosen.name} fits, and there is nothing to choose from"
    faster = sorted(
        (one for one in candidates if one.seconds < chosen.seconds and one.fits is False), key=lambda one: -one.seconds
    )
    if not faster:
        return f"{chosen.name} fits, and none takes less time" + left
    named = faster[:_NAMED]
    lacks = ", ".join(
        f"{one.name} ({duration(one.seconds)}) by {readable(one.row.peak - plan.memory)}" for one in named
    )
    more = f", and {len(faster) - len(named)} more" * (len(faster) > len(named))
    return f"{chosen.name} takes the least time of those that fit; faster ones are too large: {lacks}{more}{left}"


def _nothing(plan: Plan, candidates: Sequence[Candidate], activations: int | None) -> str:
    """What is missing where nothing fits, and what would help."""
    best = min([one for one in candidates if one.compiled] or candidates, key=lambda one: one.row.peak)
    nearest = best.row
    state = sum(nearest.bytes.get(name, 0) for name in STATE)
    helps = []
    if nearest.level is None:
        helps.append("jaxdist.zero around the optimizer")
    elif nearest.level:
        helps.append(f"more devices ({readable(state)} are state, in shards)")
    share = "activations" if activations is None else f"activations, {readable(activations)} of the step as written"
    helps.append(
        f"microbatches by jaxdist.value_and_grad(..., microbatches=k), or jax.checkpoint around the layers ({share})"
    )
    if best.compiled and not plan.topology.kind.is_cpu and (needed := plan.fits(nearest)) != "no":
        helps.append(f"a larger {FRACTION} (it fits {needed})")
    least = "" if best.compiled else "at least "
    return (
        f"nothing fits: {best.name} comes nearest, and {least}{readable(nearest.peak - plan.memory)} are missing on "
        f"each device. What helps: {'; '.join(helps)}"
    )
