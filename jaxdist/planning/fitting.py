"""`plan`: bytes and collectives of a decorated step on hypothetical devices, and their overlap. `fit`: the ZeRO level,
device groups and mesh with which it fits, in the least time."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxdist.compilation.calling import AUTO
from jaxdist.forecast.ahead import Ahead
from jaxdist.forecast.choice import in_words, order
from jaxdist.mesh import AXIS, Sizes
from jaxdist.planning.elsewhere import LEVELS, Elsewhere
from jaxdist.planning.footprint import readable
from jaxdist.planning.report import FRACTION, STATE, Candidate, Plan, duration

_MOST = 10  # compilations, if there are several meshes
_NAMED = 3  # candidates that a sentence names


def plan(
    step: Callable[..., Any],
    *args: Any,
    topology: str,
    levels: Sequence[int] = LEVELS,
    mesh: Sizes | None = None,
) -> Plan:
    """Compile a decorated step for other devices, and count its bytes and collectives. No array is created.

    With `jax[cuda12]` installed, the program is the one that GPUs would run, and with `jax[tpu]` the one for TPUs; no
    GPU or TPU is needed. Otherwise temporary memory is an estimate, and overlap unknown. Times assume full speeds, so
    real times are longer.

    Args:
      step: a step decorated with `jaxdist.data_parallel` or `jaxdist.parallel`.
      *args: arguments of the step: arrays or `jax.ShapeDtypeStruct`. The batch has the examples of all devices.
      topology: ``"8xH100"`` for the devices of one host, or ``"8x8xH100"`` for hosts and devices of each. Kinds:
        A100-40, A100-80, H100, H200, B200, cpu. TPUs by the shape of a slice, as JAX names it: ``"v5e:4x4"``, or
        ``"2xv5e:4x4"`` for two slices. Kinds: v4, v5e, v5p, v6e. Append speeds to change them:
        ``"8x8xH100,network=25e9"``.
      levels: ZeRO levels to compare with the step's own.
      mesh: the sizes of the axes, as for `jaxdist.parallel`; the step's own by default.

    Returns:
      The plan. ``print`` it, or use its `candidates`, `own`, and ``to_json()``. Sizes are in bytes, times in seconds.

    Raises:
      TypeError: `step` is not a decorated step.
      ValueError: the topology or a level is invalid, the batch is empty, or the devices cannot form the mesh.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist
      >>> step = jaxdist.data_parallel(lambda w, batch: w - jnp.mean(batch, 0))
      >>> w, batch = jax.ShapeDtypeStruct((1000,), jnp.float32), jax.ShapeDtypeStruct((64, 1000), jnp.float32)
      >>> jaxdist.plan(step, w, batch, topology="4xcpu").own.total.count  # one all-reduce
      1

    References:
      Rajbhandari et al., *ZeRO*, arXiv 1910.02054, section 3.
    """
    there = Elsewhere(step, args, topology, levels, mesh)
    written = there.forecast.ahead()
    own = there.level_of(written)
    found = []
    for level in sorted({*there.others(written), own}, key=lambda level: -1 if level is None else level):
        ahead = written if level == own else there.forecast.ahead(level)
        found.append(there.candidate(there.compile(ahead), level, level == own))
    if there.compiled_for != "cpu" and (large := [one.name for one in found if not one.fits]):
        there.note(f"{', '.join(large)}: too large, so XLA schedules to save memory, not to overlap")
    return there.plan(written, found)


def fit(
    step: Callable[..., Any],
    *args: Any,
    topology: str,
    levels: Sequence[int] = LEVELS,
    mesh: Sizes | Literal["auto"] | None = None,
) -> Plan:
    """Find the ZeRO level, sharding groups and mesh with which a step fits in memory and takes the least time.

    The step is compiled as written, and at each level for state sharded over all devices and, with several hosts of
    several devices, for ``within="host"``.

    Args:
      step: a step decorated with `jaxdist.data_parallel` or `jaxdist.parallel`.
      *args: arguments of the step, see `plan`.
      topology: the devices, see `plan`.
      levels: ZeRO levels to try.
      mesh: the sizes of the axes; None for the step's own mesh. "auto" compiles the ten most promising candidates at
        most, of meshes that divide the batch and keep the model and sequence axes within a host.

    Returns:
      The candidates. ``print`` them, or use `chosen` (None if nothing fits), its ``code``, and ``to_json()``.

    Raises:
      TypeError: `step` is not a decorated step.
      ValueError: the topology or a level is invalid, or the devices cannot form the mesh.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist
      >>> step = jaxdist.data_parallel(lambda w, batch: w - jnp.mean(batch, 0))
      >>> w, batch = jax.ShapeDtypeStruct((1000,), jnp.float32), jax.ShapeDtypeStruct((64, 1000), jnp.float32)
      >>> jaxdist.planning.fit(step, w, batch, topology="4xcpu").chosen.fits
      True
    """
    auto = mesh == AUTO or (mesh is None and getattr(step, "mesh", None) == AUTO)
    there = Elsewhere(step, args, topology, levels, {AXIS: -1} if auto else mesh)
    if auto:
        on_each = map(there.on, there.meshes())
        among = [one for on in on_each for one in _options(on, in_words(on.forecast.mesh.shape))]
        if not among:
            raise ValueError(f"no mesh of {there.topology} divides the batch")
        among = [one for one in among if not one.there.forecast.repeats] or among
        candidates, left = _search(among)
    else:
        among = _options(there, in_words(there.forecast.mesh.shape) if mesh else "")
        candidates, left = [one.compile()[0] for one in among], []
        there.note("the number of microbatches and the use of jax.checkpoint are as in the step")
    if there.compiled_for == "cpu":
        there.note("no schedule available; communication is assumed not to overlap")
    fitting = [one for one in candidates if one.fits]
    chosen = min(fitting, key=lambda one: (one.seconds, one.peak), default=None)
    found = there.plan(among[0].ahead, candidates, chosen=chosen, shown=_shown(candidates) if auto else ())
    return dataclasses.replace(found, why=_nothing(found) if chosen is None else _why(found, chosen) + _left(left))


@dataclass(frozen=True)
class _Option:
    """A candidate that can be compiled."""

    there: Elsewhere  # its step on the devices
    ahead: Ahead  # emitted
    bound: Candidate  # lower bounds of its needs

    def compile(self) -> tuple[Candidate, float]:
        """Compile it; also return the ratio of its temporaries to the values that it holds at once."""
        needs = self.there.compile(self.ahead)
        found = self.there.candidate(needs, self.bound.level, self.bound.own, self.bound.mesh)
        return found, needs.temporaries / max(1, self.ahead.held_at_once)


def _options(there: Elsewhere, mesh: str) -> list[_Option]:
    """Return the step as written, and at each other level and group size; emitted, not compiled."""
    as_written = there.forecast.ahead()
    own = there.level_of(as_written), as_written.shared
    levels = there.others(as_written) if there.forecast.mesh.shape.get(AXIS, 1) > 1 else []
    wanted = {(level, shared) for level in levels for shared in ({0, there.in_host} if level else {0})}
    found = []
    for level, shared in sorted({own, *wanted}, key=lambda one: (-1 if one[0] is None else one[0], one[1])):
        ahead = as_written if (level, shared) == own else there.forecast.ahead(level, shared)
        found.append(_Option(there, ahead, there.candidate(there.bound(ahead), level, (level, shared) == own, mesh)))
    return found


def _search(among: Sequence[_Option]) -> tuple[list[Candidate], list[Candidate]]:
    """Compile promising candidates until no other can be faster; return all, and those beyond the limit."""
    there = among[0].there
    found = [one.bound for one in among]
    ratios: dict[int, float] = {}
    waiting = [i for i, one in enumerate(found) if one.fits is None]

    def turn(i: int) -> tuple[bool, float, int]:
        # Assume the same ratio of temporaries to held values as for the same step at other levels.
        known = [r for k, r in ratios.items() if among[k].there is among[i].there] or list(ratios.values())
        more = statistics.median(known) * among[i].ahead.held_at_once if known else 0
        return order(found[i].seconds, found[i].peak + more, found[i].peak, there.memory)

    before = len(there.programs)
    while waiting and len(there.programs) - before < _MOST:
        i = min(waiting, key=turn)
        waiting.remove(i)
        found[i], ratios[i] = among[i].compile()
        if found[i].fits:
            waiting = [k for k in waiting if found[k].seconds < found[i].seconds]
    return found, [found[i] for i in waiting]


def _shown(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return all candidates that were compiled, and the fastest of each mesh: there are many."""
    fastest: dict[str, Candidate] = {}
    for one in candidates:
        if one.mesh not in fastest or one.seconds < fastest[one.mesh].seconds:
            fastest[one.mesh] = one
    return [one for one in candidates if one.compile_seconds or one is fastest[one.mesh]]


def _why(plan: Plan, chosen: Candidate) -> str:
    if len(plan.candidates) == 1:
        return f"{chosen.name} fits, and there is nothing to choose from"
    faster = [one for one in plan.candidates if one.seconds < chosen.seconds and one.fits is False]
    faster.sort(key=lambda one: one.seconds, reverse=True)
    if not faster:
        return f"{chosen.name} fits, and none takes less time"
    lacks = ", ".join(
        f"{one.name} ({duration(one.seconds)}) by {readable(plan.missing(one))}" for one in faster[:_NAMED]
    )
    more = f", and {len(faster) - _NAMED} more" * (len(faster) > _NAMED)
    return f"{chosen.name} takes the least time of those that fit; faster ones are too large: {lacks}{more}"


def _left(left: Sequence[Candidate]) -> str:
    if not left:
        return ""
    least = min(left, key=lambda one: one.seconds)
    return (
        f"; after {_MOST} compilations {len(left)} candidates that may be faster were not compiled, the fastest being "
        f"{least.name} (at least {duration(least.seconds)})"
    )


def _nothing(plan: Plan) -> str:
    """Explain how much memory is missing if nothing fits, and how to reduce the need."""
    best = min([one for one in plan.candidates if one.compile_seconds] or plan.candidates, key=lambda one: one.peak)
    helps = ["microbatches by jaxdist.value_and_grad(..., microbatches=k)", "jax.checkpoint around the layers"]
    if best.level is None:
        helps.insert(0, "jaxdist.zero around the optimizer")
    elif best.level:
        state = sum(best.bytes.get(name, 0) for name in STATE)
        helps.insert(0, f"more devices ({readable(state)} are state, in shards)")
    if plan.fit(best).startswith("with"):
        helps.append(f"a larger {FRACTION}")
    least = "" if best.compile_seconds else "at least "
    return (
        f"nothing fits: {best.name} comes closest, but each device lacks {least}{readable(plan.missing(best))}"
        f". Possible remedies: {', '.join(helps)}"
    )
