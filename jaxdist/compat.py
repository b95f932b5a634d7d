"""Every private or version-dependent touch of JAX and mpi4jax, each with its reason; nothing else imports `_src`."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import gc
import operator
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import config as _config
from jax._src import core as _core
from jax._src import source_info_util
from jax._src.lax import lax as _lax
from jax._src.lax import parallel as _parallel
from jax.extend.core import ClosedJaxpr
from jax.extend.core.primitives import jit_p

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


def other_collectives() -> tuple[Any, ...]:
    """Primitives that name an axis and have no public name in every version."""
    names = (
        "pgather_p",
        "pbroadcast_p",
        "ragged_all_to_all_p",
        "psend_p",
        "precv_p",
        "all_gather_reduced_p",
        "preduced_p",
    )
    return tuple(p for name in names if (p := getattr(_parallel, name, None)) is not None)


def trace_settings() -> Any:
    """The settings of JAX that a trace depends on, the threefry generator's among them (no public query)."""
    return _config.trace_context()


def trace_state_clean() -> bool:
    """Whether nothing is being traced (no public query)."""
    return _core.trace_state_clean()


def manual_axes() -> frozenset[str]:
    """Mesh axes of the ``shard_map`` under whose trace the code runs."""
    mesh = jax.sharding.get_abstract_mesh()
    return frozenset() if mesh.empty else frozenset(mesh.manual_axes)


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


def call(closed: ClosedJaxpr, args: Sequence[Any]) -> Sequence[Any]:
    """Evaluate a jaxpr as a call in what is being traced, without tracing it anew.

    `jax.jit` of it would; the parameters of its primitive are another set in each version, so an empty one gives them.
    """
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


def name_stack(eqn: Any) -> str:
    """In which `jax.named_scope`s and transformations an equation was traced (no public access)."""
    return str(eqn.source_info.name_stack)


def in_backward_pass(eqn: Any) -> bool:
    """Whether differentiation made an equation for its backward pass: its name stack says so."""
    return _transposed(eqn.source_info.name_stack)


@functools.lru_cache(maxsize=4096)
def _transposed(stack: Any) -> bool:
    return "transpose(" in str(stack)


def user_line(eqn: Any) -> str:
    """``file:line`` of the user's code that an equation comes from, or "" (no public access)."""
    for frame in source_info_util.user_frames(eqn.source_info.traceback):
        if not frame.file_name.startswith(_OURS):
            return f"{frame.file_name}:{frame.start_line}"
    return ""


_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep  # noqa: PTH100, PTH120


def closed(jaxpr: Any) -> ClosedJaxpr:
    """An open jaxpr (of `jax.checkpoint`) as a closed one without constants; the same for the same."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else _closed(jaxpr)


@functools.cache
def _closed(jaxpr: Any) -> ClosedJaxpr:
    return ClosedJaxpr(jaxpr, ())


def with_constants_as_inputs(jaxpr: Any) -> Any:
    """A jaxpr whose constants come first among its inputs (`jax.checkpoint` holds an open one)."""
    return (
        jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], debug_info=None)
        if jaxpr.constvars
        else jaxpr
    )


def linear_solve(params: dict[str, Any], ins: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """The jaxpr that solves a `lax.custom_linear_solve`, and those operands that it takes."""
    lengths, start = params["const_lengths"], 0
    for name in lengths._fields:
        if name == "solve":
            break
        start += getattr(lengths, name)
    rest = sum(lengths)
    return params["jaxprs"].solve, (*ins[start : start + lengths.solve], *ins[rest:])


def scatter_add(xs: Sequence[Any], params: Mapping[str, Any]) -> Any:
    """A ``scatter-add`` equation on operands of another dtype: its parameters hold a jaxpr of its own."""
    given = {k: params[k] for k in ("indices_are_sorted", "unique_indices", "mode")}
    return jax.lax.scatter_add(xs[0], xs[1], xs[2], params["dimension_numbers"], **given)


def makes_bits_by_place(dtype: Any) -> bool:
    """Whether the random bits of keys of a type depend on the key and the place of an entry alone."""
    impl = getattr(dtype, "_impl", None)
    return getattr(impl, "name", "") == "threefry2x32" and bool(_config.threefry_partitionable.value)


def threefry(key_a: Any, key_b: Any, high: Any, low: Any) -> Sequence[Any]:
    """The two words that threefry makes of a key and a 64-bit counter (public, but in an experimental place)."""
    from jax.extend.random import threefry2x32_p

    return threefry2x32_p.bind(key_a, key_b, high, low)


def scan_split(params: Mapping[str, Any]) -> tuple[int, int]:
    """(number of constants, number of carries) of a scan equation (0.12 keeps them in a FlatTree)."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def with_weak_type(x: Any, weak_type: bool) -> Any:
    """`x` typed as a Python number is, or not (shard_map drops weak types; no public cast makes one)."""
    return _lax._convert_element_type(x, x.dtype, weak_type=weak_type) if weak_type else x


def is_pmapped(function: Any) -> bool:
    """Whether `jax.pmap` made it (what it returns is a plain function, of jax._src.pmap)."""
    return getattr(function, "__globals__", {}).get("__name__") == "jax._src.pmap"


# --- compilation


def on_compile(instead: Callable[[Callable[..., Any], Any], Any], program: Callable[..., Any]) -> None:
    """Have each program of this process compiled by `instead`, which is given JAX's own way to do it and the program.

    Here JAX has not found the program in its persistent cache. There is no public place.

    Args:
      instead: called with a function that compiles a program, and the program; returns the executable.
      program: makes it of JAX's own arguments; a tuple of them.
    """
    from jax._src import compiler

    original = compiler.backend_compile_and_load

    def compile_(*args: Any) -> Any:
        return instead(lambda given: original(*given), program(*args))

    compiler.backend_compile_and_load = compile_


def same_cache_key_on_all_ranks(processor: bytes) -> None:
    """In JAX's persistent cache a program for CPUs has one key, whichever process compiles it.

    JAX takes the number of a program's one device into the key (not so on GPUs), and that of the process. But only
    process 0 writes: no other would find anything.

    Args:
      processor: describes that of this machine; for another's there is another key.
    """
    from jax._src import cache_key

    of_options, of_devices = cache_key._hash_serialized_compile_options, cache_key._hash_accelerator_config

    def hash_options(hashed: Any, options: Any, *args: Any, **kwargs: Any) -> None:
        of_options(hashed, for_any_device(options), *args, **kwargs)

    def hash_devices(hashed: Any, devices: Any) -> None:
        if devices.flat[0].platform == "cpu":
            hashed.update(processor)
        else:
            of_devices(hashed, devices)

    cache_key._hash_serialized_compile_options = hash_options
    cache_key._hash_accelerator_config = hash_devices


def writes_cache() -> bool:
    """Whether this process writes what it compiles into JAX's persistent cache."""
    from jax._src import compilation_cache

    return distributed_ids()[0] == 0 and compilation_cache.is_persistent_cache_enabled()


def for_any_device(options: Any) -> Any:
    """Options of the compiler; those for one device are the same whichever it is."""
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    given = options.device_assignment
    if given is None or given.replica_count() * given.computation_count() > 1:
        return options
    options = copy.deepcopy(options)
    options.device_assignment = xla_client.DeviceAssignment.create(np.zeros((1, 1), int))
    return options


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


def settings() -> dict[str, Any]:
    """All of `jax.config`, by name. (`values` is there in jax 0.10-0.12, and documented nowhere.)"""
    return dict(jax.config.values)


def use_settings(wanted: Mapping[str, Any]) -> None:
    """Make `jax.config` what it was in another process, as far as this one's differs."""
    mine = settings()
    for name, value in wanted.items():
        if name in mine and mine[name] != value:
            jax.config.update(name, value)


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


def on_exit_code(note: Callable[[Any], None]) -> None:
    """Have `note` told the code of the SystemExit that ends the script, before the functions of atexit run.

    Python tells nobody: neither excepthook nor atexit. But the interpreter then asks the exception for its `code`, with
    no frame of Python on the stack; so that attribute is one of ours. (Seen to work with Python 3.8 to 3.13.)
    """
    members = gc.get_referents(SystemExit.__dict__)[0]
    code = members["code"]

    def get(error: SystemExit) -> Any:
        value = code.__get__(error)
        if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
            note(value)
        return value

    members["code"] = property(get, code.__set__, code.__delete__)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))


def before_threads_end(call: Callable[[], None]) -> None:
    """Run something when the main thread is at its end and executors of other threads still work.

    `atexit` is too late for what a thread does with orbax meanwhile: before Python waits for its threads it forbids
    new work for executors (`concurrent.futures.thread._python_exit`, which registers itself in the same way; what
    registered last runs first). Python 3.9-3.14 have this and nothing public.
    """
    import concurrent.futures.process
    import concurrent.futures.thread  # noqa: F401

    threading._register_atexit(call)  # pyright: ignore[reportAttributeAccessIssue]


def quiet_distributed() -> None:
    """Switch off what jax.distributed does that harms a training job; before `initialize`.

    The preemption service installs a C++ SIGTERM handler that swallows the signal: the launcher's
    SIGTERM would end nothing. The proxy check warns on every rank. Both flags exist in
    jax 0.10-0.12; a version without them needs nothing.
    """
    for name in ("jax_enable_preemption_service", "jax_check_proxy_envs"):
        with contextlib.suppress(AttributeError):
            jax.config.update(name, False)


def when_client_has_left(call: Callable[[], None]) -> None:
    """`call` something in JAX's own shutdown at exit: this process's client has left, the coordinator is still there.

    jax 0.10-0.12 ends the client, then the service, if there is one, in one call. After it process 0 may be gone.
    """
    from jax._src import distributed

    state = distributed.global_state
    service = state.service  # None on other processes

    class Service:
        """The coordinator, as far as JAX's own shutdown knows it."""

        def shutdown(self) -> None:
            call()
            if service is not None:
                service.shutdown()

    if state.client is not None:
        state.service = Service()


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
