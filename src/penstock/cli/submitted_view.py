"""Submitted runs as text: lists, one of them, what was queued, what was fetched."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.cli.telling import Column, labelled, lasted, size, when

if TYPE_CHECKING:
    from penstock.controller.runs import Kind
    from penstock.controller.submitting import Prepared

WORDS: dict["Kind", str] = {"eval": "evaluation", "train": "training run"}
KEYS: dict["Kind", str] = {"eval": "eval_runs", "train": "training_runs"}
"""Of the list in a page."""
KEYS_OF_ONE: dict["Kind", str] = {"eval": "eval_run", "train": "training_run"}
"""Of the run itself in what is told of one."""


def _named(key: str, *names: str) -> Any:
    def cell(row: Mapping[str, Any]) -> object:
        found: Mapping[str, Any] = row.get(key) or {}
        return next((found[name] for name in ("name", *names) if found.get(name)), "")

    return cell


def _score(row: Mapping[str, Any]) -> object:
    results: Mapping[str, Any] = row.get("results") or {}
    return results.get("score")


def _progress(row: Mapping[str, Any]) -> object:
    step, total = row.get("current_step"), row.get("total_steps")
    return f"{step}/{total}" if step is not None and total else ""


_FIRST = (
    Column("name", lambda row: row.get("name")),
    Column("status", lambda row: row.get("status")),
    Column("rollout", _named("rollout")),
    Column("model", _named("model", "model_name")),
    Column("dataset", _named("dataset", "file_name")),
)
_LAST = (Column("submitted", lambda row: when(row.get("created_at"))), Column("by", lambda row: row.get("creator_name")))
COLUMNS: dict["Kind", tuple[Column, ...]] = {
    "eval": (*_FIRST, Column("reward", _score), *_LAST),
    "train": (*_FIRST, Column("step", _progress), Column("reward", lambda row: row.get("reward")), *_LAST),
}


def submitted_text(kind: "Kind", prepared: "Prepared", record: Mapping[str, Any], url: str) -> str:
    """What was queued where, and what to run next."""
    name = record["name"]
    head = f"Queued {WORDS[kind]} {name} at {url}."
    facts = [
        *(("id", record["id"]), ("rollout", prepared.rollout), ("model", prepared.model), ("dataset", prepared.dataset)),
        *(("branch", prepared.branch), ("commit", prepared.commit_sha)),
    ]
    following = [
        ("follow", f"penstock {kind} logs {name} -f"),
        ("result", f"penstock {kind} info {name}"),
        ("files", f"penstock {kind} download {name}"),
    ]
    return f"{head}\n\n{labelled(facts)}\n\n{labelled(following)}"


def as_text(kind: "Kind", found: Mapping[str, Any]) -> str:
    """One run: where it stands, what it is of, its numbers, what to run next."""
    run: Mapping[str, Any] = found[KEYS_OF_ONE[kind]]
    parts = [
        f"{WORDS[kind].capitalize()} {run['name']} is {run['status']}" + (f": {run['message']}" if run.get("message") else ""),
        labelled(_standing(run, found)),
        labelled(_evaluated(found) if kind == "eval" else _trained(run, found)),
        labelled([("next", _next(kind, run))]),
    ]
    return "\n\n".join(part for part in parts if part)


def _standing(run: Mapping[str, Any], found: Mapping[str, Any]) -> list[tuple[str, object]]:
    config: Mapping[str, Any] = found.get("config") or {}
    scopes: Mapping[str, Any] = found.get("resolved_secret_scopes") or {}
    return [
        ("id", run.get("id")),
        ("submitted", when(run.get("created_at"))),
        ("started", when(run.get("started_at"))),
        ("took" if run.get("completed_at") else "for", lasted(run.get("started_at"), run.get("completed_at"))),
        ("rollout", _named("rollout")(found)),
        ("entrypoint", found.get("entrypoint")),
        ("model", _named("model", "model_name")(found) or config.get("model_path")),
        ("dataset", _named("dataset", "file_name")(found)),
        ("branch", found.get("branch")),
        ("commit", (found.get("commit_sha") or "")[:12]),
        ("secrets", ", ".join(f"{name} ({scope})" for name, scope in scopes.items())),
    ]


def _evaluated(found: Mapping[str, Any]) -> list[tuple[str, object]]:
    results: Mapping[str, Any] = found.get("results") or {}
    stats: Mapping[str, Any] = results.get("reward_stats") or {}
    metrics: Mapping[str, Any] = found.get("metrics") or {}
    chances: list[dict[str, Any]] = metrics.get("pass_at_k") or []
    passes = ", ".join(f"{one['k']}: {one['value']:.3g}" for one in chances if one.get("value") is not None)
    spread = ", ".join(f"{key} {stats[key]:.3g}" for key in ("median", "std", "min", "max") if stats.get(key) is not None)
    return [
        ("reward", results.get("score")),
        ("", spread),
        ("pass@k", passes),
        ("attempts", results.get("total_runs")),
        ("passed", f"{results['passed']} of {results.get('graded')} graded" if results.get("passed") is not None else None),
        ("failed", (found.get("metrics") or {}).get("overview", {}).get("skipped")),
        ("tokens", results.get("total_tokens")),
    ]


def _trained(run: Mapping[str, Any], found: Mapping[str, Any]) -> list[tuple[str, object]]:
    metrics: Mapping[str, Any] = found.get("metrics") or {}
    overview: Mapping[str, Any] = metrics.get("overview") or {}
    summaries: list[Mapping[str, Any]] = overview.get("metric_summaries") or []
    shown = [(str(one.get("title") or one.get("key")), _curve(one)) for one in summaries]
    checkpoints: list[dict[str, Any]] = found.get("checkpoints") or []
    kept = ", ".join(str(one.get("checkpoint_name") or one.get("id")) for one in checkpoints)
    steps = f"{overview.get('latest_step')} of {overview.get('total_steps')}" if overview.get("latest_step") is not None else None
    return [("steps", steps), ("examples", run.get("examples_processed_count")), *shown, ("checkpoints", kept)]


def _curve(one: Mapping[str, Any]) -> str:
    first, last = one.get("initial"), one.get("latest")
    return f"{first:.4g} → {last:.4g}" if isinstance(first, int | float) and isinstance(last, int | float) else ""


def _next(kind: "Kind", run: Mapping[str, Any]) -> str:
    if run["status"] in ("pending", "running"):
        return f"penstock {kind} logs {run['name']} -f"
    return f"penstock {kind} download {run['name']}" if run["status"] == "finished" else f"penstock {kind} logs {run['name']}"


def downloaded_text(kind: "Kind", found: Mapping[str, Any]) -> str:
    """How many files came, where they are, what did not come."""
    there = f", {found['skipped']} were there" if found["skipped"] else ""
    lines = [f"Fetched {found['downloaded']} files ({size(found['bytes'])}) into {found['folder']}{there}."]
    lines += [f"  failed  {one['path']}: {one['error']}" for one in found["failed"]]
    if found["failed"]:
        lines.append(f"\n  next  the same command fetches what is missing: penstock {kind} download {found['name']}")
    return "\n".join(lines)
