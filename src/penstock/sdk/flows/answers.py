"""What the gateway answers to a flow: one object for both forms in which flows read it."""

from typing import Any


class Generated(tuple[str, list[int], list[int]]):
    """A reply: unpacks into `text, response_ids, prompt_ids`, and carries what else is known of the call."""

    log_probs: list[float] | None
    """Of `response_ids`; None where the engine tells none."""
    stop_reason: str | None
    policy_version: int | None
    """The version that the engine served; that of the last token where it changed within the reply."""
    policy_versions: list[int] | None
    """Per token."""
    step_index: int | None
    """Of the call among those that are recorded of the rollout."""

    def __new__(cls, answer: dict[str, Any]) -> "Generated":
        """From the body of the gateway's answer."""
        made = super().__new__(cls, (answer["response_text"], answer["response_ids"], answer["prompt_ids"]))
        for name in ("log_probs", "stop_reason", "policy_version", "policy_versions", "step_index"):
            setattr(made, name, answer.get(name))
        return made

    @property
    def text(self) -> str:
        """What was said, as the template's own text: tool calls included, special tokens not."""
        return self[0]

    @property
    def response_ids(self) -> list[int]:
        """The tokens that were sampled."""
        return self[1]

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens that the model saw."""
        return self[2]


class Judged(float):
    """A reward, to be used as the number that it is or read like the gateway's answer: `reward["reward"]`."""

    answer: dict[str, Any]

    def __new__(cls, answer: dict[str, Any]) -> "Judged":
        """From the body of the gateway's answer."""
        made = super().__new__(cls, answer["reward"])
        made.answer = answer
        return made

    def __getitem__(self, name: str) -> Any:
        return self.answer[name]

    def get(self, name: str, default: Any = None) -> Any:
        """As a dictionary's."""
        return self.answer.get(name, default)
