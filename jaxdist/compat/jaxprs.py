"""Equations and jaxprs: what they hold, where they come from, and binding them anew."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import callback, debugging, ffi, hijax, source_info_util
from jax._src import config as _config
from jax._src.custom_partitioning_sharding_rule import BATCHING, str_to_sdy_sharding_rule
from jax._src.interpreters import batching, mlir
from jax._src.pallas.hlo_interpreter import pallas_call_hlo_interpret
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import ClosedJaxpr
from jax.extend.core.primitives import jit_p
from jax.sharding import AbstractMesh, use_abstract_mesh
from jaxlib.mlir import ir

from jaxdist.sources import is_ours, of_the_user


def bind(eqn: Any, params: dict[str, Any], args: Sequence[Any], in_bounds: bool = True) -> Sequence[Any]:
    """Bind an equation's primitive to other parameters and arguments, as `jax.core.eval_jaxpr` does (private)."""
    with context_of(eqn):
        args = _in_bounds(eqn.primitive.name, args, params) if in_bounds else args
        out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
    return out if eqn.primitive.multiple_results else [out]


@contextlib.contextmanager
def context_of(eqn: Any) -> Iterator[None]:
    """Trace with the source line, name, and settings of an equation, but under the current mesh."""
    # JAX records the mesh of a `with_sharding_constraint` or a `shard_map` in the context of some equations. We place
    # values ourselves, and inside our `shard_map` any other mesh is an error.
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    now = jax.sharding.get_abstract_mesh()
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        mesh = jax.sharding.get_abstract_mesh()
        other = now if mesh.manual_axes else AbstractMesh((), ())
        with contextlib.nullcontext() if mesh.empty or mesh == other else use_abstract_mesh(other):
            yield


def batched_entry_by_entry(primitive: Any) -> bool:
    """Whether JAX batches a primitive elementwise, according to a private table."""
    rule = getattr(batching.fancy_primitive_batchers.get(primitive), "func", None)
    return rule is batching.vectorized_batcher or rule is batching.broadcast_batcher


# They call a Python function on the host, their parameter ``callback``.
CALLBACKS = (callback.pure_callback_p, callback.io_callback_p, debugging.debug_callback_p)

composite_p = hijax.call_hi_primitive_p  # made of others, in one piece in a trace (``jnp.nonzero`` from jax 0.12 on)


def expanded(interpreter: Any, eqn: Any, *args: Any) -> Sequence[Any]:
    """What a composite operation is made of, traced; a rule of an `Interpreter`."""
    with context_of(eqn) if user_line(eqn) else contextlib.nullcontext():  # else that of the call around it
        return eqn.primitive.to_lojax(*args, **eqn.params)


def _in_bounds(name: str, args: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    """Operands of a slice whose start lies in the array, where an operation on slices would move it to."""
    # Where it makes one slice of two, the user's and ours, XLA forgets to where (openxla/xla#49121, in all versions),
    # and adds their starts in the type that they have, which may be of 8 bits.
    if name == "dynamic_slice":
        (x, *starts), sizes = args, params["slice_sizes"]
        return [x, *map(_clamped, starts, x.shape, sizes)]
    if name == "dynamic_update_slice":
        x, update, *starts = args
        return [x, update, *map(_clamped, starts, x.shape, update.shape)]
    return args


def _clamped(start: Any, length: int, size: int) -> Any:
    dtype = jax.dtypes.result_type(start)
    wide = jnp.promote_types(dtype, jnp.int32) if dtype.itemsize < 4 else dtype
    if length == size:
        return np.zeros((), wide)
    last = min(length - size, jnp.iinfo(dtype).max)
    return lax.clamp(np.zeros((), dtype), start, np.asarray(last, dtype)).astype(wide)


def call(closed: ClosedJaxpr, args: Sequence[Any]) -> Sequence[Any]:
    """Add a jaxpr to the current trace as one call. `jax.jit` would trace it again."""
    # Its primitive has other parameters in each version, so an empty call gives them.
    params = dict(_empty_call(jax.sharding.get_abstract_mesh()))
    for name, count in (("in", len(args)), ("out", len(closed.out_avals))):
        for kind in ("shardings", "layouts"):
            params[f"{name}_{kind}"] = (params[f"{name}_{kind}"][0],) * count
    params.update(jaxpr=closed, donated_invars=(False,) * len(args), name="part")
    return jit_p.bind(*args, **params)


@functools.lru_cache(maxsize=64)
def _empty_call(mesh: Any) -> dict[str, Any]:
    """The parameters of a call with one argument and one result, traced under the mesh of the moment."""
    return jax.make_jaxpr(jax.jit(lambda x: x + 1))(0.0).eqns[0].params


def in_backward_pass(eqn: Any) -> bool:
    """Whether differentiation made an equation for its backward pass: its name stack says so."""
    return _transposed(eqn.source_info.name_stack)


@functools.lru_cache(maxsize=4096)
def _transposed(stack: Any) -> bool:
    return "transpose(" in str(stack)


def user_line(eqn: Any) -> str:
    """``file:line`` of the user's own code that an equation comes from or that calls the library which it comes from;
    "" if unknown (no public access)."""
    theirs = ""
    for frame in source_info_util.user_frames(eqn.source_info.traceback):
        line = f"{frame.file_name}:{frame.start_line}"
        if of_the_user(frame.file_name):
            return line
        theirs = theirs or ("" if is_ours(frame.file_name) else line)
    return theirs


def closed(jaxpr: Any) -> ClosedJaxpr:
    """An open jaxpr (of `jax.checkpoint`, of lineax) as a closed one whose constants come first among its inputs; the
    same for the same."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else _closed(jaxpr)


@functools.cache
def _closed(jaxpr: Any) -> ClosedJaxpr:
    return ClosedJaxpr(with_constants_as_inputs(jaxpr), ())


def opened(made: ClosedJaxpr, constants: int) -> Any:
    """Undo `closed`: the first inputs become the constants of an open jaxpr again."""
    invars = made.jaxpr.invars
    return made.jaxpr.replace(constvars=invars[:constants], invars=invars[constants:]) if constants else made.jaxpr


def with_constants_as_inputs(jaxpr: Any) -> Any:
    """A jaxpr whose constants come first among its inputs (`jax.checkpoint` holds an open one)."""
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]) if jaxpr.constvars else jaxpr


def scan_split(params: Mapping[str, Any]) -> tuple[int, int]:
    """(number of constants, number of carries) of a scan equation (0.12 keeps them in a FlatTree)."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def linear_solve(params: dict[str, Any], ins: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """The jaxpr that solves a `lax.custom_linear_solve`, and those operands that it takes."""
    lengths = params["const_lengths"]
    start = sum(lengths[: lengths._fields.index("solve")])
    return params["jaxprs"].solve, (*ins[start : start + lengths.solve], *ins[sum(lengths) :])


def scatter_add(xs: Sequence[Any], params: Mapping[str, Any]) -> Any:
    """A ``scatter-add`` equation on operands of another dtype: its parameters hold a jaxpr of its own."""
    given = {k: params[k] for k in ("indices_are_sorted", "unique_indices", "mode")}
    return jax.lax.scatter_add(xs[0], xs[1], xs[2], params["dimension_numbers"], **given)


def makes_bits_by_place(dtype: Any) -> bool:
    """Whether the random bits of keys of a type depend on the key and the place of an entry alone."""
    return draws_by_key(dtype) and bool(_config.threefry_partitionable.value)


def draws_by_key(dtype: Any) -> bool:
    """Whether a key draws the same bits in an array of keys as alone. Nothing is assumed but of threefry."""
    # Under `vmap`, all rbg keys draw from the first ("Advanced RNG configuration" in the docs of `jax.random`).
    return getattr(getattr(dtype, "_impl", None), "name", "") == "threefry2x32"


def threefry(key_a: Any, key_b: Any, high: Any, low: Any) -> Sequence[Any]:
    """The two words that threefry makes of a key and a 64-bit counter (public, but in an experimental place)."""
    from jax.extend.random import threefry2x32_p

    return threefry2x32_p.bind(key_a, key_b, high, low)


def block_size(dim: Any) -> int | None:
    """The entries along a dimension of a Pallas kernel's block, if its index counts blocks, else None (no public
    types for all of them)."""
    match type(dim).__name__:
        case "Squeezed":
            return 1
        case "Blocked":
            return dim.block_size
        case "Element" if dim.block_size == 1 and tuple(dim.padding) == (0, 0):
            return 1
    return None


def is_whole(eqn: Any) -> bool:
    """Whether a ``swap`` writes to all of its memory (how it is indexed is private)."""
    for step in jax.tree.unflatten(eqn.params["tree"], eqn.invars[2:]):
        if not hasattr(step, "indices"):
            return False
        for index, size in zip(step.indices, step.shape, strict=True):
            start = getattr(index, "start", index)
            length, stride = getattr(index, "size", 1), getattr(index, "stride", 1)
            if not isinstance(getattr(start, "val", start), int) or getattr(start, "val", start) != 0:
                return False
            if (length, stride) != (size, 1):
                return False
    return True


def kernel_name(eqn: Any) -> str:
    """The name that a kernel has of its own, or ""."""
    params = eqn.params
    match eqn.primitive.name:
        case "pallas_call":
            return params.get("name") or params["jaxpr"].debug_info.func_name
        case "ffi_call":
            return params["target_name"]
        case "custom_partitioning":
            return params["call"].jaxpr.debug_info.func_name
    return ""


def interpreted_kernel(eqn: Any) -> ClosedJaxpr:
    """A ``pallas_call`` as operations on whole arrays: what ``interpret=True`` lowers it to (private)."""
    taken = inspect.signature(pallas_call_hlo_interpret).parameters
    run = functools.partial(pallas_call_hlo_interpret, **{k: v for k, v in eqn.params.items() if k in taken})
    return jax.make_jaxpr(run)(*(v.aval for v in eqn.invars))


def sharding_rule(params: Mapping[str, Any], ins: Sequence[Any], outs: Sequence[Any]) -> Any:
    """The `SdyShardingRule` of a ``custom_partitioning`` equation on arrays of these types; None if it has none."""
    rule, settings = params["sharding_rule"], {}
    if callable(rule):  # it gets MLIR's types
        with mlir.make_ir_context(), ir.Location.unknown():
            types = [
                [ir.RankedTensorType.get(a.shape, mlir.dtype_to_ir_type(a.dtype)) for a in avals]
                for avals in (ins, outs)
            ]
            rule = rule(*params["static_args"], jax.sharding.get_abstract_mesh(), *types)
    if isinstance(rule, (list, tuple)):
        rule, settings = rule
    return str_to_sdy_sharding_rule(rule, **settings) if isinstance(rule, str) else rule


def split_by_shardy(mapping: Sequence[Any], rank: int) -> list[tuple[str, ...]]:
    """The factors of each dimension of an array, outermost first, in an `SdyShardingRule`."""
    dims = [(d,) if isinstance(d, str) else tuple(d) for d in mapping]
    if dims and BATCHING in dims[0][0]:  # "..." stands for as many dimensions as are left
        dims[:1] = [(f"{dims[0][0]}{d}",) for d in range(rank - len(dims) + 1)]
    return dims


def of_transformer_engine(eqn: Any) -> ClosedJaxpr | None:
    """What a primitive of TransformerEngine is lowered to: a ``custom_partitioning``, with the rule of its class."""
    base = sys.modules.get("transformer_engine.jax.cpp_extensions.base")
    classes = getattr(base, "_primitive_registry", {}).values()
    if (cls := next((c for c in classes if c.outer_primitive is eqn.primitive), None)) is None:
        return None
    kernel = custom_partitioning(cls.impl, static_argnums=cls.impl_static_args)
    kernel.def_partition(cls.partition, cls.infer_sharding_from_operands, sharding_rule=cls.shardy_sharding_rule)
    return jax.make_jaxpr(functools.partial(kernel, **eqn.params))(*(v.aval for v in eqn.invars))


def batches(eqn: Any) -> int:
    """How often `jax.vmap` put a dimension before those of an equation's operands, as far as `count_batches` saw it."""
    return str(eqn.source_info.name_stack).count(_BATCHED)


_BATCHED = "jaxdist_batched"


def count_batches() -> None:
    """Let the rules of `jax.vmap` for calls of the user's say that they added a dimension: the equation doesn't."""
    for primitive in (ffi.ffi_call_p, callback.pure_callback_p):
        rule = batching.fancy_primitive_batchers[primitive]
        batching.fancy_primitive_batchers[primitive] = functools.partial(_counted, rule)


def _counted(rule: Any, axis: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    adds = params["vmap_method"] and any(d is not None for d in dims)
    with jax.named_scope(_BATCHED) if adds else contextlib.nullcontext():
        return rule(axis, args, dims, **params)


count_batches()
