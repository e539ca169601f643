"""The key with which a server calls its controller back."""

from dataclasses import dataclass, field

__all__ = ["ControllerAuth"]


@dataclass
class ControllerAuth:
    """Holds the key and does not show it."""

    api_key: str | None = field(default=None, repr=False)

    def as_bearer_headers(self) -> dict[str, str] | None:
        """The header that carries it; None where there is no key."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else None
