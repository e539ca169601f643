"""Collects the public surface: commands, config keys, tables, routes, events, file formats and public names.

`python tests/unit/surface.py --write` records it in `golden/`, one JSON file per part. A change there is a change for users, so its
commit must explain it. If code moves, adapt the collector here and leave the golden files as they are.
"""

import argparse
import ast
import asyncio
import functools
import gc
import importlib
import importlib.util
import inspect
import json
import re
import sqlite3
import tempfile
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("golden")
WHEELS = ("penstock", "penstock_controller", "penstock_compat", "osmosis_ai", "claw_r1")


@functools.cache
def sources() -> list[tuple[str, ast.Module]]:
    """Returns the name and syntax tree of every module of the installed wheels."""
    found: list[tuple[str, ast.Module]] = []
    for wheel in WHEELS:
        spec = importlib.util.find_spec(wheel)
        if spec is None or not spec.submodule_search_locations:
            continue
        top = Path(spec.submodule_search_locations[0])
        for file in sorted(top.rglob("*.py")):
            inner = file.relative_to(top)
            if inner.parts[0] != "templates":
                name = ".".join([wheel, *inner.with_suffix("").parts]).removesuffix(".__init__")
                found.append((name, ast.parse(file.read_text())))
    return found


def module(*names: str) -> Any:
    """Imports the first of these modules that exists."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not error.name or not name.startswith(error.name):
                raise
    raise ModuleNotFoundError(names)


def commands() -> dict[str, Any]:
    """Returns the options of every command: names, type, default; not the help texts."""
    import typer.main

    found: dict[str, Any] = {}

    def walk(command: Any, path: str) -> None:
        found[path] = {option.name: _option(option) for option in command.params if option.name != "help"}
        for name, child in sorted(getattr(command, "commands", {}).items()):
            walk(child, f"{path} {name}")

    walk(typer.main.get_command(module("penstock.cli.app").app), "penstock")
    walk(typer.main.get_command(module("osmosis_ai.cli.app").app), "osmosis")
    return found


def _option(option: Any) -> str:
    names = "/".join([*option.opts, *option.secondary_opts])
    many = "*" if option.multiple or option.nargs == -1 else ""
    default = "" if callable(option.default) else f" = {_portable(option.default)}"
    return f"{names} {_plain(option.type_descriptor.annotation)}{many}{' required' if option.required else ''}{default}"


def registries() -> dict[str, Any]:
    """Returns every table of names by its kind."""
    from penstock.registry import Registry

    for name, tree in sources():
        if any(isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Registry" for node in ast.walk(tree)):
            importlib.import_module(name)
    return {found.kind: found for found in gc.get_objects() if type(found) is Registry}


def tables() -> dict[str, Any]:
    return {kind: sorted(registry) for kind, registry in sorted(registries().items())}


def config() -> dict[str, Any]:
    """Returns type and default of every dotted key of a run, of each entry's own settings, and of other TOML files."""
    from penstock.config import RunConfig

    run = RunConfig.model_validate({"dataset": {"train": "tasks.jsonl"}})
    found = dict(_keys(RunConfig, "run.toml:"))
    found |= _keys(module("penstock.gateway.standalone").Settings, "gateway.toml:")
    experiments = module("penstock_controller.workspace.sections", "penstock_controller.experiment", "penstock.workspace.sections")
    found |= _keys(experiments.EvalFile, "eval experiment:")
    found |= _keys(experiments.TrainFile, "train experiment:")
    known = registries()
    for name in known["engine section"]:
        found |= _keys(known["engine section"].load(name), f"[engine] {name}:")
    for name in known["executor"]:
        if name != "ray" or importlib.util.find_spec("ray"):
            found |= _keys(known["executor"].load(name).section, f"[executor] {name}:")
    for kind in ("advantage", "loss"):
        for name in known[kind]:
            function = known[kind].load(name)
            for hint in typing.get_type_hints(getattr(function, "function", function)).values():
                if inspect.isclass(hint) and issubclass(hint, BaseModel) and hint is not type(run.train):
                    found |= _keys(hint, f"[{kind}] {name}:")
    return found


def _keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        inner = [kind for kind in (field.annotation, *typing.get_args(field.annotation)) if inspect.isclass(kind)]
        sections = [kind for kind in inner if issubclass(kind, BaseModel)]
        if sections:
            yield from _keys(sections[0], f"{prefix}{name}.")
        else:
            default = "required" if field.is_required() else _portable(field.get_default(call_default_factory=True))
            yield f"{prefix}{name}", f"{_plain(field.annotation)} = {default}"


def _plain(kind: Any) -> str:
    """Returns the name of a type without modules and validators."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _plain(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_plain, arguments))
    if origin and origin is not typing.Literal:
        return f"{origin.__name__}[{', '.join(map(_plain, arguments))}]"
    return kind.__name__ if inspect.isclass(kind) else str(kind).removeprefix("typing.")


def _portable(value: Any) -> str:
    return re.sub("(Posix|Windows)Path", "Path", repr(value))


def routes() -> dict[str, Any]:
    """Returns method and path of each HTTP route of the gateway, the dashboard and the controller."""
    return {"gateway": asyncio.run(_gateway_routes()), **asyncio.run(_starlette_routes())}


async def _gateway_routes() -> list[str]:
    from penstock.chat.renderer import Renderer
    from penstock.testing import ScriptedEngine, workbench, write_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        renderer = Renderer.load(write_tokenizer(Path(folder)))
        async with workbench(ScriptedEngine([], renderer.tokenizer), renderer) as bench:
            listed = (await bench.http().get("/docs")).text
    return sorted(re.sub(r" +", " ", line) for line in listed.splitlines())


async def _starlette_routes() -> dict[str, Any]:
    view = module("penstock.view.app")
    context = module("penstock_controller.context")
    home = module("penstock_controller.home")
    api = module("penstock_controller.api.app")
    with tempfile.TemporaryDirectory() as folder:
        shown = view.make_view_app(module("penstock.view.sources").FolderSource(Path(folder)), names=None)
        async with context.open_controller(home.Home(Path(folder) / "home"), context.ControllerLimits()) as controller:
            served = api.make_app(controller, "http://127.0.0.1")
    return {"view": _listed(shown), "view screens": sorted(view.SCREENS), "controller": _listed(served)}


def _listed(app: Any) -> list[str]:
    return sorted(f"{method} {route.path}" for route in app.routes for method in route.methods if method != "HEAD")


def events() -> list[str]:
    """Returns the literal kinds that are given to an event emitter."""
    calls = (node for _, tree in sources() for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args)
    emitted = (call.args[0] for call in calls if getattr(call.func, "attr", "") == "emit")
    return sorted({kind.value for kind in emitted if isinstance(kind, ast.Constant) and isinstance(kind.value, str)})


def names() -> dict[str, Any]:
    """Returns the public names of the packages."""
    found = dict[str, Any]()
    for name, tree in sources():
        for node in tree.body:
            is_all = isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["__all__"]
            if is_all and (name == "penstock" or name.startswith(("osmosis_ai", "claw_r1"))):
                found[name] = sorted(importlib.import_module(name).__all__)
    return found


def schema() -> list[str]:
    """Returns the SQL of a new SQLite pool."""
    with tempfile.TemporaryDirectory() as folder:

        async def create() -> None:
            pool = registries()["pool"].load("sqlite")(Path(folder))
            await pool.stats()
            await pool.close()

        asyncio.run(create())
        with sqlite3.connect(Path(folder) / "pool.db") as database:
            rows = database.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name").fetchall()
    return [" ".join(sql.split()) for (sql,) in rows]


def run_folder() -> dict[str, Any]:
    """Returns the files and the metrics keys of a tiny training run with an evaluation."""
    run = module("penstock.cli.app").run
    with tempfile.TemporaryDirectory() as folder:
        settings = [f'run.folder="{folder}"', "train.steps=1", "rollout.groups_per_step=1", "rollout.group_size=2"]
        settings += ['dataset.eval="tasks.jsonl"', "dataset.eval_limit=1"]
        config = ROOT / "tests/helpers/tiny_run/train.toml"
        assert run(["train", str(config), *(word for each in settings for word in ("--set", each))]) == 0
        top = Path(folder) / "tiny"
        files = sorted(str(file.relative_to(top)) for file in top.rglob("*") if file.is_file())
        metrics = json.loads((top / "metrics.jsonl").read_text().splitlines()[-1])
        config_keys = sorted(json.loads((top / "config.json").read_bytes()))
        summary = sorted(json.loads((top / "summary.json").read_bytes()))
    return {"files": files, "metrics.jsonl": sorted(metrics), "config.json": config_keys, "summary.json": summary}


PARTS = {part.__name__: part for part in (commands, tables, config, routes, events, names, schema)}
"""Collected in seconds; `run_folder` trains and is slow."""

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Record the public surface in golden/.")
    parser.add_argument("--write", nargs="*", metavar="PART", required=True, help="only these parts")
    for name, part in (PARTS | {"run_folder": run_folder}).items():
        if name in (chosen := parser.parse_args().write) or not chosen:
            (GOLDEN / f"{name}.json").write_text(json.dumps(part(), indent=1, ensure_ascii=False) + "\n")
