"""What a tracker's own process does to its allocator."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
from tests.waiting import within

ARENAS = """
import ctypes, os, tempfile, threading
{calm}
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
began = threading.Barrier(8)

def allocate():
    began.wait()
    libc.malloc(1000)
    began.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.fopen.restype = ctypes.c_void_p
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "arenas")
    file = ctypes.c_void_p(libc.fopen(path.encode(), b"w"))
    libc.malloc_info(0, file)
    libc.fclose(file)
    print(open(path).read().count("<heap nr="))
"""


def arenas(calm: str) -> int:
    """How many a process with eight threads has."""
    command = [sys.executable, "-c", ARENAS.format(calm=calm)]
    return int(
        subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=within(60)).stdout
    )


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's malloc")
def test_threads_share_two_arenas() -> None:
    calm = "from kafkamq.runtime.memory import calm_allocator; calm_allocator()"
    assert arenas("") > 2
    assert arenas(calm) == 2
