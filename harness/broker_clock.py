"""A broker's wall clock that a test moves, while the machine's stays.

The broker's Java runs with a small library in front of the C library (LD_PRELOAD, compiled by the
C compiler that is there): what it asks of the wall clock is moved by an offset in a file, which may
change at any time; the monotonic clock, and with it every timeout, is untouched. So the timestamps
that the broker appends step as they do when somebody sets a machine's clock.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from pathlib import Path

from kafkamq.errors import ConfigError

_SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t *offset_s;

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("KAFKAMQ_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (page != MAP_FAILED) offset_s = page;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, id, now);
    if (result == 0 && offset_s && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        now->tv_sec += *offset_s;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &found)) return -1;
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *place) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (place) *place = found.tv_sec;
    return found.tv_sec;
}
"""


def why_no_clock() -> str:
    """Why a broker's clock cannot be moved here; empty: it can."""
    if sys.platform != "linux":
        return "LD_PRELOAD is Linux's"
    return "" if shutil.which("cc") else "a C compiler is missing (cc)"


class BrokerClock:
    """The clock of one broker: start it with ``launcher`` (of `LocalKafka`)."""

    def __init__(self, folder: Path) -> None:
        """Compiles the library into a folder.

        Raises:
            ConfigError: there is no compiler, or it refuses.
        """
        if reason := why_no_clock():
            raise ConfigError(f"the broker's clock cannot be moved: {reason}")
        self._file = folder / "clock"
        self.set(0)
        library = folder / "clock.so"
        command = ["cc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        done = subprocess.run(command, input=_SOURCE, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ConfigError(f"the broker's clock cannot be moved: {done.stderr.strip()}")
        self.launcher = ("env", f"LD_PRELOAD={library}", f"KAFKAMQ_CLOCK={self._file}")

    def set(self, offset_s: int) -> None:
        """So many seconds ahead of the machine's clock, from now on; below 0: behind."""
        if not self._file.exists():
            self._file.write_bytes(bytes(8))
        with self._file.open("r+b") as file:  # in place: the broker has it mapped
            file.write(struct.pack("=q", offset_s))
