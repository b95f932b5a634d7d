"""The control channel: exchanges, what it says when ranks disagree, goodbyes, alarms, deaths."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from harness import jobs
from harness.channels import everywhere, job, until

from jaxdist.control import rendezvous
from jaxdist.control.channel import Control, ControlError
from jaxdist.control.keys import Key


def test_exchange_gathers_in_rank_order_and_one_process_needs_no_network():
    assert Control(0, 1).exchange("a", 7) == [7]
    controls = job(3)
    for i in range(20):
        got = everywhere([lambda c=c, i=i: c.exchange("a", (i, c.rank)) for c in controls])
        assert got == [[(i, 0), (i, 1), (i, 2)]] * 3
    assert [c.notices for c in controls] == [{}] * 3
    assert [m.pid for m in controls[1].members] == [os.getpid()] * 3


def test_notices_tell_who_waits_and_where_before_the_exchange_ends():
    controls = job(3)
    heard: list[tuple[int, int, int, str]] = []
    for c in controls:
        c.listen("enter", lambda rank, entry, me=c.rank: heard.append((me, rank, *entry)))
    controls[1].where_is(this=lambda: 7)
    early = threading.Thread(target=lambda: controls[1].exchange("step", "shapes", what="a step"), daemon=True)
    early.start()
    until(lambda: len(heard) == 2)
    assert sorted(heard) == [(0, 1, 7, "a step"), (2, 1, 7, "a step")]
    assert controls[0].notices == {"step": {1: "shapes"}}
    assert controls[0].waiting == {1: (7, "a step")}
    everywhere([lambda c=c: c.exchange("step") for c in (controls[0], controls[2])])
    early.join(20)
    assert not controls[0].notices
    assert not controls[0].waiting


def test_different_tags_are_an_error_on_every_rank_and_the_next_exchange_works():
    controls = job(4)
    got = everywhere([lambda c=c: c.exchange("save" if c.rank == 2 else "step") for c in controls[:3]])
    for rank, error in enumerate(got):  # while the last rank is still away
        assert isinstance(error, ControlError)
        assert re.match(rf"rank {rank}:.*ranks 0, 1 at 'step'.*rank 2 at 'save'.*not there: rank 3", str(error))
    with pytest.raises(ControlError, match=r"'step'.*'save'"):
        controls[3].exchange("step")
    assert everywhere([lambda c=c: c.exchange("on", c.rank) for c in controls]) == [[0, 1, 2, 3]] * 4


def test_timeout_names_the_missing_on_every_rank():
    controls = job(3)
    # Rank 0 has patience; the one that has none ends the wait of both.
    got = everywhere([lambda: controls[0].exchange("eval"), lambda: controls[1].exchange("eval", timeout=0.3)])
    for error in got:
        assert isinstance(error, ControlError)
        assert "timed out on rank 1 after 0.3 s" in str(error)
        assert f"not there: rank 2 ({controls[0].members[2].host}, pid {os.getpid()})" in str(error)
    with pytest.raises(ControlError, match="timed out on rank 1"):
        controls[2].exchange("eval")


def test_a_rank_that_left_is_named_at_once_and_its_farewell_kept():
    controls = job(3)
    controls[2].where_is(this=lambda: 5)
    got: list[Any] = []
    waiting = threading.Thread(
        target=lambda: got.extend(everywhere([lambda: controls[1].exchange("step")])), daemon=True
    )
    waiting.start()
    until(lambda: "step" in controls[0].notices)
    controls[2].close()
    waiting.join(20)
    assert "rank 2" in str(got[0])
    assert "already left" in str(got[0])
    assert controls[1].notices["bye"] == {2: 5}
    with pytest.raises(ControlError, match="already left"):
        controls[0].exchange("step")


def test_broadcast_from_any_root_of_large_buffers_and_mixed_roots():
    controls = job(3)
    big = {"w": np.arange(5_000_000, dtype=np.float32), "text": "x"}  # 20 MB: two chunks
    for root in (0, 2):
        got = everywhere([lambda c=c, r=root: c.broadcast(big if c.rank == r else None, r) for c in controls])
        for value in got:
            np.testing.assert_array_equal(value["w"], big["w"])
    got = everywhere([lambda c=c: c.broadcast(1, root=c.rank % 2) for c in controls])
    assert all("rank 1 says root=1" in str(error) for error in got)
    assert everywhere([lambda c=c: c.broadcast(c.rank, 1) for c in controls]) == [1, 1, 1]


def test_another_jobs_secret_is_not_let_in_and_the_address_is_named():
    server = rendezvous.bind("127.0.0.1", [0])
    port = server.getsockname()[1]
    address = [("127.0.0.1", port)]
    got = everywhere([
        lambda: Control(0, 2, address, server=server, key=Key(b"one"), timeout=1.2),
        lambda: Control(1, 2, address, key=Key(b"two"), timeout=0.8),
    ])  # fmt: skip
    assert isinstance(got[0], TimeoutError)
    assert "missing: rank 1" in str(got[0])
    assert isinstance(got[1], TimeoutError)
    assert f"tcp://127.0.0.1:{port}" in str(got[1])
    assert "JAXDIST_SECRET" in str(got[1])


def test_one_rank_claimed_twice_and_different_sizes_are_refused():
    for ranks, root_size, words in (((1, 1), 3, "claim rank 1"), ((1,), 2, "size 3")):
        server = rendezvous.bind("127.0.0.1", [0])
        address = [server.getsockname()]
        make = partial(Control, key=Key(b"k"), timeout=20)
        root = partial(make, 0, root_size, address, server=server)
        got = everywhere([root, *(partial(make, rank, 3, address) for rank in ranks)])
        assert all(isinstance(error, ValueError) and words in str(error) for error in got)


_SCRIPT = """
import os, signal, sys, threading, time
from jaxdist.control.channel import Control
rank, what = int(os.environ["RANK"]), sys.argv[1]
control = Control(rank, 3, [("127.0.0.1", int(os.environ["MASTER_PORT"]))], timeout=60)
control.exchange("up")
if what == "fork" and rank == 1:
    if os.fork() == 0:
        time.sleep(2)  # a data worker that outlives its parent, with inherited sockets
        os.write(1, b"the worker is over")
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
if what == "root" and rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if what == "alarm" and rank == 2:
    control.alarm("rank 2 has had enough")
    time.sleep(0.2)
    sys.exit("my own error")
if what == "bye":
    before = time.process_time()
    if rank == 1:
        time.sleep(1.5)
    control.close()
    assert control.all_left(30)  # as the end of a job waits: who goes before all have said goodbye has died
    print("cpu seconds", time.process_time() - before)
    sys.exit(0)
threading.Event().wait(60)  # stuck, as inside a collective
print("still here")
"""


@pytest.mark.parametrize(
    ("what", "culprit", "words"),
    [
        ("fork", 1, ["rank 1 (", "died without a goodbye"]),
        ("root", 0, ["rank 0 (", "died without a goodbye"]),
        ("alarm", 2, ["rank 2 has had enough"]),
    ],
)
def test_a_death_or_an_alarm_ends_the_others_whatever_they_do(what, culprit, words):
    results = jobs.spawn_env(3, ["-c", _SCRIPT, what], timeout=50)
    for rank in {0, 1, 2} - {culprit}:
        assert results[rank].returncode == 1, results[rank].output
        assert f"[jaxdist rank {rank}] " in results[rank].stderr
        assert all(word in results[rank].stderr for word in words), results[rank].output
        assert "still here" not in results[rank].stdout
    assert "over" not in results[culprit].stdout
    if what == "alarm":
        assert "my own error" in results[2].stderr


_LINK_DOWN = """
import fcntl, os, socket, struct, subprocess, sys, threading
def loopback(state):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        fcntl.ioctl(s, 0x8914, struct.pack("16sh", b"lo", state))  # SIOCSIFFLAGS
if len(sys.argv) == 1:  # alone in a network of its own
    loopback(1)
    ranks = [subprocess.Popen([sys.executable, __file__, str(r)]) for r in range(3)]
    sys.exit(0 if [r.wait() for r in ranks] == [1, 1, 1] else 2)
from jaxdist.control.channel import Control
rank = int(sys.argv[1])
control = Control(rank, 3, [("127.0.0.1", 29500)], timeout=3)
control.exchange("up")
if rank == 0:
    loopback(0)
threading.Event().wait(60)
"""


@pytest.mark.slow
def test_a_network_that_goes_down_is_noticed_at_both_ends(tmp_path):
    script = tmp_path / "link_down.py"
    script.write_text(_LINK_DOWN)
    namespace = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], check=False).returncode:
        pytest.skip("no network namespace can be made here (root or user namespaces): a link down was not checked")
    job = jobs.Job()
    job.start([*namespace, sys.executable, str(script)])
    result = job.finish(60)[0]
    assert result.returncode == 0, result.output
    for rank, other in ((0, "[12]"), (1, "0"), (2, "0")):
        assert re.search(
            rf"\[jaxdist rank {rank}\] rank {other} \(\S+, pid \d+\) can't be reached any more", result.stderr
        )


@pytest.mark.slow
def test_goodbyes_end_in_peace_and_waiting_costs_no_cpu():
    for result in jobs.spawn_env(3, ["-c", _SCRIPT, "bye"], timeout=50):
        assert (result.returncode, result.stderr) == (0, ""), result.output
        assert float(result.stdout.split()[-1]) < 0.5
