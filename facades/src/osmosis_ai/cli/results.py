"""The results of commands (a list, a detail, an operation) as JSON and as lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from osmosis_ai.cli.figures import columns, plain

Mode = Literal["human", "json", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    items: Sequence[Mapping[str, Any]]
    shown: Sequence[Sequence[str]]
    """The rows' cells as text, in the order of `titles`."""
    titles: Sequence[str]
    total_count: int
    has_more: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """More fields of the envelope. They override fields of the same name."""
    next_offset: int | None = None
    hint: str = ""

    def as_json(self) -> dict[str, Any]:
        """The envelope without its version."""
        page = {"items": self.items, "total_count": self.total_count, "has_more": self.has_more, "next_offset": self.next_offset}
        return page | dict(self.extra)

    def lines(self, mode: Mode) -> list[str]:
        """Returns tab-separated rows in plain mode, or else aligned columns with a heading."""
        if mode == "plain":
            return ["\t".join(plain(cell) for cell in row) for row in self.shown]
        more = [f"{len(self.items)} of {self.total_count}; --all shows all of them"] if self.next_offset is not None else []
        hint = [self.hint] if self.hint else []
        return [*(columns([self.titles, *self.shown]) if self.shown else ["Nothing there yet."]), *more, *hint]


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """One object with all its fields."""

    data: Mapping[str, Any]
    fields: Mapping[str, Any]
    """Values by label. None and empty text are not shown."""
    sections: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """Lines below the fields, by heading."""
    exit_code: int = 0

    def as_json(self) -> dict[str, Any]:
        """The envelope without its version."""
        return {"data": self.data}

    def lines(self, mode: Mode) -> list[str]:
        """Returns lines of `Label: value`, aligned in human mode."""
        values = [(label, plain(value)) for label, value in self.fields.items() if value not in (None, "")]
        width = max((len(label) for label, _ in values), default=0) + 2 if mode == "human" else 0
        lines = [f"{label + ':':<{width}} {value}" for label, value in values]
        for heading, below in self.sections.items():
            lines += ["", f"{heading}", *below] if mode == "human" else below
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The outcome of an action."""

    operation: str
    """The action's name, such as `eval.submit`."""
    message: str
    status: str = "success"
    resource: Mapping[str, Any] = field(default_factory=dict[str, Any])
    steps: Sequence[Mapping[str, Any]] = ()
    """Next steps for scripts."""
    hints: Sequence[str] = ()
    """Lines for people, below the message."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    exit_code: int = 0

    def as_json(self) -> dict[str, Any]:
        """The envelope without its version."""
        values = {"status": self.status, "operation": self.operation, "resource": self.resource, "message": self.message}
        return values | ({"next_steps_structured": self.steps} if self.steps else {}) | dict(self.extra)

    def lines(self, mode: Mode) -> list[str]:
        """Returns the message and the hints."""
        return [plain(self.message) if mode == "plain" else self.message, *self.hints]


Result = Listing | Detail | Operation
