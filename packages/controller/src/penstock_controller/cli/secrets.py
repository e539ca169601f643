"""`penstock secret`: secrets of runs, stored encrypted by a controller."""

import sys
from enum import StrEnum
from typing import Annotated, Literal

import typer

from penstock.cli.output import All, AsJson, Limit, Plain, TableColumn, Yes, confirm, local_time, print_result, print_table
from penstock.errors import ConfigError
from penstock_controller.cli.connection import PANEL, connect, fetch_page

app = typer.Typer(help="Secrets that runs need, stored encrypted.", no_args_is_help=True, rich_help_panel=PANEL)


class Scope(StrEnum):
    """The owner of a secret: you alone, or everyone who uses the controller."""

    personal = "personal"
    workspace = "workspace"

    @property
    def api_name(self) -> Literal["user", "workspace"]:
        """Its name in the controller's API."""
        return "user" if self is Scope.personal else "workspace"


Name = Annotated[str, typer.Argument(metavar="NAME", help="The variable that holds it in runs, such as OPENAI_API_KEY.")]
ScopeOption = Annotated[
    Scope, typer.Option(help="Yours alone, or shared with everyone who uses the controller; a run prefers yours.")
]
COLUMNS = (
    TableColumn("name", lambda row: row.get("name")),
    TableColumn("scope", lambda row: "personal" if row.get("scope") == "user" else row.get("scope")),
    TableColumn("set by", lambda row: row.get("updater_name")),
    TableColumn("updated", lambda row: local_time(row.get("updated_at") or row.get("created_at"))),
)


@app.command("set")
def set_secret(
    name: Name,
    env: Annotated[str | None, typer.Option(metavar="VAR", help="Take the value of this environment variable.")] = None,
    scope: ScopeOption = Scope.personal,
    as_json: AsJson = False,
) -> None:
    """Store or replace a secret. Prompts for its value or reads it from stdin, never from an argument."""
    from penstock_controller.vault import check_name

    check_name(name)
    value = _value(name, env)
    record = connect().set_secret(name, value, scope.api_name)
    following = f'name it in an experiment file: [secrets] required = ["{name}"]'
    print_result(record, f"Stored secret {name} ({scope}), encrypted.\n\n  next  {following}", as_json=as_json)


@app.command("list")
def list_secrets(limit: Limit = 20, everything: All = False, plain: Plain = False, as_json: AsJson = False) -> None:
    """List the names of your secrets and the shared ones; values are never printed."""
    client, key = connect(), "environment_secrets"
    page = fetch_page(lambda limit, offset: client.secrets(limit=limit, offset=offset), key, limit, everything=everything)
    print_table(
        page, key, COLUMNS, as_json=as_json, plain=plain, empty="there is no secret yet; begin with: penstock secret set NAME"
    )


@app.command()
def delete(name: Name, scope: ScopeOption = Scope.personal, yes: Yes = False, as_json: AsJson = False) -> None:
    """Delete a secret."""
    client = connect()
    confirm(f"Delete secret {name} ({scope})?", yes=yes or as_json)
    client.delete_secret(name, scope.api_name)
    print_result({"name": name, "scope": str(scope), "deleted": True}, f"Deleted secret {name} ({scope}).", as_json=as_json)


def _value(name: str, env: str | None) -> str:
    if env is not None:
        from penstock.config import secret

        return secret(env, "--env")
    if sys.stdin.isatty():
        return typer.prompt(f"Value of {name}", hide_input=True, err=True)
    value = sys.stdin.read().removesuffix("\n").removesuffix("\r")
    if not value:
        raise ConfigError(f"no value came on stdin; pipe it, or name a variable: penstock secret set {name} --env VAR")
    return value
