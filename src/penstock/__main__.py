"""`python -m penstock`: the command, with the interpreter that is asked."""

from penstock.cli import main

if __name__ == "__main__":
    main()
