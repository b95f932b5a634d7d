"""A few of the messages of fuzz_control.py; it is run by hand with ten thousand."""

from __future__ import annotations

import pytest
from harness import fuzz_control


@pytest.mark.slow
def test_a_job_goes_on_bit_for_bit_whatever_strangers_send():
    assert fuzz_control.run(150, 1) == []
