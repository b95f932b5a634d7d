"""sdist and wheel: all files are in them, and what pip installs trains."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = {
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "jaxdist").rglob("*")
    if path.suffix in {".py", ".pyi", ".typed"}
}


def _run(*command: object, cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_of_the_sdist_trains(tmp_path: Path) -> None:
    """In an environment of its own, with the packages of this one, an empty HOME and no MPI: the README's example."""
    env = {
        key: x for key, x in os.environ.items() if not key.startswith(("JAX", "XLA_", "OMPI_", "PYTHON", "VIRTUAL_"))
    }
    env |= {"HOME": str(tmp_path / "home"), "PATH": f"{tmp_path}/venv/bin"}
    (tmp_path / "home").mkdir()
    build = [sys.executable, "-m", "hatchling", "build", "-d", tmp_path]
    _run(*build, "-t", "sdist", cwd=ROOT, env=dict(os.environ))
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has no filters
        archive.extractall(tmp_path)
    (source,) = tmp_path.glob("jaxdist-*/")
    _run(*build, "-t", "wheel", cwd=source, env=dict(os.environ))
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        about = message_from_bytes(archive.read(next(n for n in archive.namelist() if n.endswith("/METADATA"))))
    assert names == PACKAGE
    assert about["License-Expression"] == "Apache-2.0"
    assert {"all", "checkpoint", "data"} <= set(about.get_all("Provides-Extra", []))
    assert "tests" in {path.name for path in source.iterdir()}

    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    _run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=tmp_path, env=env)
    own = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path, env=env).strip()
    # Behind what is in the environment itself; of the .pth files there, such as that of this checkout, none is read.
    (Path(own) / "packages.pth").write_text(sysconfig.get_path("purelib"))
    found = _run(python, "-c", "import jaxdist; print(jaxdist.__file__)", cwd=tmp_path, env=env)
    assert found.strip() == f"{own}/jaxdist/__init__.py"
    out = _run(
        tmp_path / "venv" / "bin" / "jaxdist", "run", "-n", "2", source / "examples" / "mnist.py", "--epochs", "6",
        cwd=tmp_path, env=env,
    )  # fmt: skip
    trained = re.search(r"test_accuracy=(\S+) epochs=6 devices=2 communicator=xla$", out, re.MULTILINE)
    assert trained, out
    assert float(trained[1]) > 0.9
