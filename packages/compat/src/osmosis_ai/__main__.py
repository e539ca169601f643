"""The `osmosis` command, also as `python -m osmosis_ai`."""

from penstock.__main__ import run_command


def main() -> None:
    run_command("osmosis", "osmosis_ai.cli.app")


if __name__ == "__main__":
    main()
