"""The interface of connectors, by which the processes of a job find each other."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxdist.control.channel import Control


@runtime_checkable
class Connector(Protocol):
    """A way for processes to find each other. Any object with these members works."""

    name: str  # for messages
    rank: int  # this process, 0 to size - 1. Rank 0 is the root
    size: int  # number of processes
    local_rank: int  # index among the processes of this host
    local_size: int  # number of processes on this host

    def broadcast(self, obj: Any, root: int = 0) -> Any:
        """The root's small picklable object, on every process."""
        ...


@dataclass
class Found:
    """The place of this process in the job, and a way to get any rank's value."""

    name: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    broadcast: Callable[..., Any]  # as of `Connector`
    control: Control | None = None  # that stays open as the job's


def local_position(hosts: list[str], rank: int) -> tuple[int, int]:
    """(local_rank, local_size) from the host name of each rank."""
    beside = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    return beside.index(rank), len(beside)


def read_int(env: Mapping[str, str], name: str, low: int = 0, high: int | None = None) -> int:
    """The integer in an environment variable."""
    try:
        value = int(env[name])
    except ValueError:
        value = None
    if value is None or value < low or (high is not None and value > high):
        most = "" if high is None else f" to {high}"
        raise ValueError(f"{name}={env[name]!r} in the environment, expected an integer from {low}{most}")
    return value


def need(env: Mapping[str, str], names: tuple[str, ...], connector: str, fix: str) -> None:
    """Complain about environment variables that are absent."""
    missing = [name for name in names if not env.get(name)]
    if missing:
        raise ValueError(
            f"connector {connector!r} needs {', '.join(names)} in the environment; missing: {', '.join(missing)}. {fix}"
        )
