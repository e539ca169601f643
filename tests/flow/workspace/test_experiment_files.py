"""Experiment files: what each key becomes, and one error for all problems."""

import pytest
from workspace_cases import EXPERIMENT, WORKFLOW, made_workspace, tables

from penstock.config import make_config
from penstock.errors import ConfigError
from penstock_controller.experiment import is_experiment, read_experiment, to_body, to_tables


def issues(given, kind="eval"):
    with pytest.raises(ConfigError) as refused:
        read_experiment(given, kind, "x.toml")
    return {issue.key: issue for issue in refused.value.issues}


def config(folder, given, kind, rows=40, **options):
    tree = read_experiment(given, kind, "x.toml").run_config(
        code=folder, dataset=folder / "data/multiply.jsonl", rows=rows, **options
    )
    return make_config(tree, "x.toml")


def test_every_key_of_an_evaluation_becomes_one_of_ours(tmp_path):
    made_workspace(tmp_path)
    keys = {"limit": 5, "n": 6, "batch_size": 4, "pass_threshold": 0.5, "agent_workflow_timeout_s": 9, "grader_timeout_s": 8.5}
    found = config(tmp_path, tables(evaluation=keys, workflow=WORKFLOW, grader={"strict": True}), "eval")
    assert (found.eval.rows, found.eval.samples, found.eval.k, found.eval.passes) == ("0-4", 6, (1, 2, 4, 6), 0.5)
    assert (found.rollout.concurrency, found.rollout.agent_timeout_s, found.rollout.grader_timeout_s) == (4, 9, 8.5)
    assert found.agent.entry == tmp_path / "rollouts/multiply/main.py" and found.dataset.train == tmp_path / "data/multiply.jsonl"
    assert (found.model.name, found.workflow, found.grader) == ("tiny", WORKFLOW, {"strict": True})


def test_every_key_of_a_training_file_becomes_one_of_ours(tmp_path):
    made_workspace(tmp_path)
    training = {"lr": 1e-4, "total_epochs": 3, "n_samples_per_prompt": 4, "rollout_batch_size": 16, "max_response_length": 99}
    more = {"sampling": {"rollout_temperature": 0.7, "rollout_top_p": 0.9}, "checkpoints": {"checkpoint_save_freq": 2}}
    found = config(tmp_path, tables(training=training, **more), "train")
    assert (found.train.lr, found.train.checkpoint_every, found.train.steps) == (1e-4, 2, 8)  # 3 * 40 rows in steps of 16
    assert (found.rollout.group_size, found.rollout.groups_per_step) == (4, 16)
    assert (found.sampling.temperature, found.sampling.top_p, found.sampling.max_tokens) == (0.7, 0.9, 99)


def test_defaults_equal_those_of_the_platform(tmp_path):
    made_workspace(tmp_path)
    measured, trained = config(tmp_path, tables(), "eval"), config(tmp_path, tables(), "train", rows=64)
    assert (measured.eval.samples, measured.eval.passes, measured.eval.rows) == (1, 1.0, "")
    assert (measured.rollout.agent_timeout_s, measured.rollout.grader_timeout_s) == (450, 150)
    assert (trained.train.lr, trained.train.steps, trained.rollout.group_size, trained.rollout.groups_per_step) == (1e-6, 2, 8, 32)


def test_step_and_limit_are_bounded_by_the_rows(tmp_path):
    made_workspace(tmp_path)
    assert config(tmp_path, tables(), "train", rows=5).rollout.groups_per_step == 5
    assert config(tmp_path, tables(evaluation={"limit": 9}), "eval", rows=5).eval.rows == "0-4"


def test_all_problems_are_reported_together():
    found = issues(
        {
            "experiment": {"rollout": "a/b", "entrypoint": "../main.py", "model_path": "openai/osmosis-rollout", "datset": "d"},
            "evaluation": {"n": "8", "limit": True, "batch_size": 0},
            "env": {"lower": "x", "_OSMOSIS_X": "y", "GOOD": 3, "BOTH": "z"},
            "secrets": {"required": ["BOTH", "1BAD"]},
            "training": {"lr": 1},
            "advanced": {"model.name": "other"},
            "enviroment": {},
        }
    )
    assert set(found) == {
        *("experiment.rollout", "experiment.entrypoint", "experiment.model_path", "experiment.datset"),
        *("evaluation.n", "evaluation.limit", "evaluation.batch_size", "env.lower", "env._OSMOSIS_X", "env.GOOD", "env.BOTH"),
        *("secrets.required", "training", "advanced.model.name", "enviroment"),
    }
    assert (found["experiment.datset"].correction, found["enviroment"].correction) == ("dataset", "experiment")
    assert all(issue.key in issue.message or "[" in issue.message or "BOTH" in issue.message for issue in found.values())


@pytest.mark.parametrize(
    ("more", "key", "said"),
    [
        ({"branch": "main", "commit_sha": "abcdef1"}, "experiment.commit_sha", "keep one"),
        ({"commit_sha": "abc"}, "experiment.commit_sha", "7 to 40"),
        ({"commit_sha": "nothexnothex"}, "experiment.commit_sha", "hexadecimal"),
        ({"branch": " "}, "experiment.branch", "empty"),
        ({"rollout": 3}, "experiment.rollout", "in quotes"),
        ({"model_path": ""}, "experiment.model_path", "empty"),
    ],
)
def test_a_bad_experiment_table_says_which_key_and_why(more, key, said):
    assert said in issues({"experiment": EXPERIMENT | more})[key].message


def test_each_problem_is_one_line():
    with pytest.raises(ConfigError) as one:
        read_experiment({"experiment": EXPERIMENT | {"dataset": ""}}, "eval", "x.toml")
    assert str(one.value) == "x.toml: experiment.dataset = '': is empty; write its name"
    with pytest.raises(ConfigError) as two:
        read_experiment({"experiment": EXPERIMENT | {"dataset": "", "rollot": "x"}}, "eval", "x.toml")
    assert str(two.value).splitlines()[0] == "x.toml: 2 problems"
    assert "  unknown key 'experiment.rollot'; did you mean 'rollout'?" in str(two.value).splitlines()


def test_file_of_the_other_kind_names_its_command():
    assert "penstock train" in issues(tables(training={"lr": 1.0}))["training"].message
    assert "penstock eval run" in issues(tables(evaluation={"n": 1}), "train")["evaluation"].message


def test_advanced_keys_override_in_both_forms(tmp_path):
    made_workspace(tmp_path)
    advanced = {"train": {"steps": 2, "kl": 0.1}, "rollout.concurrency": 5, "executor": {"processes": 3}}
    found = config(tmp_path, tables(advanced=advanced, training={"total_epochs": 9}), "train")
    assert (found.train.steps, found.train.kl, found.rollout.concurrency, found.executor) == (2, 0.1, 5, {"processes": 3})


def test_unknown_advanced_keys_are_warnings():
    given = tables(advanced={"gpu": "h100", "train": {"sharding": "full"}, "cluster": {"nodes": 2}})
    read = read_experiment(given, "train", "x.toml")
    assert {issue.key for issue in read.warnings} == {"advanced.gpu", "advanced.train.sharding", "advanced.cluster.nodes"}
    assert read.tables == given


def test_keys_without_effect_are_warnings():
    given = tables(training={"max_prompt_length": 4096}, checkpoints={"eval_interval": 5})
    assert [issue.key for issue in read_experiment(given, "train", "x.toml").warnings] == [
        "training.max_prompt_length",
        "checkpoints.eval_interval",
    ]
    held = read_experiment(tables(checkpoints={"eval_interval": 5}, advanced={"dataset.eval": "data/h.jsonl"}), "train", "x.toml")
    assert held.warnings == ()


def test_advanced_paths_are_relative_to_workspace_and_rollout(tmp_path):
    made_workspace(tmp_path)
    advanced = {"dataset": {"eval": "data/held.jsonl"}, "agent": {"flows": "flows.yaml"}}
    found = config(tmp_path, tables(advanced=advanced), "train")
    assert found.dataset.eval == tmp_path / "data/held.jsonl"
    assert found.agent.flows == tmp_path / "rollouts/multiply/flows.yaml"


@pytest.mark.parametrize(
    ("path", "engine", "model"),
    [
        ("smollm2-135m", "embedded", "smollm2-135m"),
        ("hf:Qwen/Qwen3-0.6B", "embedded", "hf:Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B", "embedded", "hf:Qwen/Qwen3-0.6B"),
        ("openai/gpt-5-mini", "openai", "gpt-5-mini"),
        ("anthropic/claude-x", "anthropic", "claude-x"),
        ("openrouter/meta/llama", "litellm", "openrouter/meta/llama"),
    ],
)
def test_a_model_path_names_weights_or_an_endpoint(tmp_path, path, engine, model):
    made_workspace(tmp_path)
    read = read_experiment({"experiment": EXPERIMENT | {"model_path": path}}, "eval", "x.toml")
    tree = read.run_config(code=tmp_path, dataset=tmp_path / "data/multiply.jsonl", rows=1)
    assert (tree.get("engine", {}).get("name", "embedded"), tree["model"]["name"]) == (engine, model)


def test_provider_key_is_not_sent_elsewhere(tmp_path):
    made_workspace(tmp_path)
    elsewhere = {"engine": {"url": "http://127.0.0.1:9/v1"}}
    given = {"experiment": EXPERIMENT | {"model_path": "openai/gpt-5-mini"}, "advanced": elsewhere}
    read = read_experiment(given, "eval", "x.toml")
    engine = config(tmp_path, given, "eval").engine
    assert read.warnings == () and engine.model_dump(include={"name", "url", "api_key_env"}) == {
        "name": "openai", "url": "http://127.0.0.1:9/v1", "api_key_env": None,
    }  # fmt: skip


def test_model_path_may_be_a_workspace_folder(tmp_path):
    made_workspace(tmp_path)
    (tmp_path / "mine").mkdir()
    given = {"experiment": EXPERIMENT | {"model_path": "mine"}}
    assert config(tmp_path, given, "eval").model.name == str(tmp_path / "mine")
    assert config(tmp_path, given, "eval", model="/elsewhere").model.name == "/elsewhere"


def test_an_endpoint_cannot_be_trained():
    found = issues({"experiment": EXPERIMENT | {"model_path": "openai/gpt-5-mini"}}, "train")
    assert "cannot be trained" in found["experiment.model_path"].message


def test_missing_rollout_or_entrypoint_lists_what_exists(tmp_path):
    made_workspace(tmp_path)
    for more, key, said in (
        ({"rollout": "divide"}, "experiment.rollout", "there are multiply"),
        ({"entrypoint": "no.py"}, *["experiment.entrypoint", "no file rollouts/multiply/no.py"]),
    ):
        with pytest.raises(ConfigError) as refused:
            config(tmp_path, {"experiment": EXPERIMENT | more}, "eval")
        assert refused.value.issues[0].key == key and said in str(refused.value)


def test_a_body_is_the_file_and_back():
    given = tables(evaluation={"n": 2}, env={"A": "b"}, secrets={"required": ["K"]}, advanced={}, workflow=WORKFLOW)
    body = to_body(given)
    assert body["experiment_config"] == EXPERIMENT and body["secrets"] == {"required": ["K"]} and "advanced_config" not in body
    assert to_tables(body | {"snapshot": "abc", "training_config": None}) == {k: v for k, v in given.items() if v}
    assert is_experiment(given) and not is_experiment({"dataset": {}})


def test_what_others_ask_of_an_experiment_is_there():
    more = {"branch": "main"}
    read = read_experiment({"experiment": EXPERIMENT | more, "env": {"A": "b"}, "secrets": {"required": ["K"]}}, "eval", "x.toml")
    assert (read.rollout, read.entrypoint, read.model_path, read.dataset) == ("multiply", "main.py", "tiny", "multiply")
    assert (read.branch, read.commit_sha, read.env, read.secrets) == ("main", None, {"A": "b"}, ("K",))
