"""Whole runs of the examples: the loss curve and the final weights on several devices are those of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jobs
import numpy as np
import pytest
import quick

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("whole_runs.py")


def run(model: str, path: Path, steps: int, level: int, devices: int) -> dict[str, Any]:
    flags = f"{quick.XLA_FLAGS} --xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), model, str(path), str(steps), str(level)],
        env=jobs.environment({"XLA_FLAGS": flags}), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    found = json.loads(line.removeprefix("FOUND "))
    assert found["devices"] == devices
    return found


@pytest.mark.parametrize("model", ["mnist", "gpt"])
def test_loss_curve_and_weights(model: str, tmp_path: Path) -> None:
    """On 4 devices at level 3, interrupted within an epoch, then on 2 at level 2."""
    one = run(model, tmp_path / "one", 14, 0, 1)
    assert len(one["losses"]) == 14
    assert np.mean(one["losses"][-3:]) < np.mean(one["losses"][:3])
    four = run(model, tmp_path / "four", 8, 3, 4)
    two = run(model, tmp_path / "four", 14, 2, 2)
    np.testing.assert_allclose([*four["losses"], *two["losses"]], one["losses"], rtol=0, atol=1e-10)
    same = jax.tree.map(lambda a, b: abs(a - b) <= 1e-10, two["weights"], one["weights"])
    assert all(jax.tree.leaves(same))
