"""`run_log`, `digest`, `profile`, and the command `plot`: what a run leaves behind."""

import contextlib
import itertools
import json
import logging
import re
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from catalogue.trees import some
from harness.check import train_step
from harness.commands import command, refused
from harness.errors import missing, raises
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist.checkpoint import digest

FILE = "metrics.jsonl"


class NotYet:
    """A scalar that its device has not computed."""

    shape = ()

    def __init__(self, value: float):
        self.value, self.computed = value, False

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return self.computed

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        assert self.computed, "fetched before it was computed"
        return np.asarray(self.value)


def lines(path: Path) -> list[dict[str, Any]]:
    """Those of the file."""
    return [json.loads(line) for line in (path / FILE).read_text().splitlines()]


def steps(path: Path) -> list[int]:
    """Those that are in the file."""
    return [line["step"] for line in lines(path)]


def log_steps(path: Path, first: int, last: int, *sinks: Any) -> None:
    """Log a loss at each step from the first up to the last."""
    with jaxdist.run_log(path, sinks=sinks) as log:
        for step in range(first, last):
            log(step, loss=jnp.float32(step))


# --- the file


def test_what_is_logged(tmp_path: Path) -> None:
    """An evaluation at the same step is a line of its own; rates are those of the time between two steps."""
    run = tmp_path / "a" / "run"
    with jaxdist.run_log(run, examples_per_step=64, tokens_per_step=640) as log:
        for step in (0, 1, 2, 5):
            log(step, loss=jnp.float32(step), correct=jnp.int32(step), lr=0.5)
            time.sleep(0.01)
        log(5, accuracy=0.5, nan=jnp.nan, least=-jnp.inf)
    assert "NaN" not in (run / FILE).read_text().replace('"NaN"', "").replace('"-Infinity"', "")
    assert "jaxdist-log" not in {thread.name for thread in threading.enumerate()}  # it would abort Python's end
    *rows, last = lines(run)
    assert (last["step"], last["accuracy"], last.get("loss")) == (5, 0.5, None)
    assert [(x["loss"], x["correct"], x["lr"]) for x in rows] == [(float(i), i, 0.5) for i in (0, 1, 2, 5)]
    assert "examples_per_s" not in rows[0] | last, "the first step is compiled: it says nothing of the throughput"
    for a, b in itertools.pairwise(rows):
        rate = 64 * (b["step"] - a["step"]) / (b["time"] - a["time"])
        assert b["examples_per_s"] == pytest.approx(rate, rel=0.01)
        assert b["tokens_per_s"] == pytest.approx(10 * rate, rel=0.01)


def test_nothing_waits_for_the_device(tmp_path: Path) -> None:
    """What is not computed yet is held back, with what comes after it; but not for more than a thousand steps."""
    slow, quick = NotYet(1.0), NotYet(2.0)
    quick.computed = True
    with jaxdist.run_log(tmp_path) as log:
        log(0, loss=slow)
        log(1, loss=quick)
        assert steps(tmp_path) == []
        slow.computed = True
        log(2, loss=(last := NotYet(3.0)))
        assert steps(tmp_path) == [0, 1]
        last.computed = True
    assert steps(tmp_path) == [0, 1, 2]
    with raises(AssertionError, "fetched before"), jaxdist.run_log(tmp_path / "far") as log:
        for step in range(1100):
            log(step, loss=NotYet(1.0))


def test_what_a_log_refuses(tmp_path: Path) -> None:
    """At once, by the metric's name, and on every rank."""
    with jaxdist.run_log(tmp_path) as log:
        for step in (1.5, "1", None, np.float32(1)):
            with raises(TypeError, "step", repr(step)):
                log(step, loss=1.0)  # type: ignore[arg-type]
        for value in ("low", None, 1j, {"a": 1}, np.complex64(1), np.array("low"), 10**400, jax.random.key(0)):
            with raises(TypeError, "'odd'", "step 3", repr(value)[:9]):
                log(3, loss=1.0, odd=value)
        with raises(TypeError, "'odd'", "step 3", "traced"):
            jax.jit(lambda x: log(3, odd=x))(1.0)
        log(np.int64(3), a=True, b=Fraction(1, 2), c=2**70, d=jnp.bfloat16(1), e=[1])
        for step, metrics, tokens in [
            (3, {"odd": [1, 2]}, ("'odd'", "(2,)")), (4, {"loss": jnp.ones(2)}, ("'loss'", "step 4", "(2,)")),
            (4, {"time": 1.0}, ("'time'",)), (2, {"loss": 1.0}, ("step 2", "step 3")),
        ]:  # fmt: skip
            with raises(ValueError, *tokens):
                log(step, **metrics)
        (gone := jnp.ones(())).delete()
        with raises(RuntimeError, "'norm'", "step 4", "donated"):
            log(4, norm=gone)
    assert steps(tmp_path) == [3]
    with raises(ValueError, "closed", str(tmp_path)):
        log(4, loss=1.0)


def test_a_failure_keeps_what_was_computed_and_waits_for_nothing(tmp_path: Path) -> None:
    with contextlib.suppress(KeyError), jaxdist.run_log(tmp_path) as log:
        log(0, loss=1.0)
        log(1, loss=NotYet(1.0))
        raise KeyError
    assert steps(tmp_path) == [0]


def test_a_kill_takes_away_no_line(tmp_path: Path) -> None:
    code = "import os, jaxdist\nlog = jaxdist.run_log('.').__enter__()\n"
    code += "for step in range(100):\n    log(step, loss=1.0)\nos.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60, check=False).returncode == -9
    assert steps(tmp_path) == list(range(100))


def test_a_restart_leaves_no_step_twice(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 6)
    before = (tmp_path / FILE).read_text()
    log_steps(tmp_path, 4, 7)
    assert steps(tmp_path) == [0, 1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in lines(tmp_path)] == [0, 1, 2, 3, 4, 5, 6]
    assert (tmp_path / f"{FILE}.bak").read_text() == before
    log_steps(tmp_path, 7, 7)  # opening alone changes nothing
    log_steps(tmp_path, 7, 8)
    assert steps(tmp_path) == list(range(8))
    assert (tmp_path / f"{FILE}.bak").read_text() == before, "nothing was dropped: nothing to keep"


@pytest.mark.parametrize(
    ("cut", "more", "left"),
    [(0, b"\0" * 200, 2), (9, b"\0" * 200, 1), (9, b"", 1), (9, b"\xc3", 1), (1, b"", 2), (0, b"[3]\n7\n{}\n", 2)],
    ids=["zeros", "torn, zeros", "torn", "torn UTF-8", "no end of line", "something else"],
)
def test_what_a_crash_has_damaged_is_dropped(
    cut: int, more: bytes, left: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log_steps(tmp_path, 0, 2)
    file = tmp_path / FILE
    file.write_bytes(damaged := file.read_bytes()[: -cut or None] + more)
    with caplog.at_level(logging.WARNING, "jaxdist"):
        log_steps(tmp_path, 2, 3)
    assert steps(tmp_path) == [*range(left), 2]
    assert (tmp_path / f"{FILE}.bak").read_bytes() == damaged
    assert [str(file) in text for text in caplog.messages] == [True] * (cut != 1)


def test_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).touch()
    for use in (jaxdist.run_log, jaxdist.profile):
        with raises(OSError, str(tmp_path / FILE / "run")), use(tmp_path / FILE / "run"):
            pass
    for total in ("9", 9.0):
        with raises(TypeError, repr(total)):
            jaxdist.run_log(tmp_path, total=total)  # type: ignore[arg-type]
    for sinks in ("tensorboard", ["wandb"], print):
        with raises(TypeError, "sinks"), jaxdist.run_log(tmp_path, sinks=sinks):  # type: ignore[arg-type]
            pass


# --- the progress, and sinks


def test_lines_of_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first step and the last; in between one about every ten seconds."""
    with jaxdist.run_log(tmp_path, total=4, examples_per_step=8) as log:
        for step in (1, 2, 3, 4):
            log(step, loss=float(step))
            time.sleep(0.01)
    out, err = capsys.readouterr()
    first, last = err.splitlines()
    assert (out, first) == ("", "step 1/4  loss=1")
    assert re.fullmatch(r"step 4/4  loss=4  examples_per_s=[\d.,]+  0:00:00 left", last)


def test_a_sink_that_fails_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good: list[Any] = []
    bad: list[int] = []

    def broken(step: int, metrics: dict[str, float]) -> None:
        metrics.clear()  # its own
        bad.append(step)
        if step == 2:
            raise ConnectionError("gone")

    with caplog.at_level(logging.WARNING, "jaxdist"):
        log_steps(tmp_path, 0, 4, broken, lambda *given: good.append(given))
    assert good == [(step, {"loss": float(step)}) for step in range(4)]
    assert (bad, steps(tmp_path)) == ([0, 1, 2], [0, 1, 2, 3])
    (text,) = caplog.messages
    assert missing(("broken", "step 2", "ConnectionError: gone"), text) == []


# --- digest

STATE = {
    "w": np.arange(35, dtype=np.float32).reshape(5, 7), "half": some("bfloat16", 6), "step": 3,
    "key": jax.random.key(1), "name": "a", "none": None, "empty": np.zeros((0, 3)), "flag": True,
}  # fmt: skip
CHANGES: list[dict[str, Any]] = [
    {"w": STATE["w"].reshape(7, 5)}, {"w": STATE["w"].view(np.int32)}, {"w": -STATE["w"]}, {"w": STATE["w"][::-1]},
    {"w": np.roll(STATE["w"], 1, 1)}, {"w": np.zeros_like(STATE["w"])}, {"half": -STATE["half"]}, {"step": 4},
    {"key": jax.random.key(2)}, {"name": "b"}, {"flag": False}, {"empty": np.zeros((3, 0))}, {"none": 0},
]  # fmt: skip


def test_a_digest_changes_with_any_bit() -> None:
    seen = {digest(STATE), *(digest(STATE | change) for change in CHANGES)}
    assert len(seen) == 1 + len(CHANGES)
    assert digest(dict(STATE)) in seen
    for dtype in ("uint8", "int16", "bfloat16", "float64", "complex128"):
        raw = (x := some(dtype, 15).reshape(3, 5)).reshape(-1).view(np.uint8)
        seen = {digest(x)}
        for byte, bit in itertools.product(range(raw.size), range(8)):
            raw[byte] ^= 1 << bit
            seen.add(digest(x))
            raw[byte] ^= 1 << bit
        assert len(seen) == 1 + raw.size * 8, dtype


def test_a_digest_is_the_same_however_a_state_is_kept() -> None:
    """In shards of any form, padded, or whole on the host."""
    mesh = Mesh(np.reshape(jax.devices(), (2, 4)), ("a", "b"))
    for dtype in ("bool", "uint8", "int16", "bfloat16", "float32", "complex128"):
        specs = {(40_008,): P("a"), (6, 8): P("a", "b"), (8, 3, 4): P("b", None, "a"), (16, 5): P(("a", "b"))}
        for shape, spec in specs.items():
            x = some(dtype, int(np.prod(shape))).reshape(shape)
            assert digest(jax.device_put(x, NamedSharding(mesh, spec))) == digest(x), (dtype, shape)
    for level in (1, 3):
        tx = jaxdist.zero(optax.adam(0.1), level)  # type: ignore[arg-type]
        params = {"even": jnp.ones((16, 3)), "odd": jnp.ones((9, 5))}
        loss = lambda p, x: jnp.mean((x @ p["even"]) ** 2) + jnp.sum(p["odd"] ** 2)
        state = jaxdist.data_parallel(train_step(loss, tx))(params, tx.init(params), jnp.ones((8, 16)))[:2]
        assert digest(state) == digest(jax.tree.map(np.asarray, jaxdist.unshard(state))) < 1 << 53


# --- profile


def test_a_profile(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of three steps on eight devices: traces on disk, and what collectives take, on stderr."""

    @jaxdist.data_parallel
    def step(w: Any, batch: Any) -> Any:
        total = jnp.tanh(batch @ w).sum(0)
        return w + 1e-3 * total, {"mean": total.mean()}

    w, batch = jnp.ones((64, 64), jnp.float32), np.ones((16, 64), np.float32)
    for path in (tmp_path / "compiles", tmp_path):
        capfd.readouterr()
        with jaxdist.profile(path):
            for _ in range(3):
                w, _ = step(w, batch)
    assert list((tmp_path / "rank0").rglob("*.xplane.pb"))
    assert list((tmp_path / "rank0").rglob("perfetto_trace.json.gz"))
    said = capfd.readouterr().err
    rows = [re.split(r"  +", line) for line in said.splitlines()]
    shares = {row[0]: float(row[1].strip("%")) for row in rows if len(row) > 1 and "%" in row[1]}
    assert shares.keys() == {"computing", "all-reduce", "waiting in collectives"}
    assert all(0 < share < 100 for share in shares.values())
    assert sum(shares.values()) == pytest.approx(100, abs=0.2)
    (sent,) = (row for row in rows if row[0] == "all-reduce")
    own = Path(__file__).read_text().splitlines()
    number = next(i for i, line in enumerate(own, 1) if "= jnp.tanh(batch @ w)" in line)
    assert (int(sent[2]) % 3, sent[3], sent[4].endswith(f"test_logs.py:{number}")) == (0, "data", True), said
    for _ in range(2):  # an error inside ends the trace
        with pytest.raises(KeyError), jaxdist.profile(tmp_path):
            raise KeyError
    with jaxdist.profile(tmp_path / "nothing"):
        pass
    assert "no device ran anything" in capfd.readouterr().err


# --- commands


def write_run(folder: Path, *losses: str) -> Path:
    """The log of a run."""
    folder.mkdir()
    rows = [f'{{"step": {i}, "time": {i}, "loss": {x}, "examples_per_s": {100 + i}}}' for i, x in enumerate(losses)]
    (folder / FILE).write_text("\n".join([*rows, '{"step": 1, "time": 1, "accuracy": 0.5}', ""]))
    return folder


def test_plot(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", "3", '"NaN"', "0.001"), write_run(tmp_path / "b", "2", '"Infinity"')
    assert command("plot", a) == (0, str(a / "metrics.png"))
    assert (a / "metrics.png").read_bytes().startswith(b"\x89PNG\r\n")
    out = tmp_path / "both.svg"
    assert command("plot", a, b, "--metrics", "loss,accuracy", "--dark", "--out", out) == (0, str(out))
    assert "<svg" in out.read_text()


def test_what_plot_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / FILE).write_text("")
    for arguments, tokens in [
        ((tmp_path / "nowhere",), ("nowhere", FILE)), ((tmp_path / "empty",), ("'loss'", "none")), ((), ("RUN",)),
        ((run, "--metrics", "lr"), ("'lr'", "accuracy, loss")), ((run, "--out", "x.txt"), ("'txt'", "svg")),
    ]:  # fmt: skip
        refused(tokens, "plot", *arguments)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(["jaxdist[plots]"], "plot", run)
