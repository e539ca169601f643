"""The dotted keys of `claw_r1.async_main`: what each sets, what is refused by name, and what is said to have no effect."""

from pathlib import Path

import pytest

from claw_r1.async_main import main, run_config
from claw_r1.convert import convert, read_overrides
from claw_r1.keys import ACTOR, ALIASES, COMBINED_KEYS, FIXED_KEYS, FLOW, IGNORED_KEYS, MAPPED_KEYS, ROLLOUT
from penstock.config import RunConfig, load_config
from penstock.errors import ConfigError

NEEDED = ("data.train_files=tasks.jsonl", "actor_rollout_ref.model.path=tiny")
REFERENCE = f"""
algorithm.adv_estimator=grpo data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=128
data.max_prompt_length=512 data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation='error'
data.return_raw_chat=True actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct {ACTOR}.optim.lr=1e-6
actor_rollout_ref.model.use_remove_padding=True {ACTOR}.ppo_mini_batch_size=32 {ACTOR}.ppo_micro_batch_size_per_gpu=40
{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.001 {ACTOR}.kl_loss_type=low_var_kl {ACTOR}.entropy_coeff=0
actor_rollout_ref.model.enable_gradient_checkpointing=True {ACTOR}.fsdp_config.param_offload=False
{ROLLOUT}.log_prob_micro_batch_size_per_gpu=40 {ROLLOUT}.tensor_model_parallel_size=1 {ROLLOUT}.name=vllm
{ROLLOUT}.gpu_memory_utilization=0.8 {ROLLOUT}.n=5 {FLOW}.default_agent_flow=blackbox_gsm8k_agent
{FLOW}.agent_flow_config_path=claw_r1/blackbox_agent/agent_flow_config.yaml actor_rollout_ref.ref.fsdp_config.param_offload=True
algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=["console","swanlab"] trainer.project_name='black_box'
trainer.experiment_name='qwen_gsm8k' trainer.n_gpus_per_node=2 trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=20
trainer.total_training_steps=870 rollout.n_gpus_per_node=1 rollout.nnodes=1 async_training.trigger_parameter_sync_step=1
async_training.use_rollout_log_probs=true async_training.max_queue_size=null
""".split()
"""The keys of the reference's own GSM8K run."""


def settings(*arguments: str) -> dict:
    return convert(read_overrides(arguments)).settings


def config(*arguments: str) -> RunConfig:
    return run_config(convert(read_overrides([*NEEDED, *arguments])))


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config(*arguments)
    return str(caught.value)


def test_references_own_command_line_is_a_run():
    converted = convert(read_overrides(REFERENCE))
    made = run_config(converted)
    assert (made.model.name, made.rollout.group_size, made.rollout.groups_per_step) == ("hf:Qwen/Qwen2.5-3B-Instruct", 5, 128)
    assert (made.train.lr, made.train.kl, made.train.steps, made.train.eval_every) == (1e-6, 0.001, 870, 20)
    assert (made.sampling.max_tokens, made.rollout.max_staleness, made.agent.flow) == (1024, 1, "blackbox_gsm8k_agent")
    assert (made.run.folder, made.run.name) == (Path("runs/black_box"), "qwen_gsm8k")
    assert (made.scale.name, made.rollout.executor) == ("ray", "ray")
    assert converted.config["actor_rollout_ref"]["rollout"]["agent"]["default_agent_flow"] == "blackbox_gsm8k_agent"
    said = "\n".join(converted.notices)
    assert "trainer.nnodes" in said and f"{ROLLOUT}.name" in said and "trainer.test_freq" not in said


def test_packaged_flows_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = "claw_r1/blackbox_agent/agent_flow_config.yaml"
    assert Path(settings(f"agent_flow_config_path={path}")["agent.flows"]).is_file()
    (tmp_path / "claw_r1" / "blackbox_agent").mkdir(parents=True)
    (tmp_path / path).touch()
    assert settings(f"agent_flow_config_path={path}")["agent.flows"] == path


@pytest.mark.parametrize(("alias", "key"), ALIASES.items())
def test_both_documented_spellings_of_a_key_are_one(alias, key):
    assert read_overrides([f"{alias}=1"]) == read_overrides([f"{key}=1"]) == {key: 1}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1_000", 1000),
        ("-1", -1),
        ("0.5", 0.5),
        ("True", True),
        ("null", None),
        ("None", None),
        ("", None),
        ("'error'", "error"),
        ('"a=b"', "a=b"),
        ("[console,wandb]", ["console", "wandb"]),
        ('["console", 1e-3]', ["console", 1e-3]),
        ("{a: 1}", {"a": 1}),
        ("{a:1,b:x}", {"a": 1, "b": "x"}),
        ("a=b", "a=b"),
        ("hf:ORG/NAME@main", "hf:ORG/NAME@main"),
    ],
)
def test_value_is_read_as_hydra_reads_it(text, value):
    assert read_overrides([f"+trainer.logger={text}"]) == {"trainer.logger": value}


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--config-name=ppo", "no config files of Hydra"),
        ("~trainer.logger", "cannot be taken away"),
        ("trainer.logger", "write it as key=value"),
        ("=1", "write it as key=value"),
        ("trainer.logger=[a", "close what is open"),
        ("trainer.default_local_dir=${trainer.project_name}", "write the value itself"),
    ],
)
def test_argument_without_value_is_refused(argument, words):
    assert words in refused(argument)


@pytest.mark.parametrize("key", [*MAPPED_KEYS, *(key for key in COMBINED_KEYS if "resume" not in key and "clip" not in key)])
def test_every_key_names_an_existing_setting(key):
    ours = (MAPPED_KEYS[key].ours if key in MAPPED_KEYS else COMBINED_KEYS[key][0]).split(", ")
    for each in ours:
        section, name = each.split(".")
        free = section in ("executor", "grader")
        assert free or name in RunConfig.model_fields[section].annotation.model_fields  # pyright: ignore


@pytest.mark.parametrize(
    ("given", "ours", "value"),
    [
        (f"{ROLLOUT}.top_k=-1", "sampling.top_k", 0),
        ("trainer.test_freq=-1", "train.eval_every", 0),
        ("rollout.test_freq=3", "train.eval_every", 3),
        ("data.train_files=[a.parquet]", "dataset.train", "a.parquet"),
        ("algorithm.norm_adv_by_std_in_grpo=False", "train.advantage", "dr_grpo"),
        (f"{ACTOR}.use_kl_loss=True", "train.kl", 0.001),
        (f"{ACTOR}.kl_loss_coef=0.1", "train.kl", 0.0),
        (f"{ROLLOUT}.val_kwargs.temperature=0.7", "sampling.eval_temperature", 0.7),
        (f"{ROLLOUT}.val_kwargs.do_sample=False", "sampling.eval_temperature", 0.0),
        ("async_training.max_queue_size=9", "rollout.overflow", "drop"),
        ("rollout.total_rollout_steps=7", "train.steps", 7),
        ("trainer.default_local_dir=a/b", "run.folder", "a"),
        ("custom_reward_function.path=score.py", "grader.path", str(Path("score.py").absolute())),
        ("penstock.train.lr=1e-3", "train.lr", 1e-3),
    ],
)
def test_key_sets_what_it_means_here(given, ours, value):
    assert settings(given)[ours] == value


@pytest.mark.parametrize(("steps", "share", "versions"), [(1, 0, 0), (1, 0.1, 1), (4, 0.1, 4), (4, 0, 3), (2, 1, 3)])
def test_staleness_that_the_two_keys_allow_becomes_a_bound(steps, share, versions):
    given = (f"async_training.trigger_parameter_sync_step={steps}", f"async_training.staleness_threshold={share}")
    assert settings(*given)["rollout.max_staleness"] == versions


def test_synchronous_training_takes_no_staleness_key():
    assert convert({}, is_async=False).settings["rollout.max_staleness"] == 0
    with pytest.raises(ConfigError, match="main_agent_ppo"):
        convert({"async_training.staleness_threshold": 0.5}, is_async=False)


def test_one_clip_sets_both_sides():
    both = settings(f"{ACTOR}.clip_ratio=0.3")
    assert (both["train.clip_low"], both["train.clip_high"]) == (0.3, 0.3)
    wider = settings(f"{ACTOR}.clip_ratio=0.3", f"{ACTOR}.clip_ratio_high=0.4")
    assert (wider["train.clip_low"], wider["train.clip_high"]) == (0.3, 0.4)


@pytest.mark.parametrize("key", FIXED_KEYS)
def test_fixed_key_with_another_value_is_refused(key):
    kept = FIXED_KEYS[key].values[0]
    assert convert({key: kept}).notices == []
    message = refused(f"{key}=other")
    assert key in message and FIXED_KEYS[key].reason in message


def test_keys_without_effect_are_accepted_and_named_with_the_reason():
    keys = [each.replace("*", "anything") for patterns in IGNORED_KEYS.values() for each in patterns]
    notices = convert(dict.fromkeys(keys, 1)).notices
    assert sorted(key for notice in notices for key in keys if f" {key}," in notice or f" {key} (" in notice) == sorted(keys)
    assert len(notices) == len(IGNORED_KEYS)


def test_no_key_is_in_two_tables():
    tables = [*MAPPED_KEYS, *COMBINED_KEYS, *FIXED_KEYS, *(each for patterns in IGNORED_KEYS.values() for each in patterns)]
    assert len(tables) == len(set(tables))


def test_unknown_key_names_the_nearest():
    assert f"did you mean '{ROLLOUT}.temperature'?" in refused(f"{ROLLOUT}.temprature=1")
    assert "docs/claw-r1.md" in refused("nothing.like.it=1")


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("trainer.total_training_steps=many", "trainer.total_training_steps = 'many'"),
        ("trainer.experiment_name=a/b", "trainer.experiment_name = 'a/b'"),
        ("algorithm.adv_estimator=gae", "use grpo"),
        ("async_training.staleness_threshold=-1", "0 or more"),
        ("penstock.train.learning=1", "unknown key 'train.learning'"),
        ("trainer.resume_mode=resume_path", "use auto or disable"),
    ],
)
def test_bad_value_is_reported_under_the_given_key(argument, words):
    assert words in refused(argument)


def test_missing_dataset_is_asked_for_by_its_key():
    with pytest.raises(ConfigError, match=r"data\.train_files"):
        run_config(convert({}))


def test_epochs_become_steps_over_the_tasks_of_the_file(tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "1+1"}\n' * 10)
    made = run_config(convert(read_overrides([f"data.train_files={tasks}", "trainer.total_epochs=3", "data.train_batch_size=4"])))
    assert made.train.steps == 7


def test_same_keys_work_without_ray():
    (notice,) = convert(read_overrides(["penstock.scale.name=none", f"{FLOW}.num_workers=4"])).notices
    assert f"{FLOW}.num_workers (there are no workers in one process)" in notice
    made = config("penstock.scale.name=none", f"{FLOW}.num_workers=4")
    assert (made.scale.name, made.rollout.executor, made.executor) == ("none", "inline", {})


def test_bad_input_is_one_line_and_exit_code_2(capsys):
    assert main(["trainer.totl_epochs=1"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "trainer.total_epochs" in err
    assert main(["--help"]) == 0


def test_settings_equal_those_of_a_config_file(tmp_path):
    (tmp_path / "train.toml").write_text('[dataset]\ntrain = "tasks.jsonl"\n[model]\nname = "tiny"\n[train]\nlr = 0.001\n')
    ours = load_config(tmp_path / "train.toml")
    theirs = config(f"{ACTOR}.optim.lr=1e-3", "penstock.scale.name=none")
    assert theirs.train == ours.train
