"""Who calls the controller: its owner, or a device of a person."""

import re
import socket
from typing import NamedTuple

from penstock.errors import ControllerError

OWNER = "owner"
"""Token id and person of whoever has the token of the home folder. What older versions stored belongs to them."""
DEVICE = "device:"
"""Before the token id of a device on its own; no person's name begins so."""
PERSON = re.compile(r"[a-z0-9](?:[a-z0-9._@+-]{0,62}[a-z0-9])?")

GIT_HEADER = "x-osmosis-git"
"""Names the repository of a workspace, as `owner/name`."""
NO_REPOSITORY = "local/none"
"""Its value from a folder without one."""


class Identity(NamedTuple):
    """The bearer of a token."""

    token_id: str
    name: str
    """The person's, or of a device on its own what it calls itself."""
    expires_at: str | None = None
    person: str = OWNER
    """Whose runs, secrets, datasets and deployments this token may change."""

    @property
    def is_owner(self) -> bool:
        """Whether this is the owner's own token. A device that was approved for the owner is not."""
        return self.token_id == OWNER

    @property
    def label(self) -> str:
        """The name for lists that others see: a device that calls itself like a person is not taken for them."""
        return f"{self.name} (device)" if self.person.startswith(DEVICE) else self.name

    @property
    def email(self) -> str:
        """A placeholder: clients expect one."""
        return f"{self.token_id}@{socket.gethostname() or 'localhost'}"

    def may_change(self, person: str) -> bool:
        """Whether what belongs to `person` may be changed by this token."""
        return self.is_owner or self.person == person


THE_OWNER = Identity(OWNER, OWNER)


def device_identity(token_id: str, device: str, expires_at: str, person: str) -> Identity:
    """Returns the bearer of a device's token; with an empty `person` the device counts as a separate person."""
    if person:
        return Identity(token_id, person, expires_at, person)
    return Identity(token_id, device, expires_at, f"{DEVICE}{token_id}")


def check_person(name: str) -> str:
    """Returns a person's name in lower case; ControllerError 400 if it is none."""
    lower = name.strip().lower()
    if not PERSON.fullmatch(lower):
        text = f"{name[:80]!r} is no person's name; use letters, digits and . _ @ + - such as ann or ann@example.org"
        raise ControllerError(text, code="PERSON_INVALID", status=400, details={"field": "person"})
    return lower


def require_owner(who: Identity) -> None:
    """Raises ControllerError 403 unless `who` is the owner."""
    if not who.is_owner:
        text = "this needs the owner's token, which lies in the controller's folder; run the command on the controller's machine"
        raise ControllerError(text, code="FORBIDDEN", status=403)


def require_own(who: Identity, person: str, what: str) -> None:
    """Raises ControllerError 403 unless `who` may change what belongs to `person`."""
    if not who.may_change(person):
        raise ControllerError(f"{what} is another's; only they or the controller's owner may do this", code="FORBIDDEN", status=403)
