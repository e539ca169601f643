"""The run folder: every file of a run, in one place that can be zipped and sent to a colleague. The author's code is among them.

Rewards of an edited grader cannot be compared with those from before, so a run continues with changed code only if asked to.
"""

import difflib
import hashlib
import itertools
import secrets
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import orjson

import penstock
from penstock.config import RunConfig, stored_config
from penstock.errors import ConfigError, Issue
from penstock.events import Events
from penstock.pool import POOLS
from penstock.sdk.discovery import Agent
from penstock.system.files import add_checksum, exclusive_lock, file_checksum, remove_checksum, write_file

MAY_CHANGE = (
    "run.folder", "train.steps", "train.checkpoint_every", "train.checkpoints_kept", "train.eval_every", "train.tokens_per_pass",
    "train.on_alarm",
    "train.device", "eval.", "gateway.", "executor.", "scale.", "track.", "engine.url", "engine.api_key_env", "engine.retries",
    "engine.retry_s", "engine.first_token_s", "engine.stall_s", "engine.down_s", "engine.weights", "engine.sleep", "engine.slots",
    "engine.cache_tokens",
)  # fmt: skip
"""Keys, or prefixes of keys, that a resumed run may change: none has an influence on what was trained so far."""


COMPONENT = "components/"
"""Begins the keys of a step's metrics that hold the means of its rewards' named parts."""


def component_values(entry: Mapping[str, Any]) -> dict[str, float]:
    """Returns the means of the reward's named parts in a line of `metrics.jsonl`, by name."""
    return {key.removeprefix(COMPONENT): value for key, value in entry.items() if key.startswith(COMPONENT)}


FRESH = "start over with --fresh, which keeps this run aside"
"""The last remedy for a run whose files are damaged."""
HEAD_BYTES = 64 * 1024
"""Of the events, to see how a run began."""
CHECKSUMS = ".checksums.json"
"""The checksums of the small files, by name: of their content now, and of that before, which a kill may have left."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths and small files of one run."""

    path: Path
    resumed: bool

    @property
    def checkpoints(self) -> Path:
        """Policy versions, one folder each."""
        return self.path / "checkpoints"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def id(self) -> str:
        """Names the run in its pool and its checkpoints, so that those of another run are recognized; empty in older runs."""
        return (self._read("config.json") or {}).get("id", "")

    @property
    def kind(self) -> Literal["train", "eval", "gateway"]:
        """What it was made by, as far as its files tell; `gateway` for any recording that is neither of the others."""
        if self.metrics() or self.checkpoints.exists():
            return "train"
        try:
            with self.events.open("rb") as file:
                first = file.read(HEAD_BYTES)
        except OSError:
            first = b""
        with suppress(ConfigError):
            if b'"kind":"eval.begin"' in first or "outcome" in (self.summary() or {}):
                return "eval"
        return "train" if b'"kind":"run.start"' in first else "gateway"

    def config(self) -> RunConfig:
        """Returns the config that the run was started with."""
        return stored_config(self.settings()["config"], str(self.path / "config.json"))

    def discard_start(self) -> None:
        """Remove the config, so that the folder counts as not started."""
        (self.path / "config.json").unlink()

    def metrics(self) -> list[dict[str, Any]]:
        """Returns one entry per training step; a line that is damaged, or that a kill cut short, is left out."""
        return self.read_metrics().entries

    def read_metrics(self) -> "StoredMetrics":
        entries, key, damaged = list[dict[str, Any]](), self.id, 0
        for line in _lines(self.path / "metrics.jsonl"):
            try:
                entry = orjson.loads(remove_checksum(line, key))
                entries += [entry] if isinstance(entry["step"], int) else []
            except (ValueError, KeyError, TypeError):
                damaged += line.endswith(b"\n")  # else a kill cut it short
        return StoredMetrics(entries, damaged)

    def add_metrics(self, entry: dict[str, Any]) -> None:
        """Append the metrics of one step."""
        with (self.path / "metrics.jsonl").open("ab") as out:
            out.write(_metrics_line(entry, self.id))

    def keep_metrics(self, steps: int) -> list[dict[str, Any]]:
        """Drop the metrics of steps after `steps`, which a kill undid, and damaged lines; returns those kept."""
        kept, key = [entry for entry in self.metrics() if entry["step"] <= steps], self.id
        write_file(self.path / "metrics.jsonl", b"".join(_metrics_line(entry, key) for entry in kept))
        return kept

    def evaluations(self) -> dict[str, float | None]:
        """Returns held-out rewards by time, such as `before-0` or `during-8`; None where one was skipped or failed."""
        return self._read("evals.json") or {}

    def task_rewards(self) -> dict[str, list[float]]:
        """Returns the rewards of the held-out tasks, in their order, by time; without evaluations that were skipped or failed."""
        return self._read("task_rewards.json") or {}

    def add_evaluation(self, when: str, reward: float | None, rewards: Sequence[float] = ()) -> None:
        """Record a held-out reward, and those of the tasks, so that a resumed run does not measure them again."""
        if rewards:
            self._write("task_rewards.json", orjson.dumps({**self.task_rewards(), when: list(rewards)}))
        self._write("evals.json", orjson.dumps({**self.evaluations(), when: reward}))

    def keep_evaluations(self, steps: int) -> None:
        """Drop evaluations after `steps`, of weights that a kill undid."""
        for name, found in (("task_rewards.json", self.task_rewards()), ("evals.json", self.evaluations())):
            kept = {when: reward for when, reward in found.items() if int(when.rpartition("-")[2]) <= steps}
            if kept != found:
                self._write(name, orjson.dumps(kept))

    def code_versions(self) -> list["CodeVersion"]:
        """Returns the author's code that the run has used, the latest last; none in older runs."""
        return [CodeVersion(**version) for version in (self._read("code.json") or {}).get("versions", ())]

    def add_code_version(self, version: "CodeVersion") -> None:
        versions = [each._asdict() for each in (*self.code_versions(), version)]
        self._write("code.json", orjson.dumps({"versions": versions}))

    def tracker_ids(self) -> dict[str, str]:
        """Returns the ids that trackers gave the run, by their names."""
        return self._read("trackers.json") or {}

    def add_tracker_id(self, tracker: str, name: str) -> None:
        """Record a tracker's id of the run, so that a resumed run uses it."""
        self._write("trackers.json", orjson.dumps({**self.tracker_ids(), tracker: name}))

    def summary(self) -> dict[str, Any] | None:
        """Returns the summary of when the run last ended."""
        return self._read("summary.json")

    def write_summary(self, summary: bytes) -> None:
        self._write("summary.json", orjson.dumps(orjson.loads(summary), option=orjson.OPT_INDENT_2))

    def set_aside_damaged(self) -> list[str]:
        """Rename small files that are damaged and that the run can do without. Returns what was wrong."""
        found: list[str] = []
        for name in ("code.json", "evals.json", "summary.json", "task_rewards.json", "trackers.json"):
            try:
                self._read(name)
            except ConfigError as error:
                (self.path / name).replace(self.path / f"{name}.damaged")
                found.append(str(error))
        return found

    def settings(self) -> dict[str, Any]:
        """Returns the content of `config.json`; ConfigError if it is damaged or not that of a run."""
        settings = self._read("config.json") or {}
        if not {"config", "datasets"} <= settings.keys():  # a checkpoint has a config.json too
            raise ConfigError(f"{self.path}: not a run folder; give one that `penstock train` made, such as runs/multiply")
        return settings

    def write_settings(self, settings: dict[str, Any]) -> None:
        self._write("config.json", orjson.dumps(settings, option=orjson.OPT_INDENT_2))

    def _read(self, name: str) -> dict[str, Any] | None:
        """Returns the JSON object in a small file, None if there is none; ConfigError if it is damaged."""
        file = self.path / name
        try:
            content = file.read_bytes()
            found = orjson.loads(content)
            known = self._checksums().get(name)
            if not isinstance(found, dict) or (known and _checksum(content) not in known):
                raise ValueError("it does not match its checksum")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as cause:
            instead = FRESH if name == "config.json" else "train on, which sets it aside"
            raise ConfigError(
                f"{file} is damaged: {cause}; restore a copy (if you changed it, remove {CHECKSUMS} next to it), or {instead}"
            ) from cause
        return found  # pyright: ignore[reportUnknownVariableType]

    def _write(self, name: str, content: bytes) -> None:
        known = self._checksums()
        known[name] = [*known.get(name, ())[-1:], _checksum(content)]
        write_file(self.path / CHECKSUMS, orjson.dumps(known))  # first: after a kill in between it still names the old content
        write_file(self.path / name, content)

    def _checksums(self) -> dict[str, list[str]]:
        try:
            found: Any = orjson.loads((self.path / CHECKSUMS).read_bytes())
        except (OSError, ValueError):  # an older run, or damaged: nothing is known
            return {}
        named = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
        return {name: known for name, known in named.items() if isinstance(known, list)}


class CodeVersion(NamedTuple):
    """The author's code from one step of a run on."""

    after_step: int
    """The last step that was made without it."""
    files: dict[str, str]
    """Texts by path."""


class StoredMetrics(NamedTuple):
    entries: list[dict[str, Any]]
    """One per training step."""
    damaged: int
    """Lines that were left out."""


def open_run_folder(
    config: RunConfig, *, fresh: bool, may_change: tuple[str, ...] = MAY_CHANGE, digests: Mapping[str, str] | None = None
) -> RunFolder:
    """Create the folder, or open the existing one; ConfigError if settings or files differ from those that it was started with.

    `may_change` are keys, or prefixes of keys, that may differ; `digests` are those of further files, by name.
    """
    path = config.run.folder / config.run.name
    settings = {"config": config.model_dump(mode="json"), "datasets": _dataset_digests(config) | dict(digests or {})}
    if fresh and path.exists():
        with locked(path):
            _archive(path)
    folder = RunFolder(path, resumed=True)
    if (path / "config.json").exists():
        _refuse_changes(path, folder.settings(), settings, may_change)
        return folder
    if started := [name for name in ("pool.db", "checkpoints") if (path / name).exists()]:
        raise ConfigError(f"{path} has {started[0]}, but no config.json; restore it, or {FRESH}")
    try:
        path.mkdir(parents=True, exist_ok=True)
        folder.write_settings(settings | {"id": secrets.token_hex(8)})
    except OSError as cause:
        raise ConfigError(f"{path}: the run folder cannot be made: {cause.strerror}; set run.folder to a writable place") from cause
    return RunFolder(path, resumed=False)


def find_run_folder(path: Path) -> RunFolder:
    """Returns the folder of a run that was started; ConfigError if it is none."""
    folder = RunFolder(path, resumed=True)
    folder.settings()
    return folder


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Lock the run for this process; the system releases the lock when the process dies.

    Inside it, a file of the run that cannot be read or written is a ConfigError.
    """
    refusal = ConfigError(f"{path}: another process is training this run; wait for it or pick another run.name")
    try:
        with exclusive_lock(path / ".lock", refusal):
            yield
    except OSError as cause:
        if not str(cause.filename or "").startswith(str(path)):
            raise
        raise ConfigError(f"{cause.filename}: {cause.strerror}; a run needs a folder that it can write to") from cause


def _lines(path: Path) -> Iterator[bytes]:
    if path.exists():
        yield from path.read_bytes().splitlines(keepends=True)


def _metrics_line(entry: dict[str, Any], key: str) -> bytes:
    return add_checksum(orjson.dumps(entry), key) + b"\n"


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _dataset_digests(config: RunConfig) -> dict[str, str]:
    return {str(file): file_checksum(file) for file in (config.dataset.train, config.dataset.eval) if file is not None}


def _archive(path: Path) -> None:
    """Rename a run, with its tables if they are in a database elsewhere."""
    kept, pool = _archive_name(path), dict[str, Any]()
    with suppress(ConfigError, LookupError, TypeError):  # a damaged one names no database
        pool = RunFolder(path, resumed=True).settings()["config"]["pool"]
    if pool:
        POOLS.load(pool["name"]).rename_run(pool.get("url", ""), path.name, kept.name)
    path.rename(kept)


def _archive_name(path: Path) -> Path:
    number = 1
    while (old := path.with_name(f"{path.name}.old{number}")).exists():
        number += 1
    return old


def _refuse_changes(path: Path, before: dict[str, Any], now: dict[str, Any], may_change: tuple[str, ...]) -> None:
    # Through the config, so that a key that came later has its default in an older run.
    old, new = (_flat(stored_config(each["config"], str(path)).model_dump(mode="json")) for each in (before, now))
    differing = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    changed = [key for key in differing if not _of_run(key).startswith(may_change)]
    if changed:
        key = changed[0]
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise ConfigError(
            f"{path} was started with {key} = {old.get(key)!r}, now it is {new.get(key)!r}{more}; "
            "change it back, set another run.name, or start over with --fresh (the old run is kept)"
        )
    if other := [name for name, digest in now["datasets"].items() if before["datasets"].get(name) != digest]:
        raise ConfigError(f"{path} was started when {other[0]} was another; set another run.name, or start over with --fresh")


def _of_run(key: str) -> str:
    """`policies.judge.engine.url` → `engine.url`: what may change in the run's engine may in a policy's own."""
    section, _, rest = key.partition(".")
    return rest.partition(".")[2] if section == "policies" else key


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")  # pyright: ignore[reportUnknownArgumentType]
        else:
            flat[prefix + key] = value
    return flat


ALLOW = "--allow-code-change"
SHOWN_LINES = 12
"""Changed lines that a refusal shows."""
PACKAGE = Path(penstock.__file__).parent


def author_files(agent: Agent) -> dict[str, str]:
    """Returns the texts of the agent's files, by path from the entry file's folder.

    They are the entry file, the modules in its folder and below that it imports, files that the grader's config names, and for a
    command those among its arguments. For an agent made from objects they are the sources of these.
    """
    if agent.sources:
        return dict(agent.sources)
    entry = agent.entry.resolve()
    home = entry if entry.is_dir() else entry.parent  # flows may be named by a table, without an entry file
    modules = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    own = [path for file in modules if file and (path := Path(file)).suffix == ".py" and _is_own(path, home)]
    configured = [value for _, value in agent.grader_config or () if isinstance(value, Path)]
    arguments = [agent.source.folder / argument for argument in agent.source.command]
    files = {path.resolve() for path in (agent.entry, *own, *configured, *arguments) if path.is_file()}
    texts = {str(path.relative_to(home) if path.is_relative_to(home) else path): path.read_bytes() for path in sorted(files)}
    return {name: text.decode("utf-8", "replace") for name, text in texts.items()}


def _is_own(file: Path, home: Path) -> bool:
    return file.is_relative_to(home) and "site-packages" not in file.parts and not file.is_relative_to(PACKAGE)


def use_code(folder: RunFolder, agent: Agent, events: Events, *, allow_change: bool) -> None:
    """Keep the agent's code in the run folder. ConfigError if it is not the code that the run has used, unless that is allowed.

    Before the first step nothing was trained, and any change is allowed: the evaluation before training is then made again.
    """
    for problem in folder.set_aside_damaged():
        events.emit("record.damaged", text=problem)
    versions, files, step = folder.code_versions(), author_files(agent), len(folder.metrics())
    changed = changed_lines(versions[-1].files, files) if versions else []
    if changed and step and not allow_change:
        raise _refusal(folder, changed)
    if not versions or changed:  # a new run, one of an earlier penstock, or other code
        folder.add_code_version(CodeVersion(after_step=step, files=files))
    if changed and not step:
        folder.keep_evaluations(-1)
    if changed:
        text = f"{CodeChange(step, _names(changed)).text}: rewards from before may not compare with those from now on"
        events.emit("code.changed", step=step, files=_names(changed), text=text)


class CodeChange(NamedTuple):
    after_step: int
    files: list[str]

    @property
    def text(self) -> str:
        return f"the code changed after step {self.after_step} ({', '.join(self.files)})"


def code_changes(folder: RunFolder) -> list[CodeChange]:
    """Returns the changes that the run went on with."""
    pairs = itertools.pairwise(folder.code_versions())
    return [CodeChange(new.after_step, _names(changed_lines(old.files, new.files))) for old, new in pairs]


def changed_lines(before: Mapping[str, str], now: Mapping[str, str]) -> list[Issue]:
    """Returns one issue for each line that was removed or added, with its file as the key."""
    found: list[Issue] = []
    for name in sorted({*before, *now}):
        if name not in now or name not in before:
            found.append(Issue(name, f"{name} is {'new' if name in now else 'not used any more'}"))
            continue
        old, new = before[name].splitlines(), now[name].splitlines()
        for kind, old_from, old_to, new_from, new_to in difflib.SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes():
            if kind != "equal":
                found += [Issue(name, f"{name}, line {at + 1}: - {old[at]}") for at in range(old_from, old_to)]
                found += [Issue(name, f"{name}, line {at + 1}: + {new[at]}") for at in range(new_from, new_to)]
    return found


def _names(changed: list[Issue]) -> list[str]:
    return list(dict.fromkeys(issue.key for issue in changed))


def _refusal(folder: RunFolder, changed: list[Issue]) -> ConfigError:
    more = len(changed) - SHOWN_LINES
    shown = changed[:SHOWN_LINES] + ([Issue("", f"and {more} more lines")] if more > 0 else [])
    lines = f" ({shown[0].message})" if len(shown) == 1 else ""
    what = f"{folder.path} was trained with other code: {', '.join(_names(changed))} changed{lines}"
    return ConfigError(
        f"{what}, and two rewards would be mixed in one curve; "
        f"change it back, set another run.name, start over with --fresh, or continue with {ALLOW}, which marks the change",
        shown,
    )
