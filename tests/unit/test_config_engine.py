"""`[engine]` takes the keys of the engine that it names, and no others."""

from pathlib import Path

import pytest

from penstock.config import EngineSection, load_config, make_config
from penstock.engines.servers.vllm import VllmSection
from penstock.errors import ConfigError

ROOT = Path(__file__).parents[2]
LEAST = '[dataset]\ntrain = "tasks.jsonl"\n'
VLLM = LEAST + '[engine]\nname = "vllm"\nurl = ["http://a:1", "http://b:1"]\n'


def written(folder: Path, text: str) -> Path:
    (folder / "train.toml").write_text(text)
    return folder / "train.toml"


def test_engine_behind_http_has_settings(tmp_path: Path):
    engine = load_config(written(tmp_path, VLLM), ["engine.stall_s=7"]).engine
    assert isinstance(engine, VllmSection)
    assert (engine.url, engine.stall_s) == (("http://a:1", "http://b:1"), 7.0)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_config_survives_a_round_trip(tmp_path: Path, name: str):
    config = load_config(written(tmp_path, VLLM), [f"engine.name={name}"])
    assert make_config(config.model_dump(mode="json"), "again") == config


def test_other_engines_take_what_the_embedded_one_does(tmp_path: Path):
    engine = load_config(written(tmp_path, LEAST + '[engine]\nname = "mine:engine"\nslots = 3\n')).engine
    assert (type(engine), engine.slots) == (EngineSection, 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (VLLM + "stal_s = 3\n", "unknown key 'engine.stal_s'; did you mean 'stall_s'?"),
        (LEAST + '[engine]\nurl = ["http://a:1"]\n', "unknown key 'engine.url'"),
        (LEAST + '[engine]\nname = "vllm"\n', "key 'engine.url' is missing"),
        (LEAST + '[engine]\nname = "sglang"\nurl = []\n', "engine.url = []"),
        (VLLM + "slots = 3\n", "engine.slots = 3: is a setting of the embedded engine"),
        (VLLM + 'dtype = "bfloat16"\n', "engine.dtype = 'bfloat16': is a setting of the embedded engine"),
        ("engine = 3\n" + LEAST, "engine = 3: write it as a table, [engine]"),
    ],
)
def test_what_it_does_not_take_is_refused_with_its_key(tmp_path: Path, text: str, said: str):
    with pytest.raises(ConfigError) as refused:
        load_config(written(tmp_path, text))
    assert said in str(refused.value)


def test_servers_that_cannot_be_reached_are_named_before_run_begins(tmp_path: Path):
    section = load_config(written(tmp_path, VLLM), ['engine.url=["http://127.0.0.1:1"]']).engine
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:1/health"):
        section.preflight("any")


def test_the_page_on_engines_lists_every_setting_with_its_default():
    page = (ROOT / "docs/train.md").read_text()
    for key, field in VllmSection.model_fields.items():
        if key not in EngineSection.model_fields:
            default = "required" if field.is_required() else f"`{field.default}`"
            assert f"| `engine.{key}` | {default} |" in page
