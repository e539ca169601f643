"""Pythonic tool calls of Llama 4 and others: a list of calls with keyword arguments, `[f(a=1), g(b="x")]`."""

import ast
import json
import re
from typing import Any

from penstock.chat.parsers.base import BaseToolFormat, CallParser, ParseOptions, PartialCall, Read, TextSource

START, END = "<|python_start|>", "<|python_end|>"
NAME, KEY = re.compile(r"[\w.\-]*"), re.compile(r"\w*")
OUTSIDE = re.compile(r"[\"'()\[\]{},]")
INSIDE = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
WORDS = {"true": "true", "false": "false", "null": "null"}


class Pythonic(BaseToolFormat):
    special: tuple[str, ...] = (START, END)

    def matches(self, template: str) -> bool:
        return re.search(r"\[\s*\w+\(\w+\s*=", template) is not None

    def begin(self, name: str) -> str:
        return f"[{name}(" if name else "["

    def parser(self, options: ParseOptions) -> "PythonicParser":
        return PythonicParser(options)


class PythonicParser(CallParser):
    """The list is at the beginning of the reply or after a tag. Arguments are converted to JSON one by one."""

    opens: tuple[str, ...] = (START,)

    def first_calls(self) -> Read[None]:
        self.source.mark()
        if (yield from self.source.peek()) == "[":
            yield from self.calls("")
        else:
            self.source.rewind()

    def calls(self, opener: str) -> Read[bool]:
        source = self.source
        if not (yield from source.token("[")):
            source.rewind()
            return False
        first = good = yield from self.attempt(self._call)
        while good:
            source.mark()
            if not (yield from source.token(",")):
                source.release()
                yield from source.token("]")
                yield from source.token(END)
                break
            good = yield from self.attempt(self._call)
        return first

    def _call(self, call: PartialCall) -> Read[bool]:
        source = self.source
        yield from source.peek()
        name = yield from source.run(NAME)
        if not name or not (yield from source.token("(")):
            return False
        call.set_name(name)
        opening = "{"
        while not (yield from source.token(")")):
            if opening != "{":
                if not (yield from source.token(",")):
                    return False
                if (yield from source.token(")")):
                    break
            argument = yield from self._argument()
            if argument is None:
                return False
            call.add_arguments(opening + argument)
            opening = ", "
        call.add_arguments("{}" if opening == "{" else "}")
        return True

    def _argument(self) -> Read[str | None]:
        """Read one `key=value` and return it as a JSON member."""
        yield from self.source.peek()
        key = yield from self.source.run(KEY)
        if not key or not (yield from self.source.token("=")):
            return None
        value = _as_json((yield from _read_literal(self.source)))
        return None if value is None else f"{json.dumps(key)}: {value}"


def _read_literal(source: TextSource) -> Read[str]:
    """Read up to the comma or bracket that ends a Python literal, outside its quotes and brackets."""
    parts: list[str] = []
    quote, depth, escaped = "", 0, False
    while (yield from source.more()):
        text, at, end = source.text, source.at + escaped, -1
        escaped = False
        while found := (INSIDE[quote] if quote else OUTSIDE).search(text, at):
            char, at = found.group(), found.end()
            if char == "\\":
                escaped = at == len(text)
                at += 1
            elif quote or char in INSIDE:
                quote = "" if quote else char
            elif depth == 0 and char in ",)]}":
                end = found.start()
                break
            else:
                depth += (char in "([{") - (char in ")]}")
        parts.append(source.take((end if end >= 0 else len(text)) - source.at))
        if end >= 0:
            break
    return "".join(parts)


def _as_json(literal: str) -> str | None:
    text = literal.strip()
    if text in WORDS:
        return WORDS[text]
    try:
        value: Any = ast.literal_eval(text)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()  # fails for a lone surrogate, which JSON readers refuse
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return written
