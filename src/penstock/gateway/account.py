"""What is known of a model call when it is over: it is counted and told, never recorded."""

from dataclasses import dataclass, field

from penstock.errors import RequestError
from penstock.gateway.calls import Call, Caller
from penstock.records import Step


@dataclass(slots=True)
class Account:
    """Filled in on the way; what a call did not come to stays empty."""

    caller: Caller | None = None
    call: Call | None = None
    prompt_tokens: int = 0
    """As the engine got them; 0 where nothing was sampled, as for an answer that is given again."""
    sampled_tokens: int = 0
    """Of all choices, recorded or not."""
    first_token_s: float | None = None
    """From the request to the engine until its first token."""
    steps: list[Step] = field(default_factory=list[Step])
    """What was recorded, also of a reply that broke off."""
    error: RequestError | None = None
    """What the caller was told."""
