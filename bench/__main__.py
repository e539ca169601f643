"""Runs the benchmarks named on the command line, or all: `python -m bench decode training`."""

import importlib
import sys

NAMES = (
    "decode",
    "structured",
    "training",
    "pool",
    "gateway",
    "rollouts",
    "step",
    "evals",
    "view",
    "scale",
)


def main() -> None:
    for name in sys.argv[1:] or NAMES:
        if name not in NAMES:
            raise SystemExit(f"no benchmark {name!r}; there are {', '.join(NAMES)}")
        print(f"== {name}", flush=True)
        importlib.import_module(f"bench.{name}").main()


if __name__ == "__main__":
    main()
