"""Freed memory stays with the process, unless the environment has settings of its own."""

import platform
import subprocess
import sys

import pytest

from mnemos.lab.run import kept_memory

FAULTS = """
import ctypes, importlib.util, resource, sys
spec = importlib.util.spec_from_file_location("kept_memory", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.keep_freed_memory())
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes, c.memset.argtypes = ctypes.c_void_p, [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def use(size=64 << 20):
    block = c.malloc(size)
    c.memset(block, 1, size)
    c.free(block)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""  # noqa: E501 the program of a child process


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
@pytest.mark.parametrize("environment", [{}, {"MALLOC_ARENA_MAX": "1"}])
def test_a_second_use_of_a_large_block_needs_no_new_pages(environment):
    own = bool(environment)
    command = [sys.executable, "-c", FAULTS, kept_memory.__file__]
    kept, faults = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert kept == str(not own)
    assert (int(faults) < 100) == (not own)
