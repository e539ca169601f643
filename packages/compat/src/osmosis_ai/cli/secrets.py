"""`osmosis secret`: secrets of runs. Their values cannot be read back."""

import os
import re
from typing import Annotated, Literal

import typer

from osmosis_ai.cli.connection import All, Limit, connect, fetch_page
from osmosis_ai.cli.output import CliError, Listing, Operation, Terminal, moment, plain, terminal
from osmosis_ai.cli.records import known, secret_item
from osmosis_ai.cli.runs import Yes
from penstock_controller.client import all_rows

app = typer.Typer(help="Secrets of a controller.", no_args_is_help=True)
NAME = re.compile(r"[A-Z][A-Z0-9_]{0,254}")
Name = Annotated[str, typer.Argument(metavar="NAME", help="Such as OPENAI_API_KEY.")]
Scope = Annotated[str, typer.Option("--scope", help="personal, which goes before the other, or workspace.")]


@app.command("list")
def list_secrets(
    limit: Limit = 50,
    everything: All = False,
    scope: Annotated[str, typer.Option("--scope", help="all, personal or workspace.")] = "all",
) -> Listing:
    """List secrets by name; values are never shown."""
    asked = "all" if scope == "all" else _scope(scope, "all, personal or workspace")
    here = connect()
    page = fetch_page(
        lambda rows, at: here.client.secrets(scope=asked, limit=rows, offset=at),
        "environment_secrets",
        limit=limit,
        everything=everything,
    )
    items = [secret_item(record) for record in page.rows]
    return Listing(
        items=items,
        shown=[[plain(one["name"]), plain(one["scope"]), moment(one["updated_at"]), plain(one["updater_name"])] for one in items],
        titles=["Name", "Scope", "Updated", "By"],
        extra=here.where | known({"platform_url": page.reply.get("platform_url")}),
        **page.listed(),
    )


@app.command("set")
def set_secret(
    context: typer.Context,
    name: Name,
    scope: Scope = "personal",
    variable: Annotated[
        str | None, typer.Option("--env", metavar="VAR", help="The environment variable that has the value.")
    ] = None,
) -> Operation:
    """Keep a secret, in the place of an earlier one; its value is asked for, or comes from a variable."""
    if not NAME.fullmatch(name):
        raise CliError(f"{name}: a secret's name has capital letters, digits and _, begins with a letter, at most 255 of them")
    stored = _scope(scope)
    value = _value(terminal(context), variable)
    here = connect()
    record = here.client.set_secret(name, value, stored)
    return Operation(
        operation="secret.set",
        message=f"Kept the {scope} secret {name}.",
        resource=secret_item(record) | here.where,
        extra=known({"platform_url": record.get("platform_url")}),
    )


@app.command("delete")
def delete_secret(context: typer.Context, name: Name, scope: Scope = "personal", yes: Yes = False) -> Operation:
    """Forget a secret."""
    stored = _scope(scope)
    here = connect()
    found = all_rows(lambda at: here.client.secrets(scope=stored, offset=at), "environment_secrets")
    if all(record.get("name") != name for record in found):
        raise CliError(f"There is no {scope} secret {name}; see: osmosis secret list", "NOT_FOUND")
    terminal(context).confirm(f"Delete the {scope} secret {name}?", yes=yes, summary={"Name": name, "Scope": scope})
    here.client.delete_secret(name, stored)
    resource = {"name": name, "scope": scope, **here.where}
    return Operation(operation="secret.delete", message=f"Deleted the {scope} secret {name}.", resource=resource)


def _scope(word: str, choice: str = "personal or workspace") -> Literal["user", "workspace"]:
    if word in ("personal", "user"):
        return "user"
    if word == "workspace":
        return "workspace"
    raise CliError(f"--scope {word}: write {choice}")


def _value(term: Terminal, variable: str | None) -> str:
    if variable is not None:
        value = os.environ.get(variable, "")
        if not value:
            raise CliError(f"--env {variable}: that variable is not set, or empty")
        return value
    if not term.can_ask:
        raise CliError("Nobody can be asked for the value here; pass --env VAR", "INTERACTIVE_REQUIRED", flags=["--env"])
    return typer.prompt("Value", hide_input=True, err=True)
