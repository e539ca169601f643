"""Claw-R1's dotted keys that have an effect, each with the Penstock setting that it sets."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

Values = Mapping[str, Any]

FLOW = "actor_rollout_ref.rollout.agent"
ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"

ALIASES = {
    "agent_flow_config_path": f"{FLOW}.agent_flow_config_path",
    "default_agent_flow": f"{FLOW}.default_agent_flow",
    "agent_flow.agent_flow_config_path": f"{FLOW}.agent_flow_config_path",
    "agent_flow.default_agent_flow": f"{FLOW}.default_agent_flow",
    "agent_flow.num_workers": f"{FLOW}.num_workers",
    "async_trainer.max_queue_size": "async_training.max_queue_size",
    "async_trainer.staleness_threshold": "async_training.staleness_threshold",
    "async_trainer.trigger_parameter_sync_step": "async_training.trigger_parameter_sync_step",
    "async_trainer.use_rollout_log_probs": "async_training.use_rollout_log_probs",
    "reward.type": "reward_model.type",
    "rollout.mode": f"{ROLLOUT}.mode",
    "trainer.model.path": "actor_rollout_ref.model.path",
    "trainer.model.trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
}
"""Alternative spellings. Claw-R1's documentation uses them, its code does not."""


class MappedKey(NamedTuple):
    """A key that sets exactly one setting."""

    ours: str
    read: Callable[[Any], Any] = lambda value: value
    """Converts the value. None leaves the setting at its default."""
    note: str = ""


def from_here(value: Any) -> Any:
    """Makes a path absolute: other processes have another working directory."""
    return value and str(Path(str(value)).absolute())


def model(value: Any) -> Any:
    """Adds the prefix `hf:` to a Hugging Face name. Folders and Penstock's model names stay unchanged."""
    is_remote = isinstance(value, str) and value.count("/") == 1 and not value.startswith(("/", ".", "~", "hf:"))
    return f"hf:{value}" if is_remote and not Path(str(value)).exists() else value


def one_file(value: Any) -> Any:
    """Unpacks a list of one file."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def packaged(value: Any) -> Any:
    """Looks for a path that does not exist next to the installed `claw_r1` package."""
    spec = find_spec("claw_r1")
    roots = [Path(place).parent for place in (spec.submodule_search_locations or ())] if spec else []
    found = [root / str(value) for root in roots if value and not Path(str(value)).exists() and (root / str(value)).is_file()]
    return str(found[0]) if found else value


def positive(value: Any) -> Any:
    """Returns None for 0 or less (in Claw-R1: never, no limit), which leaves the setting at its default."""
    return None if isinstance(value, int | float) and value <= 0 else value


def not_negative(value: Any) -> Any:
    """Returns 0 for a negative number (in Claw-R1: never, all)."""
    return max(0, value) if isinstance(value, int) else value


MAPPED_KEYS: dict[str, MappedKey] = {
    "actor_rollout_ref.model.path": MappedKey(
        "model.name", model, "`tiny`, `smollm2-135m`, a folder, or `ORG/NAME` of Hugging Face"
    ),
    f"{FLOW}.default_agent_flow": MappedKey("agent.flow"),
    f"{FLOW}.agent_flow_config_path": MappedKey(
        "agent.flows", packaged, "a file that is not there is looked for in the installed package"
    ),
    f"{FLOW}.num_workers": MappedKey("executor.workers", note="on Ray only"),
    f"{ROLLOUT}.n": MappedKey("rollout.group_size"),
    f"{ROLLOUT}.temperature": MappedKey("sampling.temperature"),
    f"{ROLLOUT}.top_p": MappedKey("sampling.top_p"),
    f"{ROLLOUT}.top_k": MappedKey("sampling.top_k", not_negative),
    f"{ROLLOUT}.response_length": MappedKey("sampling.max_tokens"),
    f"{ROLLOUT}.max_num_seqs": MappedKey("engine.slots"),
    f"{ACTOR}.optim.lr": MappedKey("train.lr"),
    f"{ACTOR}.optim.weight_decay": MappedKey("train.weight_decay"),
    f"{ACTOR}.grad_clip": MappedKey("train.grad_clip"),
    f"{ACTOR}.clip_ratio_low": MappedKey("train.clip_low"),
    f"{ACTOR}.clip_ratio_high": MappedKey("train.clip_high"),
    f"{ACTOR}.ppo_epochs": MappedKey("train.updates_per_step"),
    f"{ACTOR}.ppo_max_token_len_per_gpu": MappedKey("train.tokens_per_pass"),
    "data.train_files": MappedKey("dataset.train", one_file, "one file: JSONL, CSV or parquet"),
    "data.val_files": MappedKey("dataset.eval", one_file, "one file"),
    "data.val_max_samples": MappedKey("dataset.eval_limit", positive),
    "data.train_batch_size": MappedKey("rollout.groups_per_step"),
    "data.max_response_length": MappedKey("sampling.max_tokens"),
    "data.shuffle": MappedKey("dataset.shuffle"),
    "data.seed": MappedKey("run.seed"),
    "trainer.total_training_steps": MappedKey("train.steps"),
    "trainer.test_freq": MappedKey("train.eval_every", not_negative),
    "rollout.test_freq": MappedKey("train.eval_every", not_negative),
    "trainer.save_freq": MappedKey(
        "train.checkpoint_every", positive, "-1 keeps the default: what is not saved cannot be taken up again"
    ),
    "trainer.max_actor_ckpt_to_keep": MappedKey("train.checkpoints_kept", note="at least 2"),
    "trainer.gateway_port": MappedKey("gateway.port", note="any free one where not given"),
    "trainer.device": MappedKey("engine.device"),
    "async_training.enable_prefix_tree_merge": MappedKey(
        "train.shared_prefix", note="on where not given; the gradients are the same"
    ),
    "ray_kwargs.ray_init.address": MappedKey(
        "scale.address", note="`auto` or an address; a Ray of its own is started where not given"
    ),
    "custom_reward_function.path": MappedKey("grader.path", from_here, "a file with the function that grades"),
    "custom_reward_function.name": MappedKey("grader.function", note="`compute_score` where not given"),
}

COMBINED_KEYS: dict[str, tuple[str, str]] = {
    "algorithm.adv_estimator": ("train.advantage", "`grpo`"),
    "algorithm.norm_adv_by_std_in_grpo": ("train.advantage", "false makes `grpo` `dr_grpo`"),
    f"{ACTOR}.use_kl_loss": ("train.kl", "false is 0"),
    f"{ACTOR}.kl_loss_coef": ("train.kl", "0.001 where not given"),
    f"{ACTOR}.clip_ratio": ("train.clip_low, train.clip_high", "both, where the key of one does not say otherwise"),
    f"{ROLLOUT}.val_kwargs.temperature": ("sampling.eval_temperature", ""),
    f"{ROLLOUT}.val_kwargs.do_sample": ("sampling.eval_temperature", "false is 0"),
    "async_training.staleness_threshold": (
        "rollout.max_staleness",
        "with the sync step k and the threshold t: k - 1 + ⌈k · t⌉ versions, enforced; 4 where neither is given",
    ),
    "async_training.trigger_parameter_sync_step": ("rollout.max_staleness", "weights are published after every step all the same"),
    "async_training.max_queue_size": ("rollout.max_waiting, rollout.overflow", "the oldest complete group is dropped, and counted"),
    "trainer.total_epochs": ("train.steps", "epochs times tasks over batch size, where no number of steps is given"),
    "rollout.total_epochs": ("train.steps", "the same"),
    "rollout.total_rollout_steps": ("train.steps", "where `trainer.total_training_steps` is not given"),
    "trainer.project_name": ("run.folder", "`runs/PROJECT`"),
    "trainer.experiment_name": ("run.name", ""),
    "trainer.default_local_dir": ("run.folder, run.name", "the folder of the run; goes before the two names"),
    "trainer.resume_mode": ("", "`auto` takes the run of that name up, `disable` keeps it aside and starts over"),
}
"""Keys that determine a setting together; see `convert.py`."""
