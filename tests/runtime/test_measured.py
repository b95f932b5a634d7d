"""`jaxdist.runtime.measured`: jobs that measure what their ranks compute and send, and those that need not."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from jaxdist.machine import KINDS, VIRTUAL
from jaxdist.runtime import measured

_EACH_ITS_OWN = """
import dataclasses
import jax
import jaxdist
from jaxdist.machine import VIRTUAL
from jaxdist.runtime import measured

measured.measure = lambda *_: dataclasses.replace(VIRTUAL.kind, link=2.0 ** (20 + jax.process_index()))
ctx = jaxdist.init()
links = ctx.control.exchange("links", ctx.kind.link)
if ctx.is_root:
    print(links)
"""


def test_all_ranks_take_what_the_root_has_measured_or_remembers_or_is_told(jaxdist: Any, tmp_path: Path) -> None:
    """Else they would compile different programs."""
    (tmp_path / "script.py").write_text(_EACH_ITS_OWN)

    def links(folder: Path, name: str | None = None) -> str:
        env = {"XDG_CACHE_HOME": str(folder), "JAXDIST_MACHINE": name}
        done = jaxdist("run", "-n", 2, "--launcher", "env", "script.py", timeout=120, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert links(tmp_path) == f"[{2.0**20}, {2.0**20}]"
    path = tmp_path / "jaxdist" / "machines.json"
    ((key, kept),) = json.loads(path.read_text()).items()
    assert kept["link"] == 2.0**20
    path.write_text(json.dumps({key: {**kept, "link": 12345.0}}))
    assert links(tmp_path) == "[12345.0, 12345.0]"
    link = KINDS["h100"].link
    assert links(tmp_path / "other", "h100") == f"[{link}, {link}]"
    assert not (tmp_path / "other").exists()


WRONG = [0, -1, True, "1", None, float("nan"), float("inf"), 10**400]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "[" * 100_000, '{"a": 1}', '{"a": {"color": 1}}', '{"a": {"link": 1.0}}']
    + [json.dumps({"a": dict.fromkeys(measured._KEPT, n)}) for n in WRONG],
)  # fmt: skip
def test_a_file_that_is_damaged_is_measured_again(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "jaxdist").mkdir()
    (tmp_path / "jaxdist" / "machines.json").write_text(text)
    assert measured.remembered() == {}
    measured.remember("b", VIRTUAL.kind)
    assert {key: one.link for key, one in measured.remembered().items()} == {"b": VIRTUAL.kind.link}


def test_one_entry_that_is_damaged_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured.remember("a", VIRTUAL.kind)
    path = tmp_path / "jaxdist" / "machines.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "b": {"link": 0}}))
    measured.remember("c", VIRTUAL.kind)
    assert measured.remembered().keys() == {"a", "c"}


def test_a_pipe_in_its_place_is_not_waited_for_and_where_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "jaxdist").mkdir()
    os.mkfifo(tmp_path / "jaxdist" / "machines.json")
    assert measured.remembered() == {}
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    measured.remember("a", VIRTUAL.kind)
    assert measured.remembered() == {}


@pytest.mark.parametrize("name", ["cpu", "H100"])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_its_platform_stays_what_it_is(name: str, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CPUs can't do is not asked of them because they are priced as GPUs."""
    monkeypatch.setenv("JAXDIST_MACHINE", name)
    kind = measured.named(platform)
    assert kind is not None
    assert kind.is_cpu == (platform == "cpu")


def test_a_named_one_but_for_some_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXDIST_MACHINE", "H100,network=25e9,latency=0")
    assert measured.named("gpu") == dataclasses.replace(KINDS["h100"], network=25e9, latency=0)


NO_NUMBER = "after the kind, expected NAME=NUMBER with a name of link, network"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h1000", "JAXDIST_MACHINE='h1000': there is no such kind of device; valid: A100-40"),
        *((f"cpu,{what}", NO_NUMBER)
          for what in ("network", "network=", "network=0", "network=-1", "network=1.2.3", "flops=1e400", "latency=nan",
                       "memory=1", "=1", "")),
    ],
)  # fmt: skip
def test_no_such_kind_or_number(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXDIST_MACHINE", name)
    with pytest.raises(ValueError, match=said):
        measured.named("cpu")
