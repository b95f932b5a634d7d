"""Where `jaxdist.run_log` also writes metrics: TensorBoard, Weights & Biases, MLflow, or an object of one's own."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Sink(Protocol):
    """What `jaxdist.run_log` needs of a place for metrics: four methods, which only the root calls.

    An error in `open` stops the job, on every rank. One in another method is a warning, and the sink gets no more:
    training goes on, and ``metrics.jsonl`` has everything.

    Example:
      >>> import jaxdist, tempfile
      >>> class Print:
      ...     def open(self, path): ...
      ...     def drop(self, step): ...
      ...     def write(self, step, time, metrics): print(step, metrics)
      ...     def close(self, failed): print("failed" if failed else "done")
      >>> folder = tempfile.TemporaryDirectory()
      >>> with folder as run, jaxdist.run_log(run, sinks=[Print()]) as log:
      ...     log(0, loss=0.5)
      0 {'loss': 0.5}
      done
    """

    def open(self, path: Path) -> None:
        """Get ready, before the first step: the folder of the run, which has the files of an earlier start."""
        ...

    def drop(self, step: int) -> None:
        """Remove what was logged for this step and later ones, if possible: a restarted run goes on from here."""
        ...

    def write(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step, and when it ended (seconds since 1970); in a thread of the sink's own."""
        ...

    def close(self, failed: bool) -> None:
        """The end of the run; or an exception has ended it."""
        ...


class TensorBoard:
    """Event files for TensorBoard, in the folder of the run.

    Raises:
      ImportError: (from `jaxdist.run_log`, on every rank) tensorboardX is missing on the root.

    Example:
      >>> import jaxdist, tempfile
      >>> with tempfile.TemporaryDirectory() as run:
      ...     with jaxdist.run_log(run, sinks=[jaxdist.sinks.TensorBoard()]) as log:
      ...         log(0, loss=0.5)
      ...     len(list(Path(run).glob("events.out.tfevents.*")))
      1
    """

    def __init__(self) -> None:
        self._writer: Any = None

    def open(self, path: Path) -> None:
        self._module, self._path = _imported("tensorboardX", "tensorboard"), path

    def drop(self, step: int) -> None:
        # Its own names are of a second, and of two files of one name the later is left.
        own = f".{time.time_ns()}"
        self._writer = self._module.SummaryWriter(str(self._path), purge_step=step, filename_suffix=own)

    def write(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._module.SummaryWriter(str(self._path))
        for name, x in metrics.items():
            self._writer.add_scalar(name, x, step, time)

    def close(self, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class Wandb:
    """A run of Weights & Biases; a restarted job goes on with the run of the same folder.

    The run's id is kept in the folder, in ``wandb.id``. A restart from an earlier step rewinds the run; a server that
    can't do that ignores the steps that it has already.

    Args:
      **init: arguments of ``wandb.init``: ``project``, ``config``, ``mode="offline"`` and the like.

    Raises:
      ImportError: (from `jaxdist.run_log`, on every rank) wandb is missing on the root.
      RuntimeError: (likewise) ``wandb.init`` has failed; says how.

    Example:
      >>> import jaxdist
      >>> sink = jaxdist.sinks.Wandb(project="letters", config={"lr": 1e-3}, mode="offline")

    References:
      https://docs.wandb.ai/guides/runs/rewind
    """

    def __init__(self, **init: Any):
        self._init, self._run = init, None

    def open(self, path: Path) -> None:
        self._module, self._path = _imported("wandb", "wandb"), path
        self._start(_noted(path / "wandb.id"), resume="allow")

    def drop(self, step: int) -> None:
        run: Any = self._run
        run.finish()
        if step <= 0:
            self._start(None)
            return
        try:
            self._start(None, resume_from=f"{run.id}?_step={step - 1}")
        except self._module.Error:
            self._start(run.id, resume="allow")

    def write(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        run: Any = self._run
        run.log({**metrics, "_timestamp": time}, step=step)

    def close(self, failed: bool) -> None:
        run: Any = self._run
        run.finish(exit_code=int(failed))

    def _start(self, name: str | None, **how: Any) -> None:
        self._run = self._module.init(**{"dir": str(self._path), "id": name, **how, **self._init})
        (self._path / "wandb.id").write_text(self._run.id)


class MLflow:
    """A run of MLflow; a restarted job goes on with the run of the same folder.

    The run's id is kept in the folder, in ``mlflow.id``. MLflow can't remove metrics: what a restart logs again stands
    there twice, and the later one counts.

    Args:
      experiment: its name; made if there is none.
      uri: of the server or the store, such as ``"http://host:5000"`` or ``"sqlite:///runs.db"``; default:
        ``MLFLOW_TRACKING_URI``, or MLflow's own.
      params: logged as the parameters of the run, when it is new.

    Raises:
      ImportError: (from `jaxdist.run_log`, on every rank) mlflow is missing on the root.
      RuntimeError: (likewise) the server does not answer; says how.

    Example:
      >>> import jaxdist
      >>> sink = jaxdist.sinks.MLflow("letters", uri="sqlite:///runs.db", params={"lr": 1e-3})
    """

    _EVERY, _MOST = 1.0, 500  # seconds from one request to the next, and metrics in one (MLflow takes 1000)

    def __init__(self, experiment: str = "Default", uri: str | None = None, params: Mapping[str, Any] | None = None):
        self._experiment, self._uri, self._params = experiment, uri, params or {}
        self._held: list[Any] = []
        self._sent = 0.0

    def open(self, path: Path) -> None:
        self._client = _imported("mlflow", "mlflow").MlflowClient(tracking_uri=self._uri)
        self._entities = _imported("mlflow.entities", "mlflow")
        run = _noted(path / "mlflow.id")
        if run is None:
            found = self._client.get_experiment_by_name(self._experiment)
            number = found.experiment_id if found else self._client.create_experiment(self._experiment)
            run = self._client.create_run(number, run_name=path.name or None).info.run_id
            params = [self._entities.Param(name, str(x)) for name, x in self._params.items()]
            self._client.log_batch(run, params=params)
            (path / "mlflow.id").write_text(run)
        else:
            self._client.update_run(run, status="RUNNING")
        self._run = run

    def drop(self, step: int) -> None:
        pass

    def write(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        self._held += [self._entities.Metric(name, float(x), int(1000 * time), step) for name, x in metrics.items()]
        self._send(at_once=False)

    def close(self, failed: bool) -> None:
        self._send(at_once=True)
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")

    def _send(self, at_once: bool) -> None:
        while self._held and (at_once or len(self._held) >= self._MOST or time.monotonic() > self._sent + self._EVERY):
            some, self._held = self._held[: self._MOST], self._held[self._MOST :]
            self._client.log_batch(self._run, metrics=some)
            self._sent = time.monotonic()


def _imported(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if error.name != package:  # it is there, and lacks something itself
            raise
        raise ImportError(f"this sink needs {package}: pip install 'jaxdist[{extra}]'", name=package) from None


def _noted(file: Path) -> str | None:
    """The id of the run that an earlier start has left in the folder."""
    return (file.read_text().strip() or None) if file.exists() else None
