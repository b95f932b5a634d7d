"""Ranks that would compile programs in another way are refused."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest
from harness import jobs

from jaxdist.runtime.compiler import Compiler, check_same, flags_of, settings


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ("", {}),
        ("--xla_b=2 --xla_a", {"--xla_a": "true", "--xla_b": "2"}),
        ("--xla_a=1 --xla_b=True --xla_c=0", {"--xla_a": "true", "--xla_b": "true", "--xla_c": "false"}),
        ("--xla_a=1\n--xla_a=2", {"--xla_a": "2"}),
        ("--xla_b=p=q '--xla_a=x y'", {"--xla_a": "x y", "--xla_b": "p=q"}),
        ("--xla_a=it's", {"--xla_a": "it's"}),
        ("--xla_dump_to=/tmp --xla_gpu_cuda_data_dir=/cuda --xla_force_host_platform_device_count=8", {}),
    ],
)
def test_flags(given: str, flags: dict[str, str]) -> None:
    assert flags_of(given) == flags
    assert list(flags_of(given)) == sorted(flags)


def test_flags_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "flags").write_text("--xla_a=1\n--xla_dump_to=here\n")
    assert flags_of(f"{tmp_path}/flags") == {"--xla_a": "true"}
    for name in (f"{tmp_path}/none", "  ", "'--xla_a=1'"):
        with pytest.raises(ValueError, match="for the name of a file: No such file"):
            flags_of(name)


def test_what_differs_is_named() -> None:
    one = Compiler({"jax": "1", "jaxlib": "1"}, {"jax_enable_x64": "True"}, {"--a": "1", "--c": ""})
    check_same([one, one], str)
    other = one._replace(flags={"--a": "2", "--b": "3"})
    changed = "--a=1 / --a=2, --c= / --c is not set, --b is not set / --b=3"
    with pytest.raises(ValueError, match=f"^0 and 2 have other XLA_FLAGS: {changed}"):
        check_same([one, one, other, other], str)
    with pytest.raises(ValueError, match=r"^0 and 1 have other versions: jaxlib=1 / jaxlib=2"):
        check_same([one, Compiler({"jax": "1", "jaxlib": "2"}, {}, {})], str)
    with pytest.raises(ValueError, match=r"^0 and 1 have other settings of JAX: jax_enable_x64=True / .*=False\. Set"):
        check_same([one, one._replace(settings={"jax_enable_x64": "False"})], str)


def test_settings_on_which_programs_depend() -> None:
    changed = {
        "jax_enable_x64": False, "jax_default_prng_impl": "rbg", "jax_disable_jit": True,
        "jax_default_matmul_precision": "float32",
    }  # fmt: skip
    kept = settings()
    for name, value in changed.items():
        before = getattr(jax.config, name)
        jax.config.update(name, value)
        try:
            now = settings()
        finally:
            jax.config.update(name, before)
        assert [one for one in kept if now[one] != kept[one]] == [name]


_SCRIPT = """
import os, sys
os.environ["XLA_FLAGS"] += f" {sys.argv[1 + int(os.environ['RANK'])]}"
import jaxdist
jaxdist.init(timeout=30)
"""


def test_a_job_with_other_flags_is_refused_on_every_rank() -> None:
    off, on = (f"--xla_cpu_enable_fast_math={value}" for value in ("false", "true"))
    for result in jobs.spawn_env(3, ["-c", _SCRIPT, off, off, on], timeout=60):
        assert result.returncode != 0
        assert re.search(rf"rank 0 \(.*\) and rank 2 \(.*\) have other XLA_FLAGS: {off} / {on}\.", result.stderr)
        assert "-x XLA_FLAGS" in result.stderr
