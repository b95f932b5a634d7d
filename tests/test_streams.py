"""Standard streams that were closed when a process started: a daemon's child, `2>&-`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
from harness import jobs

from jaxdist import streams

_CLOSED = ("<&-", ">&-", "2>&-")
_SEE = """
import os, sys
def see(): return [os.readlink(f"/proc/self/fd/{k}") if os.path.exists(f"/proc/self/fd/{k}") else "" for k in range(3)]
"""


def _closing(*which: str) -> list[str]:
    """Runs this Python without these streams."""
    return ["sh", "-c", f'exec "$0" "$@" {" ".join(which)}', sys.executable]


@pytest.mark.parametrize("which", [(0,), (1,), (0, 2), (0, 1, 2)], ids=str)
def test_the_null_device_stands_in_for_what_is_closed(which, tmp_path):
    code = f"""{_SEE}
import subprocess
first = see()
import jaxdist
print("out"); print("err", file=sys.stderr); sys.stdout.flush(); sys.stderr.isatty(); sys.stdin.read()
child = subprocess.run([sys.executable, "-c", {_SEE!r} + "open(sys.argv[1], 'w').write(repr(see()))", "child"])
open("seen", "w").write(repr((first, see())))
"""
    command = [*_closing(*(_CLOSED[k] for k in which)), "-c", code]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 0, done
    first, after = eval((tmp_path / "seen").read_text())
    assert [k for k in range(3) if not first[k]] == list(which)
    assert after == ["/dev/null" if k in which else first[k] for k in range(3)]
    assert eval((tmp_path / "child").read_text()) == after
    assert (done.stdout, done.stderr) == (b"" if 1 in which else b"out\n", b"" if 2 in which else b"err\n")


_RANK = f"""{_SEE}
if "first" in sys.argv:
    import socket
    pair = socket.socketpair()
    pair[0].setblocking(False)
import numpy as np, jaxdist
try:
    ctx = jaxdist.init(timeout=30)
    ctx.control.say("a line of jaxdist's")
    os.write(2, b"a line of a library's\\n")
    for i in range(5): jaxdist.allreduce(np.ones(8))
finally:
    with open(f"{{sys.argv[1]}}/seen.{{os.environ['RANK']}}", "w") as file:
        file.write(repr(see()))
if "first" in sys.argv: pair[0].recv(1)
"""


def _two_ranks(path, closing, which, *more):
    """What they say, one of them without some streams and with more arguments."""
    job = jobs.Job()
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(jobs.free_port())}
    for r in range(2):
        start, arguments = (_closing(*which), more) if r == closing else ([sys.executable], ())
        job.start([*start, "-c", _RANK, str(path), *arguments], {**where, "RANK": str(r)})
    return job.finish(90)


@pytest.mark.parametrize(("rank", "which"), [(0, ("2>&-",)), (1, _CLOSED)], ids=["stderr", "all"])
def test_nothing_of_the_job_gets_the_number_of_a_stream(rank, which, tmp_path):
    results = _two_ranks(tmp_path, rank, which)
    assert [result.returncode for result in results] == [0, 0], [result.output for result in results]
    seen = eval((tmp_path / f"seen.{rank}").read_text())
    assert [seen[{"<&-": 0, ">&-": 1, "2>&-": 2}[name]] for name in which] == ["/dev/null"] * len(which)


def test_a_connection_that_has_the_number_already_is_an_error_on_every_rank(tmp_path):
    """Of a library that was imported before jaxdist: nothing is written over it, and it can't be moved."""
    results = _two_ranks(tmp_path, 1, _CLOSED, "first")
    assert all(result.returncode != 0 for result in results)
    assert "failed: RuntimeError: rank 1: stdout was closed when this process started" in results[0].output
    assert "Import jaxdist first" in results[0].output


@pytest.mark.mpi
def test_sockets_of_mpi_do_not_get_the_number_of_a_stream(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(f"""{_SEE}
if "first" in sys.argv:
    from mpi4py import MPI
import numpy as np, jaxdist
ctx = jaxdist.init(timeout=30)
for i in range(5): jaxdist.allreduce(np.ones(8))
print("SEEN", see(), flush=True)
""")
    for more in ([], ["first"]):
        job = jobs.Job()
        one = 'test ${OMPI_COMM_WORLD_RANK:-$PMI_RANK} = 0 && exec "$0" "$@" || exec "$0" "$@" 2>&-'
        job.start([jobs.mpirun_path(), "-np", "2", "sh", "-c", one, sys.executable, str(script), *more])
        (done,) = job.finish(90)
        if more:  # before jaxdist could do anything
            assert "failed: RuntimeError: rank 1: stderr was closed when this process started" in done.output
        else:
            assert done.returncode == 0, done.output
            assert done.stdout.count("/dev/null']") == 1, done.output


def test_the_launcher_runs_without_streams(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(f"{_SEE}\nopen(os.environ['RANK'], 'w').write(repr(see())); print('a line')")
    command = [*_closing(*_CLOSED), "-m", "jaxdist", "run", "-n", "2", "--launcher", "env", "--prefix", script]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, timeout=90, check=False, env=jobs.environment())
    assert done.returncode == 0, done
    for rank in "01":
        seen = eval((tmp_path / rank).read_text())
        assert not [name for name in seen if name.startswith("socket:")]
        assert "" not in seen


def _write_into(number: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams.os, "write", lambda to, data: real(number if to == 2 else to, data))
    monkeypatch.setattr(streams.select, "select", lambda r, w, x: wait(r, [number], x))
    streams.write(text)


real, wait = os.write, streams.select.select


def test_a_long_text_into_a_pipe_that_does_not_block_arrives_whole(monkeypatch):
    end, start = os.pipe()
    os.set_blocking(start, False)
    text = "\udc80ö" * 200_000
    writer = threading.Thread(target=_write_into, args=(start, text, monkeypatch))
    writer.start()
    expected, got = text.encode(errors="backslashreplace"), b""
    while len(got) < len(expected):
        got += os.read(end, 1 << 16)
    writer.join(60)
    assert got == expected
    os.close(end)
    _write_into(start, text, monkeypatch)  # nobody reads it any more: no error
    os.close(start)
