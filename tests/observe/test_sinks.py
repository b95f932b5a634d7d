"""The sinks of `run_log`, on the real packages, offline: what they store, after a restart too; and sinks that fail."""

from __future__ import annotations

import importlib
import logging
import math
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import jaxdist
from jaxdist.observe import sinking
from jaxdist.observe.metrics import read_metrics


def log_steps(path: Path, first: int, last: int, *sinks: Any, **kwargs: Any) -> None:
    with jaxdist.run_log(path, sinks=sinks, examples_per_step=8, **kwargs) as log:
        for step in range(first, last):
            log(step, state={"w": jnp.ones(2)}, loss=jnp.float32(step), lr=math.nan)


# --- the real packages


def scalars(folder: Path) -> Iterator[tuple[str, int, float]]:
    """What TensorBoard reads in the order of its files: (tag, step, value), and where a restart purges."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]

    for file in sorted(folder.glob("events.out.tfevents.*")):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack_from("<Q", data)
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.session_log.status == SessionLog.START:
                yield "purge", event.step, 0
            yield from ((value.tag, event.step, value.simple_value) for value in event.summary.value)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    log_steps(tmp_path, 0, 3, jaxdist.sinks.TensorBoard(), hash_every=1)
    found = [x for x in scalars(tmp_path) if x[0] != "examples_per_s"]
    assert [x for x in found if x[0] == "loss"] == [("loss", 0, 0), ("loss", 1, 1), ("loss", 2, 2)]
    assert all(math.isnan(value) for tag, _, value in found if tag == "lr")
    assert {tag for tag, _, _ in scalars(tmp_path)} == {"loss", "lr", "examples_per_s"}, "no hash, which is no number"
    log_steps(tmp_path, 1, 3, jaxdist.sinks.TensorBoard())
    assert [x for x in scalars(tmp_path) if x[0] in ("loss", "purge")][3:] == [
        ("purge", 1, 0), ("loss", 1, 1), ("loss", 2, 2),
    ]  # fmt: skip


def wandb_runs(folder: Path) -> list[list[Any]]:
    """What is in the files, once all have an end: wandb's own process writes them, a little later."""
    end = time.monotonic() + 60
    while True:
        found = list(_wandb_runs(folder))
        if all(code >= 0 for *_, code in found):
            return [row for _, *row in sorted(found, key=lambda row: row[0]) if row[1]]
        assert time.monotonic() < end, found
        time.sleep(0.05)


def _wandb_runs(folder: Path) -> Iterator[tuple[float, Any, list[tuple[int, float]], int]]:
    """The record, the losses by step and the exit code in each file of an offline run, which is a log of LevelDB."""
    message = importlib.import_module("wandb.proto.wandb_internal_pb2").Record

    for file in folder.glob("wandb/offline-run-*/*.wandb"):
        data, at, rest = file.read_bytes(), 7, b""
        run, losses, code, first = None, [], -1, 0.0
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            _, length, kind = struct.unpack_from("<IHB", data, at)
            rest, at = rest + data[at + 7 : at + 7 + length], at + 7 + length
            if kind in (1, 4):  # whole, or the last part
                record, rest = message.FromString(rest), b""
                if record.HasField("run"):
                    run = record.run
                if record.HasField("history"):
                    row = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
                    losses.append((int(row["_step"]), float(row["loss"])))
                    first = first or float(row["_timestamp"])
                if record.HasField("exit"):
                    code = record.exit.exit_code
        yield first, run, losses, code


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("wandb")
    for name, value in {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "WANDB_DISABLE_GIT": "true"}.items():
        monkeypatch.setenv(name, value)
    return module


def offline() -> Any:
    return jaxdist.sinks.Wandb(project="letters", config={"lr": 0.5}, mode="offline")


def test_wandb_goes_on_with_its_run(wandb: Any, tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 3, offline())
    log_steps(tmp_path, 3, 4, offline())  # nothing is to go
    log_steps(tmp_path, 2, 4, offline())  # from a checkpoint before the end
    log_steps(tmp_path, 0, 2, offline())  # from the start: another run
    first, *runs, last = wandb_runs(tmp_path)
    run, losses, code = first
    assert (run.project, losses, code) == ("letters", [(0, 0), (1, 1), (2, 2)], 0)
    assert [(r.run_id, found) for r, found, _ in runs] == [(run.run_id, [(3, 3)]), (run.run_id, [(2, 2), (3, 3)])]
    assert (runs[0][0].HasField("branch_point"), runs[1][0].branch_point.value) == (False, 1)
    assert last[0].run_id != run.run_id
    assert last[1] == [(0, 0), (1, 1)]
    assert (tmp_path / "wandb.id").read_text() == last[0].run_id


def test_wandb_of_a_server_that_can_t_rewind(wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_steps(tmp_path, 0, 3, offline())
    plain = wandb.init

    def init(**kwargs: Any) -> Any:
        if "resume_from" in kwargs:
            raise wandb.errors.CommError("not on this server")
        return plain(**kwargs)

    monkeypatch.setattr(wandb, "init", init)
    log_steps(tmp_path, 2, 4, offline())
    runs = wandb_runs(tmp_path)
    assert [losses for _, losses, _ in runs] == [[(0, 0), (1, 1), (2, 2)], [(2, 2), (3, 3)]]
    assert runs[0][0].run_id == runs[1][0].run_id


def test_wandb_learns_that_a_run_failed(wandb: Any, tmp_path: Path) -> None:
    def train() -> None:
        with jaxdist.run_log(tmp_path, sinks=[offline()]) as log:
            log(0, loss=1.0)
            raise KeyError

    with pytest.raises(KeyError):
        train()
    assert [(losses, code) for _, losses, code in wandb_runs(tmp_path)] == [([(0, 1)], 1)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # mlflow's, about sqlalchemy
def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("alembic")  # what its store in a file takes
    uri = f"sqlite:///{tmp_path}/runs.db"
    sink = lambda: jaxdist.sinks.MLflow("letters", uri=uri, params={"lr": 0.5})
    log_steps(tmp_path, 0, 3, sink())
    log_steps(tmp_path, 2, 4, sink())
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("letters").experiment_id])
    assert (run.info.status, run.data.params) == ("FINISHED", {"lr": "0.5"})
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(0, 0), (1, 1), (2, 2), (2, 2), (3, 3)]
    times = [line["time"] for line in read_metrics(tmp_path)]
    assert [history[i].timestamp for i in (0, 1, 3, 4)] == [int(1000 * time) for time in times]
    assert all(math.isnan(m.value) for m in client.get_metric_history(run.info.run_id, "lr"))

    def fail() -> None:
        with jaxdist.run_log(tmp_path, sinks=[sink()]) as log:
            log(4, loss=1.0)
            assert client.get_run(run.info.run_id).info.status == "RUNNING"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert client.get_run(run.info.run_id).info.status == "FAILED"
    assert client.get_metric_history(run.info.run_id, "loss")[-1].value == 1


@pytest.mark.parametrize(
    ("sink", "package", "extra"),
    [
        (jaxdist.sinks.TensorBoard(), "tensorboardX", "tensorboard"),
        (jaxdist.sinks.Wandb(), "wandb", "wandb"),
        (jaxdist.sinks.MLflow(), "mlflow", "mlflow"),
    ],
)
def test_a_package_that_is_missing(
    sink: Any, package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"needs {package}: pip install 'jaxdist\[{extra}\]'"):
        log_steps(tmp_path, 0, 1, sink)


# --- sinks that fail


class Recording:
    """What it was given, in order."""

    def __init__(self, fails: str = ""):
        self.fails, self.said = fails, []

    def _do(self, what: str) -> None:
        self.said.append(what)
        if self.fails and what.startswith(self.fails):
            raise ConnectionError("gone")

    def open(self, path: Path) -> None:
        self._do("open")

    def drop(self, step: int) -> None:
        self._do(f"drop {step}")

    def write(self, step: int, time: float, metrics: Any) -> None:
        self._do(f"write {step}")

    def close(self, failed: bool) -> None:
        self._do(f"close {failed}")


@pytest.mark.parametrize(
    ("fails", "said", "warning"),
    [
        ("drop", ["open", "drop 1"], "Recording failed at drop(1): ConnectionError: gone. It gets no more metrics"),
        ("write 2", ["open", "drop 1", "write 1", "write 2"], "Recording failed at step 2: ConnectionError: gone"),
        ("close", ["open", "drop 1", "write 1", "write 2", "write 3", "close False"], "Recording failed at its end"),
    ],
)
def test_one_that_fails_is_left_out(
    fails: str, said: list[str], warning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log_steps(tmp_path, 0, 3)
    bad, good = Recording(fails), Recording()
    with caplog.at_level(logging.WARNING, "jaxdist"):
        log_steps(tmp_path, 1, 4, bad, good)
    assert bad.said == said
    assert good.said == ["open", "drop 1", "write 1", "write 2", "write 3", "close False"]
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3]
    (text,) = caplog.messages
    assert text.startswith(f"run_log: {warning}")


def test_one_that_can_t_be_opened_stops_the_job_and_the_others_are_closed(tmp_path: Path) -> None:
    first, second, third = Recording(), Recording("open"), Recording()
    with pytest.raises(RuntimeError, match="Recording can't be opened: ConnectionError: gone"):
        log_steps(tmp_path, 0, 1, first, second, third)
    assert (first.said, third.said) == (["open", "close True"], [])


def test_one_that_hangs_holds_nothing_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a step, nor, for long, the end; and one that is far behind gets no more."""
    monkeypatch.setattr(sinking, "_END", 0.1)
    monkeypatch.setattr(sinking, "_MOST", 2)
    begun, go = threading.Event(), threading.Event()

    class Hanging(Recording):
        def write(self, step: int, time: float, metrics: Any) -> None:
            begun.set()
            assert go.wait(60)
            super().write(step, time, metrics)

    sink = Hanging()
    with caplog.at_level(logging.WARNING, "jaxdist"), jaxdist.run_log(tmp_path, sinks=[sink]) as log:
        log(0, loss=0.0)
        assert begun.wait(60)
        for step in range(1, 9):
            log(step, loss=0.0)
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(9))
    assert [text for text in caplog.messages if "2 steps behind" in text] == caplog.messages
    assert len(caplog.messages) == 1
    (thread,) = (x for x in threading.enumerate() if x.name == "jaxdist-Hanging")
    go.set()
    thread.join(60)
    assert sink.said == ["open", "write 0"]


def test_a_run_without_a_step_and_one_that_fails_close_their_sinks(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 0, sink := Recording())
    assert sink.said == ["open", "close False"]
    with pytest.raises(KeyError), jaxdist.run_log(tmp_path, sinks=[sink := Recording()]):
        raise KeyError
    assert sink.said == ["open", "close True"]


@pytest.mark.parametrize("sinks", ["tensorboard", ["wandb"], Recording(), [Recording]])
def test_what_is_no_list_of_sinks(sinks: Any, tmp_path: Path) -> None:
    with (
        pytest.raises(TypeError, match=r"expected a list of sinks, such as \[jaxdist.sinks.TensorBoard\(\)\]"),
        jaxdist.run_log(tmp_path, sinks=sinks),
    ):
        pass
