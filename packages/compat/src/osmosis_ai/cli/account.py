"""`osmosis auth`: login, logout and identity at a controller."""

import os
import platform
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from osmosis_ai.cli.connection import Login, forget_login, identify, open_client, platform_url, save_login, saved_login
from osmosis_ai.cli.output import CliError, Detail, Operation, Terminal, moment, terminal
from osmosis_ai.cli.records import Record, below, known
from osmosis_ai.cli.runs import Yes
from penstock.errors import ControllerError
from penstock_controller.client import ControllerClient

app = typer.Typer(help="Log in at a controller.", no_args_is_help=True)
LONGEST_S = 900
"""How long a login waits for approval."""


@app.command("login")
def login(
    context: typer.Context,
    force: Annotated[bool, typer.Option("--force", help="Log in again where one is logged in.")] = False,
    token: Annotated[str | None, typer.Option("--token", help="A token that the controller knows.")] = None,
) -> Operation:
    """Log in at OSMOSIS_PLATFORM_URL; a controller on this machine needs no login."""
    url = platform_url()
    if url is None:
        if token is not None:
            raise CliError("--token is for the controller that OSMOSIS_PLATFORM_URL names; set it")
        client = open_client()
        return _login_result(
            client.url, _login_of(client, ""), "environment", "The controller on this machine needs no login.", "noop"
        )
    variable = os.environ.get("OSMOSIS_TOKEN")
    if token is None and variable:
        found = _login_of(ControllerClient(url, variable), variable)
        return _login_result(url, found, "environment", f"OSMOSIS_TOKEN is {found.email}'s; nothing was kept.", "noop")
    before = saved_login(url)
    if token is None and before is not None and not force:
        return _login_result(
            url,
            _login_of(ControllerClient(url, before.token), before.token),
            "token",
            f"Logged in already as {before.email}.",
            "noop",
        )
    made = _login_of(ControllerClient(url, token), token) if token is not None else _wait_for_approval(url, terminal(context))
    save_login(url, made)
    return _login_result(url, made, "token", f"Logged in at {url} as {made.email}.", "success", saved=True)


@app.command("logout")
def logout(context: typer.Context, yes: Yes = False) -> Operation:
    """Forget the login at OSMOSIS_PLATFORM_URL, and make its token worthless."""
    url = platform_url()
    login = saved_login(url) if url else None
    status: dict[str, Any] = {"logged_in": False, "platform_url": url} | (
        {"env_token_set": True} if os.environ.get("OSMOSIS_TOKEN") else {}
    )
    if url is None or login is None:
        return Operation(operation="auth.logout", status="noop", message="Not logged in; nothing to do.", resource=status)
    terminal(context).confirm(f"Log {login.email} out?", yes=yes, summary={"Account": login.email, "Controller": url})
    status["revoked"] = _revoke(ControllerClient(url, login.token), login, terminal(context))
    forget_login(url)
    return Operation(operation="auth.logout", message=f"Logged out at {url}.", resource=status)


@app.command("whoami")
def whoami() -> Detail:
    """Show who you are at the controller."""
    from penstock_controller.workspace import find_workspace

    workspace = find_workspace(Path())
    try:
        client = open_client(identify(workspace.path).identity if workspace else None)
    except CliError as error:
        raise CliError(str(error), "AUTH_REQUIRED") from error
    found = client.verify()
    source = "environment" if platform_url() and os.environ.get("OSMOSIS_TOKEN") else "credentials"
    user: Record = found["user"]
    account = {"email": user["email"], "name": user.get("name"), "expires_at": found.get("expires_at")}
    account |= {"platform_url": client.url, "source": source}
    data = account | {"workspace": found.get("workspace"), "account": account | known({"token_id": found.get("token_id")})}
    fields = {
        "Email": user["email"],
        "Name": user.get("name"),
        "Controller": client.url,
        "Workspace": below(found, "workspace").get("name"),
        "Expires": moment(found["expires_at"]) if found.get("expires_at") else None,
        "Source": source,
    }
    return Detail(data=data, fields=fields)


def _login_of(client: ControllerClient, token: str) -> Login:
    """Returns the login that `token` belongs to. Raises AUTH_REQUIRED if the controller does not know the token."""
    found = client.verify()
    user: Record = found["user"]
    return Login(
        token=token,
        email=user["email"],
        name=user.get("name"),
        expires_at=found.get("expires_at"),
        token_id=found.get("token_id"),
    )


def _wait_for_approval(url: str, term: Terminal) -> Login:
    """Waits until a user approves this machine at the controller."""
    if not term.can_ask:
        raise CliError(
            "Nobody can approve a login here; pass --token, or set OSMOSIS_TOKEN", "INTERACTIVE_REQUIRED", flags=["--token"]
        )
    client = ControllerClient(url, None)
    asked = client.authorize_device(platform.node() or "osmosis")
    typer.echo(f"Code: {asked['user_code']}\nApprove it at: {asked['verification_uri']}", err=True)
    deadline, pause_s = time.monotonic() + min(LONGEST_S, asked["expires_in"]), asked["interval"]
    while time.monotonic() < deadline:
        time.sleep(pause_s)
        try:
            token: str = client.device_token(asked["device_code"])["token"]
            return _login_of(ControllerClient(url, token), token)
        except ControllerError as error:
            if str(error) not in ("authorization_pending", "slow_down"):
                raise
            pause_s = min(pause_s + 5, 30) if str(error) == "slow_down" else pause_s
    raise CliError("Nobody approved the login in time; run: osmosis auth login", "AUTH_REQUIRED")


def _revoke(client: ControllerClient, login: Login, term: Terminal) -> bool:
    if login.token_id is None:
        return False
    try:
        client.revoke(login.token_id)
    except ControllerError as error:
        if error.status != 401:
            term.warn(f"The token could not be made worthless: {error}")
            return False
    return True


def _login_result(url: str, login: Login, source: str, message: str, status: str, *, saved: bool = False) -> Operation:
    resource = {"email": login.email, "name": login.name, "expires_at": login.expires_at, "platform_url": url}
    resource |= {"workspace": None, "source": source, "verified": True, "saved": saved} | ({"token_store": "file"} if saved else {})
    return Operation(operation="auth.login", status=status, message=message, resource=resource)
