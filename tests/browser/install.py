"""Installs what `make test-view` needs besides, outside the checkout: `python tests/browser/install.py FOLDER`.

axe-core comes from npm. The trackers' packages (450 MB) get an environment of their own, which sees the project's after its own.
"""

import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


def main(folder: Path) -> None:
    axe, trackers = folder / "axe", folder / "trackers"
    axe.mkdir(parents=True, exist_ok=True)
    run("npm", "install", "--prefix", axe, "--no-audit", "--no-fund", "--no-update-notifier", "axe-core@latest")
    if not (trackers / "bin" / "python").exists():
        venv.create(trackers, with_pip=True)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = [package for name in TRACKERS for package in extras[name]]
    python = trackers / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--upgrade", "-c", ROOT / "constraints.txt", *wanted)
    own = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True)
    project = sysconfig.get_path("purelib")
    (Path(own.stdout.strip()) / "project.pth").write_text(f"import site; site.addsitedir({project!r})\n")


def run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).expanduser())
