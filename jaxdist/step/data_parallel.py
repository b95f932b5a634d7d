"""`data_parallel`: run a train step that was written for one device on all of them."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar, Unpack, overload

from jax.sharding import Mesh

from jaxdist.compat import is_pmapped
from jaxdist.compilation.calling import (
    ANNOTATIONS,
    AUTO,
    COMPRESSIONS,
    AnyMesh,
    Batch,
    Calling,
    Compression,
    Layouts,
    Settings,
)
from jaxdist.mesh import AXIS, Sizes
from jaxdist.step.decorated import DataParallel, decorated_with

P = ParamSpec("P")
R = TypeVar("R")


class Options(TypedDict, total=False):
    """The options of `data_parallel`, except the mesh."""

    batch_argnums: Batch | Sequence[Batch] | None
    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]
    donate_argnums: int | Sequence[int]
    donate_argnames: str | Sequence[str]
    donate: bool
    check_finite: bool
    check_every: int
    verify: bool
    bucket_bytes: int | None
    compress: Compression | None
    compiler_options: Mapping[str, Any] | None


@overload
def data_parallel(
    step: Callable[P, R], *, mesh: Mesh | None = ..., **options: Unpack[Options]
) -> DataParallel[P, R]: ...
@overload
def data_parallel(
    *, mesh: Mesh | None = ..., **options: Unpack[Options]
) -> Callable[[Callable[P, R]], DataParallel[P, R]]: ...
def data_parallel(
    step: Callable[..., Any] | None = None,
    *,
    batch_argnums: Batch | Sequence[Batch] | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    donate: bool = False,
    check_finite: bool = False,
    check_every: int = 0,
    verify: bool = False,
    bucket_bytes: int | None = None,
    compress: Compression | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
) -> Any:
    """Run a pure train step, written for one device, on every device of the job.

    The decorated step returns what ``jax.jit(step)`` returns on one device with the whole batch, up to the rounding of
    floating-point sums. Inside the step, ``x.shape[0]`` is the size of the whole batch, and a mean covers all examples.

    * Each process passes its own rows of the batch, as `jaxdist.loader` reads them or `Context.rows` says; the rows of
      all ranks are joined in rank order. A global array is used unchanged. Where the devices do not divide the rows,
      the last devices have fewer.
    * All other arguments are state. A part of the result with the structure, shapes, and dtypes of a state argument is
      stored like that argument. State that is not on the devices yet is taken from rank 0; if the step does not return
      it, it must be the same on every rank. Leaves that are not arrays are constants.
    * Results are global arrays. Values with one entry per example may be split over the devices.

    An axis that the step names, as in ``lax.pmean(x, "batch")``, has size one; `jaxdist.per_device` runs code on each
    device.

    Args:
      step: a function ``(*state, batch) -> result``, pure and jit-compatible.
      batch_argnums: the arguments that are the batch: positions, names, or paths to parts of an argument
        (``"state.images"``, ``"data['x']"``); ``()`` for no batch. Arrays in them are split along their first
        dimension; numbers, arrays without dimensions, and single keys are whole. By default, the batch is the last
        argument whose arrays all have one length and that does not occur in the result, plus every other argument of
        that length ("Rules of a step" in the docs).
      static_argnums: arguments that are constants of the program, as in `jax.jit`.
      static_argnames: names of such arguments.
      donate_argnums: state arguments whose memory the results may reuse, as in `jax.jit`.
      donate_argnames: names of such arguments.
      donate: if True, donate every state argument whose structure, shapes, and dtypes occur in the result as often as
        among the arguments, except single numbers.
      check_finite: if True, raise an error on every rank if the result, or a value passed to `jaxdist.check_finite`,
        has a NaN or an infinity. Each call waits for the step, and state is not donated.
      check_every: run `jaxdist.check_sync` on the result every this many calls; 0 for never.
      verify: if True, compare each new program with the step before it runs, as `jaxdist.verify` does, and raise an
        error on every rank if it is not the step.
      bucket_bytes: combine gradients of one dtype into messages of about this size; 0 sends each separately. The
        default is 1 MiB between CPU processes, 256 KiB between devices of a process, and 0 (left to XLA) on GPUs.
      compress: ``"bf16"`` or ``"fp16"`` to send gradients in 16 bits. Between CPU processes, the error is at most
        2**-8 (bf16) or 2**-10 (fp16) of the sum of the parts' magnitudes.
      compiler_options: options of XLA for this step, as in `jax.jit`.
      mesh: the devices to use, with one axis named ``"data"``. The default is all devices of the job.

    Returns:
      A function with the same arguments and with `jax.jit`'s methods: ``trace``, ``lower``, ``eval_shape``, and
      ``clear_cache``. ``step.lower(*args).compile()`` takes the arguments of a call.

    Raises:
      ValueError: (on every rank) a rank passes other rows of the batch than its own, or the ranks' arguments differ.
      StepError: (at the first call) an operation cannot run on several devices, or see `verify`.
      RuntimeError: an earlier call took an argument's memory.
      FloatingPointError: see `check_finite`.
      SyncError: see `check_every`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist
      >>> @jaxdist.data_parallel
      ... def step(w, batch):
      ...     loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
      ...     return w - 0.1 * grad, loss
      >>> w, loss = step(jnp.ones(3), jnp.ones((8, 3)))
      >>> float(loss)
      9.0
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={mesh!r}: a jax.sharding.Mesh; jaxdist.parallel takes sizes of axes, and 'auto'")
    if mesh is not None and mesh.axis_names != (AXIS,):
        raise ValueError(f"mesh has axes {mesh.axis_names}; data_parallel needs one, named {AXIS!r}")
    options = Options(
        batch_argnums=batch_argnums, static_argnums=static_argnums, static_argnames=static_argnames,
        donate_argnums=donate_argnums, donate_argnames=donate_argnames, donate=donate, check_finite=check_finite,
        check_every=check_every, verify=verify, bucket_bytes=bucket_bytes, compress=compress,
        compiler_options=compiler_options,
    )  # fmt: skip
    return decorator(step, mesh, None, options)


@overload
def parallel(
    step: Callable[P, R], *, mesh: AnyMesh, layouts: Layouts | None = ..., **options: Unpack[Options]
) -> DataParallel[P, R]: ...
@overload
def parallel(
    *, mesh: AnyMesh, layouts: Layouts | None = ..., **options: Unpack[Options]
) -> Callable[[Callable[P, R]], DataParallel[P, R]]: ...
def parallel(
    step: Callable[..., Any] | None = None,
    *,
    mesh: Mesh | Sizes | Literal["auto"],
    layouts: Layouts | None = None,
    **options: Unpack[Options],
) -> Any:
    """Run a step as `data_parallel` does, on a mesh that also divides the model and sequences.

    * The axis ``"data"`` splits the batch along its first dimension.
    * ``"sequence"`` splits the batch along its second dimension, if that is at least as long as the axis.
    * ``"model"`` cuts the leaves of the state along the dimensions in `layouts`, or along dimensions that jaxdist
      finds: in a transformer, the heads of the attention and the hidden layer of each feed-forward network.

    A leaf that is already cut stays cut. One that flax's annotations cut along ``"model"`` is cut so, and what belongs
    to it (`nn.with_partitioning`, `nnx.with_partitioning`, and logical names by the rules that are set at the first
    call).

    Args:
      step: see `data_parallel`.
      mesh: the sizes of the axes, one of which may be -1 for the remaining devices, or a `jax.sharding.Mesh` with these
        names. Neighboring devices differ in the last axis. With ``"auto"``, the first call uses the mesh that
        `jaxdist.planning.fit` ranks first, or the mesh of state that is sharded already. Each process then passes its
        own rows of the batch (`Context.rows` without a mesh).
      layouts: regular expressions and the dimension that the model axis cuts, or None for no cut. The first expression
        found in the name of a leaf (``"params['w']"``) applies; other leaves are whole. With ``"annotations"``, those
        of flax, which there must be. By default, they are followed if there are any that name ``"model"``; else jaxdist
        searches for the cheapest dimensions, and `explain` lists them.
      options: all other arguments of `data_parallel`.

    Raises:
      TypeError: an option is unknown, or `mesh` or `layouts` has the wrong type.
      ValueError: `mesh` or an expression is invalid; (at the first call) the devices cannot form the mesh, an
        expression matches no leaf, or a leaf does not have the dimension.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist
      >>> def step(w, x):
      ...     loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w["in"]) @ w["out"]))(w)
      ...     return jax.tree.map(lambda w, g: w - 0.1 * g, w, grad), loss
      >>> step = jaxdist.parallel(step, mesh={"data": -1, "model": 1}, layouts={"in": 1, "out": 0})
      >>> w, loss = step({"in": jnp.ones((3, 4)), "out": jnp.ones((4, 2))}, jnp.zeros((8, 3)))
      >>> float(loss)
      0.0
    """
    if not isinstance(mesh, (Mesh, Mapping)) and mesh != AUTO:
        raise (ValueError if isinstance(mesh, str) else TypeError)(
            f"mesh={mesh!r}: the sizes of its axes, as {{'data': 2, 'model': 4}}, a jax.sharding.Mesh, or 'auto'"
        )
    if layouts is not None and layouts != ANNOTATIONS:
        _check_layouts(layouts)
    return decorator(step, mesh, layouts, options)


def decorator(step: Callable[..., Any] | None, mesh: AnyMesh | None, layouts: Layouts | None, options: Options) -> Any:
    """The decorated step, or what decorates one."""
    values: dict[str, Any] = {**_DEFAULTS, **options}
    _check(values)
    values |= {name: _several(x) for name, x in values.items() if name.endswith(("nums", "names")) and x is not None}

    def decorate(step: Callable[..., Any]) -> Any:
        if not callable(step):
            raise TypeError(f"data_parallel decorates a function, not {step!r}")
        if is_pmapped(step):
            raise TypeError(
                f"data_parallel takes a step for one device, and {getattr(step, '__name__', step)!r} is jax.pmap's: "
                "decorate with jaxdist.data_parallel instead of jax.pmap; lax.pmean and the like stay, and arguments "
                "lose the axis of devices"
            )
        calling = Calling(step, values["static_argnums"], values["static_argnames"])
        donated = calling.named("donate", values["donate_argnums"], values["donate_argnames"])
        settings = Settings(
            step, calling, values["batch_argnums"], values["donate"], donated, values["check_finite"],
            values["check_every"], values["verify"], mesh, layouts, values["bucket_bytes"], values["compress"],
            # Sorted, as ranks compare the text of the options, and a dictionary may have another order on each.
            tuple(sorted((values["compiler_options"] or {}).items())),
        )  # fmt: skip
        return decorated_with(settings)

    return decorate if step is None else decorate(step)


_DEFAULTS = Options(
    batch_argnums=None, static_argnums=(), static_argnames=(), donate_argnums=(), donate_argnames=(), donate=False,
    check_finite=False, check_every=0, verify=False, bucket_bytes=None, compress=None, compiler_options=None,
)  # fmt: skip


def _check(values: Mapping[str, Any]) -> None:
    """Refuse options that mean nothing."""
    if unknown := [name for name in values if name not in _DEFAULTS]:
        raise TypeError(f"unknown option {unknown[0]!r}; valid: {', '.join(_DEFAULTS)}")
    check_every, compress, bucket_bytes = (values[name] for name in ("check_every", "compress", "bucket_bytes"))
    if type(check_every) is not int or check_every < 0:
        raise ValueError(f"check_every={check_every!r}: a number of calls, or 0 for never")
    if compress not in (None, *COMPRESSIONS):
        raise ValueError(f"compress={compress!r}: gradients can be sent as 'bf16' or 'fp16', or unchanged (None)")
    if not isinstance(values["compiler_options"] or {}, Mapping):
        raise TypeError(f"compiler_options={values['compiler_options']!r}: a dictionary of XLA's options by name")
    if not (bucket_bytes is None or (type(bucket_bytes) is int and bucket_bytes >= 0)):
        raise ValueError(f"bucket_bytes={bucket_bytes!r}: a number of bytes, 0 to send each gradient alone")


def _check_layouts(layouts: object) -> None:
    """Refuse anything but dimensions by regular expressions."""
    if not isinstance(layouts, Mapping):
        raise TypeError(f'layouts={layouts!r}: a dictionary, as {{r"Dense_0.*kernel": 1}}, or {ANNOTATIONS!r}')
    for expression, dim in layouts.items():
        try:
            re.compile(expression)
        except (re.error, TypeError) as error:
            raise ValueError(f"layouts: {expression!r} is not a regular expression: {error}") from None
        if dim is not None and type(dim) is not int:
            raise TypeError(f"layouts={{{expression!r}: {dim!r}}}: the dimension to cut, a number, or None for none")


def _several(numbers_or_names: Batch | Sequence[Batch]) -> tuple[Batch, ...]:
    return (numbers_or_names,) if isinstance(numbers_or_names, (int, str)) else tuple(numbers_or_names)
