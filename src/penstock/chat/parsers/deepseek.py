"""Tool calls of DeepSeek V3, R1 and V3.1: a section of special tokens, with the arguments as JSON, fenced in the first two."""

import re

from penstock.chat.parsers.base import BaseToolFormat, CallParser, ParseOptions, PartialCall, Read, ReplyParser, read_object

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001 (the tokens are spelt so)
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
FENCE, FENCED = "```", "```json"
NAME = re.compile(r"[^\s<{`]*")


class DeepSeek(BaseToolFormat):
    """V3 and R1: `function`, the name on a line of its own, the arguments in a fence. See `ToolFormat`."""

    special: tuple[str, ...] = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR, "<think>", "</think>")

    def matches(self, template: str) -> bool:
        """Whether the template writes fenced calls."""
        return CALLS_BEGIN in template and FENCED in template

    def begin(self, name: str) -> str:
        """Up to where the arguments, or the name, come."""
        return f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}{name}" + (f"\n{FENCED}\n" if name else "")

    def parser(self, reading: ParseOptions) -> ReplyParser:
        """A fresh parser; it reads both forms."""
        return DeepSeekParser(reading)


class DeepSeekPlain(DeepSeek):
    """V3.1 and later: the name, then the arguments."""

    def matches(self, template: str) -> bool:
        """Whether the template writes calls without a fence."""
        return CALLS_BEGIN in template and FENCED not in template

    def begin(self, name: str) -> str:
        """Up to where the arguments, or the name, come."""
        return f"{CALLS_BEGIN}{CALL_BEGIN}{name}" + (SEPARATOR if name else "")


class DeepSeekParser(CallParser):
    """Both forms, told apart by what comes before the separator. The section's own frame may be missing."""

    opens: tuple[str, ...] = (CALLS_BEGIN, CALL_BEGIN)

    def calls(self, opener: str) -> Read[bool]:
        """All calls of a section."""
        if opener == CALLS_BEGIN and not (yield from self.source.token(CALL_BEGIN)):
            self.source.rewind()
            return False
        first = good = yield from self.attempt(self._call)
        while good:
            self.source.mark()
            if not (yield from self.source.token(CALL_BEGIN)):
                self.source.release()
                yield from self.source.token(CALLS_END)
                break
            good = yield from self.attempt(self._call)
        return first

    def _call(self, draft: PartialCall) -> Read[bool]:
        source = self.source
        name = yield from source.run(NAME)
        if not (yield from source.token(SEPARATOR)):
            return False
        fenced = name == "function"
        if fenced:
            name = yield from source.run(NAME)
            fenced = yield from source.token(FENCED)
        draft.named(name)
        whole = bool(name) and (yield from read_object(source, draft.grow))
        if fenced:
            whole = (yield from source.token(FENCE)) and whole
        return ((yield from source.token(CALL_END)) or source.is_spent) and whole
