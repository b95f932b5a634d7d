"""Compile one step for one structure of arguments: trace, pass, prove, lower."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist import compat, finite
from jaxdist.communicators import compiler_options, lowering
from jaxdist.errors import StepError
from jaxdist.step.interpreter import contains
from jaxdist.step.layouts import Layout, Padded, sharding
from jaxdist.step.passes.alone import Alone
from jaxdist.step.passes.fuse import Fuse
from jaxdist.step.passes.homes import homes, roles
from jaxdist.step.passes.layout import Flow, infer
from jaxdist.step.passes.levels import at_level, levels
from jaxdist.step.passes.reductions import Reductions
from jaxdist.step.passes.shards import Gathered, Shards
from jaxdist.step.primitives import AXIS, Op, all_reduce, shard_p
from jaxdist.step.trace import capture

_GATHERED_AT_ONCE = 64
"""Of what is kept in shards, at most one part in so many is whole at a time for the sake of fewer messages."""


class _Traced(NamedTuple):
    """A step as a jaxpr.

    Attributes:
      jaxpr: its outputs are the leaves of the result; then, if there are findings, one more with them.
      tree: of the result.
      untyped: why JAX's types refuse the step, if they do.
      checked: what the findings are about (see `jaxdist.finite`).
      levels: of the uses of `jaxdist.zero` in the step, as it was written.
      roles: by input: what it is to `jaxdist.zero`, if anything.
    """

    jaxpr: ClosedJaxpr
    tree: Any
    untyped: Exception | None
    checked: tuple[str, ...]
    levels: frozenset[int]
    roles: dict[int, str]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Static:
    """A leaf that is no array (an activation function in a module, a string): constant of the program."""

    value: Any


def is_array(leaf: Any) -> bool:
    """Whether a leaf of the arguments is data, as opposed to a constant of the program."""
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, bool, int, float, complex)) or hasattr(leaf, "__array__")


@dataclass(frozen=True, eq=False)
class Signature:
    """The structure of a call: what a compiled program is specific to, besides shapes and dtypes.

    Attributes:
      tree: of the tuple of all arguments; a leaf that is no array is a `Static` node of it.
      is_batch: for each leaf, whether it belongs to the batch.
      names: how messages call each leaf.
    """

    tree: Any
    is_batch: tuple[bool, ...]
    names: tuple[str, ...]

    @functools.cached_property
    def state(self) -> tuple[int, ...]:
        """Positions of the state's leaves."""
        return tuple(i for i, b in enumerate(self.is_batch) if not b)

    @functools.cached_property
    def batch(self) -> tuple[int, ...]:
        """Positions of the batch's leaves."""
        return tuple(i for i, b in enumerate(self.is_batch) if b)

    @functools.cached_property
    def pick_state(self) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """The state's of all leaves."""
        return picker(self.state)


def picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that takes the items at these positions from a sequence, fast."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda items: [items[i] for i in positions]


@dataclass(frozen=True)
class _Output:
    """What becomes of one output leaf.

    Attributes:
      action: ``"as is"``, ``"mean"``, ``"sum"``, ``"first"`` device's, or ``"concat"``.
      source: the input leaf whose next value it is; None: an aux value.
    """

    action: str
    source: int | None


class Traces:
    """The jaxprs of one step, for arguments of one structure.

    Args:
      step: written for one device.
      signature: structure of its arguments.
      mesh: one axis, ``"data"``.
      check_finite: whether the result is looked at.
      level: of ZeRO, in place of those that the step says.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        signature: Signature,
        mesh: Mesh,
        check_finite: bool = False,
        level: int | None = None,
    ):
        self.step, self.signature, self.mesh, self.check_finite = step, signature, mesh, check_finite
        self.level = level
        self._latest: tuple[Any, _Traced, list[Layout | None]] | None = None

    def __call__(self, avals: Sequence[jax.ShapeDtypeStruct]) -> _Traced:
        """The step at arguments of these types."""
        return self._at(avals)[1]

    def homes(self, avals: Sequence[jax.ShapeDtypeStruct]) -> list[Layout | None]:
        """How the step wants each argument to be kept; None: whole."""
        return list(self._at(avals)[2])

    def trace(self, avals: Sequence[jax.ShapeDtypeStruct]) -> _Traced:
        """The step at arguments of these types, not kept."""
        return _trace(self.step, self.signature, avals, self.mesh, self.check_finite, self.level)

    def _at(self, avals: Sequence[jax.ShapeDtypeStruct]) -> tuple[Any, _Traced, list[Layout | None]]:
        key = tuple((a.shape, a.dtype, a.weak_type) for a in avals)
        if self._latest is None or self._latest[0] != key:
            traced = self.trace(avals)
            self._latest = key, traced, homes(traced.jaxpr, self.mesh.size)
        return self._latest


class Program:
    """The function ``(state leaves, batch leaves) -> step's result, findings`` on global arrays, compiled per shape by
    jit.

    Args:
      traces: of the step.
      layouts: how each leaf of the arguments is kept; None: whole on every device, or it belongs to the batch.
      op: what gradients are over the devices, and scalar floating aux values.
      communicator: whose lowering rules to use.
      donate: whether the state's memory may be reused.
      bucket_bytes: see `passes.fuse`.
      compress: the dtype in which gradients travel; None: their own.
      on_traced: told what is about to be lowered, and what it gathers for operations that need whole arrays, whenever
        jit traces anew.

    Attributes:
      checked: what the findings are about; nothing: there are none.
    """

    def __init__(
        self,
        traces: Traces,
        layouts: Sequence[Layout | None],
        op: Op,
        communicator: str,
        donate: bool,
        bucket_bytes: int,
        compress: str | None,
        on_traced: Callable[[ClosedJaxpr, Sequence[Gathered]], None] | None = None,
    ):
        self._traces, self.layouts = traces, tuple(layouts)
        self.signature, self._mesh = traces.signature, traces.mesh
        # Where the state's leaves are arrays with padding.
        padded = [self.layouts[i] for i in self.signature.state]
        self.padded = [i for i, how in enumerate(padded) if how and how.pad]
        self._op: Op = op
        self._bucket_bytes, self._compress = bucket_bytes, compress
        self._communicator, self._on_traced = communicator, on_traced
        self._has_constants = False
        self.checked: tuple[str, ...] = ()
        self._padded_outputs: list[tuple[int, Layout]] = []
        self._specs = [
            P(AXIS) if batch else P() if how is None else how.spec
            for batch, how in zip(self.signature.is_batch, self.layouts, strict=True)
        ]
        run = functools.partial(self._run)
        run.__name__ = getattr(traces.step, "__name__", "step")  # type: ignore[attr-defined]
        state = [sharding(self._mesh, self.layouts[i]) for i in self.signature.state]
        batch = NamedSharding(self._mesh, P(AXIS))
        self._jitted = jax.jit(
            run,
            in_shardings=(state, batch),
            donate_argnums=(0,) if donate else (),
            compiler_options=compiler_options(self._mesh) or None,
        )

    def __call__(self, state: Sequence[Any], batch: Sequence[Any]) -> tuple[Any, Any]:
        """Run it.

        Returns:
          The step's result, and the findings of `jaxdist.finite` (None: it has none).

        Raises:
          StepError: the proof that the new state is the same on every device fails.
        """
        result, found = self._jitted(state, batch), None
        if self.checked:  # as of its trace
            result, found = result
        if self._padded_outputs:
            leaves, tree = jax.tree.flatten(result)
            for i, how in self._padded_outputs:
                leaves[i] = Padded(leaves[i], how)
            result = jax.tree.unflatten(tree, leaves)
        return constants_back(result) if self._has_constants else result, found

    def lower(self, state: Sequence[Any], batch: Sequence[Any]) -> Any:
        """As ``jax.jit(f).lower``."""
        return self._jitted.lower(state, batch)

    def _run(self, state: Sequence[Any], batch: Sequence[Any]) -> Any:
        signature, mesh, op = self.signature, self._mesh, self._op
        args = _interleave(signature.is_batch, state, batch)
        held = [_abstract(x) for x in args]
        avals = [
            jax.ShapeDtypeStruct(how.logical(a.shape), a.dtype, weak_type=a.weak_type) if how else a
            for a, how in zip(held, self.layouts, strict=True)
        ]
        closed, out_tree, untyped, self.checked, *_ = self._traces(avals)
        checked = untyped is None
        self._has_constants = _has_constants(out_tree)
        closed, shapes, loops = self._reductions(closed, avals, checked)
        self._refuse_per_example(shapes, loops, avals)
        flows = infer(closed, _inputs(signature))
        outputs = _outputs(closed, flows, out_tree, signature, avals, op, untyped)
        weak = [aval.weak_type for aval in closed.out_avals]
        closed, layouts, gathered = self._finished(closed, outputs, held, checked)
        last = Alone() if mesh.size == 1 else self._fuse(avals)
        closed = capture(lambda *xs: last.run(closed, *xs), held, self._specs, mesh, check=checked)
        if self._on_traced is not None:
            self._on_traced(closed, gathered)

        def on_device(*xs: Any) -> list[Any]:
            return lowering(self._communicator, mesh).run(closed, *xs)

        out_specs = [
            P(AXIS) if out.action == "concat" else how.spec if how else P()
            for out, how in zip(outputs, layouts, strict=True)
        ]
        self._padded_outputs = [(i, how) for i, how in enumerate(layouts) if how and how.pad]
        outs = jax.shard_map(on_device, mesh=mesh, in_specs=tuple(self._specs), out_specs=out_specs, check_vma=checked)(
            *args
        )
        # A counter that came as a Python number goes out as one came in, or the next call would compile anew.
        outs = [compat.with_weak_type(x, w) for x, w in zip(outs, weak, strict=True)]
        found = outs.pop() if self.checked else None
        result = jax.tree.unflatten(out_tree, outs)
        return (result, found) if self.checked else result

    def _reductions(
        self, closed: ClosedJaxpr, avals: Sequence[Any], checked: bool
    ) -> tuple[ClosedJaxpr, list[tuple[int, ...]], list[int]]:
        """The step after the *mean* pass, the shapes of the gradients it reduces, the lengths of loops that do so."""
        rules = Reductions(self._op, self._compress)

        def run(*args: Any) -> list[Any]:
            rules.shapes.clear()
            rules.loops.clear()
            return [rules.finish(x) for x in rules.run(closed, *args)]

        closed = capture(run, avals, self._logical_specs, self._mesh, check=checked)
        return closed, list(rules.shapes), list(rules.loops)

    def _fuse(self, avals: Sequence[Any]) -> Fuse:
        in_shards = sum(a.size * a.dtype.itemsize for a, how in zip(avals, self.layouts, strict=True) if how)
        on_cpu = self._mesh.devices.flat[0].platform == "cpu"
        return Fuse(self._bucket_bytes, in_shards // _GATHERED_AT_ONCE, barriers=not on_cpu)

    @property
    def _logical_specs(self) -> list[P]:
        return [P(AXIS) if batch else P() for batch in self.signature.is_batch]

    def _finished(
        self, closed: ClosedJaxpr, outputs: Sequence[_Output], held: Sequence[Any], checked: bool
    ) -> tuple[ClosedJaxpr, list[Layout | None], list[Gathered]]:
        """The step on what its devices hold, with what becomes of its outputs.

        Returns:
          The step after the *shards* pass, if it has anything in shards; how each output is held; what it gathers.
        """
        layouts: list[Layout | None] = [None] * len(outputs)
        gathered: list[Gathered] = []
        varying: set[Any] = set()
        in_shards = any(self.layouts) or contains(closed.jaxpr, {shard_p})
        if in_shards:
            infer(closed, _inputs(self.signature), varying)

        def run(*args: Any) -> list[Any]:
            if not in_shards:
                outs = jaxpr_as_fun(closed)(*args)
            else:
                wanted = ["any" if out.source is None else self.layouts[out.source] or "whole" for out in outputs]
                shards = Shards(closed, self.layouts, varying, wanted, self._mesh.size)
                outs, layouts[:] = shards(*args)
                gathered[:] = shards.gathered
            return [_finish(how.action, x) for how, x in zip(outputs, outs, strict=True)]

        closed = capture(run, held, self._specs, self._mesh, check=checked)
        return closed, layouts, gathered

    def _refuse_per_example(self, shapes: list[tuple[int, ...]], loops: list[int], avals: Sequence[Any]) -> None:
        """Refuse to reduce gradients one example at a time (``vmap(grad(loss))``, ``lax.map`` of it).

        Example i of one device has nothing to do with example i of another. What tells such a gradient from others is
        that its shape, or the length of its loop, follows the batch: in doubt the step is traced with a batch of twice
        the size.
        """
        is_batch = self.signature.is_batch
        sizes = {a.shape[0] // self._mesh.size for a, b in zip(avals, is_batch, strict=True) if b}
        state = {a.shape for a, b in zip(avals, is_batch, strict=True) if not b}
        odd = [s for s in shapes if sizes & set(s) and s not in state]
        long = [n for n in loops if n > 1 and any(size % n == 0 for size in sizes)]
        if not odd and not long:
            return
        twice = [
            jax.ShapeDtypeStruct((2 * a.shape[0], *a.shape[1:]), a.dtype) if b else a
            for a, b in zip(avals, is_batch, strict=True)
        ]
        try:
            closed, _, untyped, *_ = self._traces.trace(twice)
            _, shapes, loops = self._reductions(closed, twice, untyped is None)
        except Exception as error:
            if not odd:
                return  # loops over microbatches of a fixed size, most likely
            shapes, why = [], f" (It can't be traced with another batch size, to be sure: {error})"
        else:
            why = ""
        if gone := [s for s in odd if s not in shapes]:
            what = f"a gradient of shape {gone[0]} has one entry an example (jax.vmap of jax.grad?)"
        elif unseen := [n for n in long if n not in loops]:
            what = f"gradients are taken in a loop of {unseen[0]} turns, one for each example or few (lax.map?)"
        else:
            return
        raise StepError(
            f"{what} and would be averaged over the devices one by one, mixing unrelated examples. Differentiate with "
            "respect to a copy that belongs to the device, local = jax.lax.pcast(params, 'data', to='varying'), and "
            "average what you make of the gradients: jax.lax.pmean(x, 'data')" + why
        )


def _is_static(leaf: Any) -> bool:
    return isinstance(leaf, Static)


def constants_back(tree: Any) -> Any:
    """`tree` with what its `Static` nodes hold in their place."""
    return jax.tree.map(lambda x: x.value if _is_static(x) else x, tree, is_leaf=_is_static)


def _has_constants(tree: Any) -> bool:
    marked = jax.tree.unflatten(tree, [0] * tree.num_leaves)
    return any(map(_is_static, jax.tree.leaves(marked, is_leaf=_is_static)))


def _interleave(is_batch: Sequence[bool], state: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
    leaves = {False: iter(state), True: iter(batch)}
    return [next(leaves[b]) for b in is_batch]


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _trace(
    step: Callable[..., Any],
    signature: Signature,
    avals: Sequence[Any],
    mesh: Mesh,
    check_finite: bool,
    level: int | None,
) -> _Traced:
    trees: list[tuple[Any, tuple[str, ...]]] = []

    def flat(*leaves: Any) -> list[Any]:
        args = constants_back(jax.tree.unflatten(signature.tree, leaves))
        with finite.collecting() as found:
            result = step(*args)
            if check_finite:
                found.look_at(result, "result")
        result = jax.tree.map(lambda leaf: leaf if is_array(leaf) else Static(leaf), result)
        outs, tree = jax.tree.flatten(result)
        trees.append((tree, tuple(found.names)))
        return [*outs, found.everywhere()] if found.names else outs

    specs = [P(AXIS) if batch else P() for batch in signature.is_batch]

    def traced(refused: Exception | None) -> _Traced:
        jaxpr = capture(flat, avals, specs, mesh, check=refused is None)
        own, known = levels(jaxpr.jaxpr), roles(jaxpr)
        if 0 in own or (own and level is not None):
            run = at_level(jaxpr, level)
            jaxpr = capture(run, avals, specs, mesh, check=refused is None)
        return _Traced(jaxpr, trees[-1][0], refused, trees[-1][1], own, known)

    try:
        return traced(None)
    except StepError:
        raise
    except (TypeError, ValueError, NotImplementedError) as refused:
        # A model that the types can't follow (a Pallas kernel, say) or an error of the step's own: the untyped trace
        # tells which. There only `jaxdist.value_and_grad` knows what a gradient is, and the proof below insists on it.
        try:
            return traced(refused)
        except Exception:
            raise refused from None


def _inputs(signature: Signature) -> list[Flow]:
    """State enters replicated, each leaf on its own; the batch varies."""
    return [Flow(varying=True) if batch else Flow(deps=1 << i) for i, batch in enumerate(signature.is_batch)]


def _outputs(
    closed: ClosedJaxpr,
    flows: Sequence[Flow],
    out_tree: Any,
    signature: Signature,
    avals: Sequence[Any],
    op: Op,
    untyped: Exception | None,
) -> list[_Output]:
    """Decide what becomes of each output leaf, or refuse."""
    state = match_state(out_tree, closed.out_avals, flows, signature, avals)
    names = leaf_names(out_tree)
    if len(flows) > len(names):  # findings
        state, names = [*state, None], [*names, ""]
    outputs: list[_Output] = []
    refused: list[str] = []
    # A running statistic depends on no state that varies itself other than affinely (see `passes.layout`).
    unsettled = 0
    for flow, source in zip(flows, state, strict=True):
        if flow.varying and source is not None:
            unsettled |= 1 << source
    for flow, aval, source, name in zip(flows, closed.out_avals, state, names, strict=True):
        typed = AXIS in compat.varying_axes(aval)
        floating = jnp.issubdtype(aval.dtype, jnp.inexact)
        if not flow.varying:
            outputs.append(_Output("first" if typed else "as is", source))
        elif source is not None:
            # A running statistic of local data, or a scalar that is kept as it comes (the last loss).
            running = flow.scaled & (1 << source) or (aval.ndim == 0 and not flow.deps & (1 << source))
            if floating and running and op == "mean" and not flow.bent & unsettled:
                outputs.append(_Output("mean", source))
            else:
                refused.append(_refusal(signature.names[source], aval, floating, untyped))
        elif aval.ndim > 0:
            outputs.append(_Output("concat", source))
        elif floating:
            outputs.append(_Output(op, source))
        elif jnp.issubdtype(aval.dtype, jnp.integer):
            outputs.append(_Output("sum", source))
        else:
            refused.append(
                f"result{name} is a {aval.str_short()} that differs between devices: return it with a leading axis "
                "(then the devices' values are concatenated), or as an integer (then they are summed)"
            )
    if refused:
        more = f"\n(and {len(refused) - 1} more like it)" if len(refused) > 1 else ""
        raise StepError(refused[0] + more)
    return outputs


def _refusal(name: str, aval: Any, floating: bool, untyped: Exception | None) -> str:
    what = f"the new value of state leaf {name} ({aval.str_short(short_dtypes=True)}) would differ between devices: "
    if not floating:
        return what + (
            "it is computed from this device's part of the batch, and an integer, boolean or key can't be averaged. "
            "Reduce what it is computed from over the devices first (jax.lax.psum or pmax over the axis 'data'), or "
            "return it as an aux value instead"
        )
    reduce = (
        "Reduce what else it takes from this device's part of the batch (a loss that steers the optimizer, a total, a "
        "queue) yourself: jax.lax.pmean(x, 'data') or psum"
    )
    if untyped is not None:
        reason = (str(untyped).strip() or type(untyped).__name__).splitlines()[0]
        return what + (
            f"JAX's types can't follow this step ({reason}), so a plain jax.grad gives each device the gradient of its "
            "own part of the batch. Replace jax.value_and_grad by jaxdist.value_and_grad (jax.grad by jaxdist.grad); "
            f"nothing else changes. {reduce}"
        )
    return what + (
        "it is computed from this device's part of the batch without a reduction over the devices, and is no running "
        "average (a * old + b) of a mean. Gradients of jax.grad with respect to the step's state are reduced for you. "
        + reduce
    )


def _finish(action: str, x: Any) -> Any:
    if action in ("mean", "sum"):
        return all_reduce(x, op=action)  # type: ignore[arg-type]
    if action == "first":
        # The proof knows more than JAX's types: the same everywhere, but typed as varying (an all_gather's result).
        narrow = x.astype(jnp.int8) if x.dtype == bool else x
        mine = lax.axis_index(AXIS) == 0
        return all_reduce(jnp.where(mine, narrow, jnp.zeros_like(narrow)), op="sum").astype(x.dtype)
    return x


def leaf_names(tree: Any) -> list[str]:
    """The path of each leaf of a structure, as Python would write it."""
    paths, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, [0] * tree.num_leaves))
    return [jax.tree_util.keystr(path) for path, _ in paths]


def match_state(
    out_tree: Any,
    out_avals: Sequence[Any],
    flows: Sequence[Flow],
    signature: Signature,
    avals: Sequence[Any],
) -> list[int | None]:
    """For each output leaf, the input leaf whose next value it is, or None for an aux value.

    The result, or a part of it, is the next value of a state argument if it has that argument's structure, shapes and
    kinds of dtype (flax's BatchNorm may widen its statistics). Tuples, lists and dicts are searched from the outside
    in; each argument is matched once, in order. A single array of local data is matched only if it depends on the
    argument, a scalar only if affinely: else it is an aux value that happens to look like one.
    """
    start = 0
    candidates: list[tuple[Any, list[int]]] = []
    arguments = signature.tree.children()
    for argument in arguments:
        leaves = list(range(start, start + argument.num_leaves))
        start += argument.num_leaves
        if leaves and not signature.is_batch[leaves[0]]:
            candidates.append((argument, leaves))

    matched: list[int | None] = [None] * out_tree.num_leaves

    def fits(tree: Any, first: int, argument: Any, leaves: list[int]) -> bool:
        if tree != argument or not all(
            out_avals[first + k].shape == avals[i].shape
            and jnp.issubdtype(out_avals[first + k].dtype, jnp.inexact) == jnp.issubdtype(avals[i].dtype, jnp.inexact)
            for k, i in enumerate(leaves)
        ):
            return False
        flow, own = flows[first], 1 << leaves[0]
        if not jax.tree_util.treedef_is_leaf(tree) or not flow.varying:
            return True
        return bool(flow.deps & own) and (avals[leaves[0]].ndim > 0 or not flow.bent & own)

    def visit(tree: Any, first: int) -> None:
        for k, (argument, leaves) in enumerate(candidates):
            if fits(tree, first, argument, leaves):
                matched[first : first + len(leaves)] = leaves
                del candidates[k]
                return
        node = tree.node_data()
        if node is not None and node[0] in (tuple, list, dict):
            for child in tree.children():
                visit(child, first)
                first += child.num_leaves

    visit(out_tree, 0)
    return matched
