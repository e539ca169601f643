"""The `penstock` command, also as `python -m penstock`, with the interpreter that is asked."""

import sys


def main() -> None:
    try:
        from penstock.cli.app import main as run_command  # takes a second, in which a Ctrl-C may come
    except KeyboardInterrupt:
        sys.exit(130)
    run_command()


if __name__ == "__main__":
    main()
