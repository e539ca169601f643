"""Kills the process that started it if its event loop does not hear of a signal: native code may hold the interpreter, and with it
every thread that could.

A program of its own. Standard input brings a byte for each signal that came, as `signal.set_wakeup_fd` writes it, and `HEARD` once
the loop knows. Arguments: the process, and how many seconds that may take.
"""

import os
import select
import signal
import sys
import time

HEARD = 0
SIGNALS = (signal.SIGINT, signal.SIGTERM)
QUIT = b"penstock: quit at once, as a kill would\n"


def watch(process: int, patience_s: float) -> None:
    deadline = None
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([0], [], [], left)[0]:
            break
        numbers = os.read(0, 256)
        if not numbers:  # the process has ended, or left the block
            return
        for number in numbers:
            if number == HEARD:
                deadline = None
            elif number in SIGNALS:
                deadline = deadline or time.monotonic() + patience_s
    if os.getppid() == process:
        os.write(2, QUIT)
        os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    watch(int(sys.argv[1]), float(sys.argv[2]))
