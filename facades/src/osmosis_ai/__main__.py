"""Runs the `osmosis` command: `python -m osmosis_ai`."""

from osmosis_ai.cli import main

if __name__ == "__main__":
    main()
