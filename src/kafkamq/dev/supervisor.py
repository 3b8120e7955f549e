"""Runs a command and ends it when the process that asked for it is gone, even by kill -9.

Run as a script by `BrokerProcess`, with nothing imported from this package:
``supervisor.py PARENT_PID GRACE_SECONDS FOLDER_TO_REMOVE COMMAND...`` (an empty folder removes
nothing). It writes the process id of the command to its standard output, ends when the command
does and hands its exit code on. The command's own output goes to standard error.

The death signal of Linux alone would not do: it fires when the *thread* that started the process
ends, and a broker may well be started in a short-lived thread. Here it only ties the command to
this script, which has one thread.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time

POLL_S = 0.25
_PR_SET_PDEATHSIG = 1


def start(command: list[str]) -> int:
    """Starts the command as a child that dies with this process; returns its id."""
    supervisor = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        if sys.platform == "linux":
            import ctypes

            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:
                # The supervisor died before the call above.
                os._exit(1)
        os.dup2(2, 1)
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"ERROR cannot run {command[0]}: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(127)


def exit_code(status: int) -> int:
    """Return an exit code as shells give it: 128 + n after signal n."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def watch(child: int, *, parent: int, grace_s: float, remove: str) -> int:
    """Waits for the child, or for the end of the parent and then ends the child."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    # This only wakes the select below.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    kill_at = None
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if kill_at is None and os.getppid() != parent:
            # Data that is thrown away needs no clean stop.
            kill_at = time.monotonic() + (0.0 if remove else grace_s)
            os.kill(child, signal.SIGCONT)
            os.kill(child, signal.SIGTERM)
        if kill_at is not None and time.monotonic() >= kill_at:
            os.kill(child, signal.SIGKILL)
        if select.select([woken], [], [], POLL_S)[0]:
            os.read(woken, 4096)
    if kill_at is not None and remove:
        shutil.rmtree(remove, ignore_errors=True)
    return exit_code(status)


def main(arguments: list[str]) -> int:
    parent, grace, remove, *command = arguments
    child = start(command)
    os.write(1, b"%d\n" % child)
    return watch(child, parent=int(parent), grace_s=float(grace), remove=remove)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
