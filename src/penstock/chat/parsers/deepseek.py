"""DeepSeek tool calls: a section of special tokens with JSON arguments, fenced in V3 and R1, plain from V3.1 on."""

import re

from penstock.chat.parsers.base import BaseToolFormat, CallParser, ParseOptions, PartialCall, Read, read_object

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001 (the tokens are spelt so)
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
FENCE, FENCED = "```", "```json"
NAME = re.compile(r"[^\s<{`]*")


class DeepSeek(BaseToolFormat):
    """V3 and R1: `function`, the name, then the arguments in a fence."""

    special: tuple[str, ...] = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR, "<think>", "</think>")
    opener: str = CALLS_BEGIN
    end: tuple[str, ...] | None = (FENCE, CALL_END, CALLS_END)

    def matches(self, template: str) -> bool:
        return CALLS_BEGIN in template and FENCED in template

    def begin(self, name: str) -> str:
        return f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}{name}" + (f"\n{FENCED}\n" if name else "")

    def parser(self, options: ParseOptions) -> "DeepSeekParser":
        return DeepSeekParser(options)


class DeepSeekPlain(DeepSeek):
    """V3.1 and later: the name, then the arguments."""

    end: tuple[str, ...] | None = (CALL_END, CALLS_END)

    def matches(self, template: str) -> bool:
        return CALLS_BEGIN in template and FENCED not in template

    def begin(self, name: str) -> str:
        return f"{CALLS_BEGIN}{CALL_BEGIN}{name}" + (SEPARATOR if name else "")


class DeepSeekParser(CallParser):
    """Reads both forms: only the fenced one has `function` before the separator. The tokens around the section may be missing."""

    opens: tuple[str, ...] = (CALLS_BEGIN, CALL_BEGIN)

    def calls(self, opener: str) -> Read[bool]:
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

    def _call(self, call: PartialCall) -> Read[bool]:
        source = self.source
        name = yield from source.run(NAME)
        if not (yield from source.token(SEPARATOR)):
            return False
        fenced = name == "function"
        if fenced:
            name = yield from source.run(NAME)
            fenced = yield from source.token(FENCED)
        call.set_name(name)
        whole = bool(name) and (yield from read_object(source, call.add_arguments))
        if fenced:
            whole = (yield from source.token(FENCE)) and whole
        return ((yield from source.token(CALL_END)) or source.at_end) and whole
