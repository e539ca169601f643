"""Detection of CPUs that claim AMX instructions but cannot run them; oneDNN is then told not to use them.

Some virtual machines and sandboxes list AMX among the CPU's features and refuse to run it. oneDNN computes torch's bfloat16
products on a CPU, and there the first one ends the process with SIGILL. oneDNN reads $ONEDNN_MAX_CPU_ISA once, at its first
product or query, which may come long after `import torch`: https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html
"""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import orjson

from penstock.config import cache_folder
from penstock.errors import ConfigError
from penstock.system.files import write_file

VARIABLE, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
PRODUCTS = """
import torch
from torch.nn import functional
rows = torch.ones(64, 64, dtype=torch.bfloat16)
for left in (rows[:1], rows):
    functional.linear(left, rows)
heads = torch.ones(1, 4, 64, 64, dtype=torch.bfloat16)
torch.bmm(heads[0], heads[0])
functional.scaled_dot_product_attention(heads, heads, heads)
"""
CHILD = (sys.executable, "-c", PRODUCTS)
DEADLINE_S = 120
"""The child takes four seconds on a quiet machine, nearly all of them to import torch."""

log = logging.getLogger(__name__)


def limit_onednn(child: Sequence[str] = CHILD, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Disable AMX in oneDNN if this CPU cannot run it, for this process and its children; returns whether it is disabled.

    A CPU that claims AMX is tested by the command `child`, once per boot. $ONEDNN_MAX_CPU_ISA is left alone if it is set.
    """
    if VARIABLE not in os.environ and not _runs_claimed_amx(child, cpuinfo):
        log.warning("this CPU claims AMX and cannot run it: bfloat16 is computed without (%s=%s)", VARIABLE, WITHOUT_AMX)
        os.environ[VARIABLE] = WITHOUT_AMX
    return os.environ.get(VARIABLE) == WITHOUT_AMX


def _runs_claimed_amx(child: Sequence[str], cpuinfo: Path) -> bool:
    cpu = _first_cpu(cpuinfo)
    if not any(flag.startswith("amx") for flag in cpu.get("flags", "").split()):
        return True
    machine = {"cpu": cpu.get("model name", ""), "boot": _boot(), "torch": metadata.version("torch")}
    if (known := _recall(machine)) is not None:
        return known
    works = _try(child, os.environ) == 0
    if not works and (status := _try(child, {**os.environ, VARIABLE: WITHOUT_AMX})) != 0:
        raise ConfigError(f"bfloat16 cannot be computed on this CPU (a trial {_end(status)}); set engine.dtype = 'float32'")
    _remember(machine, works)
    return works


def _first_cpu(cpuinfo: Path) -> dict[str, str]:
    """The fields of the first processor listed; empty if the system has no such list."""
    try:
        first = cpuinfo.read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _boot() -> str:
    """Differs between machines that share a home folder, and between boots, as the hypervisor may have changed."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return os.uname().nodename


def _try(child: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """The exit status of `child`, a negative one for a signal; None if it ran past its deadline."""
    try:
        done = subprocess.run(
            child, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return done.returncode


def _end(status: int | None) -> str:
    if status is None:
        return f"ran for more than {DEADLINE_S} seconds"
    return f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"


def _recall(machine: dict[str, str]) -> bool | None:
    """The result of an earlier trial on this machine since its last boot; None if there was none."""
    try:
        saved = orjson.loads(_cache_file().read_bytes())
        return saved["runs_amx"] if saved["machine"] == machine else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(machine: dict[str, str], works: bool) -> None:
    with suppress(OSError):  # without the cache file, the next process only repeats the trial
        _cache_file().parent.mkdir(parents=True, exist_ok=True)
        write_file(_cache_file(), orjson.dumps({"machine": machine, "runs_amx": works}))


def _cache_file() -> Path:
    return cache_folder() / "cpu_features.json"
