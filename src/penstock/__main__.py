"""The `penstock` command, also as `python -m penstock`, with the interpreter that is asked."""

import os
import signal
from importlib import import_module


def main() -> None:
    run_command("penstock", "penstock.cli.app")


def run_command(name: str, module: str) -> None:
    """Imports the module of the command `name` and calls its `main`.

    A Ctrl-C during the import, which takes a second, ends the process with a line: as an exception it would be a traceback, and
    crashes some native modules.
    """

    def stop(*_: object) -> None:
        os.write(2, f"\n{name}: stopped by Ctrl-C\n".encode())
        os._exit(130)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as in the background of a script
        signal.signal(signal.SIGINT, stop)
    command = import_module(module).main
    if signal.getsignal(signal.SIGINT) is stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


if __name__ == "__main__":
    main()
