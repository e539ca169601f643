"""`python -m osmosis_ai`: the `osmosis` command."""

from osmosis_ai.cli import main

if __name__ == "__main__":
    main()
