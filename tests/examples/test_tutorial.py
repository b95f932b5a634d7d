"""The tutorial: its page shows the files of examples/tutorial, and each of them has the losses of the first."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import jobs, quick

ROOT = Path(__file__).parents[2]
STEPS = [ROOT / "examples" / "tutorial" / f"step{k}.py" for k in range(1, 5)]
EPOCHS, BATCHES = 20, 18
DIES = str(ROOT / "tests" / "harness" / "dies.py")
RUN = [sys.executable, "-m", "jaxdist", "run", "-n"]


def losses(command: list[str], folder: Path, devices: int = 1, fails: bool = False) -> dict[int, float]:
    """By epoch, as the program prints them."""
    flags = f"--xla_force_host_platform_device_count={devices} {quick.XLA_FLAGS}"
    env = jobs.environment({"XLA_FLAGS": flags, "JAX_ENABLE_X64": None})
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    found = re.findall(r"^epoch (\d+) loss (\S+) right \d+$", done.stdout, re.MULTILINE)
    assert len({epoch for epoch, _ in found}) == len(found), "printed by several ranks"
    return {int(epoch): float(loss) for epoch, loss in found}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    found = losses([sys.executable, str(STEPS[0])], tmp_path_factory.mktemp("one"))
    assert list(found) == list(range(EPOCHS))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "command", "devices"),
    [(2, [sys.executable], 8), (3, [*RUN, "2"], 2)],
    ids=str,
)
def test_each_step_has_the_losses_of_one_device(
    step: int, command: list[str], devices: int, one_device: dict[int, float], tmp_path: Path
) -> None:
    assert losses([*command, str(STEPS[step - 1])], tmp_path, devices) == pytest.approx(one_device, rel=1e-3)


@pytest.mark.slow
def test_killed_and_resumed_on_fewer_ranks(one_device: dict[int, float], tmp_path: Path) -> None:
    at = 40
    before = losses([*RUN, "2", DIES, str(at), str(STEPS[3])], tmp_path, fails=True)
    assert list(before) == list(range((at - 1) // BATCHES))
    after = losses([*RUN, "1", str(STEPS[3])], tmp_path)
    assert list(after) == list(range(at // BATCHES, EPOCHS))
    assert before | after == pytest.approx({e: one_device[e] for e in before | after}, rel=1e-3)
