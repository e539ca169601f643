"""The run's config: what is read, and the one line that each mistake gets."""

from pathlib import Path

import pytest

from penstock.config import cache_folder, load_config, make_config, stored_config
from penstock.errors import ConfigError

LEAST = '[dataset]\ntrain = "tasks.jsonl"\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "train.toml"
    path.write_text(text, encoding="utf-8")
    return path


def complaint(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(written(folder, text), overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_paths_are_relative_to_the_file(tmp_path):
    config = load_config(written(tmp_path, LEAST + 'eval = "held.jsonl"\n[agent]\nentry = "my.py"\n'))
    assert config.dataset.train == tmp_path / "tasks.jsonl"
    assert config.dataset.eval == tmp_path / "held.jsonl"
    assert config.agent.entry == tmp_path / "my.py"
    assert config.run.folder == Path("runs")


def test_override_wins_over_file_and_keeps_its_toml_type(tmp_path):
    path = written(tmp_path, LEAST + "[train]\nlr = 1.0\n")
    config = load_config(path, ["train.lr=1e-5", "run.name=second", "train.shared_prefix=false", 'workflow.tags=["a", "b"]'])
    assert config.train.lr == 1e-5
    assert config.run.name == "second"
    assert config.train.shared_prefix is False
    assert config.workflow == {"tags": ["a", "b"]}


def test_an_override_keeps_what_follows_the_first_equals_sign(tmp_path):
    assert load_config(written(tmp_path, LEAST), ["workflow.query=a=b"]).workflow == {"query": "a=b"}


def test_a_frozen_config_cannot_be_changed_later(tmp_path):
    config = load_config(written(tmp_path, LEAST))
    with pytest.raises(Exception, match="frozen"):
        config.train.lr = 1.0  # pyright: ignore[reportAttributeAccessIssue]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_config(tmp_path / "absent.toml")


def test_a_folder_in_place_of_a_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="read"):
        load_config(tmp_path)


def test_bad_toml_says_where(tmp_path):
    assert "not valid TOML" in (message := complaint(tmp_path, LEAST + "[train]\nlr = \n"))
    assert "line 4" in message


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    assert load_config(written(tmp_path, "\ufeff" + LEAST)).train.steps == 10


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LEAST + "[rollout]\ngroup_sise = 4\n", "unknown key 'rollout.group_sise'; did you mean 'group_size'?"),
        (LEAST + "[train]\npromote = true\n", "it was removed"),
        (LEAST + "[training]\nsteps = 1\n", "unknown key 'training'; did you mean 'train'?"),
        ('[datasets]\ntrain = "tasks.jsonl"\n', "unknown key 'datasets'; did you mean 'dataset'?"),
        (LEAST + "[policies.planner]\nlrr = 1\n", "unknown key 'policies.planner.lrr'; did you mean 'lr'?"),
        (LEAST + '[policies.j]\nfrozen = true\n[policies.j.engine]\nname = "openai"\nurll = "x"\n', "did you mean 'url'?"),
        (LEAST + "[agent]\nzzzzzz = 1\n", "unknown key 'agent.zzzzzz'; known keys: command, entry, flow, flows"),
    ],
)
def test_an_unknown_key_names_the_nearest(tmp_path, text, said):
    assert said in complaint(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[train]\nsteps = 3\n", "key 'dataset' is missing"),
        (LEAST + '[train]\nlr = "fast"\n', "train.lr = 'fast'"),
        (LEAST + "[train]\nlr = nan\n", "train.lr = nan"),
        (LEAST + "[train]\nlr = -1.0\n", "train.lr = -1.0"),
        (LEAST + "[rollout]\ngroup_size = 0\n", "rollout.group_size = 0"),
        ("train = 3\n" + LEAST, "train = 3: write it as a table, [train]"),
        (LEAST + '[run]\nname = "../elsewhere"\n', "run.name = '../elsewhere'"),
        (LEAST + "[run]\nname = 5\n", "run.name = 5: input should be a valid string; write it in quotes"),
        (LEAST + '[engine]\ndtype = "float16"\n', "engine.dtype = 'float16'"),
        (LEAST + '[policies.planner]\nmodel = "tiny"\n', "model is for a frozen policy"),
        (LEAST + "[policies.judge]\nfrozen = true\nlr = 1.0\n", "lr has no meaning for a frozen policy"),
        (LEAST + '[policies."a b"]\n', "policies.a b = 'a b'"),
        (LEAST + "[policies]\nplanner = 3\n", "write it as a table, [policies.planner]"),
        (LEAST + "[policies.a]\ndefault = true\n[policies.b]\ndefault = true\n", "more than one policy has default = true"),
    ],
)
def test_a_wrong_value_is_shown_with_its_key(tmp_path, text, said):
    assert said in complaint(tmp_path, text)


def test_policies_keep_engine_keys_after_a_round_trip(tmp_path):
    text = LEAST + '[policies.user]\nfrozen = true\n[policies.user.engine]\nname = "openai"\nurl = "http://h/v1"\n'
    config = load_config(written(tmp_path, text))
    assert config.policies["user"].engine.url == "http://h/v1"
    assert make_config(config.model_dump(mode="json"), "again") == config


def test_a_config_without_policies_has_no_such_key(tmp_path):
    assert "policies" not in load_config(written(tmp_path, LEAST)).model_dump(mode="json")


def test_all_mistakes_are_reported_at_once(tmp_path):
    text = LEAST + '[train]\nlearning_rat = 1\nsteps = -1\n[rollout]\ngroup_sise = 4\n[engine]\nslot = 3\ndtype = "x"\n'
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text))
    found = {issue.key: issue.correction for issue in caught.value.issues}
    assert found == {
        "rollout.group_sise": "group_size", "train.learning_rat": "lr", "train.steps": None,
        "engine.slot": "slots", "engine.dtype": None,
    }  # fmt: skip
    first, *lines = str(caught.value).splitlines()
    assert first.endswith("train.toml: 5 problems")
    assert [line.strip() for line in lines] == [issue.line for issue in caught.value.issues]


def test_a_mistyped_key_stands_for_the_one_that_is_missing(tmp_path):
    assert "'datasets'; did you mean 'dataset'?" in complaint(tmp_path, '[datasets]\ntrain = "tasks.jsonl"\n')


@pytest.mark.parametrize("override", ["train.lr", "=3", "", "train.=3", ".lr=3", "train..lr=3"])
def test_override_without_key_or_value_says_how_to_write_it(tmp_path, override):
    assert "write it as section.key=value" in complaint(tmp_path, LEAST, override)


def test_an_override_below_a_plain_value_is_refused(tmp_path):
    assert "'lr' is a value, not a section" in complaint(tmp_path, LEAST + "[train]\nlr = 1.0\n", "train.lr.x=1")


def test_an_override_cannot_smuggle_a_second_key(tmp_path):
    config = load_config(written(tmp_path, LEAST), ["workflow.text=1\nother = 2"])
    assert config.workflow == {"text": "1\nother = 2"}


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("PENSTOCK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "penstock"


def test_stored_config_with_removed_keys_still_opens():
    tree = {"dataset": {"train": "tasks.jsonl"}, "train": {"promote": True, "reward_range": [0, 2], "on_alarm": "rollback"}}
    assert stored_config(tree, "config.json").train.on_alarm == "stop"
