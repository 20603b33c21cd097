"""Memory that stays where it is, however long a run and however different its rows."""

import ctypes
import json
import os
import subprocess
import sys

import pytest

from leadline.policy.kernel_caches import KERNELS, bound_kernel_caches

NAMES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="what is in use is asked of glibc 2.33 or later"
)
def test_updates_on_rows_of_ever_other_lengths_take_no_more_and_more_memory() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.memory_growth"]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    after_ten, _, after_thirty = json.loads(output.splitlines()[-1])
    assert after_thirty < 1.1 * after_ten


def test_what_the_environment_says_of_the_caches_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAMES[0], "7")
    monkeypatch.delenv(NAMES[1], raising=False)
    bound_kernel_caches()
    assert [os.environ[name] for name in NAMES] == ["7", str(KERNELS)]
