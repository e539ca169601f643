"""Benchmarks on one GPU: `python -m bench.gpu [--model FOLDER] [--json FILE] [NAME …]`, without a name all but `decode-1.7B`.

`update --shape 4B` measures updates of that shape alone.

Results are printed as they come. While vLLM starts, which takes a minute or two, `learn` makes the runs of which steps alone count.
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from bench.gpu import decode, learn, update
from penstock.models import resolve

NAMES = ("decode", "learn", "update")
LARGE = "decode-1.7B"
"""Runs only where it is named: its vLLM takes two minutes to start."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu")
    parser.add_argument("--model", default="smollm2-135m", help="SmolLM2-135M-Instruct: a folder, or a name that `penstock` knows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of each part there as soon as it ends")
    parser.add_argument("--shape", choices=update.SHAPES, help="only updates of this shape")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join((*NAMES, LARGE)))
    options = parser.parse_args()
    if unknown := sorted({*options.names} - {*NAMES, LARGE}):
        raise SystemExit(f"no benchmark {unknown[0]!r}; there are {', '.join((*NAMES, LARGE))}")
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here: these benchmarks need CUDA; `python -m bench` runs on a CPU")
    names, folder, started = options.names or NAMES, resolve(options.model).path, time.perf_counter()
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(f"{figures['device']}, torch {torch.__version__}", flush=True)
    failed: list[str] = []

    def measure(name: str, work: Callable[[], Any]) -> None:
        """Print what fails, and go on with the next part."""
        print(f"== {name}", flush=True)
        try:
            figures[name] = work()
        except Exception:
            traceback.print_exc()
            failed.append(name)
        print(f"== {name} ended {time.perf_counter() - started:.0f} s after the start", flush=True)
        if options.json:
            options.json.write_text(json.dumps(figures, indent=2))

    with ExitStack() as stack:
        peers = stack.enter_context(decode.opened_peers(folder)) if "decode" in names else None
        if "learn" in names:
            measure("learn, beside each other", lambda: learn.run_beside(folder))
        if peers is not None:
            measure("decode", lambda: decode.main(folder, peers))
    if "learn" in names:
        measure("learn", lambda: learn.main(folder, figures.pop("learn, beside each other", {})))
    if "update" in names:
        measure("update", lambda: update.main([options.shape] if options.shape else list(update.SHAPES)))
    if LARGE in names:
        measure(LARGE, decode.main_large)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
