"""A few of the messages of fuzz_control.py; it is run by hand with ten thousand."""

from __future__ import annotations

import os

import fuzz_control
import pytest

pytestmark = pytest.mark.slow


def test_a_job_goes_on_bit_for_bit_whatever_strangers_send():
    assert fuzz_control.run(300, 1) == []


def test_without_a_secret_other_users_of_the_host_are_strangers():
    if os.geteuid() != 0:
        pytest.skip("not root: messages of another user were not checked")
    assert fuzz_control.run(300, 2, secret=False, other_user=True) == []
