"""`data_parallel`: run a train step that was written for one device on all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar, Unpack, overload

from jax.sharding import Mesh

from jaxdist.compat import is_pmapped
from jaxdist.mesh import AXIS, Sizes
from jaxdist.step.calling import Calling
from jaxdist.step.decorated import DataParallel, decorated_with
from jaxdist.step.settings import AUTO, COMPRESSIONS, Batch, Compression, Settings

P = ParamSpec("P")
R = TypeVar("R")


class Options(TypedDict, total=False):
    """What `data_parallel` takes beside the mesh."""

    batch_argnums: Batch | Sequence[Batch] | None
    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]
    donate_argnums: int | Sequence[int]
    donate_argnames: str | Sequence[str]
    donate: bool
    check_finite: bool
    check_every: int
    bucket_bytes: int | None
    compress: Compression | None


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
    bucket_bytes: int | None = None,
    compress: Compression | None = None,
    mesh: Mesh | None = None,
) -> Any:
    """Run a pure train step, written for one device, on every device of the job.

    The decorated step returns what ``jax.jit(step)`` returns on one device with the whole batch, up to the rounding of
    floating-point sums: every leaf, for every pure step. Inside the step ``x.shape[0]`` is the size of the whole batch,
    and a mean is over all examples. Each device computes its part of the examples; what couples them (a gradient, the
    statistics of BatchNorm, a similarity matrix) moves between the devices.

    * Each process passes its own part of the batch: arrays of any kind and of the same shapes on all ranks, which are
      put together in rank order. An array that is global already is taken as it is. Where the devices don't divide the
      examples, the last devices have fewer.
    * All other arguments are state: any number of pytrees. A part of the result that has the structure, shapes and
      types of a state argument is kept on the devices as that is. State that is not on the devices yet is taken from
      the root rank. State that the step does not return must be the same on every rank. A leaf that is no array is a
      constant of the program.
    * Results are global arrays: the state as it is kept, and other values whole, or split over the devices where they
      have an entry per example.

    An axis that the step names, as code for `jax.pmap` does with ``lax.pmean(x, "batch")``, has size one inside it, so
    such code is right as it is. Code for each device goes into `jaxdist.per_device`. Under `jax.grad`, or in another
    decorated step, it is the plain step.

    Args:
      step: ``(*state, batch) -> result``, pure, jit-compatible.
      batch_argnums: which arguments are the batch: positions, names, or paths of a part of one (``"state.images"``,
        ``"data['x']"``); ``()`` for none. Arrays in it are split, each along its first dimension; numbers, arrays
        without a dimension and single keys are one for all. Default: the last argument whose arrays all have one
        length, and of whose structure, shapes and types the step returns nothing; and every other argument of that
        length. If there is none, the last one that has one length, or is not returned. What an earlier step, `restore`
        or `shard` has made is state. In one process this does not change the result. In several the values that the
        ranks pass to the first call are compared, and if they speak against it, that is an error.
      static_argnums: arguments that are constants of the program, as of `jax.jit`.
      static_argnames: the same, by name.
      donate_argnums: arguments of state whose memory the results may take, as of `jax.jit`: what a call has taken can't
        be used afterwards. What you pass to the first call is copied to the devices, and stays usable.
      donate_argnames: the same, by name.
      donate: the same for all state that the step returns: for each argument of whose structure, shapes and types the
        result has as many parts as there are arguments. Not for a single number.
      check_finite: after each call look for NaN and infinity in the result (and what `jaxdist.check_finite` names
        inside the step) and raise, on every rank, naming the first such leaf. Waits for the step to end; the state is
        not donated, so that the one given is still there after the error.
      check_every: every so many calls compare what each device holds in full, bit for bit, over all devices and ranks,
        as `jaxdist.check_sync` does, and raise on every rank if it differs. Waits for that step to end. 0: never.
      bucket_bytes: gradients of one dtype travel together in messages of about so many bytes; a larger one travels
        alone. 0: each travels alone. Default: 1 MiB between CPU processes, 256 KiB between the devices of one, and 0 on
        GPUs, where XLA joins the messages.
      compress: ``"bf16"`` or ``"fp16"``: wider floating gradients are cast to it on the wire, half the bytes of
        float32. Between CPU processes each device's part is rounded, the parts are added in float32 and their sum is
        rounded again: a relative error of at most 2**-8 (bf16; 2**-10 fp16) of the sum of the parts' magnitudes. On
        GPUs NCCL rounds each partial sum as well. The optimizer sees the gradient's own dtype. Losses, aux values,
        statistics of the batch and collectives of your own are not compressed.
      mesh: the devices to use, one axis named ``"data"``; default: all of the job.

    Returns:
      A function of the same arguments. Its methods ``lower``, ``trace``, ``eval_shape`` and ``clear_cache`` are those
      of what ``jax.jit`` returns.

    Raises:
      ValueError: (on every rank) a batch that can't be divided over the devices, or ranks whose arguments differ.
      StepError: (when first called) an operation that is not possible on several devices.
      RuntimeError: an argument's memory was taken by an earlier call; see `donate`.
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

    References:
      Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020;
      https://docs.jax.dev/en/latest/notebooks/shard_map.html
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={mesh!r}: a jax.sharding.Mesh; jaxdist.parallel takes sizes of axes, and 'auto'")
    if mesh is not None and mesh.axis_names != (AXIS,):
        raise ValueError(f"mesh has axes {mesh.axis_names}; data_parallel needs one, named {AXIS!r}")
    options = Options(
        batch_argnums=batch_argnums, static_argnums=static_argnums, static_argnames=static_argnames,
        donate_argnums=donate_argnums, donate_argnames=donate_argnames, donate=donate,
        check_finite=check_finite, check_every=check_every, bucket_bytes=bucket_bytes, compress=compress,
    )  # fmt: skip
    return decorator(step, mesh, None, options)


@overload
def parallel(
    step: Callable[P, R],
    *,
    mesh: Mesh | Sizes | Literal["auto"],
    layouts: Mapping[str, int | None] | None = ...,
    **options: Unpack[Options],
) -> DataParallel[P, R]: ...
@overload
def parallel(
    *,
    mesh: Mesh | Sizes | Literal["auto"],
    layouts: Mapping[str, int | None] | None = ...,
    **options: Unpack[Options],
) -> Callable[[Callable[P, R]], DataParallel[P, R]]: ...
def parallel(
    step: Callable[..., Any] | None = None,
    *,
    mesh: Mesh | Sizes | Literal["auto"],
    layouts: Mapping[str, int | None] | None = None,
    **options: Unpack[Options],
) -> Any:
    """`data_parallel` on a mesh of several axes, which divide the batch, the model and sequences.

    What an axis does follows from its name:

    * ``"data"`` splits the batch along its first dimension.
    * ``"sequence"`` splits the batch along its second dimension, where that is at least as long as the axis.
    * ``"model"`` cuts the leaves of the state along the dimensions in `layouts`, or along those that jaxdist finds: in
      a transformer the heads of the attention and the hidden layer of each feed-forward network.

    A leaf that comes cut already stays so. Where the devices don't divide a dimension its end is padded.

    Args:
      step: as for `data_parallel`.
      mesh: the sizes of the axes, of which one may be -1, for the devices that are left. Neighbouring devices differ in
        the last axis, as in JAX. Or a mesh with these names. Or "auto": the first call (or `lower` or `explain` before
        it, which every rank then calls) takes the mesh that `jaxdist.planning.fit` ranks first for these arguments on
        these devices, without a compilation, and later calls keep it. If a leaf of the state lies in slices on a mesh,
        that one is taken. With "auto" each process passes its own part of the batch, as for `data_parallel`.
      layouts: regular expressions, each with the dimension that the model axis cuts, or None for whole. An expression
        is searched for in the name of a leaf of the state (``"params['w']"``), and the first that is found counts. All
        other leaves are whole. Default: a search, before the first call, for the dimensions that cost least in bytes
        sent, work and memory; `explain` lists them. If leaves come cut by the model axis, the others follow these.
      options: all other arguments of `data_parallel`.

    Raises:
      TypeError: an unknown option, or a mesh or layouts of another type.
      ValueError: another word than "auto", an expression that is not valid; (when first called) an unknown axis, sizes
        that the devices don't make, an expression that is found in no leaf, or a dimension that a leaf does not have.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist
      >>> def step(w, x):
      ...     loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w["in"]) @ w["out"]))(w)
      ...     return jax.tree.map(lambda w, g: w - 0.1 * g, w, grad), loss
      >>> step = jaxdist.parallel(step, mesh={"data": -1, "model": 1}, layouts={"in": 1, "out": 0})
      >>> w, loss = step({"in": jnp.ones((3, 4)), "out": jnp.ones((4, 2))}, jnp.zeros((8, 3)))
      >>> float(loss)
      0.0

    References:
      Shoeybi et al., *Megatron-LM*, arXiv 1909.08053; Xu et al., *GSPMD*, arXiv 2105.04663.
    """
    if not isinstance(mesh, (Mesh, Mapping)) and mesh != AUTO:
        raise (ValueError if isinstance(mesh, str) else TypeError)(
            f"mesh={mesh!r}: the sizes of its axes, as {{'data': 2, 'model': 4}}, a jax.sharding.Mesh, or 'auto'"
        )
    if layouts is not None:
        _check_layouts(layouts)
    return decorator(step, mesh, layouts, options)


def decorator(
    step: Callable[..., Any] | None,
    mesh: Mesh | Sizes | Literal["auto"] | None,
    layouts: Mapping[str, int | None] | None,
    options: Options,
) -> Any:
    """The decorated step, or what decorates one."""
    of: dict[str, Any] = {**_DEFAULTS, **options}
    _check(of)
    argnums = {
        name: _several(of[name]) for name in of if name.endswith(("argnums", "argnames")) and of[name] is not None
    }

    def decorate(step: Callable[..., Any]) -> Any:
        if not callable(step):
            raise TypeError(f"data_parallel decorates a function, not {step!r}")
        if is_pmapped(step):
            raise TypeError(
                f"data_parallel takes a step for one device, and {getattr(step, '__name__', step)!r} is jax.pmap's: "
                "decorate with jaxdist.data_parallel in place of jax.pmap; lax.pmean and the like stay, and arguments "
                "lose the axis of devices"
            )
        calling = Calling(step, argnums["static_argnums"], argnums["static_argnames"])
        donated = calling.named(argnums["donate_argnums"], "donate_argnums").union(argnums["donate_argnames"])
        calling.check_named(donated, "donate_argnames")
        settings = Settings(
            step, calling, argnums.get("batch_argnums"), of["donate"], donated, of["check_finite"],
            of["check_every"], mesh, layouts, of["bucket_bytes"], of["compress"],
        )  # fmt: skip
        return decorated_with(settings)

    return decorate if step is None else decorate(step)


_DEFAULTS = Options(
    batch_argnums=None, static_argnums=(), static_argnames=(), donate_argnums=(), donate_argnames=(), donate=False,
    check_finite=False, check_every=0, bucket_bytes=None, compress=None,
)  # fmt: skip


def _check(of: Mapping[str, Any]) -> None:
    """Refuse options that mean nothing."""
    if unknown := [name for name in of if name not in _DEFAULTS]:
        raise TypeError(f"there is no option {unknown[0]!r}; valid: {', '.join(_DEFAULTS)}")
    check_every, compress, bucket_bytes = (of[name] for name in ("check_every", "compress", "bucket_bytes"))
    if type(check_every) is not int or check_every < 0:
        raise ValueError(f"check_every={check_every!r}: a number of calls, or 0 for never")
    if compress not in (None, *COMPRESSIONS):
        raise ValueError(f"compress={compress!r}: gradients can travel as 'bf16' or 'fp16', or as they are (None)")
    if not (bucket_bytes is None or (type(bucket_bytes) is int and bucket_bytes >= 0)):
        raise ValueError(f"bucket_bytes={bucket_bytes!r}: a number of bytes, 0 to send each gradient alone")


def _check_layouts(layouts: Any) -> None:
    """Refuse what is no dimension by a regular expression."""
    if not isinstance(layouts, Mapping):
        raise TypeError(f'layouts={layouts!r}: a dictionary, as {{r"Dense_0.*kernel": 1}}')
    for expression, dim in layouts.items():
        try:
            re.compile(expression)
        except (re.error, TypeError) as error:
            raise ValueError(f"layouts: {expression!r} is no regular expression: {error}") from None
        if dim is not None and type(dim) is not int:
            raise TypeError(f"layouts={{{expression!r}: {dim!r}}}: the dimension to cut, a number, or None for none")


def _several(given: Any) -> tuple[Any, ...]:
    return (given,) if isinstance(given, (int, str)) else tuple(given)
