"""What `jaxdist run` and its root write on a terminal: what is started, how long it compiles, and a bar."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # together

TRAIN = """
import sys
import jax.numpy as jnp, numpy as np
import jaxdist

ctx = jaxdist.init()

@jaxdist.data_parallel
def step(w, batch):
    loss = jnp.mean((batch @ w) ** 2)
    return w - 0.1, loss

w = jnp.ones(2)
with jaxdist.run_log("run", total=3, examples_per_step=8) as log:
    for i in range(3):
        w, loss = step(w, np.full((8 // ctx.size, 2), ctx.rank + 1.0))
        log(i, loss=loss)
        if ctx.is_root:
            print("printed", i, flush=True)
"""
BAR = "\r\x1b[2Kstep"


def on_a_terminal(folder: Path, *words: str, out: Path | None = None, environment: dict[str, str] | None = None) -> str:
    """What appears on a terminal; without words, those of `jaxdist run`: of the script by itself."""
    (folder / "train.py").write_text(textwrap.dedent(TRAIN))
    ours, theirs = pty.openpty()
    seen: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the last one that had it open has closed it
            while data := os.read(ours, 1 << 16):
                seen.append(data)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX"))}
    env |= {"TERM": "xterm", "XLA_FLAGS": "--xla_backend_optimization_level=0"} | (environment or {})
    with contextlib.ExitStack() as stack:
        stdout = theirs if out is None else stack.enter_context(out.open("wb"))
        run = ["-m", "jaxdist", "run", *words] if words else []
        command = [sys.executable, *run, "train.py"]
        streams = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": theirs}
        done = subprocess.run(command, **streams, cwd=folder, env=env, timeout=120, check=False)  # type: ignore[call-overload]
    os.close(theirs)
    reader.join(60)
    os.close(ours)
    text = b"".join(seen).decode()
    assert done.returncode == 0, text
    return text


def test_a_bar(launcher: str, tmp_path: Path) -> None:
    """Drawn by the root, above which lines of ranks go; a standard output that is a file gets these alone."""
    out = tmp_path / "out.txt"
    text = on_a_terminal(tmp_path, "-n", "2", "--launcher", launcher, out=out)
    head, _, rest = text.partition("\x1b[?25l")
    lines = head.replace("\r\x1b[K", "").splitlines()
    assert lines[0].startswith("jaxdist: 2 ranks on 1 host, ")
    assert lines[1] == "jaxdist: compiling step ..."
    assert re.fullmatch(r"jaxdist: step: compiled in \S+ s, first call in \S+ s", lines[2])
    assert len(lines) == 3
    assert re.search(r"3/3.* loss=\S+  [\d,]+ examples/s\r\n\x1b\[\?25h", rest[rest.rindex(BAR) :])
    assert text.endswith("\x1b[?25h")  # again, should the root be killed
    assert out.read_text() == "printed 0\nprinted 1\nprinted 2\n"


def test_a_process_by_itself_has_the_bar_alone(tmp_path: Path) -> None:
    text = on_a_terminal(tmp_path)
    assert "jaxdist:" not in text
    assert re.search(r"3/3.* loss=\S+  [\d,]+ examples/s\r\n\x1b\[\?25h$", text)
    assert re.findall(r"\x1b\[2Kprinted (\d)", text) == ["0", "1", "2"]  # above it


def test_lines_of_ranks_do_not_stick_to_the_bar(tmp_path: Path) -> None:
    text = on_a_terminal(tmp_path, "-n", "2", "--launcher", "env")
    assert re.findall(r"(.{4})printed (\d)\r\n", text, re.DOTALL) == [("\r\x1b[K", str(i)) for i in range(3)]


@pytest.mark.parametrize(
    ("words", "environment"), [(("--prefix",), {}), (("--only-rank", "0"), {}), ((), {"TERM": "dumb"})], ids=str
)
def test_lines_where_a_bar_would_be_torn(words: tuple[str, ...], environment: dict[str, str], tmp_path: Path) -> None:
    text = on_a_terminal(tmp_path, "-n", "2", "--launcher", "env", *words, environment=environment)
    assert "\x1b" not in text
    assert re.search(r"step 3/3  loss=", text)


def test_who_asks_for_something_else_or_nothing_gets_it(tmp_path: Path) -> None:
    text = on_a_terminal(tmp_path, "-n", "2", "--launcher", "env", environment={"JAXDIST_LOG": ""})
    assert "2 ranks on 1 host" in text
    assert "compil" not in text
