"""A call's arguments on their way to clients that parse them as they come, and give up where they are no JSON."""

import re
from math import isfinite
from typing import Any

import orjson

INVALID_JSON = "INVALID_JSON"
"""The key under which arguments that are no JSON object travel in one, both ways."""

SPACE = re.compile(r"[ \t\n\r]+")
INSIDE = re.compile(
    r"(?:[^\"\\\x00-\x1f]+|\\[\"\\/bfnrt]|\\u(?![dD][89a-fA-F])[\da-fA-F]{4}"
    r"|\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2})*"
)
"""The inside of a string, as far as its characters and escapes are whole."""
CUT = re.compile(r"(?:\\(?:u(?:[\da-fA-F]{0,3}|[dD][89abAB][\da-fA-F]{2}(?:\\(?:u[\da-fA-F]{0,3})?)?))?)?\Z")
"""The beginning of an escape, which the next part may complete."""
WORD = re.compile(r"[^\s,:{}\[\]\"]+")
SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
KEYS, VALUES = ("key", "first key"), ("value", "first value")


class InputText:
    """Arguments in parts: what was given out is always the beginning of a JSON object, and in the end a whole one.

    Text that no object goes on with is held back, and told in the end under `INVALID_JSON`, beside the members that were given
    out already. The parser behind it only counts brackets, so what stands between them may be anything; nothing comes after.
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._rest = ""
        """What is not checked yet."""
        self._at = 0
        """How much of `_rest` is, while it is being checked."""
        self._open: list[str] = []
        """The end of every object and list that is open."""
        self._want = "object"
        """What must come next; "first" may also be the end, "end" also a comma. "nothing" comes after the whole object."""
        self._string = ""
        """What the open string is, "key" or "value"; empty where none is."""
        self._wrong = False

    def push(self, text: str) -> str:
        """What can be given out now."""
        self._parts.append(text)
        self._rest += "" if self._wrong else text
        while not self._wrong and self._at < len(self._rest) and self._token():
            pass
        given, self._rest, self._at = self._rest[: self._at], self._rest[self._at :], 0
        return given

    def finish(self, *, cut: bool) -> str:
        """What makes it an object where it is none; nothing where the reply was cut short, which clients are told and expect."""
        if self._want == "nothing" or not any(self._parts) or (cut and not self._wrong):
            return ""
        told = f'"{INVALID_JSON}":{orjson.dumps("".join(self._parts)).decode()}}}'
        return "{" + told if self._want == "object" else self._closed() + told

    def _closed(self) -> str:
        """The end of the member that was begun, and what comes before another one."""
        text, want = ('"', {"key": "colon", "value": "end"}[self._string]) if self._string else ("", self._want)
        inner = "".join(reversed(self._open[1:]))
        missing = {"colon": ":null", "value": "null", "key": '"":null' if inner else ""}
        return text + missing.get(want, "") + inner + ("" if want in KEYS and not inner else ",")

    def _token(self) -> bool:
        """Check one more token; False where its end is not there yet, or where it is wrong."""
        if self._string:
            return self._in_string()
        if space := SPACE.match(self._rest, self._at):
            self._at = space.end()
            return True
        char, want = self._rest[self._at], self._want
        if char == '"' and want in KEYS + VALUES:
            self._string = "key" if want in KEYS else "value"
            return self._take(want)
        if (char == "{" and want in ("object", *VALUES)) or (char == "[" and want in VALUES):
            self._open.append("}" if char == "{" else "]")
            return self._take("first key" if char == "{" else "first value")
        if self._open and char == self._open[-1] and want in ("end", "first key" if char == "}" else "first value"):
            self._open.pop()
            return self._take("end" if self._open else "nothing")
        if char == "," and want == "end":
            return self._take("key" if self._open[-1] == "}" else "value")
        return self._take("value") if char == ":" and want == "colon" else self._scalar()

    def _take(self, want: str) -> bool:
        self._at, self._want = self._at + 1, want
        return True

    def _in_string(self) -> bool:
        run = INSIDE.match(self._rest, self._at)
        assert run is not None, "no character at all is a match too"
        self._at = run.end()
        if self._rest.startswith('"', self._at):
            kind, self._string = self._string, ""
            return self._take("colon" if kind == "key" else "end")
        self._wrong = CUT.match(self._rest, self._at) is None
        return False

    def _scalar(self) -> bool:
        """A number or a word: only what comes after it shows where it ends."""
        word = WORD.match(self._rest, self._at) if self._want in VALUES else None
        if word is not None and word.end() == len(self._rest):
            return False
        if word is None or not _is_scalar(word.group()):
            self._wrong = True
            return False
        self._at, self._want = word.end(), "end"
        return True


def _is_scalar(word: str) -> bool:
    """Whether a word is a JSON value that stays the same when it is read and written again."""
    return SCALAR.fullmatch(word) is not None and (word in ("true", "false", "null") or isfinite(float(word)))


def as_input(arguments: str) -> Any:
    """Whole arguments as an object, to be written out: as the model wrote them, or wrapped where they are none."""
    try:
        is_object = isinstance(orjson.loads(arguments or "{}"), dict)
    except orjson.JSONDecodeError:
        is_object = False
    return orjson.Fragment(arguments or "{}") if is_object else {INVALID_JSON: arguments}
