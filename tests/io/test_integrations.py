"""Data and sinks of metrics of other packages; in CI with the newest Python (`uv run --group integrations`)."""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import json
import math
import struct
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue.sources import N
from harness.loaders import epoch, flat, make, ranks

import jaxdist

# --- sources


def installed(name: str) -> Any:
    """A module, if its package is there."""
    package = {"array_record": "array-record", "mlflow": "mlflow-skinny"}.get(top := name.partition(".")[0], top)
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed (uv run --group integrations)")
    return importlib.import_module(name)


def check(source: Any, window: int = 0, **how: Any) -> None:
    """What ranks read that come and go, a state of which is kept as JSON, is what one process reads."""
    alone = [make(source, 1, tail="keep", shuffle=window, **how)]
    want = [flat(epoch(alone)) for _ in range(2)]
    assert sorted(want[0]) == sorted(want[1]) == list(range(N))
    got: list[list[int]] = [[], []]
    state: Any = None
    for size, batch_size, steps in [(2, 3, 2), (3, 1, 4), (1, 2, 5), (3, 5, 9), (2, 4, 3)]:
        loaders = ranks(lambda: source, size, batch_size, tail="keep", shuffle=window, **how)
        for loader in loaders if state else ():
            loader.set_state(json.loads(state))
        got[loaders[0].epoch] += flat(epoch(loaders, steps))
        state = json.dumps(loaders[0].get_state())
    assert (got[0], got[1]) == (want[0], want[1][: len(got[1]) or 1])


@pytest.mark.parametrize("shards", [1, 4])
def test_hugging_face(shards: int) -> None:
    """By index, and as streams: also those whose own state leaves out what waits in a buffer."""
    by_index = installed("datasets").Dataset.from_dict({"x": list(range(N))})
    rows = by_index.to_iterable_dataset(num_shards=shards)
    buffered = rows.shuffle(seed=0, buffer_size=8)
    taken = rows.skip(0).take(N)
    few = rows.map(lambda row: {"x": row["x"], "even": row["x"] % 2 == 0}).filter(lambda row: row["x"] < N)
    for stream, window in [
        (few, 0),
        (rows, 8),
        (taken, 0),
        (buffered, 0),
        (buffered.map(dict, batched=True, batch_size=3), 0),
    ]:
        check(stream, window, transform=lambda row: row["x"])
    batches = make(by_index.with_format("numpy"), 4, tail="keep")
    assert sorted(np.concatenate([batch["x"] for batch in batches]).tolist()) == list(range(N))


def test_parquet(tmp_path: Path) -> None:
    pyarrow = installed("pyarrow")
    parquet = installed("pyarrow.parquet")
    files = []
    for i, numbers in enumerate(np.array_split(np.arange(N), 3)):
        files.append(str(tmp_path / f"{i}.parquet"))
        parquet.write_table(pyarrow.table({"x": numbers}), files[-1], row_group_size=7)
    check(grain.experimental.ParquetIterDataset(files).map(lambda row: int(row["x"])), window=16)


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # WebDataset's files
def test_tars(tmp_path: Path) -> None:
    webdataset = installed("webdataset")
    files = []
    for i, numbers in enumerate(np.array_split(np.arange(N), 3)):
        files.append(str(tmp_path / f"{i}.tar"))
        with tarfile.open(files[-1], "w") as tar:
            for number in numbers.tolist():
                raw = str(number).encode()
                (info := tarfile.TarInfo(f"{number:06}.cls")).size = len(raw)
                tar.addfile(info, io.BytesIO(raw))
    rows = webdataset.WebDataset(files, shardshuffle=False).decode().to_tuple("cls").map(lambda row: row[0])
    check(rows, window=16)


def test_array_records(tmp_path: Path) -> None:
    writer = installed("array_record.python.array_record_module")
    path = str(tmp_path / "x.array_record")
    file = writer.ArrayRecordWriter(path, "group_size:1")
    for i in range(N):
        file.write(np.int64(i).tobytes())
    file.close()
    source = grain.sources.ArrayRecordDataSource(path)
    loader = make(source, 4, tail="keep", transform=lambda raw: np.frombuffer(raw, np.int64)[0])
    assert sorted(np.concatenate(list(loader)).tolist()) == list(range(N))


# --- sinks of metrics, as docs/evaluate.md has them: what they store, offline, after a restart too


def log_steps(path: Path, first: int, last: int, sink: Any) -> None:
    """Log a loss at each step from the first up to the last."""
    with jaxdist.run_log(path, sinks=[sink]) as log:
        for step in range(first, last):
            log(step, loss=jnp.float32(step), lr=math.nan)


def events(folder: Path) -> Iterator[tuple[str, int, float]]:
    """What TensorBoard reads, in the order of its files: (tag, step, value), and where a restart purges."""
    event_pb2 = importlib.import_module("tensorboardX.proto.event_pb2")
    for file in sorted(folder.glob("events.out.tfevents.*")):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack_from("<Q", data)
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.session_log.status == event_pb2.SessionLog.START:
                yield "purge", event.step, 0
            yield from ((value.tag, event.step, value.simple_value) for value in event.summary.value)


def test_tensorboard(tmp_path: Path) -> None:
    tensorboard = installed("tensorboardX")
    for start, suffix in ((0, ".a"), (1, ".b")):  # else the second would have the name of the first
        writer = tensorboard.SummaryWriter(str(tmp_path), purge_step=start, filename_suffix=suffix, write_to_disk=True)

        def sink(step: int, metrics: dict[str, float], writer: Any = writer) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)

        log_steps(tmp_path, start, 3, sink)
        writer.close()
    found = list(events(tmp_path))
    losses = [("loss", 0, 0), ("loss", 1, 1), ("loss", 2, 2)]
    purged = [("purge", 0, 0), *losses, ("purge", 1, 0), *losses[1:]]
    assert [x for x in found if x[0] in ("loss", "purge")] == purged
    assert all(math.isnan(value) for tag, _, value in found if tag == "lr")


def records(file: Path) -> Iterator[Any]:
    """Of a file of wandb, which is a log of LevelDB."""
    message = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    data, at, rest = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        rest, at = rest + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield message.FromString(rest)
            rest = b""


def wandb_losses(folder: Path) -> list[tuple[int, float]]:
    """Those of the only offline run, by step."""
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows = [
        {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        for record in records(file) if record.HasField("history")
    ]  # fmt: skip
    return [(int(row["_step"]), float(row["loss"])) for row in rows]


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = installed("wandb")
    for name, value in {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "WANDB_DISABLE_GIT": "true"}.items():
        monkeypatch.setenv(name, value)
    for mode in ("offline", "disabled"):  # of the root, and of another rank
        run = wandb.init(project="letters", id="letters-1", resume="allow", mode=mode, dir=str(tmp_path))
        log_steps(tmp_path, 0, 3, lambda step, metrics, run=run: run.log(metrics, step=step))
        run.finish()
        end = time.monotonic() + 60
        while (
            len(wandb_losses(tmp_path)) < 3 and time.monotonic() < end
        ):  # wandb's own process writes them, a little later
            time.sleep(0.05)
        assert wandb_losses(tmp_path) == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # mlflow's, about sqlalchemy
def test_mlflow(tmp_path: Path) -> None:
    mlflow, _ = installed("mlflow"), installed("alembic")  # what its store in a file takes
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    mlflow.set_experiment("letters")
    run_id = None
    for first, last in ((0, 3), (2, 4)):
        run_id = mlflow.start_run(run_id=run_id).info.run_id
        log_steps(tmp_path, first, last, lambda step, metrics: mlflow.log_metrics(metrics, step, synchronous=False))
        mlflow.flush_async_logging()
        mlflow.end_run()
    history = mlflow.MlflowClient().get_metric_history(run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(0, 0), (1, 1), (2, 2), (2, 2), (3, 3)]
    assert all(math.isnan(m.value) for m in mlflow.MlflowClient().get_metric_history(run_id, "lr"))
