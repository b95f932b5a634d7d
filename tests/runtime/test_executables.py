"""Each program is compiled by one rank of a machine, and every rank runs what it would have compiled itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import jobs
from jax._src import compiler
from jax.interpreters import mlir
from jaxlib.mlir import ir

from jaxdist.communicators.handles import put_in, take_out
from jaxdist.runtime import executables
from jaxdist.runtime.executables import Executables
from jaxdist.runtime.lowered import LoweredProgram

_SCRIPT = str(Path(__file__).with_name("run_executables.py"))


def _run(how: str, ranks: int, *parts: str, **env: str) -> list[dict[str, Any]]:
    start = jobs.start_mpirun if how == "mpi" else jobs.start_env
    if how == "mpi":
        env["JAXDIST_COMMUNICATOR"] = "mpi"
    results = start(ranks, [_SCRIPT, *parts], env).finish(240)
    assert all(result.returncode == 0 for result in results), results
    lines = [line for result in results for line in result.stdout.splitlines() if line.startswith("{")]
    return sorted(map(json.loads, lines), key=lambda found: found["rank"])


def _alike(found: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """What was compiled of the parts whose programs are the same on all ranks."""
    return [(name, names) for name, names in found["compiled"].items() if name == "local" or "level" in name]


def _compiled_once(shared: list[dict[str, Any]], each: list[dict[str, Any]]) -> None:
    """What all run, to the same bits as ranks that compile for themselves; and each rank what is its own."""
    assert [found["bits"] for found in shared] == [found["bits"] for found in each]
    for name, alone in _alike(each[0]):
        # Fewer: levels 1 and 2 of a step may be one program.
        together = Counter(program for found in shared for program in found["compiled"][name])
        assert together <= Counter(alone), name
        assert together or name == "level 2"
    assert all("jit_other" in found["compiled"]["differs"] for found in shared)
    assert all({"jit_own", "jit_step"} <= {*found["compiled"]["callbacks"]} for found in shared)


FULL = "JAXDIST_FULL" in os.environ
PARTS = ("local", "level 1", "level 3", "callbacks", "differs", "shifted")
RANKS = pytest.mark.parametrize("ranks", [2, 3] if FULL else [2])


@pytest.mark.slow
@pytest.mark.mpi
@RANKS
def test_results_are_those_of_ranks_that_compile_for_themselves(ranks: int) -> None:
    parts = () if FULL else PARTS  # all
    each = _run("mpi", ranks, *parts, JAXDIST_COMPILE="each")
    assert all(one["compiled"][name] == alone for one in each for name, alone in _alike(each[0]))
    _compiled_once(_run("mpi", ranks, *parts), each)


@pytest.mark.slow
@RANKS
def test_also_over_gloo_and_jaxs_persistent_cache_serves_every_rank(ranks: int, tmp_path: Path) -> None:
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    parts, kept = ("local", "level 2", "callbacks", "differs"), ("local", "level 2")
    written = _run("env", ranks, *parts, **cache)  # the root compiles what it writes
    _compiled_once(_run("env", ranks, *parts), written)
    read = _run("env", ranks, *kept, **cache)
    assert [found["bits"] for found in read] == [{name: found["bits"][name] for name in kept} for found in written]
    assert [found["compiled"] for found in read] == [{name: [] for name in kept}] * ranks


# --- in one process


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], LoweredProgram]:
    """What JAX hands to the compiler for a function of an array."""

    def lower(function: Callable[..., Any]) -> LoweredProgram:
        found: list[LoweredProgram] = []
        with monkeypatch.context() as patch:
            original = compiler.backend_compile_and_load
            patch.setattr(
                compiler,
                "backend_compile_and_load",
                lambda *args: (found.append(LoweredProgram(*args)), original(*args))[1],
            )
            jax.jit(function).lower(np.ones(3, np.float32)).compile()
        return found[0]

    return lower


class _Ranks:
    """Ranks of a job in one process; counts what is compiled."""

    def __init__(self, folder: Path, timeout: float = 60.0):
        self.said: list[str] = []
        self.compiled: list[str] = []
        controls = [SimpleNamespace(rank=rank, who="rank {}".format, say=self.said.append) for rank in range(3)]
        self.ranks = [Executables(control, timeout, folder) for control in controls]  # type: ignore[arg-type]

    def __call__(self, rank: int, program: LoweredProgram) -> Any:
        return self.ranks[rank](self.compile, program)

    def compile(self, program: LoweredProgram) -> Any:
        self.compiled.append(program.name)
        return compiler.backend_compile_and_load(*program)


def _entries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.suffix]


def test_the_second_loads_what_the_first_compiled(tmp_path: Path, lowered: Any) -> None:
    ranks, program = _Ranks(tmp_path), lowered(lambda x: x * 2)
    made = [ranks(rank, program) for rank in range(3)]
    assert ranks.compiled == [program.name]
    for executable in made:
        out = executable.execute_sharded([jnp.arange(3.0, dtype=np.float32)])
        np.testing.assert_array_equal(out.disassemble_into_single_device_arrays()[0][0], [0, 2, 4])


def test_another_program_or_another_setting_is_compiled_and_where_it_is_written_makes_no_other(
    tmp_path: Path, lowered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = _Ranks(tmp_path)
    ranks(0, lowered(lambda x: x * 2))
    ranks(1, lowered(
        lambda x:
            x * 2
    ))  # fmt: skip
    assert len(ranks.compiled) == 1
    ranks(1, lowered(lambda x: x * 3))
    monkeypatch.setenv("PJRT_NPROC", "3")
    ranks(2, lowered(lambda x: x * 2))
    assert len(ranks.compiled) == 3


def test_what_is_damaged_or_has_no_folder_is_compiled_anew(tmp_path: Path, lowered: Any) -> None:
    ranks, program = _Ranks(tmp_path), lowered(lambda x: x * 2)
    ranks(0, program)
    (entry,) = _entries(tmp_path)
    for count, damaged in enumerate((entry.read_bytes()[: entry.stat().st_size // 2], b"no executable", b""), 2):
        entry.write_bytes(damaged)
        assert ranks(1, program) is not None
        assert len(ranks.compiled) == count
    ranks = _Ranks(tmp_path / "gone")
    assert ranks(0, program) is not None
    assert ranks(1, program) is not None
    assert len(ranks.compiled) == 2


def test_an_error_of_the_compiler_is_each_ranks_own_and_nobody_waits(tmp_path: Path, lowered: Any) -> None:
    ranks, program = _Ranks(tmp_path), lowered(lambda x: x * 2)

    def fails(program: LoweredProgram) -> Any:
        raise ValueError("on purpose")

    for rank in (0, 1):
        with pytest.raises(ValueError, match="on purpose"):
            ranks.ranks[rank](fails, program)
    assert ranks(2, program) is not None


def test_who_waits_says_so_once_and_not_for_ever(tmp_path: Path, lowered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executables, "_SAY_SECONDS", 0.2)
    ranks, program = _Ranks(tmp_path, timeout=0.5), lowered(lambda x: x * 2)

    def nested(given: LoweredProgram) -> Any:  # while rank 0 compiles
        assert ranks(1, given) is not None
        assert ranks(2, given) is not None
        return ranks.compile(given)

    ranks.ranks[0](nested, program)
    assert len(ranks.compiled) == 3
    line = f"has waited for {{}} s: rank 0 compiles {program.name!r} for the ranks of this host"
    assert ranks.said == [line.format("0.2"), line.format("0.4")]


_HOLDER = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from jaxdist.runtime.executables import Executables
entry = Path(sys.argv[1])
one = Executables(SimpleNamespace(rank=0), 60.0, entry.parent)
assert one._turn(entry, None) is not None
print("holds", flush=True)
time.sleep(10)
"""


def test_the_death_of_the_rank_that_compiles_lets_another(tmp_path: Path, lowered: Any) -> None:
    program = lowered(lambda x: x * 2)
    entry = tmp_path / executables._key(program)
    with subprocess.Popen([sys.executable, "-c", _HOLDER, str(entry)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"holds\n"
        ranks = _Ranks(tmp_path)
        pause = time.sleep

        def then_it_dies(seconds: float) -> None:
            holder.kill()
            holder.wait()
            pause(seconds)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(executables.time, "sleep", then_it_dies)
            assert ranks(1, program) is not None
        assert len(ranks.compiled) == 1


# --- the folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(executables, "atexit", SimpleNamespace(register=lambda call: None))
    return tmp_path


def test_one_rank_offers_a_folder_and_what_killed_jobs_left_is_removed(temporary: Path) -> None:
    left = temporary / "jaxdist-programs-left"
    left.mkdir(mode=0o700)
    (left / "entry").write_bytes(b"of a job that was killed")
    first, second = (Path(executables.offer(0).folder) for _ in range(2))
    assert not left.exists()
    assert first.exists()  # in use
    assert second.stat().st_mode & 0o777 == 0o700
    assert executables.offer(1).folder == ""


def _shared(offers: Sequence[executables.Offer], monkeypatch: pytest.MonkeyPatch) -> bool:
    found: list[Any] = []
    monkeypatch.setattr(executables.compat, "on_compile", lambda *args: found.append(args))
    monkeypatch.setattr(executables.compat, "same_cache_key_on_all_ranks", lambda processor: None)
    executables.share(SimpleNamespace(rank=0), 60.0, offers)  # type: ignore[arg-type]
    return bool(found)


def test_only_a_folder_of_ones_own_is_used(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = executables.offer(0)
    beside = executables.Offer(mine.machine)
    assert _shared([mine, beside], monkeypatch)
    assert not _shared([mine, executables.Offer("another machine")], monkeypatch)
    assert not _shared([executables.Offer("another machine", mine.folder), beside], monkeypatch)
    elsewhere = executables.Offer(mine.machine, str(temporary / "of another file system"))
    assert not _shared([beside, elsewhere], monkeypatch)
    Path(mine.folder).chmod(0o755)
    assert not _shared([mine, beside], monkeypatch)


# --- MPI's handles

_CALL = """
module @jit_step {{
  func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {{
    %0 = stablehlo.custom_call @mpi_allreduce_ffi(%arg0) {{mhlo.backend_config = {{comm = {comm} : i64,
      dtype = {dtype} : i64, nitems = 4 : i64, op = {op} : i64}}, api_version = 4 : i32}}
      : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }}
}}
"""


def _calls(**handles: int) -> ir.Module:
    with mlir.make_ir_context():
        return ir.Module.parse(_CALL.format(**handles))


def test_without_its_handles_a_program_is_the_same_everywhere() -> None:
    one, other = _calls(comm=94539430212800, dtype=139802549975968, op=1), _calls(comm=-7, dtype=1140850688, op=2)
    assert take_out(one) == [94539430212800, 139802549975968, 1]
    assert take_out(other) == [-7, 1140850688, 2]
    assert str(one) == str(other)
    assert "nitems = 4" in str(one)
    # Two communicators where the other rank has one.
    another = _calls(comm=5, dtype=5, op=6)
    assert take_out(another) == [5, 6]
    assert str(another) != str(one)
    too_long = _calls(comm=-(2**63), dtype=1, op=2)
    before = str(too_long)
    assert take_out(too_long) == []
    assert str(too_long) == before


def test_handles_are_written_without_changing_a_length() -> None:
    module = _calls(comm=94539430212800, dtype=139802549975968, op=1)
    handles = take_out(module)
    text = str(module).encode()
    mine = put_in(text, handles)
    assert len(mine) == len(text)
    assert b"comm =      94539430212800 : i64" in mine
    with mlir.make_ir_context():
        assert take_out(ir.Module.parse(mine)) == handles
    assert put_in(text, []) == text
