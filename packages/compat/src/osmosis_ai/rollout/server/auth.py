"""The key that a rollout server sends in callbacks to its controller."""

from dataclasses import dataclass, field

__all__ = ["ControllerAuth"]


@dataclass
class ControllerAuth:
    """The key is not part of the repr."""

    api_key: str | None = field(default=None, repr=False)

    def as_bearer_headers(self) -> dict[str, str] | None:
        """Returns the Authorization header, or None without a key."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else None
