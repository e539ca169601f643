"""`osmosis model`: base models, trained models and deployments."""

from typing import Annotated, Any, Literal

import typer

from osmosis_ai.cli.connection import All, Connection, Limit, Page, connect, fetch_page
from osmosis_ai.cli.output import CliError, Detail, Listing, Operation, moment, plain, two_digits
from osmosis_ai.cli.records import Record, known

app = typer.Typer(help="Models of a controller.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the model.")]
Kind = Literal["base", "lora"]
BASE = ("id", "model_name", "base_model", "creator_name", "created_at", "updated_at")
TRAINED = ("id", "model_name", "base_model", "training_run_name", "checkpoint_step", "reward", "created_at")
SERVING = ("deployment_status", "deployed_at", "deployed_by")
ACTIVE = ("active_deployments", "max_active_deployments")
PUBLISHED = ("hf_upload_status", "hf_url", "uploaded_by", "inference_model")


@app.command("list")
def list_models(
    limit: Limit = 50,
    everything: All = False,
    kind: Annotated[str | None, typer.Option("--type", help="Only base or lora models.")] = None,
) -> Listing:
    """List models to begin with (base) and models that were trained (lora)."""
    if kind not in (None, "base", "lora"):
        raise CliError(f"--type {kind}: write base or lora")
    here = connect()
    kinds: list[Kind] = ["base", "lora"] if kind is None else ["base"] if kind == "base" else ["lora"]
    pages: dict[Kind, Page] = {one: _page(here, one, limit, everything) for one in kinds}
    shown = [_shown(row, one) for one, page in pages.items() for row in page.rows]
    titles = ["Name", "Kind", "Base Model", "Reward", "Serving", "Created"]
    extra = known({name: page.reply.get(name) for page in pages.values() for name in ACTIVE}) | here.where
    if kind is not None:
        (page,) = pages.values()
        items = [_item(row, kinds[0]) for row in page.rows]
        return Listing(items=items, shown=shown, titles=titles, extra=extra, **page.listed())
    tables = {f"{one}_models": {"items": [_item(row, one) for row in page.rows], **page.listed()} for one, page in pages.items()}
    return ModelListing(items=[], shown=shown, titles=titles, total_count=len(shown), extra=tables | extra)


class ModelListing(Listing):
    """Two lists, each with its own page."""

    def as_json(self) -> dict[str, Any]:
        return dict(self.extra)


@app.command("info")
def show(name: Name) -> Detail:
    """Show a trained model."""
    here = connect()
    record = here.client.model(name)
    item = _item(record, "lora") | {key: record.get(key) for key in PUBLISHED}
    fields = {
        "Name": item["model_name"],
        "Base Model": item["base_model"],
        "Training Run": item["training_run_name"],
        "Step": item["checkpoint_step"],
        "Reward": item["reward"],
        "Created": moment(item["created_at"]),
        "Serving": item.get("deployment_status"),
        "Inference Model": item["inference_model"],
    }
    return Detail(data={"lora_model": item, "platform_url": record.get("platform_url"), **here.where}, fields=fields)


@app.command("deploy")
def deploy(name: Name) -> Operation:
    """Have a trained model served with an OpenAI-compatible API."""
    here = connect()
    return _operation("deploy", name, here.client.deploy(name), here)


@app.command("undeploy")
def undeploy(name: Name) -> Operation:
    """Serve a model no longer."""
    here = connect()
    return _operation("undeploy", name, here.client.undeploy(name), here)


def _operation(verb: str, name: str, record: Record, here: Connection) -> Operation:
    resource = {key: record.get(key) for key in ("id", "model_name", "status")} | here.where
    done = "is served" if verb == "deploy" else "is served no longer"
    return Operation(
        operation=f"model.{verb}",
        message=f"The model {name} {done}.",
        resource=resource,
        steps=[{"action": "model_info", "name": record.get("model_name") or name}],
        hints=[f"Look at it: osmosis model info {name}"],
    )


def _page(here: Connection, kind: Kind, limit: int, everything: bool) -> Page:
    return fetch_page(
        lambda rows, at: here.client.models(kind, limit=rows, offset=at), "models", limit=limit, everything=everything
    )


def _item(record: Record, kind: Kind) -> Record:
    names = BASE if kind == "base" else TRAINED
    return {name: record.get(name) for name in names} | {name: record[name] for name in SERVING if name in record}


def _shown(record: Record, kind: Kind) -> list[str]:
    names = [plain(record.get("model_name")), kind, plain(record.get("base_model"))]
    reward = two_digits(record.get("reward"))
    return [*names, reward, plain(record.get("deployment_status")), moment(record.get("created_at"))]
