"""Benchmarks on one GPU: `python -m bench.gpu [--model FOLDER] [NAME …]`, all of them without a name."""

import argparse
import importlib

import torch

from penstock.models import resolve

NAMES = ("decode", "update", "learn")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu")
    parser.add_argument("--model", default="smollm2-135m", help="SmolLM2-135M-Instruct: a folder, or a name that `penstock` knows")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    options = parser.parse_args()
    if unknown := sorted({*options.names} - {*NAMES}):
        raise SystemExit(f"no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here: these benchmarks need CUDA; `python -m bench` runs on a CPU")
    folder = resolve(options.model).path
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for name in options.names or NAMES:
        print(f"== {name}", flush=True)
        importlib.import_module(f"bench.gpu.{name}").main(folder)


if __name__ == "__main__":
    main()
