"""Several policies behind one gateway: the model name that an agent asks for chooses the one that answers."""

from collections.abc import Mapping
from typing import NamedTuple

from penstock.chat.renderer import Renderer
from penstock.engines.base import Engine
from penstock.engines.text_endpoints.base import TextEndpoint
from penstock.errors import RequestError
from penstock.gateway.sources import ReplySource, TextEndpointSource, TokenSource
from penstock.pool.pictures import PictureStore
from penstock.sdk.routing import PLACEHOLDER_NAMES


class ServedPolicy(NamedTuple):
    """What answers under a policy's name."""

    engine: Engine
    renderer: Renderer | None
    """None if the engine returns text."""
    default: bool = False
    """Whether it also answers under names of no policy."""


class PolicySources:
    """The source of each policy's replies. Without policies it is one, under the empty name, and it answers every model name."""

    def __init__(self, main: ReplySource, policies: Mapping[str, ServedPolicy]) -> None:
        self.by_name = {name: make_source(policy.engine, policy.renderer) for name, policy in policies.items()} or {"": main}
        self._default = next((name for name, policy in policies.items() if policy.default), None) if policies else ""

    @property
    def names(self) -> list[str]:
        """The names of the policies; empty if there are none."""
        return [name for name in self.by_name if name]

    def choose(self, model: object, transcript: str) -> str:
        """The policy that answers a call for `model`, else the one of the transcript's name; RequestError 404 if none does.

        The second is for frameworks whose agents have a name and leave that of the model to us.
        """
        for name in (model, transcript):
            if isinstance(name, str) and name in self.by_name:
                return name
        if self._default is None:
            raise self.unknown(model)
        return self._default

    def named(self, model: str) -> str | None:
        """The policy of this name, or that answers the placeholder; None if there is none."""
        if model in self.names:
            return model
        return self._default if model in PLACEHOLDER_NAMES else None

    def unknown(self, model: object) -> RequestError:
        named = f"there is no model {str(model)[:200]!r}" if model else "the request names no model"
        text = f"{named}; this gateway serves the policies {', '.join(self.names)}"
        return RequestError(text, status=404, code="model_not_found", param="model")


def make_source(engine: Engine, renderer: Renderer | None, pictures: PictureStore | None = None) -> ReplySource:
    if isinstance(engine, TextEndpoint):
        return TextEndpointSource(engine)
    assert renderer is not None, "an engine that takes token ids needs its model's renderer"
    return TokenSource(engine, renderer, pictures)
