"""The MPI communicator: MPI calls inside the compiled program, by mpi4jax's FFI targets.

The program stays the one that XLA compiles for the mesh of all processes, so state and batch are the same global
arrays as under the XLA communicator; only that its collectives are custom calls. mpi4jax's own functions order their
calls by a JAX effect that programs over several devices refuse, and cost 0.3 ms each from Python. Here an XLA token is
threaded from call to call: on every rank the calls run in program order, as MPI asks.

Values that no token can cross (a loop's carry) take an integer instead. `_join` makes it of a token and
`_fork` makes a token of it, both through a call that XLA can't look into: an all-reduce over this process alone.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive
from jax.extend.core import primitives as p
from jax.interpreters import mlir

from jaxdist import compat
from jaxdist.communicators import exchange
from jaxdist.communicators.mpi_groups import library, of_group
from jaxdist.ir.interpreter import CHECKPOINT, Interpreter, axes_of, bodies, groups_of
from jaxdist.ir.primitives import slices
from jaxdist.mesh import Axis, along

Communicator = Any  # of mpi4py, which is optional
Arrays = Sequence[jax.Array]
Ordered = tuple[jax.Array, Arrays]  # the order after control flow, and its results
MOST = 2**31 - 1  # most elements per message, since mpi4jax passes MPI a C int


def _call_type(x: Any, token: Any, *, shape: tuple[int, ...], **_: Any) -> Any:
    return [x.update(shape=shape, weak_type=False), token]


def _call_lowering(
    ctx: Any, x: Any, token: Any, *, target: str, attributes: tuple[tuple[str, int], ...], **_: Any
) -> Any:
    rule = jax.ffi.ffi_lowering(target, has_side_effect=True)
    return rule(ctx, x, token, **{name: np.int64(value) for name, value in attributes})


@functools.cache
def _call_p(name: str) -> Primitive:
    """Return a primitive for a call into MPI; XLA and traces (`jaxdist.profile`) use its name."""
    call = Primitive(f"jaxdist_mpi_{name}")
    call.multiple_results = True
    call.def_abstract_eval(_call_type)
    mlir.register_lowering(call, _call_lowering, platform="cpu")
    mlir.register_lowering(call, _call_lowering, platform="cuda")
    return call


def _bind(
    name: str, kind: str, x: jax.Array, token: jax.Array, shape: tuple[int, ...], attributes: Mapping[str, int]
) -> list[jax.Array]:
    """Bind an MPI call, and return its result and the next token."""
    given = tuple(sorted(attributes.items()))
    return _call_p(name).bind(x, token, target=f"mpi_{kind}_ffi", shape=shape, attributes=given)


def _reduction(comm: Communicator, count: int, dtype: np.dtype, op: str) -> dict[str, int]:
    """Return the attributes of an all-reduce."""
    how = _handle(getattr(library(), op.upper()))
    return {"nitems": count, "op": how, "comm": _handle(comm), "dtype": _mpi_type(dtype)}


def _handle(mpi_object: Any) -> int:
    handle = library()._handleof(mpi_object)
    return handle - (1 << 64) if handle >= 1 << 63 else handle


# Named types only: mpi4py's own translation makes a duplicate, which no predefined reduction accepts.
_TYPES = {
    "float32": "FLOAT", "float64": "DOUBLE", "complex64": "C_FLOAT_COMPLEX", "complex128": "C_DOUBLE_COMPLEX",
    **{f"{kind}{bits}": f"{kind.upper()}{bits}_T" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
}  # fmt: skip


def _mpi_type(dtype: np.dtype) -> int:
    return _handle(getattr(library(), _TYPES[np.dtype(dtype).name]))


class MpiLowering(Interpreter):
    """Evaluates a step's jaxpr on a process of a ``shard_map``, with MPI calls in program order."""

    def __init__(self, axes: Sequence[Axis], ranks: tuple[int, ...], order: jax.Array | None = None):
        super().__init__(
            {
                **exchange.rules(self._among),
                p.psum_p: lambda _, eqn, x: self._reduced(eqn, x, "sum"),
                p.pmax_p: lambda _, eqn, x: self._reduced(eqn, x, "max"),
                p.pmin_p: lambda _, eqn, x: self._reduced(eqn, x, "min"),
                p.all_gather_p: self._all_gather,
                p.all_to_all_p: self._all_to_all,
                compat.reduce_scatter_p: self._reduce_scatter,
                p.ppermute_p: self._permute,
                p.ragged_all_to_all_p: self._unsupported,
            }
        )
        self.axes, self.ranks = axes, ranks
        self._token = lax.create_token() if order is None else self._fork(order)

    # --- the calls

    def _among(self, eqn: JaxprEqn) -> exchange.Among:
        comm = self._comm(eqn)
        to_all, from_all, total = (functools.partial(move, comm) for move in (self._to_all, self._from_all, self._sum))
        return exchange.Among(comm.Get_size(), to_all, from_all, total)

    def _to_all(self, comm: Communicator, parts: jax.Array) -> jax.Array:
        return self._exchange("alltoall", comm, parts, parts.shape)

    def _from_all(self, comm: Communicator, part: jax.Array) -> jax.Array:
        return self._exchange("allgather", comm, part, (comm.Get_size(), *part.shape))

    def _sum(self, comm: Communicator, x: jax.Array, wire: str | None) -> jax.Array:
        if wire is None:
            return self._all_reduce(comm, x, "sum")
        to_all, from_all = (functools.partial(move, comm) for move in (self._to_all, self._from_all))
        return exchange.all_reduce(x, wire, comm.Get_size(), to_all, from_all)

    def _all_reduce(self, comm: Communicator, x: jax.Array, op: str) -> jax.Array:
        if op in ("max", "min") and jnp.issubdtype(x.dtype, jnp.floating):
            return exchange.extreme(x, op, lambda key: self._all_reduce(comm, key, op))
        # Open MPI adds integers of 8 and 16 bits with saturation where it uses vector instructions.
        is_short = x.dtype == bool or (jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize < 4)
        wide = x.astype(jnp.int32 if is_short else exchange.reducible(x.dtype))
        return self._call("allreduce", wide, wide.shape, **_reduction(comm, x.size, wide.dtype, op)).astype(x.dtype)

    def _exchange(self, kind: str, comm: Communicator, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Run an all-gather, or an all-to-all over the leading dimension, of bytes in any dtype."""
        count = x.size // (comm.Get_size() if kind == "alltoall" else 1)
        raw, restore = exchange.bits(x)
        dtype = _mpi_type(raw.dtype)
        out = self._call(
            kind, raw, shape, comm=_handle(comm),
            sendcount=count, recvcount=count, sendtype=dtype, recvtype=dtype,
        )  # fmt: skip
        return restore(out)

    def _call(self, kind: str, x: jax.Array, shape: Sequence[int] | None = None, **attributes: int) -> jax.Array:
        shape = tuple(x.shape if shape is None else shape)
        if not x.size:  # nothing to send; MPI libraries differ on counts of zero
            return jnp.zeros(shape, x.dtype)
        if (count := attributes.get("nitems") or attributes["sendcount"]) > MOST:
            raise NotImplementedError(
                f"communicator 'mpi' can't send {count:,} elements at once, more than a C int counts: use communicator "
                "'xla' for this step"
            )
        out, self._token = _bind(kind, kind, x, self._token, shape, attributes)
        return out

    # --- rules for JAX's collectives

    def _reduced(self, eqn: JaxprEqn, x: jax.Array, op: str) -> jax.Array:
        axes = axes_of(eqn)
        own = tuple(axis for axis in axes if isinstance(axis, int))  # from vmap
        if own:
            wide = x.astype(exchange.reducible(x.dtype))
            x = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}[op](wide, own).astype(x.dtype)
        named = tuple(axis for axis in axes if not isinstance(axis, int))
        return self._all_reduce(self._comm(eqn, named), x, op) if named else x

    def _all_gather(self, _: Interpreter, eqn: JaxprEqn, x: jax.Array) -> jax.Array:
        comm = self._comm(eqn)
        dim = eqn.params["all_gather_dimension"]
        out = self._exchange("allgather", comm, x, (comm.Get_size(), *x.shape))
        out = jnp.moveaxis(out, 0, dim)
        return _merge(out, dim) if eqn.params["tiled"] else out

    def _all_to_all(self, _: Interpreter, eqn: JaxprEqn, x: jax.Array) -> jax.Array:
        split, concat = eqn.params["split_axis"], eqn.params["concat_axis"]
        # Tiled or not: lax.all_to_all adds and drops the dimension that makes the difference itself.
        return _merge(jnp.moveaxis(self._scattered(self._comm(eqn), x, split), 0, concat), concat)

    def _reduce_scatter(self, _: Interpreter, eqn: JaxprEqn, x: jax.Array) -> jax.Array:
        parts = self._scattered(self._comm(eqn), x, eqn.params["scatter_dimension"], merge=eqn.params["tiled"])
        return exchange.summed(parts).astype(x.dtype)

    def _scattered(self, comm: Communicator, x: jax.Array, dim: int, merge: bool = True) -> jax.Array:
        """Stack this process's slice along `dim` of each process's `x` in a new dimension."""
        parts = slices(x, dim, comm.Get_size())
        parts = parts if merge else parts.squeeze(dim + 1)
        return self._exchange("alltoall", comm, parts, parts.shape)

    def _permute(self, _: Interpreter, eqn: JaxprEqn, x: jax.Array) -> jax.Array:
        comm = self._comm(eqn)
        null = library().PROC_NULL
        mine = comm.Get_rank()
        dest = dict(eqn.params["perm"]).get(mine, null)
        source = {d: s for s, d in eqn.params["perm"]}.get(mine, null)
        raw, restore = exchange.bits(x)
        dtype = _mpi_type(raw.dtype)
        out = self._call(
            "sendrecv", raw, sendcount=x.size, recvcount=x.size, sendtype=dtype, recvtype=dtype,
            dest=dest, source=source, sendtag=0, recvtag=0, comm=_handle(comm), status=compat.mpi_status_ignore(),
        )  # fmt: skip
        # Nothing is written where nothing is received. The result must be used all the same: a call without use is
        # dropped from the program, and the rank that this one sends to would wait for ever.
        return jnp.where(source != null, restore(out), jnp.zeros((), x.dtype))

    def _comm(self, eqn: JaxprEqn, axes: Sequence[str] | None = None) -> Communicator:
        """Return the communicator of the devices in an equation's collective."""
        names = axes or axes_of(eqn)
        ours, groups = along(self.axes, names), groups_of(eqn)
        if not {axis.name for axis in self.axes}.issuperset(names) or (groups and ours):
            self._unsupported(self, eqn)
        return of_group(self.ranks, ours if groups is None else tuple(map(tuple, groups)))

    def _unsupported(self, _: Interpreter, eqn: JaxprEqn, *args: jax.Array) -> NoReturn:
        raise NotImplementedError(
            f"communicator 'mpi' has no {eqn.primitive.name} over {eqn.params}: use communicator 'xla' for this step"
        )

    # --- order across control flow

    def _fork(self, order: jax.Array) -> jax.Array:
        _, token = self._alone(order, lax.create_token())
        return token

    def _join(self) -> jax.Array:
        order, self._token = self._alone(jnp.zeros((), jnp.int32), self._token)
        return order

    def _alone(self, x: jax.Array, token: jax.Array) -> list[jax.Array]:
        return _bind("order", "allreduce", x, token, (), _reduction(library().COMM_SELF, 1, np.dtype("int32"), "sum"))

    def _inner(self, order: jax.Array, closed: ClosedJaxpr, *args: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        rules = MpiLowering(self.axes, self.ranks, order)
        outs = rules.run(closed, *args)
        return rules._join(), outs

    def eval_nested(self, eqn: JaxprEqn, *args: jax.Array) -> Arrays:
        """Pass the order of calls through control flow with collectives inside."""
        rule = {
            "scan": self._scan, "while": self._while, "cond": self._cond, CHECKPOINT: self._checkpoint,
        }.get(eqn.primitive.name)  # fmt: skip
        if rule is None:
            raise NotImplementedError(
                f"communicator 'mpi' can't order a collective inside {eqn.primitive.name}: use communicator 'xla'"
            )
        order, outs = rule(eqn, self._join(), *args)
        self._token = self._fork(order)
        return outs

    def _scan(self, eqn: JaxprEqn, order: jax.Array, *args: jax.Array) -> Ordered:
        (scan,) = bodies(eqn)
        consts, carry, xs = scan.split(args)

        def body(carry: Arrays, xs: Arrays) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
            order, outs = self._inner(carry[0], scan.closed, *consts, *carry[1:], *xs)
            return (order, *outs[: len(scan.carry)]), tuple(outs[len(scan.carry) :])

        settings = {k: eqn.params[k] for k in ("length", "reverse", "unroll")}
        (order, *carry), ys = lax.scan(body, (order, *carry), tuple(xs), **settings)
        return order, [*carry, *ys]

    def _while(self, eqn: JaxprEqn, order: jax.Array, *args: jax.Array) -> Ordered:
        test, loop = bodies(eqn)
        cond_consts, body_consts, init = test.split(args)[0], *loop.split(args)[:2]

        # The condition may hold a collective as well, so it is evaluated in the body.
        def again(order: jax.Array, carry: Arrays) -> tuple[jax.Array, jax.Array]:
            order, (more,) = self._inner(order, test.closed, *cond_consts, *carry)
            return order, more

        def body(state: Arrays) -> tuple[jax.Array, ...]:
            order, _, *carry = state
            order, carry = self._inner(order, loop.closed, *body_consts, *carry)
            return (*again(order, carry), *carry)

        order, _, *carry = lax.while_loop(lambda s: s[1], body, (*again(order, init), *init))
        return order, carry

    def _cond(self, eqn: JaxprEqn, order: jax.Array, *args: jax.Array) -> Ordered:
        which, *operands = args

        def branch(closed: ClosedJaxpr) -> Callable[..., tuple[jax.Array, ...]]:
            def run(order: jax.Array, *xs: jax.Array) -> tuple[jax.Array, ...]:
                order, outs = self._inner(order, closed, *xs)
                return (order, *outs)

            return run

        every = [branch(closed) for closed in eqn.params["branches"]]
        order, *outs = lax.switch(which.astype(jnp.int32), every, order, *operands)
        return order, outs

    def _checkpoint(self, eqn: JaxprEqn, order: jax.Array, *args: jax.Array) -> Ordered:
        body = eqn.params["jaxpr"]

        def run(order: jax.Array, *xs: jax.Array) -> Arrays:
            order, outs = self._inner(order, compat.closed(body), *xs)
            return [order, *outs]

        closed = jax.make_jaxpr(run)(jax.typeof(order), *(v.aval for v in body.invars))
        order, *outs = compat.bind(eqn, {**eqn.params, "jaxpr": closed.jaxpr}, [order, *args])
        return order, outs


def _merge(x: jax.Array, dim: int) -> jax.Array:
    """Merge dimensions `dim` and `dim + 1`."""
    return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])
