"""Data and sinks of metrics of other packages; in CI with the newest Python (`uv run --group integrations`)."""

import importlib
import importlib.metadata
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from catalogue.sources import N
from harness.loaders import epoch, flat, make, ranks

import jaxdist

# --- sources


def installed(name: str) -> Any:
    """A module, if its package is there."""
    package = {"mlflow": "mlflow-skinny"}.get(name, name.partition(".")[0].replace("_", "-"))
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


# --- sinks of metrics, as docs/evaluate.md has them, offline


def log_steps(path: Path, sink: Any) -> None:
    with jaxdist.run_log(path, sinks=[sink]) as log:
        for step in range(3):
            log(step, loss=float(step), lr=float("nan"))


def test_tensorboard(tmp_path: Path) -> None:
    writer = installed("tensorboardX").SummaryWriter(str(tmp_path / "events"))
    log_steps(tmp_path, lambda step, metrics: [writer.add_scalar(name, x, step) for name, x in metrics.items()])
    writer.close()
    (events,) = (tmp_path / "events").iterdir()
    assert events.read_bytes().count(b"loss") == 3


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = installed("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="letters", mode="offline", dir=str(tmp_path))
    log_steps(tmp_path, lambda step, metrics: run.log(metrics, step=step))
    assert run.summary["loss"] == 1  # a step is committed at the next one, and the file written later
    run.finish()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # mlflow's, about sqlalchemy
def test_mlflow(tmp_path: Path) -> None:
    mlflow = installed("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    with mlflow.start_run() as run:
        log_steps(tmp_path, lambda step, metrics: mlflow.log_metrics(metrics, step))
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(0, 0), (1, 1), (2, 2)]
