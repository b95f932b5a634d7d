"""`jaxdist test`: check that this installation trains correctly, on one or several hosts."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from jaxdist import connectors
from jaxdist.cli.info import Check, checks, show
from jaxdist.cli.run import run
from jaxdist.connectors import site
from jaxdist.launch.job import Launcher
from jaxdist.launch.mpi import find_mpirun

_TOLERANCE = 1e-10  # for float64
_STEPS = 3


def self_test(
    what: Annotated[
        str, typer.Argument(metavar="[FILE.py:FUNCTION]", help="Verify your step instead; as for `jaxdist plan`.")
    ] = "",
    devices: Annotated[
        int | None, typer.Option(min=1, help="Number of devices of each rank. Above one, MPI is left out.")
    ] = None,
) -> None:
    """Test the installation: train at each ZeRO level and compare the result with one device.

    With FILE.py:FUNCTION, which returns `(decorated step, *arguments)`, it verifies that step (`jaxdist.verify`).

    It uses each communicator, on two ranks or on all GPUs of this machine. As a rank of a job, it tests the job:
    `jaxdist run --hosts node1:4,node2:4 -m jaxdist test` or `srun jaxdist test`. The exit code is 1 if something is
    wrong.
    """
    try:
        in_job = connectors.choose() != "local"
    except (ValueError, ImportError):  # a launcher started this process, and init will report the missing package
        in_job = True
    if in_job:
        raise typer.Exit(as_rank(what))
    from jaxdist import compat  # import both here: `jaxdist run` does not need them
    from jaxdist.runtime.devices import visible_gpus

    os.environ.setdefault("JAXDIST_TIMEOUT", "60")  # seconds to wait for missing ranks
    each, gpus = devices or 1, 0 if os.environ.get("JAX_PLATFORMS") == "cpu" else len(visible_gpus())
    ranks = max(gpus // each, 1) if gpus else 1 if compat.on_tpu_host() else 2
    code, launchers = 0, dict[str, Launcher](xla="env", mpi="mpirun")
    has_mpi = find_mpirun() is not None and all(importlib.util.find_spec(name) for name in ("mpi4py", "mpi4jax"))
    for name, launcher in launchers.items():
        if name == "mpi" and each > 1:
            continue
        if name == "mpi" and not has_mpi:
            print(f"communicator mpi is not available. To install it: {site.install()}")
            continue
        try:
            os.environ["JAXDIST_COMMUNICATOR"] = name  # for the ranks
            run(["jaxdist", "test", *([what] if what else [])], True, ranks, launcher, devices=each)
        except typer.Exit as done:
            code = code or done.exit_code
    missing = [one for one in checks() if not one.ok]
    show(missing)
    if code or any(one.name == "GPU" for one in missing):
        print("Something is wrong.")
        raise typer.Exit(1)
    print("All is well.")


def as_rank(what: str = "") -> int:
    """Run the checks, or verify a step, as one of the ranks; the root prints the results. Return the exit code."""
    import jax

    from jaxdist.runtime.context import init

    try:
        ctx = init()
    except (ValueError, RuntimeError, ImportError) as error:
        print(f"jaxdist test: {error}", file=sys.stderr, flush=True)
        return 1
    if not what:
        jax.config.update("jax_enable_x64", True)
    checked = [_verified(what)] if what else list(_levels(ctx))
    if ctx.is_root:
        kind = jax.local_devices()[0].device_kind
        print(f"communicator {ctx.communicator}: {ctx.num_devices} x {kind}, connector {ctx.connector.name}")
        show(checked)
    return int(ctx.is_root and not all(one.ok for one in checked))


def _verified(what: str) -> Check:
    """Compare the user's step with its program, for the arguments of each rank."""
    from jaxdist.cli.plan import function_of
    from jaxdist.observe.verify import verify

    found = verify(*function_of(what)())
    return Check(what, found.equal is not False, str(found), "see the line; if it is ours, please report it")


def _levels(ctx: Any) -> Iterator[Check]:
    """Train for a few steps at each level, and compare with `jax.jit` on one device."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from jaxdist.sharding import unshard, zero
    from jaxdist.step.data_parallel import data_parallel

    def loss_fn(params: Any, x: Any) -> Any:
        hidden = x @ params["in"]
        hidden = (hidden - hidden.mean(0)) / jnp.sqrt(hidden.var(0) + 1e-3)  # of the whole batch, like BatchNorm
        return jnp.mean((jnp.tanh(hidden) @ params["out"] - x.sum(1, keepdims=True)) ** 2)

    def train(transform: Any, tx: Any, batch: Any) -> Any:
        @transform
        def step(params: Any, opt_state: Any, x: Any) -> Any:
            updates, opt_state = tx.update(jax.grad(loss_fn)(params, x), opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params = jax.tree.map(jnp.asarray, begin)
        opt_state = tx.init(params)
        for _ in range(_STEPS):
            params, opt_state = step(params, opt_state, batch)
        return jax.tree.leaves(unshard(params))

    random, width = np.random.default_rng(0), 16 * ctx.num_devices
    whole = random.normal(size=(4 * ctx.num_devices, 13))
    begin = {"in": random.normal(size=(13, width)), "out": random.normal(size=(width, 1))}
    want = train(jax.jit, optax.adam(1e-2), whole)
    mine = np.split(whole, ctx.size)[ctx.rank]
    for level in (0, 1, 2, 3):
        got = train(data_parallel, zero(optax.adam(1e-2), level), mine)
        apart = max(float(np.max(np.abs(np.asarray(a) - b))) for a, b in zip(got, want, strict=True))
        worst = float(np.max(ctx.control.exchange("jaxdist test", apart)))  # NaN is the worst
        seen = f"{_STEPS} steps, {worst:.1e} away from jax.jit on one device; at most {_TOLERANCE:.0e} expected"
        yield Check(f"ZeRO level {level}", worst <= _TOLERANCE, seen, "report it with `jaxdist info`'s output")
