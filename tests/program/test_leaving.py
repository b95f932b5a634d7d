"""The way out: a step's program as one of JAX, for devices that are here or not, in a process without jaxdist."""

import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from harness import jobs
from harness.check import close, decorated, train_step
from jax.sharding import AxisType, Mesh

import jaxdist

RNG = np.random.default_rng(0)
X = RNG.normal(size=(13, 6))  # 4 devices do not divide it
PARAMS = {"a": jnp.asarray(RNG.normal(size=(6, 11))), "b": jnp.asarray(RNG.normal(size=(11, 5)))}
ADAM = optax.adam(0.1)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)


def noisy(key: Any, count: Any, w: Any, x: Any) -> Any:
    here, key = jax.random.split(key)
    return jax.random.key_data(key), count + 1, w - jnp.mean(x + jax.random.normal(here, x.shape)), x.argmax(-1), 3


def adam(*settings: Any) -> Callable[..., Any]:
    return train_step(loss, jaxdist.zero(ADAM, *settings))


STATE = (PARAMS, ADAM.init(PARAMS))
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...], Any, dict[str, int]]] = {
    "data": (adam(0), train_step(loss, ADAM), STATE, 4, {"data": 4}),
    "zero": (adam(3), train_step(loss, ADAM), STATE, 4, {"data": 4}),
    "groups": (adam(3, 2), train_step(loss, ADAM), STATE, 4, {"group": 2, "data": 2}),
    "model": (adam(3), train_step(loss, ADAM), STATE, {"data": 2, "model": 2}, {"data": 2, "model": 2}),
    "one device": (adam(3), train_step(loss, ADAM), STATE, 1, {"data": 1}),
    "keys and numbers": (noisy, noisy, (jax.random.key(0), 7, jnp.ones(())), 4, {"data": 4}),
}


def exported(name: str, **settings: Any) -> tuple[Any, list[Any], list[Any]]:
    step, plain, state, on, _ = CASES[name]
    want = jax.tree.leaves(jax.jit(plain)(*state, X))
    return jaxdist.export_step(decorated(step, on), *state, X, **settings), jax.tree.leaves((*state, X)), want


def others(axes: dict[str, int]) -> Mesh:
    devices = jax.devices()[::-1][: math.prod(axes.values())]
    return jax.make_mesh((*axes.values(),), (*axes,), (AxisType.Auto,) * len(axes), devices=devices)


@pytest.mark.parametrize("name", CASES)
def test_an_exported_step_is_the_step(name: str) -> None:
    """On other devices than those that it was exported for."""
    program, leaves, want = exported(name)
    got = program.call(*jax.device_put(leaves, [*program.in_shardings_jax(others(CASES[name][-1]))]))
    close(got, want)
    assert [x.shape for x in got] == [np.shape(x) for x in want]


def test_exported_steps_run_without_jaxdist(tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers", reason="needed by JAX to serialize what it exports")
    names = ["data", "zero", "groups", "model"]
    for name in names:
        program, leaves, want = exported(name)
        arrays = [[np.asarray(x) for x in some] for some in (leaves, want)]
        (tmp_path / name).write_bytes(pickle.dumps((bytes(program.serialize()), *arrays, CASES[name][-1])))
    env = jobs.environment({"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_ENABLE_X64": "1"})
    script = Path(__file__).parent / "scripts" / "without_jaxdist.py"
    done = subprocess.run(
        [sys.executable, str(script), *names],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("name", ["zero", "model"])
def test_for_devices_that_are_not_here(name: str, platform: str) -> None:
    program, *_ = exported(name, platforms=[platform])
    assert program.platforms == (platform,)
    assert program.nr_devices == 4
    assert all(f"stablehlo.{kind}" in program.mlir_module() for kind in ("all_reduce", "all_gather", "reduce_scatter"))


def test_a_module_of_nnx_leaves_as_its_arrays() -> None:
    model = nnx.Linear(6, 5, rngs=nnx.Rngs(0), param_dtype=float)
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        value, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return value

    program = jaxdist.export_step(decorated(step, 4), model, optimizer, X)
    state = lambda: jax.tree.leaves((nnx.state(model), nnx.state(optimizer)))
    got = program.call(*jax.device_put([*state(), X], [*program.in_shardings_jax(others({"data": 4}))]))
    want = nnx.jit(step)(model, optimizer, X)
    close(got, [want, *state()])  # what has changed in place comes after the result


def test_a_step_with_a_callback_is_not_exported() -> None:
    step = lambda w, x: w + jax.pure_callback(lambda x: x.sum(), jnp.zeros(()), x)
    with pytest.raises(NotImplementedError, match="callback"):
        jaxdist.export_step(decorated(step, 4), jnp.ones(()), X)


def test_the_program_of_one_device_as_text() -> None:
    text = jaxdist.explain(decorated(adam(3), 4), *STATE, X).program
    header, *_ = text.partition("{ lambda")
    assert "{'data': 4}" in header
    for line in ("params['a']: float64[6, 12], P(None, 'data')", "batch: float64[16, 6], P('data',)"):
        assert line in header.replace('"', "'"), header
    line = loss.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}" in text
    assert f"{Path(jaxdist.__file__).parent}/" not in text
    assert "jaxdist_all_reduce" in text
