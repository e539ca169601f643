"""Claw-R1's dotted keys: those that set something in Penstock, those that accept fixed values only, and those without effect."""

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
    "ray_kwargs.ray_init.address": MappedKey("scale.address", note="`auto` or an address; a local Ray is started if not given"),
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


# Keys that set nothing


class FixedKey(NamedTuple):
    """A key that accepts only the values that Penstock uses anyway."""

    values: tuple[Any, ...]
    reason: str


FIXED_KEYS: dict[str, FixedKey] = {
    "algorithm.use_kl_in_reward": FixedKey((False,), f"the KL penalty is in the loss; set {ACTOR}.use_kl_loss"),
    f"{ACTOR}.kl_loss_type": FixedKey(("low_var_kl", "k3"), "the KL penalty is estimated in this one way"),
    f"{ACTOR}.entropy_coeff": FixedKey((0,), "the loss has no entropy term"),
    f"{ACTOR}.policy_loss.loss_mode": FixedKey(("vanilla",), "the loss is PPO's clip"),
    f"{ACTOR}.use_rollout_log_probs": FixedKey(
        (True,), "tokens are trained with the log-probabilities that they were sampled with"
    ),
    f"{ACTOR}.optim.lr_warmup_steps": FixedKey((-1, 0, None), "the learning rate is constant"),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": FixedKey((0,), "the learning rate is constant"),
    f"{ACTOR}.optim.lr_scheduler_type": FixedKey(("constant",), "the learning rate is constant"),
    f"{ROLLOUT}.mode": FixedKey(
        ("async",), "rollouts are always asynchronous; for synchronous training run claw_r1.main_agent_ppo"
    ),
    f"{ROLLOUT}.repetition_penalty": FixedKey((1,), "engines sample without it"),
    f"{ROLLOUT}.val_kwargs.n": FixedKey((1,), "each held-out task is tried once; put rows into the file several times"),
    f"{ROLLOUT}.val_kwargs.top_p": FixedKey((1,), "held-out rollouts have a temperature of their own, and nothing else"),
    f"{ROLLOUT}.val_kwargs.top_k": FixedKey((-1, 0), "held-out rollouts have a temperature of their own, and nothing else"),
    f"{FLOW}.custom_async_server.path": FixedKey((None,), "no server is started; name an engine with penstock.engine.name"),
    f"{FLOW}.custom_async_server.name": FixedKey((None,), "no server is started; name an engine with penstock.engine.name"),
    "actor_rollout_ref.model.lora_rank": FixedKey((0,), "all weights are trained"),
    "actor_rollout_ref.model.external_lib": FixedKey((None,), "no code of a model is run"),
    "actor_rollout_ref.model.custom_chat_template": FixedKey((None,), "put it into the model's tokenizer_config.json"),
    "async_training.require_batches": FixedKey((1,), "a step takes one batch; set data.train_batch_size"),
    "async_training.use_rollout_log_probs": FixedKey(
        (True,), "tokens are trained with the log-probabilities that they were sampled with"
    ),
    "data.custom_cls.path": FixedKey((None,), "rows are read by Penstock"),
    "data.prompt_key": FixedKey(("prompt",), "rename the column to prompt"),
    "data.reward_fn_key": FixedKey(("data_source",), "rename the column to data_source"),
    "data.tokenizer": FixedKey((None,), "the model's own is used"),
    "data.train_max_samples": FixedKey((-1,), "cut the file"),
    "data.truncation": FixedKey(("error",), "a prompt is never cut: one that does not fit is refused, and ends its own rollout"),
    "reward_model.enable": FixedKey(
        (False,), "no reward model is started; ask yours in a grader or in custom_reward_function.path"
    ),
    "reward_model.type": FixedKey(("rule",), "no reward model is started; ask yours in a grader or in custom_reward_function.path"),
    "trainer.critic_warmup": FixedKey((0,), "no critic is trained"),
    "trainer.resume_from_path": FixedKey((None,), "a run is taken up under its own name; set trainer.default_local_dir"),
    "trainer.val_only": FixedKey((False,), "set trainer.total_training_steps=0"),
}

IGNORED_KEYS: dict[str, tuple[str, ...]] = {
    "one model in one process, or servers that penstock.engine.url names: nothing is laid out over GPUs": (
        *("trainer.n_gpus_per_node", "trainer.nnodes", "rollout.n_gpus_per_node", "rollout.nnodes"),
        *("trainer.tensor_model_parallel_size", "trainer.pipeline_model_parallel_size", "rollout.tensor_model_parallel_size"),
        *("actor_rollout_ref.hybrid_engine", f"{ACTOR}.fsdp_config.*", f"{ACTOR}.strategy", f"{ACTOR}.megatron.*"),
        *(f"{ACTOR}.ulysses_sequence_parallel_size", "actor_rollout_ref.ref.*", "actor_rollout_ref.nccl_timeout"),
        *(f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.data_parallel_size", f"{ROLLOUT}.pipeline_model_parallel_size"),
    ),
    "the embedded engine samples unless penstock.engine.name and penstock.engine.url name servers": (
        *(f"{ROLLOUT}.name", f"{ROLLOUT}.gpu_memory_utilization", f"{ROLLOUT}.dtype", f"{ROLLOUT}.enforce_eager"),
        *(
            f"{ROLLOUT}.free_cache_engine",
            f"{ROLLOUT}.load_format",
            f"{ROLLOUT}.max_model_len",
            f"{ROLLOUT}.max_num_batched_tokens",
        ),
        *(f"{ROLLOUT}.enable_chunked_prefill", f"{ROLLOUT}.enable_prefix_caching", f"{ROLLOUT}.engine_kwargs.*"),
        *(f"{ROLLOUT}.disable_log_stats", f"{ROLLOUT}.layered_summon", f"{ROLLOUT}.skip_tokenizer_init"),
    ),
    "all groups of a step are one batch, packed without padding; memory is bounded by penstock.train.tokens_per_pass": (
        *(f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_micro_batch_size", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
        *(
            f"{ACTOR}.use_dynamic_bsz",
            f"{ACTOR}.use_torch_compile",
            f"{ACTOR}.shuffle",
            f"{ACTOR}.entropy_from_logits_with_chunking",
        ),
        *("actor_rollout_ref.model.use_remove_padding", "actor_rollout_ref.model.enable_gradient_checkpointing"),
        *("actor_rollout_ref.model.use_fused_kernels", "actor_rollout_ref.model.use_liger", "actor_rollout_ref.model.use_shm"),
        *(f"{ROLLOUT}.log_prob_micro_batch_size", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
        *(f"{ROLLOUT}.log_prob_use_dynamic_bsz", f"{ROLLOUT}.log_prob_max_token_len_per_gpu", "trainer.balance_batch"),
    ),
    "every rollout weighs the same, and no critic is trained": (
        *(f"{ACTOR}.loss_agg_mode", f"{ACTOR}.clip_ratio_c", "algorithm.gamma", "algorithm.lam", "algorithm.kl_ctrl.*", "critic.*"),
    ),
    "a prompt may be as long as the model's context, and is never cut": (
        *("data.max_prompt_length", f"{ROLLOUT}.prompt_length", "data.filter_overlong_prompts"),
        *("data.filter_overlong_prompts_workers",),
    ),
    "flows read it from self.config": (f"{ROLLOUT}.max_turns", f"{ROLLOUT}.multi_turn.*"),
    "flows always get raw_prompt, and every token its log-probability": ("data.return_raw_chat", f"{ROLLOUT}.calculate_log_probs"),
    "rows are read by Penstock": (
        *("data.dataloader_num_workers", "data.gen_batch_size", "data.val_batch_size", "data.validation_shuffle"),
        *("data.image_key", "data.video_key", "data.return_multi_modal_inputs", "data.use_shm"),
    ),
    "weights are published while rollouts run; no rollout is ended for it": (
        *("async_training.partial_rollout", "async_training.checkpoint_engine.*", "actor_rollout_ref.checkpoint_engine.*"),
    ),
    "no code of a model is run": ("actor_rollout_ref.model.trust_remote_code",),
    "rewards come from the grader, the function that was named, or the rule of the row's data_source": ("reward_model.*",),
    "metrics are in the run's folder, and `penstock report` shows them": (
        *("trainer.logger", "trainer.log_val_generations", "trainer.rollout_data_dir", "trainer.validation_data_dir"),
        *(f"{ROLLOUT}.trace.*", f"{ROLLOUT}.prometheus.*", "global_profiler.*"),
    ),
    "held-out tasks are tried before and after training; leave data.val_files out to have none": ("trainer.val_before_train",),
    "the gateway is there before the first rollout starts": ("trainer.gateway_startup_timeout",),
    "Ray is started for the run": ("ray_kwargs.*", "ray_init.*", "trainer.ray_wait_register_center_timeout", "transfer_queue.*"),
    "a checkpoint holds weights, optimizer and cursor": (
        *(
            "trainer.default_hdfs_dir",
            "trainer.del_local_ckpt_after_load",
            "trainer.max_critic_ckpt_to_keep",
            f"{ACTOR}.checkpoint.*",
        ),
        *("trainer.esi_redundant_time", "trainer.use_legacy_worker_impl"),
    ),
    "nothing of Hydra is run": ("hydra.*",),
}
"""Maps a reason to the keys that are accepted without effect. A trailing `*` matches all keys with that prefix."""
