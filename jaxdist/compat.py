"""Every private or version-dependent touch of JAX and mpi4jax, each with its reason; nothing else imports `_src`."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import source_info_util
from jax._src.lax import lax as _lax
from jax._src.lax import parallel as _parallel
from jax._src.lax.control_flow import loops as _loops
from jax.interpreters import ad

# --- arrays

sharding_of = operator.attrgetter("_sharding")
"""`x.sharding` of an array, without the Python of a property: looked at for each leaf of the state in each call."""


def mpi_status_ignore() -> int:
    """MPI_STATUS_IGNORE for mpi4jax's FFI targets (its own sendrecv passes it; it has no public name)."""
    from mpi4jax._src.xla_bridge import MPI_STATUS_IGNORE_ADDR

    return MPI_STATUS_IGNORE_ADDR


# --- tracing and differentiation

# The replicated -> varying cast of shard_map's types (jax 0.10: `jax.lax.pcast` binds it, but the primitive
# itself has no public name), and the two public collectives whose types tie them together.
pvary_p = _core.pvary_p
psum_invariant_p = _parallel.psum_invariant_p
all_gather_invariant_p = _parallel.all_gather_invariant_p
reduce_scatter_p = _parallel.reduce_scatter_p


def checking_types() -> bool:
    """Whether the trace under way is a shard_map with check_vma=True (no public query)."""
    return bool(_config._check_vma.value)


def varying_axes(aval: Any) -> frozenset[str]:
    """Mesh axes over which a value of this type differs (0.10: `aval.mat.varying`; before: `aval.vma`)."""
    manual = getattr(aval, "mat", None)
    return manual.varying if manual is not None else getattr(aval, "vma", frozenset())


def replicated_type(aval: Any, axes: tuple[str, ...]) -> Any:
    """`aval` with `axes` no longer varying: the result type of an all-reduce over them."""
    return aval.update(manual_axis_type=aval.mat.update(varying=aval.mat.varying - frozenset(axes)))


def varying_type(aval: Any, axes: tuple[str, ...]) -> Any:
    """`aval` with `axes` varying: the result type of a cast from replicated to per-device."""
    return aval.update(manual_axis_type=aval.mat.update(varying=aval.mat.varying | frozenset(axes)))


def replace_transpose_rules(cast: Callable[..., Any], reduce: Callable[..., Any]) -> None:
    """Transpose `pvary` with `cast` and the varying -> invariant collectives through `reduce`.

    `cast(cotangent, axes)` must be numerically JAX's own rule (a psum), and `reduce(cotangent, axes)` likewise (a
    pvary): they only bind primitives of ours in place of JAX's, so that a later pass can tell a
    reduction that differentiation made from one that the user wrote.
    """
    ad.deflinear2(pvary_p, lambda ct, _, *, axes: [cast(ct, axes)])
    ad.deflinear2(psum_invariant_p, lambda ct, _, *, axes: [reduce(ct, axes)])
    gather_rule = _parallel._all_gather_invariant_transpose_rule

    def gather_transpose(ct: Any, x: Any, **params: Any) -> Any:
        axes = params["axis_name"]
        if not checking_types():  # each device holds its own cotangent of the whole: they are added
            dim, tiled = params["all_gather_dimension"], params["tiled"]
            return [jax.lax.psum_scatter(ct, axes, scatter_dimension=dim, tiled=tiled)]
        return gather_rule(reduce(ct, axes if isinstance(axes, tuple) else (axes,)), x, **params)

    ad.deflinear2(all_gather_invariant_p, gather_transpose)


def promote_loop_carries() -> None:
    """Let `lax.scan` and `lax.while_loop` start a varying carry from a replicated constant.

    JAX refuses `lax.scan(body, 0.0, xs)` under check_vma=True when the body's result varies, and tells the user to
    `pcast` the initial value. This does what the message says, through the hook by which the loops already promote
    weakly typed initial values: only programs that JAX would have refused are touched.
    """
    original = getattr(_loops, "_promote_weak_typed_input", None)
    if original is None or hasattr(original, "jaxdist"):
        return  # a JAX without the hook: such models take the unchecked trace instead

    def promote(value: Any, in_aval: Any, out_aval: Any) -> tuple[Any, bool]:
        value, changed = original(value, in_aval, out_aval)
        missing = varying_axes(out_aval) - varying_axes(in_aval)
        if missing and checking_types():
            return jax.lax.pcast(value, tuple(missing), to="varying"), True
        return value, changed

    promote.jaxdist = True  # type: ignore[attr-defined]
    _loops._promote_weak_typed_input = promote


def bind(eqn: Any, params: dict[str, Any], args: Sequence[Any]) -> Sequence[Any]:
    """Bind an equation's primitive to other parameters and arguments, in the context in which it was traced.

    As `jax.core.eval_jaxpr` does for each equation: what `get_bind_params` returns, the equation's context (its
    matmul precision, say) and its name stack have no public access.
    """
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with (
        source_info_util.user_context(eqn.source_info.traceback, name_stack=stack),
        eqn.ctx.manager,
    ):
        out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
    return out if eqn.primitive.multiple_results else [out]


def name_stack(eqn: Any) -> str:
    """In which `jax.named_scope`s and transformations an equation was traced (no public access)."""
    return str(eqn.source_info.name_stack)


def in_backward_pass(eqn: Any) -> bool:
    """Whether differentiation made an equation for its backward pass: its name stack says so."""
    return "transpose(" in name_stack(eqn)


def all_gather_replicated(x: Any, axis: str) -> Any:
    """All-gather into a new leading dimension, typed as the same on every device where types are checked.

    (`lax.all_gather(..., to="invarying")` is not in every version, and refuses an unchecked trace.)
    """
    if not checking_types():
        return jax.lax.all_gather(x, axis)
    return all_gather_invariant_p.bind(
        x, all_gather_dimension=0, axis_name=(axis,), axis_size=jax.lax.axis_size(axis), tiled=False
    )


def scan_split(params: dict[str, Any]) -> tuple[int, int]:
    """(number of constants, number of carries) of a scan equation (0.12 keeps them in a FlatTree)."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def with_weak_type(x: Any, weak_type: bool) -> Any:
    """`x` typed as a Python number is, or not (shard_map drops weak types; no public cast makes one)."""
    return _lax._convert_element_type(x, x.dtype, weak_type=weak_type) if weak_type else x


# --- devices that are not here


def gpus_elsewhere(target: str, hosts: int, per_host: int) -> list[Any]:
    """Devices that programs can be compiled for, and no more (`jax.experimental.topologies`).

    Args:
      target: XLA's description of the GPU.
      hosts: number of them.
      per_host: GPUs of each, one a process.

    Raises:
      ImportError: JAX is installed without what compiles for NVIDIA's GPUs.
    """
    import os

    from jax.experimental import topologies

    # The plugin of jax[cuda12] refuses a machine without a driver unless told; when a backend started it already has.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        _register_cuda()
        found = topologies.get_topology_desc(platform="cuda", target_config=target, topology=f"{hosts}x{per_host}x1")
    except (NotImplementedError, RuntimeError) as error:
        raise ImportError(str(error)) from None
    return list(found.devices)


@functools.cache
def _register_cuda() -> None:
    """Let the CUDA plugin register itself once more, if it refused this machine when a backend started."""
    import importlib

    from jax._src import xla_bridge

    if not backend_started() or "cuda" in xla_bridge._topology_factories:
        return
    for name in ("xla_cuda13", "xla_cuda12"):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"jax_plugins.{name}").initialize()
            return


@functools.lru_cache(maxsize=4)
def cpus_elsewhere(count: int) -> list[Any]:
    """Virtual CPU devices beside those of the backend, whose number is settled when it starts.

    A client of their own (no public way makes a second one); programs can be compiled for them.
    """
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    return list(xla_client.make_cpu_client(num_devices=count).devices())


@functools.cache
def compiler_knows(option: str, value: Any) -> bool:
    """Whether this version of XLA has a compiler option: they come and go, and one that is not there is an error."""
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    one = NamedSharding(Mesh(cpus_elsewhere(1), ("one",)), PartitionSpec())
    lowered = jax.jit(lambda x: x, in_shardings=one).lower(jax.ShapeDtypeStruct((), "float32"))
    try:
        lowered.compile(compiler_options={option: value})  # type: ignore[arg-type]
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" in str(error):
            return False
        raise
    return True


# --- process set-up


def backend_started() -> bool:
    """Whether a JAX backend is up. jax 0.10-0.12: no public way to ask without starting one."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def platforms_asked() -> str | None:
    """JAX_PLATFORMS, or what the script set; the attribute is there but typed nowhere."""
    return jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]


def distributed_client_started() -> bool:
    """Whether jax.distributed was initialized (public only as `is_initialized` since 0.4.38)."""
    return jax.distributed.is_initialized()


def distributed_ids() -> tuple[int, int]:
    """(process_id, num_processes) of jax.distributed; public only once a backend is up."""
    from jax._src import distributed

    return distributed.global_state.process_id, distributed.global_state.num_processes


def adopt(host: Any) -> jax.Array:
    """An array on the default device with the memory of a NumPy array, where that is the host's, else a copy.

    `jax.device_put` does the same and takes 25 us for it, more than the rest of a small eager collective. Host memory
    is used as it is if aligned to 64 bytes; it is kept as long as the array or anything made from it without a copy.
    """
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    if jax.config.jax_default_device is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return jax.device_put(host)
    aval, sharding, device = _on_first_device(host.shape, host.dtype)
    return xla_client.batched_device_put(aval, sharding, [host], [device], False)


@functools.lru_cache(maxsize=1024)
def _on_first_device(shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any, Any]:
    device = jax.local_devices()[0]
    return _core.ShapedArray(shape, dtype), jax.sharding.SingleDeviceSharding(device), device


def release_dropped() -> None:
    """Let go of host memory of arrays that are gone: JAX puts that off until its next call of some kinds.

    `jax._src.lib` calls this at each run of Python's garbage collector.
    """
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    _jax.collect_garbage()


def key_value_store() -> Any:
    """The key-value store of jax.distributed, which has no public name."""
    from jax._src import distributed

    client = distributed.global_state.client
    assert client is not None, "jax.distributed is not initialized"
    return client


def quiet_distributed() -> None:
    """Switch off what jax.distributed does that harms a training job; before `initialize`.

    The preemption service installs a C++ SIGTERM handler that swallows the signal: the launcher's
    SIGTERM would end nothing. The proxy check warns on every rank. Both flags exist in
    jax 0.10-0.12; a version without them needs nothing.
    """
    for name in ("jax_enable_preemption_service", "jax_check_proxy_envs"):
        with contextlib.suppress(AttributeError):
            jax.config.update(name, False)


def one_cpu_device() -> None:
    """One CPU device in this process, whatever XLA_FLAGS asks for (jax_num_cpu_devices wins)."""
    jax.config.update("jax_num_cpu_devices", 1)


def cpu_threads(count: int) -> None:
    """Threads of XLA's CPU client; before the backend starts.

    Its pool ignores OMP_NUM_THREADS and `--xla_cpu_multi_thread_eigen`; it reads PJRT_NPROC, then
    NPROC (`DefaultThreadPoolSize` in xla/pjrt/utils.cc). PJRT_NPROC is the one no other program
    reads. A user's setting of either stays.
    """
    import os

    if "NPROC" not in os.environ:
        os.environ.setdefault("PJRT_NPROC", str(count))


def gloo_at(ip: str) -> None:
    """Gloo listens at `ip`; after `jax.distributed.initialize`, before the backend starts.

    JAX 0.10-0.12 gives gloo no address, so it takes what the host name resolves to: 127.0.1.1 on
    Debian, nothing in many containers. `make_cpu_client` takes ready-made collectives.
    """
    import functools

    from jax._src import distributed, xla_bridge
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    collectives = _jax.make_gloo_tcp_collectives(distributed_client=distributed.global_state.client, hostname=ip)
    xla_bridge.register_backend_factory(
        "cpu",
        functools.partial(xla_bridge.make_cpu_client, collectives),
        priority=0,
        fail_quietly=False,
    )
