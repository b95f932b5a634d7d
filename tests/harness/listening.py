"""The TCP addresses that a process listens at."""

import psutil


def listening(pid: int | None = None) -> set[tuple[str, int]]:
    """(address, port) of each listening TCP socket of a process, by default of this one."""
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return set()
    return {tuple(one.laddr) for one in found if one.status == psutil.CONN_LISTEN}  # type: ignore[misc]
