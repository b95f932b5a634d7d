"""Where the key of a job comes from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxdist.control import keys
from jaxdist.control.keys import job_key


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home directory of its own, and no JAXDIST_SECRET."""
    monkeypatch.delenv("JAXDIST_SECRET", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_the_secret_of_the_environment_comes_first(home, monkeypatch):
    found = set()
    for secret, name in (("s", "b"), ("t", "b"), ("none", "a")):  # the last one is a key that everybody has
        monkeypatch.setenv("JAXDIST_SECRET", secret)
        assert job_key("node1", "a") == job_key("127.0.0.1", name)
        assert not job_key("127.0.0.1", name).same_user
        found.add(job_key("node1", "a").secret)
    assert len(found) == 3
    assert not (home / ".jaxdist").exists()


def test_on_one_host_the_kernel_tells_who_is_there(home, monkeypatch):
    for host in ("localhost", "127.0.0.1", "127.0.1.1", "::1"):
        assert job_key(host, "port 1").same_user
    assert job_key("localhost", "port 1") != job_key("localhost", "port 2")
    assert not (home / ".jaxdist").exists()
    monkeypatch.setitem(keys._TABLES, keys.socket.AF_INET, home / "no such table")
    with pytest.raises(ValueError, match=r"no /proc/net/tcp.*set JAXDIST_SECRET to the same random string"):
        job_key("localhost", "port 1")


def test_across_hosts_it_is_a_secret_in_the_home_directory(home):
    key = job_key("node1", "port 1")
    assert not key.same_user
    assert job_key("node1", "port 1") == key != job_key("node1", "port 2")
    path = home / ".jaxdist" / "secret"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["secret"]
    path.unlink()
    assert job_key("node1", "port 1") != key


def test_ranks_that_make_the_secret_at_the_same_time_have_the_same(home):
    code = "from jaxdist.control.keys import job_key; print(job_key('node1', 'x').secret.hex())"
    ranks = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert len({rank.communicate(timeout=60)[0] for rank in ranks}) == 1


@pytest.mark.parametrize("what", ["read by others", "short", "not a folder", "no home"])
def test_a_home_that_can_keep_no_secret_is_one_line_that_says_what_to_set(home, monkeypatch, what):
    path = home / ".jaxdist" / "secret"
    if what == "not a folder":
        path.parent.write_text("")
    elif what == "no home":
        monkeypatch.setenv("HOME", str(home / "absent"))
    else:
        path.parent.mkdir()
        path.write_text("x" if what == "short" else "x" * 64)
        path.chmod(0o600 if what == "short" else 0o644)
    with pytest.raises(ValueError, match=r"set JAXDIST_SECRET to the same random string on every rank") as error:
        job_key("node1", "port 1")
    assert "\n" not in str(error.value)
    if what == "read by others":
        assert f"chmod 600 {path}" in str(error.value)


def test_another_users_file_is_not_taken(home):
    if os.geteuid() != 0:
        pytest.skip("not root: a file of another user was not checked")
    path = home / ".jaxdist" / "secret"
    path.parent.mkdir()
    path.write_bytes(b"x" * 32)
    path.chmod(0o600)
    os.chown(path, 65534, 65534)
    with pytest.raises(ValueError, match="has to be yours"):
        job_key("node1", "port 1")
