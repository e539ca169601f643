"""`penstock model list, info, deploy, undeploy`: also the models that submitted runs have trained."""

from typing import Annotated, Any

import typer

from penstock.cli.models import Name, find_model, known_models, print_models
from penstock.cli.output import AsJson, Plain, check_format, labelled_lines, local_time, print_result, stage_progress
from penstock_controller.cli.connection import connect, connect_if_running


def add_model_commands(app: typer.Typer) -> None:
    app.command("list")(list_models)
    app.command("info")(details)
    app.command("deploy")(deploy)
    app.command("undeploy")(undeploy)


def list_models(plain: Plain = False, as_json: AsJson = False) -> None:
    """List the models that are here, the built-in ones that can be pulled, and those that submitted runs have trained."""
    check_format(as_json=as_json, plain=plain)
    trained = _trained()
    if as_json:
        print_result({"models": known_models(), **({} if trained is None else {"trained": trained})}, "", as_json=True)
        return
    print_models(["\t".join(map(str, _trained_cells(row))) if plain else _trained_line(row) for row in trained or []], plain=plain)


def details(name: Name, as_json: AsJson = False) -> None:
    """Show where a model is, or which run trained it and whether it is deployed."""
    local = find_model(name)
    if local is not None:
        print_result(local, labelled_lines(local.items()), as_json=as_json)
        return
    record = connect().model(name)
    served = record.get("inference_model")
    following = f"penstock model undeploy {name}" if served else f"penstock model deploy {name}"
    shown = [(key.replace("_", " "), value) for key, value in record.items() if key != "is_internal_user"]
    print_result(record, f"{labelled_lines(shown)}\n\n  next  {following}", as_json=as_json)


def deploy(
    name: Name,
    engine: Annotated[str | None, typer.Option(help="Engine: embedded, or vllm if installed.")] = None,
    as_json: AsJson = False,
) -> None:
    """Serve a trained model from the controller at an OpenAI-compatible URL."""
    client = connect()
    with stage_progress() as progress:
        progress(f"loading {name}")
        record = client.deploy(name, engine=engine)
    print_result(record, f"Model {name} is {record.get('status')}.\n\n  next  penstock model info {name}", as_json=as_json)


def undeploy(name: Name, as_json: AsJson = False) -> None:
    """Stop serving a model; the model is kept."""
    record = connect().undeploy(name)
    print_result(record, f"Model {name} is {record.get('status')}.\n\n  next  penstock model deploy {name}", as_json=as_json)


def _trained() -> list[dict[str, Any]] | None:
    """Returns the models that runs trained, or None if no controller is running; does not start one."""
    from penstock_controller.client import PAGE_ROWS, all_rows

    client = connect_if_running()
    if client is None:
        return None
    return list(all_rows(lambda offset: client.models("lora", limit=PAGE_ROWS, offset=offset), "models"))


def _trained_cells(row: dict[str, Any]) -> tuple[object, ...]:
    step = "" if row.get("checkpoint_step") is None else f"step {row['checkpoint_step']}"
    return (
        row.get("model_name"),
        row.get("deployment_status") or "",
        step,
        row.get("base_model") or "",
        local_time(row.get("created_at")),
    )


def _trained_line(row: dict[str, Any]) -> str:
    name, status, step, base, made = _trained_cells(row)
    return f"{name:<24} {step:>12}  {status:<8} of {base}, {made}".rstrip()
