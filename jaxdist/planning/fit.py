"""`fit`: the ZeRO level and the groups of devices with which a step fits, in the least time."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxdist.placements.groups import in_host
from jaxdist.planning.memory import readable
from jaxdist.planning.plan import LEVELS, Elsewhere, traffic_of
from jaxdist.planning.report import FRACTION, LevelPlan, Plan, duration
from jaxdist.planning.topology import REACHED, Topology

_STATE = ("parameters", "optimizer state", "other state")
_NOT_VARIED = (
    "the number of microbatches and what jax.checkpoint recomputes are as the step has them; other values are other "
    "steps, to be fitted in turn"
)


@dataclass(frozen=True)
class Candidate:
    """A step at one level, for one kind of groups. Times in seconds.

    Attributes:
      row: bytes, collectives, FLOPs.
      compute: that the FLOPs take.
      state: that it takes to read the state once, and to write it; to bring it from the host's memory, and back.
      in_host: of collectives within hosts.
      between: of collectives between hosts.
      hidden: of both, while something is computed; as far as the schedule is known.
    """

    row: LevelPlan
    compute: float
    state: float
    in_host: float
    between: float
    hidden: float

    @property
    def seconds(self) -> float:
        """Of the step: what is computed, and messages that nothing hides."""
        return self.compute + self.state + self.in_host + self.between - self.hidden

    @property
    def code(self) -> str:
        """The line that chooses it; "": the step as it is written."""
        if self.row.level is None:
            return ""
        within = "" if self.row.within is None else f", within={json.dumps(self.row.within)}"
        offload = ", offload=True" if self.row.host else ""
        return f"tx = jaxdist.zero(tx, level={self.row.level}{within}{offload})"


@dataclass(frozen=True)
class Fit:
    """What `fit` has found; prints as a table.

    Attributes:
      plan: of all candidates: their bytes and collectives.
      candidates: in the order of their levels.
      chosen: that which fits and takes the least time; None: nothing fits.
      why: a sentence.
    """

    plan: Plan
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    why: str

    def to_json(self) -> str:
        """All figures (bytes, seconds, FLOPs) as a JSON object; ``"chosen"`` is an index into ``"candidates"``."""
        figures = self.plan.figures()
        figures["candidates"] = [
            {
                **row, "missing": self._missing(one), "compute": one.compute, "state": one.state,
                "in_host": one.in_host, "between": one.between, "hidden": one.hidden, "seconds": one.seconds,
                "code": one.code,
            }
            for one, row in zip(self.candidates, figures.pop("levels"), strict=True)
        ]  # fmt: skip
        figures["reached"] = REACHED
        figures["chosen"] = None if self.chosen is None else self.candidates.index(self.chosen)
        figures["code"] = None if self.chosen is None else self.chosen.code
        figures["why"] = self.why
        return json.dumps(figures, indent=2)

    def __str__(self) -> str:
        kind, several = self.plan.topology.kind, self.plan.topology.hosts > 1
        wires = "in host, between: messages in and between hosts" if several else "wire: messages"
        out = io.StringIO()
        console = Console(file=out, width=120, markup=False, highlight=False)
        console.print(self.plan.headline)
        console.print(self._table())
        if self.chosen is not None:
            console.print(f"chosen: {self.chosen.code or 'the step as it is written'}", soft_wrap=True)
        console.print(f"why: {self.why}")
        console.print(
            f"compute: {kind.flops * REACHED / 1e12:g} TFLOP/s, {REACHED:.0%} of the {kind.flops / 1e12:g} of a device "
            f"in bfloat16; state: read and written once, at {kind.bandwidth / 1e9:.0f} GB/s; "
            f"{wires}; "
            "hidden: those that run beside what is computed"
        )
        for line in self.plan.assumed:
            console.print(line)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _missing(self, one: Candidate) -> int:
        return max(0, one.row.peak - self.plan.memory)

    def _table(self) -> Table:
        several = self.plan.topology.hosts > 1
        seconds = sum(one.row.compile_seconds for one in self.candidates)
        table = Table(
            title=f"one step on one device, in ms ({len(self.candidates)} candidates, compiled in {seconds:.0f} s)"
        )
        table.add_column("level")
        if several:
            table.add_column("within")
        wires = ("in host", "between") if several else ("wire",)
        for name in ("peak", "fits", "compute", "state", *wires, "hidden", "step"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("")
        for one in self.candidates:
            row = one.row
            level = "as written" if row.level is None else str(row.level)
            within = [] if not several else ["all" if row.within is None else str(row.within)] if row.level else [""]
            fits = "yes" if row.fits else f"lacks {readable(self._missing(one))}"
            times = (one.compute, one.state, one.in_host, *((one.between,) if several else ()), one.hidden, one.seconds)
            said = ["chosen"] * (one is self.chosen) + ["this step"] * row.own
            table.add_row(level, *within, readable(row.peak), fits, *(f"{1e3 * x:.2f}" for x in times), ", ".join(said))
        return table


def fit(step: Callable[..., Any], *args: Any, topology: str | Topology, levels: Sequence[int] = LEVELS) -> Fit:
    """Find the ZeRO level and the groups of devices with which a step fits the devices' memory, in the least time.

    The step is compiled at each level; with several hosts of several devices both for state in shards over all devices
    and for ``within="host"``: at most seven programs, and the step as it is written if it is none of them. The
    rest is as for `plan`, by which each candidate's bytes and collectives are read.

    The time of a step is that of its FLOPs at a part of what the data sheet says, of its state, read and written once
    at the full speed of the memory, and of its messages at the full speed of the links, without those that the schedule
    hides. It orders the candidates and is not what you will measure. Without a schedule (see `plan`) nothing is taken
    to be hidden, which is to the disadvantage of candidates that send more.

    How many microbatches there are and what `jax.checkpoint` recomputes is not varied: that is written in the step.

    Args:
      step: decorated with `jaxdist.data_parallel`.
      *args: what the step would be called with, as for `plan`.
      topology: the devices, as for `plan`.
      levels: of ZeRO, to be tried.

    Returns:
      The candidates: ``print`` them, or take `chosen` (None: nothing fits), its ``code``, and ``to_json()``.

    Raises:
      TypeError: `step` is not a decorated step.
      ValueError: no such topology or level, or a batch that the devices don't divide.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist, optax
      >>> tx = jaxdist.zero(optax.adam(1e-3), level=0)
      >>> @jaxdist.data_parallel
      ... def step(w, opt_state, batch):
      ...     grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
      ...     updates, opt_state = tx.update(grads, opt_state, w)
      ...     return optax.apply_updates(w, updates), opt_state
      >>> w = jax.ShapeDtypeStruct((1000, 100), jnp.float32)
      >>> found = jaxdist.fit(step, w, jax.eval_shape(tx.init, w), jax.ShapeDtypeStruct((64, 1000), jnp.float32),
      ...                     topology="4xcpu", levels=(1, 3))
      >>> [one.row.name for one in found.candidates], found.chosen.row.fits
      (['level 0', 'level 1', 'level 3'], True)
    """
    there = Elsewhere(step, args, topology, levels)
    written = there.compiled()
    own = there.level_of(written), written.ahead.shared
    groups = {0, in_host(there.hosts)}
    wanted = {(level, shared) for level in there.others(written) for shared in (groups if level else {0})}
    rows = []
    for level, shared in sorted({own, *wanted}, key=lambda one: (-1 if one[0] is None else one[0], one[1])):
        one = written if (level, shared) == own else there.compiled(level, shared)
        rows.append(there.row(one, level, (level, shared) == own, None))
    candidates = tuple(_candidate(row, there) for row in rows)
    fitting = [one for one in candidates if one.row.fits]
    chosen = min(fitting, key=lambda one: (one.seconds, one.row.peak), default=None)
    activations = there.activations(written) if chosen is None else None
    there.notes.append(_NOT_VARIED)
    if there.compiled_for != "cuda":
        there.notes.append("no schedule is known: no message is taken to be hidden")
    plan = there.plan(rows)
    return Fit(plan, candidates, chosen, _why(plan, candidates, chosen, activations))


def _candidate(row: LevelPlan, there: Elsewhere) -> Candidate:
    kind, scheduled = there.topology.kind, there.compiled_for == "cuda"
    compute = row.flops / (kind.flops * REACHED)
    state = 2 * sum(row.bytes.get(name, 0) for name in _STATE) / kind.bandwidth
    state += 2 * row.host / (kind.host or kind.bandwidth)
    in_hosts = between = hidden = 0.0
    for c in row.collectives:
        if c.devices > 1:
            traffic = traffic_of(c, there.topology, scheduled)
            if traffic.between:
                between += traffic.seconds
            else:
                in_hosts += traffic.seconds
            hidden += traffic.seconds * (traffic.overlapped or 0)
    return Candidate(row, compute, state, in_hosts, between, min(hidden, compute))


def _why(plan: Plan, candidates: Sequence[Candidate], chosen: Candidate | None, activations: int | None) -> str:
    if chosen is None:
        return _nothing(plan, min(candidates, key=lambda one: one.row.peak).row, activations)
    faster = sorted((one for one in candidates if one.seconds < chosen.seconds), key=lambda one: -one.seconds)
    if len(candidates) == 1:
        return f"{chosen.row.name} fits, and there is nothing to choose from"
    if not faster:
        return f"{chosen.row.name} fits, and none takes less time"
    lacks = ", ".join(
        f"{one.row.name} ({duration(one.seconds)}) by {readable(one.row.peak - plan.memory)}" for one in faster
    )
    return f"{chosen.row.name} takes the least time of those that fit; faster ones are too large: {lacks}"


def _nothing(plan: Plan, nearest: LevelPlan, activations: int | None) -> str:
    """What is missing where nothing fits, and what would help."""
    state = sum(nearest.bytes.get(name, 0) for name in _STATE)
    helps = []
    if nearest.level is None:
        helps.append("jaxdist.zero around the optimizer")
    elif nearest.level:
        helps.append(f"more devices ({readable(state)} are state, in shards)")
    share = "activations" if activations is None else f"activations, {readable(activations)} of the step as written"
    helps.append(
        f"microbatches by jaxdist.value_and_grad(..., microbatches=k), or jax.checkpoint around the layers ({share})"
    )
    if plan.topology.kind.name != "cpu" and (needed := plan.fits(nearest)) != "no":
        helps.append(f"a larger {FRACTION} (it fits {needed})")
    return (
        f"nothing fits: {nearest.name} comes nearest, and {readable(nearest.peak - plan.memory)} are missing on each "
        f"device. What helps: {'; '.join(helps)}"
    )
