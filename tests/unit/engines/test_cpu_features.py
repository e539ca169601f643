"""A CPU that claims AMX and cannot run it: found out by a child process, remembered, and oneDNN limited."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.engines import cpu_features
from penstock.engines.cpu_features import PRODUCTS, VARIABLE, WITHOUT_AMX, limit_onednn
from penstock.engines.embedded.engine import pick_dtype
from penstock.errors import ConfigError

CPU = torch.device("cpu")
WITH_AMX = "processor : 0\nmodel name : Xeon\nflags : fpu avx512_bf16 amx_bf16 amx_tile\n\nprocessor : 1\nflags : fpu\n"
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
DIES_WITH_AMX = f"import os, signal; os.environ.get({VARIABLE!r}) == {WITHOUT_AMX!r} or os.kill(os.getpid(), signal.SIGILL)"


class Trials:
    """A CPU that claims AMX, and a child that is counted before it does what `code` says."""

    def __init__(self, folder: Path) -> None:
        self._log, self.cpuinfo = folder / "trials", folder / "cpuinfo"
        self.cpuinfo.write_text(WITH_AMX)

    def limit(self, code: str) -> bool:
        return limit_onednn((sys.executable, "-c", f"open({str(self._log)!r}, 'a').write('x')\n{code}"), self.cpuinfo)

    @property
    def count(self) -> int:
        return len(self._log.read_text()) if self._log.exists() else 0


@pytest.fixture
def trials(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(VARIABLE, "")  # so that what a test sets is taken back
    monkeypatch.delenv(VARIABLE)
    return Trials(tmp_path)


def test_onednn_is_limited_where_the_child_dies_of_amx(trials, caplog):
    assert trials.limit(DIES_WITH_AMX)
    assert os.environ[VARIABLE] == WITHOUT_AMX
    assert "claims AMX and cannot run it" in caplog.text


def test_onednn_is_left_alone_where_the_child_lives(trials):
    assert not trials.limit("pass")
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(("code", "limited"), [("pass", False), (DIES_WITH_AMX, True)])
def test_a_second_process_takes_what_the_first_found(trials, monkeypatch, code, limited):
    trials.limit(code)
    tried = trials.count
    monkeypatch.delenv(VARIABLE, raising=False)
    assert trials.limit(DIES) is limited
    assert trials.count == tried


@pytest.mark.parametrize("changed", ["cpu", "torch", "boot", "cache"])
def test_another_machine_another_torch_and_a_damaged_cache_are_tried_again(trials, tmp_path, monkeypatch, changed):
    trials.limit("pass")
    if changed == "cpu":
        trials.cpuinfo.write_text(WITH_AMX.replace("Xeon", "Xeon 2"))
    elif changed == "cache":
        (tmp_path / "cache" / "cpu_features.json").write_text('{"machine": ')
    elif changed == "torch":
        monkeypatch.setattr(cpu_features.metadata, "version", lambda name: "9.9")  # one torch is installed
    else:
        monkeypatch.setattr(cpu_features, "_boot", lambda: "another")  # a test cannot start the machine anew
    assert trials.limit(DIES_WITH_AMX)
    assert trials.count == 3


def test_a_cache_that_cannot_be_written_costs_a_trial_and_no_more(trials, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file" / "cache"))
    assert [trials.limit("pass"), trials.limit("pass")] == [False, False]
    assert trials.count == 2


def test_a_cpu_that_claims_no_amx_is_not_tried(trials):
    trials.cpuinfo.write_text(WITH_AMX.replace("amx_bf16 amx_tile", ""))
    assert not trials.limit(DIES)
    trials.cpuinfo.unlink()
    assert not trials.limit(DIES)
    assert trials.count == 0


@pytest.mark.parametrize(("chosen", "limited"), [("AVX2", False), (WITHOUT_AMX, True)])
def test_what_the_user_has_set_stays_and_nothing_is_tried(trials, monkeypatch, chosen, limited):
    monkeypatch.setenv(VARIABLE, chosen)
    assert trials.limit(DIES) is limited
    assert (os.environ[VARIABLE], trials.count) == (chosen, 0)


def test_a_cpu_that_dies_without_amx_too_is_refused_with_the_remedy(trials):
    with pytest.raises(ConfigError, match=r"died of SIGILL\); set engine\.dtype = 'float32'"):
        trials.limit(DIES)
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("name", "device", "tried"),
    [("bfloat16", "cpu", 1), ("float32", "cpu", 0), ("auto", "cpu", 0), ("auto", "cuda", 0), ("bfloat16", "cuda", 0)],
)
def test_a_cpu_is_tried_only_before_bfloat16_on_it(name, device, tried):
    calls: list[str] = []
    pick_dtype(name, torch.device(device), limit=lambda: bool(calls.append(name)))
    assert len(calls) == tried


def test_a_limit_that_comes_too_late_is_refused_with_the_remedy(monkeypatch):
    # only a CPU with float16 instructions answers True, and this one may have none
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: True)
    with pytest.raises(ConfigError, match=f"set {VARIABLE}={WITHOUT_AMX} in the environment and start again"):
        pick_dtype("bfloat16", CPU, limit=lambda: True)
    assert pick_dtype("bfloat16", CPU, limit=lambda: False) is torch.bfloat16


def answers(code: str) -> list[str]:
    """What a fresh interpreter prints of `code`, in which `able()` asks oneDNN for bfloat16."""
    before = "import os, torch\nable = torch.ops.mkldnn._is_mkldnn_bf16_supported\n"
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, "-c", before + code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout.split()


@pytest.mark.slow
@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 instructions to limit")
def test_onednn_heeds_a_limit_set_after_torch_was_imported_and_none_after_its_first_use():
    limit = f"os.environ[{VARIABLE!r}] = 'AVX2'\n"
    assert answers(f"{limit}print(able())\n{PRODUCTS}\nprint(left.dtype)") == ["False", "torch.bfloat16"]
    assert answers("print(able())\n" + limit + "print(able())") == ["True", "True"]


def test_the_module_imports_no_torch():
    code = "import sys, penstock.engines.cpu_features; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
