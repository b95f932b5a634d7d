"""Every public transformation of optax and optax.contrib, with hyperparameters that make it do what it is there for.

Each trains a small model of leaves of many shapes. `Told` is what a step knows; an entry says which of it its update
takes besides gradients, state and parameters.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

import jaxdist

BATCH = 24  # parts for 2, 3, 4 and 8 devices
STEPS = 5
Shapes = Mapping[str, tuple[int, ...]]
SHAPES: Shapes = {"scalar": (), "one": (1,), "vector": (3,), "matrix": (7, 5), "tensor": (2, 3, 5, 7), "tall": (33, 8)}
FEW: Shapes = {name: SHAPES[name] for name in ("scalar", "matrix", "tall")}
"""For what works on slices of leaves, each by itself or by sums over them."""


class Told(NamedTuple):
    """What a step may tell an update."""

    value: Any  # the loss
    grads: Any  # of the loss
    loss: Callable[[Any], Any]  # of other parameters, on this batch


@dataclass(frozen=True)
class Entry:
    """A transformation in use."""

    make: Callable[[], Any]  # it
    extra: Callable[[Told], dict[str, Any]] = lambda _: {}  # the further arguments of its update
    poisoned: bool = False  # one gradient entry of the third batch is NaN, because of the last example
    wrap: Callable[[Any], Any] = lambda p: p  # what it trains, from the model's parameters
    trained: Callable[[Any], Any] = lambda p: p  # the part of it that gradients are taken of
    model: Callable[[Any], Any] = lambda p: p  # the model's parameters, from that part


# --- the model


def parameters(shapes: Shapes = SHAPES) -> dict[str, np.ndarray]:
    """The model's first parameters; those of one name and shape are the same beside any others."""
    rng = np.random.default_rng(0)
    drawn = {k: 0.5 * rng.normal(size=shapes.get(k, shape)) for k, shape in SHAPES.items()}
    return {k: drawn[k] for k in shapes}


def batch(i: int) -> dict[str, np.ndarray]:
    """The whole batch of step i."""
    poison = np.zeros(BATCH)
    if i == 2:
        poison[-1] = np.nan
    return {"x": np.random.default_rng(1 + i).uniform(0.3, 1.7, (BATCH, 2)), "poison": poison}


def features(data: dict[str, Any], shapes: Shapes = SHAPES) -> dict[str, Any]:
    """What the model sees of a batch: for each leaf two factors an example; the same for all entries of a step."""
    first, second = data["x"][:, :1], data["x"][:, 1:]
    out = {}
    for name, shape in shapes.items():
        rows = shape[0] if shape else 1
        columns = np.prod(shape, dtype=int) // rows
        out[name] = jnp.cos(first * jnp.arange(1, rows + 1)), jnp.sin(second * jnp.arange(1, columns + 1))
    return {"leaves": out, "goal": first[:, 0], "poison": data["poison"]}


def loss(params: dict[str, Any], seen: dict[str, Any], poisoned: bool = False) -> Any:
    """Mean over the examples; every entry of every leaf has a gradient."""
    total = jnp.asarray(0.0)
    for name, p in params.items():
        rows, columns = seen["leaves"][name]
        out = jnp.sum((rows @ jnp.tanh(p.reshape(rows.shape[1], -1))) * columns, 1) * (1 / np.sqrt(p.size))
        total += jnp.mean((out - seen["goal"]) ** 2)
    if poisoned:
        total += jnp.mean(seen["poison"]) * params["tall"][0, 0]
    return total


def step_of(
    names: Sequence[str], levels: Sequence[Any] | None = None, shapes: Shapes = SHAPES, **asked: Any
) -> Callable[..., Any]:
    """A step ``(params, opt_state of each entry, batch) -> the same`` of several entries."""
    txs: dict[str, Any] = {name: ENTRIES[name].make() for name in names}
    if levels is not None:
        txs = {name: jaxdist.zero(tx, level, **asked) for (name, tx), level in zip(txs.items(), levels, strict=True)}

    def one(name: str, params: Any, opt_state: Any, seen: Any) -> Any:
        entry = ENTRIES[name]
        of = lambda p: loss(entry.model(p), seen, entry.poisoned)
        value, grads = jax.value_and_grad(of)(entry.trained(params))
        extra = entry.extra(Told(value, grads, of))
        updates, opt_state = txs[name].update(grads, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state

    def step(*args: Any) -> Any:
        *state, data = args
        seen = features(data, shapes)
        out = [one(name, state[2 * i], state[2 * i + 1], seen) for i, name in enumerate(names)]
        return tuple(part for pair in out for part in pair)

    return step


def start(names: Sequence[str], shapes: Shapes = SHAPES) -> tuple[Any, ...]:
    """The first state of `step_of`."""
    state = []
    for name in names:
        entry = ENTRIES[name]
        params = entry.wrap(jax.tree.map(jnp.array, parameters(shapes)))
        state += [params, entry.make().init(params)]
    return tuple(state)


def start_in_shards(names: Sequence[str], level: Any, shapes: Shapes = SHAPES, **settings: Any) -> tuple[Any, ...]:
    """The same, made in a decorated function: as steps leave it, so that one program is compiled for all of them."""
    txs = [jaxdist.zero(ENTRIES[name].make(), level) for name in names]

    def init(*params: Any) -> Any:
        pairs = zip(params, txs, strict=True)
        return tuple(x for p, tx in pairs for x in (jaxdist.shard(p) if level == 3 else p, tx.init(p)))

    return jaxdist.data_parallel(init, batch_argnums=(), **settings)(*start(names, shapes)[::2])


def run_plain(names: Sequence[str], shapes: Shapes = SHAPES) -> tuple[Any, ...]:
    """Parameters and state of each, after all steps on one device."""
    step = jax.jit(step_of(names, None, shapes))
    state = start(names, shapes)
    for i in range(STEPS):
        state = step(*state, batch(i))
    return state


def run_sharded(
    names: Sequence[str], levels: Sequence[Any], shapes: Shapes = SHAPES, within: int | None = None, split: Any = None,
    offload: bool = False, state: Any = None, **settings: Any,
) -> Any:  # fmt: skip
    """The same decorated, with `jaxdist.zero`, from `state` if given; this process passes its rows of each batch."""
    asked = {"within": within, "split": split, "offload": offload}
    step = jaxdist.data_parallel(step_of(names, levels, shapes, **asked), **settings)
    state = start(names, shapes) if state is None else state
    own = jaxdist.get_context().rows(BATCH)
    for i in range(STEPS):
        state = step(*state, {k: x[own] for k, x in batch(i).items()})
    return state


# --- the catalog


def _of(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: make(*args, **kwargs)


def _down(make: Callable[..., Any], *args: Any, rate: float = 0.1, **kwargs: Any) -> Callable[[], Any]:
    """The transformation followed by a step downhill."""
    return lambda: optax.chain(make(*args, **kwargs), optax.scale(-rate))


def _value(told: Told) -> dict[str, Any]:
    return {"value": told.value}


def line_search(told: Told) -> dict[str, Any]:
    return {"value": told.value, "grad": told.grads, "value_fn": told.loss}


def _objective(told: Told) -> dict[str, Any]:
    return {"obj_fn": told.loss}


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


def _labels(params: Any) -> Any:
    return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params)


def _even(step: Any, **_: Any) -> Any:
    return step % 2 == 0


def _largest(updates: Any) -> Any:
    return jax.tree.map(lambda x: abs(x).max(), updates)


def _without_scalar(params: Any) -> Any:
    """For what knows no arrays without dimensions."""
    return {k: p for k, p in params.items() if p.ndim}


def _few(params: Any) -> Any:
    """For what evaluates the loss in loops: these take long to compile."""
    return {k: p for k, p in params.items() if k in ("vector", "matrix")}


def _muon_dimensions(params: Any) -> Any:
    """Matrices as they are; the tensor as a 6 by 35 one."""
    dims = {2: optax.contrib.MuonDimensionNumbers(0, 1), 4: optax.contrib.MuonDimensionNumbers((0, 1), (2, 3))}
    return jax.tree.map(lambda p: dims.get(p.ndim), params)


def _galore_dimensions(params: Any) -> Any:
    dims = {2: optax.contrib.GaLoreDimensionNumbers(), 4: optax.contrib.GaLoreDimensionNumbers((0, 1), (2, 3))}
    return jax.tree.map(lambda p: dims.get(p.ndim), params)


_SCHEDULE = optax.linear_schedule(0.2, 0.05, 4)
_opt, _con = optax, optax.contrib

_ALIKE: list[tuple[str, float, dict[str, float]]] = [
    ("adagrad fromage", 0.1, {}), ("adabelief adam adamax nadam yogi adopt madgrad", 0.05, {}),
    ("rmsprop rprop sign_sgd", 0.02, {}), ("lion", 0.02, {"weight_decay": 0.1}),
    ("adamw adan lamb nadamw novograd acprop ademamix schedule_free_adamw", 0.05, {"weight_decay": 0.1}),
]  # fmt: skip
_named = lambda name: getattr(optax, name, None) or getattr(optax.contrib, name)
_DOWN = "centralize identity normalize scale_by_param_block_norm scale_by_param_block_rms"

ENTRIES: dict[str, Entry] = {
    **{name: Entry(_of(_named(name), rate, **more)) for names, rate, more in _ALIKE for name in names.split()},
    **{name: Entry(_down(_named(name))) for name in _DOWN.split()},
    # optimizers
    "adadelta": Entry(_of(_opt.adadelta, 1.0, weight_decay=0.01)),
    "adafactor": Entry(
        _of(_opt.adafactor, 0.1, min_dim_size_to_factor=2, momentum=0.9, dtype_momentum=jnp.float64,
            weight_decay_rate=0.01),
    ),
    "adamaxw": Entry(_of(_opt.adamaxw, 0.05, weight_decay=0.1, mask=_matrices)),
    "amsgrad": Entry(_of(_opt.amsgrad, 0.05, b2=0.3)),
    "lars": Entry(_of(_opt.lars, 0.5, weight_decay=0.1, trust_coefficient=0.1)),
    "lbfgs": Entry(_of(_opt.lbfgs, memory_size=3), line_search, wrap=_few),
    "noisy_sgd": Entry(_of(_opt.noisy_sgd, 0.1, key=3)),
    "optimistic_adam": Entry(_of(_opt.optimistic_adam, 0.05, optimism=0.04)),
    "optimistic_adam_v2": Entry(_of(_opt.optimistic_adam_v2, 0.05, alpha=0.9, beta=0.7)),
    "optimistic_gradient_descent": Entry(_of(_opt.optimistic_gradient_descent, 0.1, alpha=0.9, beta=0.7)),
    "polyak_sgd": Entry(_of(_opt.polyak_sgd, 1e6, scaling=0.7), _value),
    "radam": Entry(_of(_opt.radam, 0.05, b2=0.9, threshold=4.2)),
    "rmsprop, centered": Entry(_of(_opt.rmsprop, 0.02, centered=True, momentum=0.9, nesterov=True)),
    "sgd": Entry(_of(_opt.sgd, 0.1, momentum=0.9, nesterov=True)),
    "signum": Entry(_of(_opt.signum, 0.02, beta=0.9)),
    "sm3": Entry(_of(_opt.sm3, 0.1), wrap=_without_scalar),
    # scalings
    "scale": Entry(_of(_opt.scale, -0.2)),
    "scale_by_backtracking_linesearch": Entry(
        lambda: _opt.chain(_opt.sgd(50.0), _opt.scale_by_backtracking_linesearch(20, slope_rtol=0.5, store_grad=True)),
        line_search,
    ),
    "scale_by_distance_over_gradients": Entry(
        _down(_opt.scale_by_distance_over_gradients, reps_rel=0.01, param_dtype=jnp.float64, rate=1.0),
        wrap=_without_scalar,  # it gives them a dimension
    ),
    "scale_by_learning_rate": Entry(_of(_opt.scale_by_learning_rate, _SCHEDULE)),
    "scale_by_schedule": Entry(_of(_opt.scale_by_schedule, lambda count: -0.1 / (1 + count))),
    "scale_by_zoom_linesearch": Entry(
        lambda: _opt.chain(_opt.sgd(0.01), _opt.scale_by_zoom_linesearch(15, initial_guess_strategy="one")),
        line_search,
    ),
    # what changes or observes updates
    "adaptive_grad_clip": Entry(_down(_opt.adaptive_grad_clip, 0.01)),
    "add_decayed_weights": Entry(_down(_opt.add_decayed_weights, 0.3, mask=_matrices)),
    "add_noise": Entry(_down(_opt.add_noise, 0.1, 0.55, key=5)),
    "clip": Entry(_down(_opt.clip, 0.01)),
    "clip_by_block_rms": Entry(_down(_opt.clip_by_block_rms, 0.01)),
    "clip_by_global_norm": Entry(_down(_opt.clip_by_global_norm, 0.1)),
    "ema": Entry(_down(_opt.ema, 0.5)),
    "keep_params_nonnegative": Entry(
        lambda: _opt.chain(_opt.sign_sgd(0.1), _opt.keep_params_nonnegative()),
        wrap=lambda p: jax.tree.map(jnp.abs, p),
    ),
    "measure_with_ema": Entry(_down(_opt.monitor, {"mean": _opt.measure_with_ema(_opt.tree.norm, 0.5)})),
    "monitor": Entry(_down(_opt.monitor, {"norm": _opt.tree.norm, "largest": _largest})),
    "normalize_by_update_norm": Entry(_down(_opt.normalize_by_update_norm)),
    "set_to_zero": Entry(_of(_opt.set_to_zero)),
    "snapshot": Entry(_down(_opt.snapshot, "largest", _largest)),
    "stateless": Entry(lambda: _opt.stateless(lambda u, p: jax.tree.map(lambda g, w: -0.1 * (g + 0.3 * w), u, p))),
    "stateless_with_tree_map": Entry(lambda: _opt.stateless_with_tree_map(lambda g, w: -0.1 * jnp.sign(w) * abs(g))),
    "trace": Entry(_down(_opt.trace, 0.9, nesterov=True)),
    "zero_nans": Entry(_down(_opt.zero_nans), poisoned=True),
    # wrappers
    "MultiSteps": Entry(_of(_opt.MultiSteps, _opt.adam(0.05), 2, accumulator_dtype=jnp.float64)),
    "apply_every": Entry(_down(_opt.apply_every, 2)),
    "apply_if_finite": Entry(_of(_opt.apply_if_finite, _opt.adam(0.05), 3), poisoned=True),
    "chain": Entry(_of(_opt.chain, _opt.clip_by_global_norm(0.1), _opt.adamw(0.05))),
    "conditionally_mask": Entry(_of(_opt.conditionally_mask, _opt.adam(0.05), _even)),
    "conditionally_transform": Entry(_of(_opt.conditionally_transform, _opt.adam(0.05), _even)),
    "flatten": Entry(_of(_opt.flatten, _opt.chain(_opt.clip_by_block_rms(0.01), _opt.trace(0.9), _opt.scale(-1.0)))),
    "freeze": Entry(lambda: _opt.chain(_opt.adam(0.05), _opt.freeze(_matrices(parameters())))),
    "inject_hyperparams": Entry(lambda: _opt.inject_hyperparams(_opt.adamw)(learning_rate=_SCHEDULE, weight_decay=0.1)),
    "inject_stateful_hyperparams": Entry(
        lambda: _opt.inject_stateful_hyperparams(_opt.adam)(learning_rate=_opt.WrappedSchedule(_SCHEDULE)),
    ),
    "lookahead": Entry(
        _of(_opt.lookahead, _opt.adam(0.05), 2, 0.5), wrap=_opt.LookaheadParams.init_synced,
        trained=lambda p: p.fast,
    ),
    "masked": Entry(_of(_opt.masked, _opt.adam(0.05), _matrices)),
    "multi_transform": Entry(_of(_opt.multi_transform, {"matrix": _opt.lamb(0.05), "vector": _opt.sgd(0.1)}, _labels)),
    "named_chain": Entry(_of(_opt.named_chain, ("clip", _opt.clip(0.01)), ("adam", _opt.adamw(0.05)))),
    "partition": Entry(_of(_opt.partition, {"matrix": _opt.adamw(0.05), "vector": _opt.set_to_zero()}, _labels)),
    "selective_transform": Entry(
        lambda: _opt.selective_transform(_opt.adam(0.05), freeze_mask=_matrices(parameters()))
    ),
    "skip_large_updates": Entry(
        _of(_opt.MultiSteps, _opt.adam(0.05), 2, accumulator_dtype=jnp.float64,
            should_skip_update_fn=functools.partial(_opt.skip_large_updates, max_squared_norm=1.2)),
    ),
    "skip_not_finite": Entry(
        _of(_opt.MultiSteps, _opt.adam(0.05), 2, accumulator_dtype=jnp.float64,
            should_skip_update_fn=_opt.skip_not_finite), poisoned=True,
    ),
    "with_extra_args_support": Entry(lambda: _opt.with_extra_args_support(_opt.adam(0.05)), _value),
    # optax.contrib
    "cocob": Entry(_of(_con.cocob, weight_decay=0.01)),
    "dadapt_adamw": Entry(_of(_con.dadapt_adamw, 1.0, estim_lr0=1e-3)),
    "dog": Entry(_of(_con.dog, 1.0, init_step=("distance", 0.01))),
    "dowg": Entry(_of(_con.dowg, 1.0, init_estim_sq_dist=1e-4)),
    "galore": Entry(
        _of(_con.galore, 0.05, rank=2, update_proj_gap=2, weight_decay=0.1,
            weight_dimension_numbers=_galore_dimensions),
    ),
    "hutchinson_estimator_diag_hessian": Entry(
        lambda: _opt.chain(_con.hutchinson_estimator_diag_hessian(jax.random.key(7)), _opt.scale(-0.1)), _objective
    ),
    "mechanize": Entry(_of(_con.mechanize, _opt.adam(0.5), s_init=1e-3)),
    "momo": Entry(_of(_con.momo, 1e6, adapt_lower_bound=True), _value),
    "momo_adam": Entry(_of(_con.momo_adam, 1e6), _value),
    "muon": Entry(_of(_con.muon, 0.05, weight_decay=0.1, muon_weight_dimension_numbers=_muon_dimensions)),
    "prodigy": Entry(_of(_con.prodigy, 1.0, estim_lr0=1e-3)),
    "reduce_on_plateau": Entry(
        lambda: _opt.chain(_opt.scale(-0.1), _con.reduce_on_plateau(0.5, patience=1, rtol=0.5)), _value,
    ),
    "sam": Entry(_of(_con.sam, _opt.sgd(0.2), _opt.chain(_con.normalize(), _opt.sgd(0.3)), 2)),
    "sam, opaque": Entry(
        _of(_con.sam, _opt.sgd(0.2), _opt.chain(_con.normalize(), _opt.sgd(0.3)), 2, opaque_mode=True),
        lambda told: {"grad_fn": lambda p, _: jax.grad(told.loss)(p)},
    ),
    "schedule_free": Entry(_of(_con.schedule_free, _opt.sgd(0.1), 0.1)),
    "schedule_free_sgd": Entry(_of(_con.schedule_free_sgd, 0.3, warmup_steps=2)),
    "simplified_ademamix": Entry(_of(_con.simplified_ademamix, 0.01, weight_decay=0.1)),
    "sophia": Entry(_of(_con.sophia, 0.05, update_interval=2, gamma=1.0), _objective),
    "split_real_and_imaginary": Entry(
        _of(_con.split_real_and_imaginary, _opt.adam(0.05)),
        wrap=lambda p: jax.tree.map(lambda x: x + 0.5j * jnp.cos(x), p),
        model=lambda p: jax.tree.map(lambda z: z.real + z.imag**2, p),
    ),
}  # fmt: skip

OF_ALL = {"freeze", "selective_transform", "skip_large_updates", "prodigy"}
"""Their masks and limits are made for all leaves of `SHAPES`."""

OF_MATRICES = {"adafactor", "flatten", "galore", "hutchinson_estimator_diag_hessian", "muon", "sam, opaque",
               "scale_by_factored_rms", "sm3", "sophia"}  # fmt: skip
"""For these the dimensions of a leaf matter: they train all of `SHAPES`."""

FAMILIES = ["adam", "lion", "lamb", "sgd", "novograd", "polyak_sgd", "chain", "apply_if_finite", "MultiSteps", "masked"]
"""One of each kind of work: entry by entry, norms, sums over all, branches, counters, labels."""

PARTS = {f"scale_by_{name}" for name in (
    "belief", "factored_rms", "optimistic_gradient", "polyak", "rms", "rss", "sign", "stddev", "trust_ratio",
)}  # fmt: skip
"""Building blocks of optimizers with other names."""

# They take the gradient of each example: see oracle/test_zero.py.
PER_EXAMPLE = {"differentially_private_aggregate", "dpsgd"}
