"""The configuration of a run: one typed tree from a TOML file with dotted overrides, and what the environment says.

An unknown key is an error that names the nearest known one. Environment variables are read here only.
"""

import difflib
import importlib
import os
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar, cast, get_args, get_origin

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from penstock.errors import ConfigError, Issue, combine_issues

T = TypeVar("T", bound=BaseModel)
RunKind = Literal["eval", "train"]
CONFIG_FILE = "penstock.toml"
"""Default config file of `penstock train` and `penstock eval run`."""


class Section(BaseModel):
    """A table of the TOML file."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# Sections


class RunSection(Section):
    """`[run]`: what the run is called and where it is kept."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The name of the run's folder."""
    folder: Path = Path("runs")
    """Where run folders are, from where the command is run."""
    seed: int = Field(default=0, ge=0)
    """Fixes the order of tasks, and sampling."""


class ModelSection(Section):
    """`[model]`: the start policy, as `penstock model pull` takes it."""

    name: str = "smollm2-135m"
    """`smollm2-135m`, `tiny`, `hf:ORG/NAME[@REV]`, or the path of a model folder or GGUF file."""


class AgentSection(Section):
    """`[agent]`: what runs each rollout; paths are relative to the TOML file."""

    entry: Path = Path("agent.py")
    """The file that holds the workflow and the grader, or flows; for a command, the grader alone."""
    flow: str = ""
    """The flow for rows that name none with `agent_name`; needed only where there are several."""
    flows: Path | None = None
    """A YAML list of flows, each with `name`, `_target_` and further keys for its constructor."""
    command: tuple[str, ...] = ()
    """A program in any language to run for each rollout in place of a workflow, with its arguments."""
    folder: Path = Path()
    """Where that program runs."""


class DatasetSection(Section):
    """`[dataset]`: tasks to train on and tasks held out, relative to the TOML file."""

    train: Path
    """JSONL, CSV or parquet."""
    eval: Path | None = None
    """Evaluated before and after training; None leaves that out."""
    eval_limit: int = Field(default=64, ge=1)
    """How many of them, from the first on."""
    shuffle: bool = True
    """Another order of tasks in each epoch, decided by the seed."""


class RolloutSection(Section):
    """`[rollout]`: how tasks become rollouts."""

    executor: str = "inline"
    """Where agents run: `inline` is in this process, `process` gives each rollout its own process, `server` a rollout server, `ray`
    the workers of a Ray cluster."""
    group_size: int = Field(default=8, ge=1)
    """Attempts at each task: what they are compared with is each other."""
    groups_per_step: int = Field(default=4, ge=1)
    """Tasks in each training step."""
    concurrency: int = Field(default=32, ge=1)
    """Rollouts that run at once."""
    min_size: int = Field(default=0, ge=0)
    """Attempts of a task that must complete before it is trained; 0 takes what there is."""
    top_up: int = Field(default=0, ge=0)
    """How often failed attempts are made up for where fewer completed; a task that stays short is dropped and counted."""
    retries: int = Field(default=3, ge=0)
    """How often an attempt that was lost with the worker that ran it is made again."""
    group_timeout_s: float | None = Field(default=None, gt=0)
    """Deadline of all attempts at a task together, from the first one's start; those that run then end as `timeout`."""
    max_waiting: int | None = Field(default=None, ge=1)
    """Tasks that may wait to be trained; one more is not started."""
    overflow: Literal["refuse", "drop"] = "refuse"
    """With `max_waiting`: `refuse` waits for room, `drop` makes it by dropping the oldest complete task, counted."""
    max_staleness: int = Field(default=0, ge=0)
    """How many policy versions old a group's tokens may be when it is trained. 0 is synchronous."""
    agent_timeout_s: float = Field(default=120.0, gt=0)
    """Deadline of a workflow; past it the rollout ends as `timeout`."""
    grader_timeout_s: float = Field(default=30.0, gt=0)
    """Deadline of a grader; past it the rollout ends as `grader_error`."""
    branches: int = Field(default=0, ge=0)
    """Continuations from each call of a rollout, to measure what the call was worth. For `train.advantage = "vine"` alone."""
    branch_calls: int = Field(default=8, ge=1)
    """Calls of a rollout that are branched from, spread evenly; those between share credit. The first one needs no branches."""


class SamplingSection(Section):
    """`[sampling]`: what holds for calls that do not say otherwise."""

    temperature: float = Field(default=1.0, ge=0)
    """The trainer divides its logits by it too."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Below 1, training is exact over the kept tokens, which the embedded engine records; servers do not tell them."""
    top_k: int = Field(default=0, ge=0)
    """0 keeps every token."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Relative to the likeliest token."""
    max_tokens: int = Field(default=256, ge=1)
    """Default and cap of one reply."""
    eval_temperature: float = Field(default=0.0, ge=0)
    """Temperature of the held-out evaluation; greedy, so that before and after differ by the policy alone."""


LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LoraModule = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA_LR = 5e-4


class TrainSection(Section):
    steps: int = Field(default=10, ge=0)
    """Training steps of the whole run; raise it to continue."""
    method: Literal["full", "lora"] = "full"
    """`full` trains all weights. `lora` trains a small adapter on top of them: less memory, and quick to publish."""
    rank: int = Field(default=16, ge=1, le=512)
    """The rank of the adapter's matrices."""
    alpha: float = Field(default=32.0, gt=0)
    """What the adapter adds is multiplied by alpha / rank."""
    target_modules: Annotated[tuple[LoraModule, ...], Field(min_length=1)] = LORA_MODULES
    """The linear layers that the adapter adds to; by default all but the head."""
    lr: float = Field(default=2e-5, ge=0)
    """The learning rate. For `lora`, the default is 5e-4."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate continues after its warm-up: it stays, or falls to `lr_floor` at the last update."""
    warmup_updates: int = Field(default=0, ge=0)
    """Updates over which the rate rises to `lr`."""
    lr_floor: float = Field(default=0.0, ge=0, le=1)
    """Share of `lr` that a falling schedule ends at."""
    optimizer: str = "adamw"
    """`adamw`, or one of torch's by its name: `muon`, `sgd`, `adafactor` and others."""
    optimizer_settings: dict[str, Any] = Field(default={}, exclude_if=lambda given: not given)
    """Its further settings, as torch names them: `betas`, `momentum` and others."""
    weight_decay: float = Field(default=0.0, ge=0)
    """The optimizer's weight decay."""
    advantage: str = "grpo"
    """How rewards become credit: `grpo`, `dr_grpo`, `rloo`, `gae` and others, see docs/algorithms.md."""
    advantage_settings: dict[str, Any] = Field(default={}, exclude_if=lambda given: not given)
    """Settings of that advantage, each with its default in docs/algorithms.md."""
    loss: str = "clip"
    """`clip`: PPO's, with a truncated importance weight. Others: `dapo`, `gspo`, `cispo`, `sapo`, `icepop`, `reinforce`."""
    loss_settings: dict[str, Any] = Field(default={}, exclude_if=lambda given: not given)
    """Settings of that loss."""
    mean: Literal["auto", "rollout", "token", "constant"] = "auto"
    """What the loss is a mean over: `rollout` weighs all rollouts the same, `token` all tokens of the batch, `constant` divides a
    rollout's sum by 128 tokens. `auto` is `constant` for `dr_grpo`, `token` for `dapo`, else `rollout`."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far a token's probability may fall, on one batch, before its gradient stops."""
    clip_high: float = Field(default=0.28, gt=0)
    """Wider above than below (DAPO's clip-higher): it keeps rare good tokens learning."""
    importance_cap: float = Field(default=2.0, gt=0)
    """Ceiling of the importance weight that corrects for stale or tempered behaviour."""
    unknown_logprobs: Literal["mask", "recompute"] = "mask"
    """For tokens whose engine did not tell the probabilities that it sampled with, such as a vLLM in its default log-probabilities
    mode at another temperature than 1: `mask` does not train them; `recompute` takes the trainer's own, from before the update."""
    kl: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty to the reference policy; 0 keeps no second model in memory."""
    kl_reference: Literal["start", "moving"] = "start"
    """`start`: the start policy. `moving`: a copy of the policy, refreshed every `reference_every` updates."""
    reference_every: int = Field(default=16, ge=1)
    """Updates between two copies of a moving reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimates the divergence from a token's two log-probabilities: their gap, half its square, or the one never negative."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss`: a separate term. `reward`: taken off the reward before credit is given; `k1` is for this alone."""
    entropy: float = Field(default=0.0, ge=0)
    """Weight of the bonus for the entropy of the distributions that tokens are sampled from."""
    dynamic_sampling: bool = False
    """Replace groups that teach nothing, as all their rewards are equal, by new ones (DAPO); they are dropped and counted."""
    overlong: tuple[int, int] | None = None
    """Sampled tokens of a rollout from which its reward gets less, and at which it gets 1 less (DAPO); None takes nothing."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer steps on each batch of groups."""
    tokens_per_pass: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """How many tokens go through the model at once: bounds memory, changes no result. `auto` is 1024 on a CPU, and what free memory
    holds on a GPU."""
    shared_prefix: bool = True
    """Forward shared prompt prefixes once; false is the flat path, slower, with the same gradients."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between held-out evaluations while training continues; 0 evaluates before and after alone."""
    checkpoint_every: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Steps between checkpoints. Groups trained since the last one are trained again after a kill, from that checkpoint. `auto` is
    1 for checkpoints of up to 200 MB, and one more for each further 200 MB, up to 10."""
    checkpoints_kept: int = Field(default=2, ge=2)
    """The newest ones; at least two."""
    on_alarm: Literal["warn", "stop"] = "warn"
    """What to do when metrics show that the run goes wrong: warn, or warn and stop."""
    attack_grader: bool = True
    """No effect any more; run `penstock grader attack` before training."""
    device: str = "auto"
    """The learner's, if the engine is on servers: `cpu`, `cuda`, `cuda:1`; `auto` takes the GPU with the most free memory,
    where there is one. The embedded engine shares its weights with the learner: there `engine.device` says it."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The learner's, likewise; `auto` is float32 on a CPU and bfloat16 on a GPU, with float32 copies that are trained."""

    @model_validator(mode="before")
    @classmethod
    def _default_lr(cls, data: Any) -> Any:
        return {"lr": LORA_LR, **data} if isinstance(data, dict) and data.get("method") == "lora" else data  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]

    @model_validator(mode="after")
    def _refuse_ignored(self) -> Self:
        def ignored(keys: tuple[str, ...], why: str) -> None:
            for key in keys:
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"{key} has no effect while {why}")

        if not self.kl:
            ignored(("kl_reference", "kl_estimator", "kl_in", "reference_every"), "train.kl is 0; set that, or leave it out")
        if self.kl_reference == "start":
            ignored(("reference_every",), "train.kl_reference is 'start'; set that to 'moving', or leave it out")
        if self.kl_estimator == "k1" and self.kl_in == "loss":
            raise ValueError("the gradient of k1 in a loss is 0 in expectation; set kl_in = 'reward', or kl_estimator to k2 or k3")
        if self.schedule == "constant":
            ignored(("lr_floor",), "train.schedule is 'constant'; set that to linear or cosine, or leave it out")
        if self.overlong is not None and not 0 <= self.overlong[0] < self.overlong[1]:
            raise ValueError("overlong: the first number of tokens must be below the second, such as [400, 500]")
        return self

    @field_validator("rank", "alpha", "target_modules")
    @classmethod
    def _refuse_without_lora(cls, value: object, at: ValidationInfo) -> object:
        if at.data.get("method") == "full" and value != cls.model_fields[at.field_name or ""].default:
            raise ValueError("is a setting of train.method = 'lora'; set that, or leave this out")
        return value


class EvalSection(Section):
    """`[eval]`: what `penstock eval run` measures; the tasks are those of `dataset.eval`, else of `dataset.train`."""

    samples: int = Field(default=1, ge=1)
    """Attempts at each task."""
    k: tuple[int, ...] = (1,)
    """For each of these, the chance that one of so many attempts passes is reported; none may be above `samples`."""
    passes: float = 1.0
    """Reward from which an attempt counts as passed."""
    rows: str = ""
    """Which tasks, by row from 0 on, such as `0-9,17`; empty takes all."""
    temperature: float | None = Field(default=None, ge=0)
    """None takes `sampling.eval_temperature` for one attempt at each task, `sampling.temperature` for several."""
    processes: int = Field(default=1, ge=1)
    """No longer used: an evaluation accepts 1 only. To use several cores, set `rollout.executor` to `process` or `ray`."""


class EngineSection(Section):
    text_only: ClassVar[bool] = False
    """Whether the engine takes messages and returns text. It then needs no model folder and no tokenizer."""
    trainable: ClassVar[bool] = True
    """Whether its tokens can be trained on and new weights can be loaded into it."""
    in_process: ClassVar[bool] = False
    """Whether the weights are in our process, so that a second process would need its own copy."""
    needs_url: ClassVar[bool] = False
    """Whether `engine.url` must name a server."""

    name: str = "embedded"
    """`embedded`: in this process, on the CPU or a GPU. `vllm`, `sglang`: servers; `openai`, `anthropic`, `litellm`: endpoints that
    give text, for evaluations. All but the first have settings of their own."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`; `auto` takes a GPU where there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto` is float32 on a CPU and bfloat16 on a GPU."""
    slots: int | None = Field(default=None, ge=1)
    """Requests decoded together. None: 32 on a CPU, 1,024 on a GPU."""
    queue: int = Field(default=1024, ge=1)
    """Requests that may wait; one more is refused."""
    cache_tokens: int | None = Field(default=None, ge=1024)
    """Bound on the tokens whose keys and values are kept. None: 65,536 on a CPU; on a GPU a third of the memory free next to
    what training needs for the weights."""

    def preflight(self, model: str) -> None:
        """Raise ConfigError if the engine cannot be reached, or cannot serve `model`. Called before a run begins."""


class EmbeddedSection(EngineSection):
    in_process: ClassVar[bool] = True


def _typed_engine(value: Any) -> Any:
    """Build `[policies.NAME.engine]` as the class of the engine that it names."""
    if not isinstance(value, Mapping):
        return value
    keys = cast("Mapping[str, Any]", value)
    return validate(engine_section(str(keys.get("name", EngineSection().name))), keys, "the engine of a policy")


class PolicySection(Section):
    """`[policies.NAME]`: one of several policies. Agents choose it by asking for the model NAME."""

    frozen: bool = False
    """Never trained: a judge, a simulated user, a policy to play against."""
    lr: float | None = Field(default=None, ge=0)
    """None takes `train.lr`."""
    model: str = ""
    """The weights of a frozen policy, as `model.name` takes them; empty takes the start policy."""
    engine: Annotated[SerializeAsAny[EngineSection], BeforeValidator(_typed_engine)] | None = None
    """Where a frozen policy is served, if not by `[engine]`: with the keys of that engine, `url` for a server or an endpoint."""
    default: bool = False
    """Also answers calls that ask for a model of no policy's name; without such a policy they are refused."""

    @model_validator(mode="after")
    def _only_frozen(self) -> Self:
        for key in ("model", "engine"):
            if getattr(self, key) and not self.frozen:
                raise ValueError(f"{key} is for a frozen policy: all others train an adapter on [model]; add frozen = true")
        if self.frozen and self.lr is not None:
            raise ValueError("lr has no meaning for a frozen policy; leave it out")
        return self


PolicyName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]


class PoolSection(Section):
    """`[pool]`: where everything is recorded."""

    name: str = "sqlite"
    """`sqlite`, `postgres`, or `memory`, which forgets and cannot be resumed."""
    url: str = ""
    """The address of the PostgreSQL database, without its password: `postgresql://user@host/name`."""
    lease_s: float = Field(default=3600.0, gt=0)
    """How long a trainer may hold groups without a word."""


class GatewaySection(Section):
    """`[gateway]`: where agents send their calls."""

    host: str = "127.0.0.1"
    """Loopback unless agents run elsewhere."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free one."""
    hosts: tuple[str, ...] = ()
    """Further names that agents call it by; a request under another name is refused, so that no web page can reach it."""
    rollout_calls: int = Field(default=256, ge=1)
    """Calls of one rollout that may run at once."""
    rollout_calls_per_s: float = Field(default=1000.0, gt=0)
    """Calls of one rollout in a second, sustained."""
    rollout_steps: int = Field(default=100_000, ge=1)
    """Calls of one rollout in all."""
    rollout_tokens: int = Field(default=100_000_000, ge=1)
    """Tokens sampled for one rollout in all."""
    body_mb: int = Field(default=16, ge=1, le=1024)
    """Largest request. A million tokens of text are about 4 MB; parsing a body of 16 MB holds up other calls for 0.1 s."""
    first_token_s: float = Field(default=600.0, gt=0)
    """Longest wait for the first token of a reply, queueing included."""
    stall_s: float = Field(default=120.0, gt=0)
    """Longest silence of the engine within a reply; the call then fails, and its step is not trained."""
    reader_s: float = Field(default=60.0, gt=0)
    """Longest wait for an agent to take what was sent; it is then cut off."""
    keep_alive_s: float = Field(default=5.0, gt=0)
    """Silence after which a stream gets an event that says nothing."""
    drain_s: float = Field(default=5.0, ge=0)
    """How long a stopping gateway waits for answers under way."""
    otel: bool = False
    """Tell OpenTelemetry of every call, over OTLP as its environment variables say; needs the packages of the extra `otel`."""


class ScaleSection(Section):
    """`[scale]`: whether the run is spread over several processes and machines."""

    name: Literal["none", "ray"] = "none"
    """`none`: all of it in this process. `ray`: rollouts and training are actors of a Ray cluster."""
    address: str = ""
    """The address of a running cluster, such as `10.0.0.1:6379`, or `auto`; empty starts one on this machine for the run."""


class TrackSection(Section):
    """`[track]`: other dashboards in which the run can be followed, besides `penstock view`."""

    to: tuple[str, ...] = ()
    """Any of `tensorboard`, `wandb`, `mlflow`, `trackio`, each an extra of penstock, and plug-ins; several at once."""
    project: str = Field(default="penstock", min_length=1)
    """What they group runs by; MLflow calls it an experiment."""
    name: str = ""
    """The run's name there; empty takes `run.name`."""
    mode: Literal["auto", "offline"] = "auto"
    """`auto` is as each is set up by its own environment variables; `offline` keeps everything on this machine."""
    rollouts: int = Field(default=8, ge=0, le=1000)
    """Rollouts of each step, or of an evaluation, that they get with their conversations: the best and the worst of each group."""
    checkpoint: bool = False
    """Whether they get the last checkpoint when the run ends."""


class RunConfig(Section):
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    agent: AgentSection = AgentSection()
    dataset: DatasetSection
    rollout: RolloutSection = RolloutSection()
    sampling: SamplingSection = SamplingSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    engine: SerializeAsAny[EngineSection] = EmbeddedSection()
    """An instance of the section class of the engine that it names; `make_config` sees to that."""
    pool: PoolSection = PoolSection()
    gateway: GatewaySection = GatewaySection()
    scale: ScaleSection = ScaleSection()
    track: TrackSection = TrackSection()
    policies: dict[PolicyName, PolicySection] = Field(default_factory=dict[str, PolicySection], exclude_if=lambda named: not named)
    """By the model name that agents ask for. Empty: one policy, under every name."""
    executor: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Settings of the executor that `rollout.executor` names."""
    workflow: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Fields of the workflow's own config class."""
    grader: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Fields of the grader's own config class."""

    @field_validator("policies")
    @classmethod
    def _one_default(cls, policies: dict[str, PolicySection]) -> dict[str, PolicySection]:
        if sum(policy.default for policy in policies.values()) > 1:
            raise ValueError("more than one policy has default = true; leave it at one of them")
        return policies


# The whole config


def load_config(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read `path`, apply overrides such as `train.lr=1e-5`, check everything; ConfigError says what to change.

    Paths inside the file are taken from the file's folder, the run folder from the current one.
    """
    tree = read_toml(path)
    override(tree, overrides)
    config = make_config(tree, str(path))
    base = path.parent
    agent = config.agent.model_copy(
        update={
            "entry": base / config.agent.entry,
            "flows": config.agent.flows and base / config.agent.flows,
            "folder": base / config.agent.folder,
        }
    )
    dataset = config.dataset.model_copy(
        update={"train": base / config.dataset.train, "eval": config.dataset.eval and base / config.dataset.eval}
    )
    return config.model_copy(update={"agent": agent, "dataset": dataset})


def stored_config(tree: Mapping[str, Any], where: str) -> RunConfig:
    """Build the config that an earlier version may have stored, without what was removed since then."""
    train = {key: value for key, value in tree.get("train", {}).items() if f"train.{key}" not in REMOVED}
    if train.get("on_alarm") == "rollback":
        train["on_alarm"] = "stop"
    return make_config({**tree, "train": train} if "train" in tree else tree, where)


def make_config(tree: Mapping[str, Any], where: str) -> RunConfig:
    """Build the whole config from a file's tables; `[engine]` takes the keys of the engine that it names."""
    engine: Any = tree.get("engine", {})
    if not isinstance(engine, Mapping):
        return validate(RunConfig, tree, where)
    keys = cast("Mapping[str, Any]", engine)
    section = engine_section(str(keys.get("name", EngineSection().name)))
    # One validation, so that all mistakes are listed at once; then a plain RunConfig, which equals any other of the same values.
    checked = validate(
        create_model("RunConfigWithEngine", __base__=RunConfig, engine=(section, ...)), {**tree, "engine": keys}, where
    )
    return RunConfig.model_construct(checked.model_fields_set, **dict(checked))


def engine_section(name: str) -> type[EngineSection]:
    """Return the class of `[engine]` for this engine. The table is imported here because engines are a layer above config."""
    table = importlib.import_module("penstock.engines").SECTIONS
    return table.load(name) if name in table else EngineSection


# Files and validation


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, or a JSON file (`.json`) with the same tables; ConfigError if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        return orjson.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError as cause:
        raise ConfigError(f"{path}: no such file; give the path of a TOML file, or write one with `penstock quickstart`") from cause
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"{path}: cannot be read: {cause}") from cause
    except (tomllib.TOMLDecodeError, orjson.JSONDecodeError) as cause:
        meant = (
            ""
            if path.suffix in (".toml", ".json")
            else "; give the run's config file, such as train.toml, which names agent and tasks"
        )
        raise ConfigError(f"{path}: not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {cause}{meant}") from cause


def override(tree: dict[str, Any], overrides: Iterable[str]) -> None:
    """Set keys of `tree`, each written as `section.key=value`."""
    for each in overrides:
        _apply(tree, each)


def validate(model: type[T], tree: Mapping[str, Any], where: str) -> T:
    """Build `model` from `tree`; ConfigError has an issue, and a line, for each mistake."""
    try:
        return model.model_validate(tree)
    except ValidationError as cause:
        raise combine_issues(where, _issues(model, cause)) from cause


def find_issues(model: type[BaseModel], tree: Mapping[str, Any]) -> list[Issue]:
    """Return the mistakes that keep `tree` from being a `model`."""
    try:
        model.model_validate(tree)
    except ValidationError as cause:
        return _issues(model, cause)
    return []


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *sections, last = [part.strip() for part in key.split(".")]
    if not equals or not all([*sections, last]):
        raise ConfigError(f"--set {override!r}: write it as section.key=value, for example train.lr=1e-5")
    value = _value(text)
    for section in sections:
        below: Any = tree.setdefault(section, {})
        if not isinstance(below, dict):
            raise ConfigError(f"--set {override!r}: {section!r} is a value, not a section")
        tree = below  # pyright: ignore[reportUnknownVariableType]
    tree[last] = value


def _value(text: str) -> Any:
    """Parse `text` as a TOML value; return it unchanged if it is none."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _issues(model: type[BaseModel], cause: ValidationError) -> list[Issue]:
    """Return the mistakes in the order of the tables, unknown keys first: a mistyped key explains a missing one."""
    errors = sorted(cause.errors(), key=lambda error: error["type"] != "extra_forbidden")
    found: dict[str, Issue] = {}
    meant: set[str] = set()
    for error in errors:
        issue = _issue(model, error)
        if issue.correction:
            meant.add(".".join([*map(str, error["loc"][:-1]), issue.correction]))
        if not (error["type"] == "missing" and issue.key in meant):
            found.setdefault(issue.key, issue)
    return list(found.values())


ALSO_CALLED = {"learning_rate": "lr", "kl_coef": "kl", "entropy_coef": "entropy", "num_generations": "group_size"}
"""Our keys by what other trainers call them."""
REMOVED = dict.fromkeys(
    ("train.promote", "train.reward_range"), "it was removed; leave it out, and compare runs with `penstock compare`"
)
"""Keys of earlier versions, and what to do instead."""


def _issue(model: type[BaseModel], error: Any) -> Issue:
    path = ".".join(str(part) for part in error["loc"] if part != "[key]")  # which says that a key itself is wrong
    if path in REMOVED:
        return Issue(path, f"unknown key {path!r}; {REMOVED[path]}")
    if error["type"] == "extra_forbidden":
        known = _fields_at(model, error["loc"][:-1])
        others = [name for name, own in ALSO_CALLED.items() if own in known]
        near = difflib.get_close_matches(str(error["loc"][-1]), [*known, *others], n=1, cutoff=0.5)
        if near:
            return Issue(path, f"unknown key {path!r}", ALSO_CALLED.get(near[0], near[0]))
        return Issue(path, f"unknown key {path!r}; known keys: {', '.join(sorted(known))}")
    if error["type"] == "missing":
        return Issue(path, f"key {path!r} is missing; add it")
    if error["type"] in ("model_type", "dict_type"):
        return Issue(path, f"{path} = {error['input']!r}: write it as a table, [{path}]")
    message = error["msg"].removeprefix("Value error, ")
    remedy = "; write it in quotes" if error["type"] == "string_type" else ""
    return Issue(path, f"{path} = {error['input']!r}: {message[:1].lower()}{message[1:]}{remedy}")


def _fields_at(model: type[BaseModel], loc: tuple[str | int, ...]) -> list[str]:
    inner: Any = model
    for part in loc:
        if get_origin(inner) is dict:  # a table of tables, such as [policies.*]
            inner = get_args(inner)[1]
        else:
            inner = inner.model_fields[str(part)].annotation if _is_model(inner) else None
    return list(inner.model_fields) if _is_model(inner) else []


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


# Environment variables


def cache_folder() -> Path:
    """Return where models are kept: $PENSTOCK_CACHE, otherwise the user's cache folder."""
    if chosen := os.environ.get("PENSTOCK_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "penstock"


def home_folder() -> Path:
    """Return the folder of the user's own controller, with its tokens and keys: $PENSTOCK_HOME, otherwise in the state folder."""
    if chosen := os.environ.get("PENSTOCK_HOME"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "penstock"


def scratch_folder() -> Path:
    """Return where agents' scratch folders are made: $TMPDIR, otherwise /var/tmp, which is on disk, or the system's choice."""
    usual = Path("/var/tmp")
    if not os.environ.get("TMPDIR") and os.access(usual, os.W_OK | os.X_OK):
        return usual
    return Path(tempfile.gettempdir())


def secret(variable: str, key: str) -> str:
    """Return the environment variable that the setting `key` names; ConfigError if it is not set."""
    if value := os.environ.get(variable, ""):
        return value
    raise ConfigError(f"{key}: the environment has no {variable}; set it")


def first_variable(*names: str) -> str | None:
    """Return the first of these environment variables that is set."""
    return next((name for name in names if os.environ.get(name)), None)


def run_secrets() -> tuple[str, ...]:
    """Return values that a run must not write anywhere: of the variables that $PENSTOCK_SECRETS lists, separated by commas."""
    names = os.environ.get("PENSTOCK_SECRETS", "").split(",")
    return tuple(value for name in names if (value := os.environ.get(name.strip(), "")))


def rollout_token() -> str | None:
    """Return the token that callers of a rollout server must send: $PENSTOCK_ROLLOUT_TOKEN; None if it is not set."""
    return os.environ.get("PENSTOCK_ROLLOUT_TOKEN") or None


def rollout_hosts() -> tuple[str, ...]:
    """Return the hosts that a rollout server may call: $PENSTOCK_ROLLOUT_HOSTS, separated by commas."""
    return tuple(host.strip() for host in os.environ.get("PENSTOCK_ROLLOUT_HOSTS", "").split(",") if host.strip())


class EnclosingRollout(NamedTuple):
    """The rollout that this process runs in, and where its model calls go."""

    base_url: str
    api_key: str
    rollout_id: str


def enclosing_rollout() -> EnclosingRollout | None:
    """Return the rollout that `penstock run` started this process for; None outside of it."""
    names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "PENSTOCK_ROLLOUT_ID")
    base_url, api_key, rollout_id = (os.environ.get(name, "") for name in names)
    return EnclosingRollout(base_url, api_key, rollout_id) if base_url and api_key and rollout_id else None
