"""Requests for the fuzzer: a known-good one for each route, changed in some places. Each is a function of seed, server and number.

Field names, query parameters and headers are taken from the source, so that a new one is fuzzed without a change here.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

import penstock
from penstock.gateway.auth import GatewayTokens

SOURCE = Path(penstock.__file__).parent
SOURCES = "\n".join(
    file.read_text()
    for folder in ("gateway", "controller", "rollout/server", "http", "view")
    for file in sorted((SOURCE / folder).rglob("*.py"))
)
FIELDS = sorted(
    {*re.findall(r'"([a-z][a-z_]{1,30})"', SOURCES), *re.findall(r"^    ([a-z][a-z_]{1,30}): [^=\n]+= ", SOURCES, re.M)}
)
QUERY = sorted(
    {
        *re.findall(r'query_params\.get\("(\w+)"', SOURCES),
        *re.findall(r'(?:int_param|_query_number)\(request, "(\w+)"', SOURCES),
        *re.findall(r'asked\.(?:text|number|seconds)\("(\w+)"', SOURCES),
    }
)
HEADERS = sorted(
    {*re.findall(r'headers\.get\("([\w-]+)"', SOURCES), *re.findall(r'header\(.*?, b"([\w-]+)"\)', SOURCES)}
    - {"host", "authorization", "content-length"}
)
PER_ROLLOUT = 30
"""Requests of the gateway that share a rollout."""


@dataclass(frozen=True)
class FuzzRequest:
    number: int
    route: str
    method: str
    raw: bytes
    answers: bool = True
    """Whether the server must answer; False where the caller leaves before the request is whole."""

    def __str__(self) -> str:
        shown = self.raw if len(self.raw) < 3000 else self.raw[:1500] + b" ... " + self.raw[-200:]
        return f"request {self.number} ({self.route}, {len(self.raw)} bytes): {shown!r}"


# Known-good requests.

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "u"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "r"},
]
BLOCKS = [
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "r", "is_error": False}]},
]
ITEMS = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
    {"role": "user", "content": "u"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "r"},
]
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3, "stream": False, "stop": ["x"], "n": 1, "max_tokens": 5}
MESSAGES = {
    "model": "m",
    "messages": BLOCKS,
    "system": [{"type": "text", "text": "s"}],
    "max_tokens": 5,
    "stream": True,
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "adaptive"},
}
RESPONSES = {
    "model": "m",
    "input": ITEMS,
    "tools": [
        {"type": "function", "name": "f", "parameters": {"type": "object"}},
        {"type": "web_search"},
        {"type": "custom", "name": "g"},
    ],
    "instructions": "i",
    "stream": True,
    "max_output_tokens": 5,
    "reasoning": {"summary": "auto"},
    "include": [],
    "text": {"verbosity": "low"},
}
STEP = {
    "prompt_ids": [1, 2],
    "response_ids": [3],
    "reward": 1.0,
    "rollout_log_probs": [-0.5],
    "trajectory_uid": "ROLLOUT",
    "prompt_uid": "p",
    "step_index": 0,
    "policy_version": 0,
    "is_last": True,
    "metadata": {"a": 1},
}
INIT = {
    "rollout_id": "NEW",
    "initial_messages": [{"role": "user", "content": "2 times 3?"}],
    "chat_completions_url": "http://127.0.0.1:9/v1",
    "completion_callback_url": "COMPLETED",
    "grader_callback_url": "GRADED",
    "label": "6",
    "metadata": {"a": 1},
    "controller_api_key": "KEY",
    "llm_api_key": "k",
    "agent_timeout_sec": 5.0,
    "grader_timeout_sec": 5.0,
    "extra_fields": {"row": 7},
}
SUBMIT = {
    "snapshot": "DIGEST",
    "origin": {"branch": "main", "commit_sha": "0" * 40, "dirty": True},
    "run_config": {
        "tables": {"run": {"name": "x"}, "model": {"name": "tiny"}, "dataset": {"train": "nothing.jsonl"}},
        "file": "penstock.toml",
    },
}
EXPERIMENT = {"experiment_config": {"rollout": "asker", "dataset": "rows", "branch": "main", "commit_sha": None}, "name": "x"}
BODIES: dict[str, list[Any]] = {
    "/v1/chat/completions": [{"model": "m", "messages": TALK, "tools": [TOOL], "tool_choice": "auto", **SAMPLING}],
    "/v1/completions": [{"model": "m", "prompt": "p", "echo": False, **SAMPLING}, {"prompt": [1, 2, 3], "max_tokens": 2}],
    "/v1/messages": [MESSAGES],
    "/v1/messages/count_tokens": [{"model": "m", "messages": BLOCKS}],
    "/v1/responses": [RESPONSES],
    "/v1/responses/input_tokens": [{"model": "m", "input": ITEMS}],
    "/generate": [
        {"trajectory_uid": "ROLLOUT", "prompt_uid": "p", "messages": TALK, "tools": [TOOL], **SAMPLING},
        {"prompt_ids": [1, 2], "sampling_params": {"temperature": 0.5, "logprobs": True}},
    ],
    "/rollouts": [
        {"rollout_id": "ROLLOUT"},
        {"rollout_id": "NEW", "group_id": "g", "task_id": "t", "channel": "val", "sampling": {"max_tokens": 3, "top_k": 1}},
    ],
    "/rollouts/{rollout_id}/grade": [{"reward": 1.0, "source": "s", "transcript": None, "step": None}],
    "/rollouts/{rollout_id}/end": [{"end": "completed", "message": "m"}],
    "/submit_steps": [{"steps": [STEP]}],
    "/compute_reward": [
        {"messages": TALK, "dataset_fields": {"ground_truth": "42"}, "trajectory_uid": "ROLLOUT"},
        {"prompt_ids": [1], "response_ids": [2], "num_turns": 2, "extra_fields": {"data_source": "openai/gsm8k"}},
    ],
    "/init_trajectory": [{}],
    "/{trajectory}/{prompt}/v1/register_trajectory": [
        {"channel": "train", "metadata": {"a": [1], "sampling": {"temperature": 0.5}}, "sampling": {"top_p": 0.5}},
    ],
    "/{trajectory}/{prompt}/v1/complete_trajectory": [{"reward": 1.0, "channel": "train"}],
    "/complete_trajectory/{trajectory}": [{"reward": None}],
    "/api/curation": [{"updates": [{"key": "ROLLOUT:0", "trainable": False, "quality": 0.5, "note": "n"}]}],
    "/api/cli/device/authorize": [{"deviceName": "laptop"}],
    "/api/cli/device/token": [{"device_code": "x"}],
    "/api/cli/device/approve": [{"user_code": "ABCD-EFGH", "deny": False}],
    "/api/cli/eval-runs": [SUBMIT, EXPERIMENT],
    "/api/cli/training-runs": [SUBMIT, EXPERIMENT],
    "/api/cli/eval-runs/{ref}/samples/download-urls": [
        {"items": [{"path": "summary.jsonl"}, {"path": "trajectories/row_1_run_0.json"}]}
    ],
    "/api/cli/training-runs/{ref}/samples/download-urls": [{"items": [{"path": "metrics.json", "token": "metrics-x.json"}]}],
    "/api/cli/datasets": [{"file_name": "NEW", "file_size": 10, "extension": "jsonl", "overwrite_dataset_id": None}],
    "/api/cli/datasets/{ref}/complete": [{"file_extension": "jsonl"}],
    "/api/cli/models/{name}/deploy": [{"engine": "embedded"}],
    "/api/cli/environment-secrets": [{"name": "WORD", "value": "a secret", "scope": "user"}],
    "/api/cli/repositories": [{"name": "acme/other", "path": "/nowhere"}],
    "/rollout": [INIT],
    "/rollout/cancel": [{"ids": ["r-1"]}, {"prefix": "nothing"}],
    "completed": [
        {
            "rollout_id": "r-1",
            "status": "success",
            "extra_fields": {"row": 7},
            "err_message": None,
            "err_category": None,
            "strays": ["x"],
        }
    ],
    "graded": [
        {
            "rollout_id": "r-1",
            "status": "success",
            "samples": {
                "main": {"id": "main", "messages": [], "label": None, "reward": 1.0, "remove_sample": False, "metrics": {"a": 1}}
            },
            "reward": 1.0,
            "step_rewards": {"0": 1.0},
            "filled": ["main"],
        }
    ],
}
PARAMETERS = {
    "model": ["scripted", "x"],
    "trajectory": ["ROLLOUT", "ROLLOUT", "NEW"],
    "prompt": ["1", "p"],
    "rollout_id": ["ROLLOUT"],
    "rollout": ["r-1", "r-2"],
    "ref": ["asked", "trained", "rows", "more", "nobody"],
    "name": ["tiny-nobody", "acme%2Fmodel"],
    "token_id": ["nobody"],
    "token": ["x.y"],
    "digest": ["DIGEST"],
    "screen": ["runs", "run", "metrics", "groups", "pool", "timeline", "evals"],
    "file": ["main.js", "view.css"],
}
QUERY_VALUES = [
    "",
    "0",
    "1",
    "50",
    "200",
    "-1",
    "1e3",
    "9" * 18,
    "9" * 400,
    "0-9999999",
    "3,7,10-20",
    "train,val",
    "train:1,val:2",
    "train:1.0",
]
QUERY_VALUES += [
    "older",
    "newer",
    "true",
    "metrics,logs",
    "metrics,trajectories,artifacts,logs,report",
    "user",
    "main",
    "--upload-pack=x",
    "ROLLOUT",
]
QUERY_VALUES += ["é", "a" * 2000, "1," * 3000, "٣", "%00", "%ff", "%", "..", "[", "x&x", "x;y=1", "ABCD-EFGH", "asked"]
QUERY_VALUES += ["run", "train-0", "train-0.1.1", "agent_error", "trained", "../run"]
HEADER_VALUES = [
    "",
    "1",
    "0",
    "-1",
    "é",
    "x",
    "k" * 300,
    "k" * 5000,
    "ROLLOUT",
    "other",
    "acme/agents",
    "ACME/agents",
    "../..",
    "null",
    "http://127.0.0.1",
]
COMMON_HEADERS = {
    "content-type": [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "multipart/form-data; boundary=x",
        "é",
        "",
    ],
    "content-encoding": ["gzip", "br", "identity"],
    "accept": ["text/event-stream", "*/*;q=0", "x"],
    "accept-encoding": ["gzip", "identity;q=0"],
    "range": [
        "bytes=0-0",
        "bytes=5-2",
        "bytes=-1",
        "bytes=0-,1-,2-",
        "bytes=" + "0-1," * 500 + "2-",
        "bytes=99999999999-",
        "x=1-2",
        "bytes=" + "9" * 400 + "-",
    ],
    "if-range": ["x", "Wed, 21 Oct 2015 07:28:00 GMT"],
    "if-modified-since": ["Wed, 21 Oct 2015 07:28:00 GMT", "x"],
    "if-none-match": ["*", '"x"'],
    "origin": ["https://evil.example", "null", "http://localhost", "http://["],
    "x-forwarded-for": ["10.0.0.1"],
    "cookie": ["a=b; c", "\x01=é"],
    "expect": ["100-continue", "x"],
    "connection": ["close", "upgrade", "x"],
    "upgrade": ["h2c", "websocket"],
    "traceparent": ["00-" + "0" * 32 + "-x-01"],
    "transfer-encoding": ["gzip"],
    "te": ["trailers"],
    "anthropic-beta": ["x"],
}
HOSTS = ["[", "", "evil.example", "me@localhost", "localhost:99999", "localhost, x", "[::1]", "é", "LOCALHOST", "x" * 300]
METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "PROPFIND"]


# Values and bodies.

GONE = object()
LITERALS = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "-1e400",
    "1e-400",
    "-0",
    "01",
    ".5",
    "+1",
    "0x10",
    "1.",
    "nul",
    "'a'",
    '{"a":1,"a":2}',
    "[1,]",
    "//",
]
NUMBERS = [
    0,
    1,
    -1,
    2,
    7,
    100,
    129,
    65536,
    2**31 - 1,
    2**31,
    2**53,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63) - 1,
    10**30,
    10**400,
]
NUMBERS += [0.5, -0.5, 1.0, 1e16, 1e308, -1e308, 5e-324, 1e-9]
TEXTS = [
    "",
    " ",
    "\x00",
    "\ud800",
    "\udfff\ud800",
    "é",
    "\U0001d54f" * 20,
    "\u202e",
    "<|im_end|>",
    "<|im_start|>system\n",
    "auto",
    "none",
    "required",
    "user",
    "tool",
]
TEXTS += [
    "function",
    "text",
    "assistant",
    "system",
    "image_url",
    "input_text",
    "..",
    "../../token",
    "a/b",
    "/etc/passwd",
    "%2F",
    "%00",
    "ROLLOUT",
    "NEW",
]
TEXTS += [
    "main",
    "null",
    "{}",
    "[",
    "f" * 300,
    "f" * 5000,
    "a b",
    "train",
    "eval",
    "embedded",
    "vllm",
    "success",
    "failure",
    "pending",
    "lost",
]
TEXTS += [
    "http://127.0.0.1:9/x",
    "http://[",
    "file:///etc/passwd",
    "http://me@127.0.0.1/",
    "$(id)",
    "' OR 1=1 --",
    "{{ 7 * 7 }}",
    "a\nb",
    "\r\nx: y",
]
LARGE = [
    "x" * 1_000_000,
    [0] * 100_000,
    [[]] * 20_000,
    {str(key): key for key in range(20_000)},
    "é" * 300_000,
    [{"role": "user", "content": "x"}] * 2_000,
    ["x"] * 50_000,
]


class Literal(str):
    """Written into JSON as it is."""


def odd(random: Random, depth: int = 0) -> Any:
    kind = random.random()
    if kind < 0.08:
        return random.choice([None, True, False, [], {}, [[]], [None], [{}], {"": ""}, {"type": None}])
    if kind < 0.30:
        return random.choice(NUMBERS)
    if kind < 0.60:
        return random.choice(TEXTS)
    if kind < 0.70:
        return Literal(random.choice(LITERALS))
    if kind < 0.76:
        levels = random.choice([10, 65, 130, 300, 1100, 20_000])
        return Literal("[" * levels + "]" * levels if random.random() < 0.5 else '{"a":' * levels + "1" + "}" * levels)
    if kind < 0.765:
        return random.choice(LARGE)
    if kind < 0.85 or depth > 3:
        return random.choice(FIELDS)
    if kind < 0.92:
        return [odd(random, depth + 1) for _ in range(random.randrange(4))]
    return {random.choice(FIELDS if random.random() < 0.7 else TEXTS): odd(random, depth + 1) for _ in range(random.randrange(4))}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where in a body something may be put instead."""
    yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*path, key))


def put(value: Any, path: tuple[Any, ...], instead: Any) -> Any:
    """Return `value` with something else at `path`; GONE takes the key away."""
    if not path:
        return instead
    copy = dict(value) if isinstance(value, dict) else list(value)
    if instead is GONE and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = put(copy[path[0]], path[1:], instead)
    return copy


def encode(value: Any) -> str:
    """JSON with lone surrogates, huge numbers, and literals as they are."""
    if value is GONE:
        return ""
    literals: list[str] = []

    def mark(value: Any) -> Any:
        if isinstance(value, Literal):
            literals.append(value)
            return f"@literal{len(literals) - 1}@"
        if isinstance(value, dict):
            return {key: mark(item) for key, item in value.items()}
        return [mark(item) for item in value] if isinstance(value, list) and len(value) < 1000 else value

    text = json.dumps(mark(value))
    return re.sub(r'"@literal(\d+)@"', lambda found: literals[int(found[1])], text) if literals else text


def mutated(body: Any, random: Random) -> Any:
    for _ in range(random.choice([0, 1, 1, 1, 2, 3])):
        found = list(places(body))
        if isinstance(body, dict) and random.random() < 0.3:
            body = {**body, random.choice(FIELDS): odd(random)}
        else:
            body = put(body, random.choice(found), GONE if random.random() < 0.15 else odd(random))
        if body is GONE or not isinstance(body, dict | list) or len(body) > 1000:
            break
    return body


def distorted(raw: bytes, random: Random) -> bytes:
    """A body as a broken client sends it."""
    kind = random.randrange(9)
    if kind == 0:
        return raw[: random.randrange(len(raw) + 1)]
    if kind == 1:
        return b"\xef\xbb\xbf" + raw
    if kind == 2:
        return raw.decode().encode("utf-16")
    if kind == 3:
        return b"\x1f\x8b\x08\x00" + random.randbytes(20)
    if kind == 4:
        place = random.randrange(len(raw) + 1)
        return raw[:place] + random.randbytes(random.randrange(1, 4)) + raw[place:]
    if kind == 5:
        return raw + raw
    if kind == 6:
        return b" " * random.choice([1, 5000]) + raw
    return b"" if kind == 7 else random.randbytes(random.choice([1, 30, 3000]))


# Requests.


class RequestMaker:
    """Makes the requests for one target, as `fuzz_server.py` describes it."""

    def __init__(self, target: dict[str, Any], seed: str) -> None:
        self._target, self._seed = target, seed
        self._host = target["url"].removeprefix("http://")
        self._tokens = GatewayTokens(target["secret"].encode()) if "secret" in target else None
        self._snapshot = bytes.fromhex(target.get("snapshot", ""))
        self.routes = [tuple(route) for route in target["routes"]]

    def rollout(self, number: int) -> str:
        """The rollout of a gateway's request."""
        return f"fuzz-{number // PER_ROLLOUT}"

    def make(self, number: int) -> FuzzRequest:
        random = Random(f"{self._seed}/{self._target['name']}/{number}")
        method, path, access = self.routes[number % len(self.routes)] if random.random() < 0.5 else random.choice(self.routes)
        route = f"{method} {path}"
        if random.random() < 0.03:
            return FuzzRequest(number, route, "", self._garbage(random, number), answers=random.random() < 0.5)
        target = self._fill(self._path(path, access, random), number)
        headers = self._headers(random, number, access)
        body = self._body(method, path, random, number)
        method = random.choice(METHODS) if random.random() < 0.05 else method
        head = [f"{method} {target} HTTP/1.1".encode("latin-1", "replace")]
        host = random.choice(HOSTS) if random.random() < 0.03 else self._host
        head += [b"host: " + host.encode(), *(b"%b: %b" % (name.encode(), value.encode()) for name, value in headers)]
        head.append(f"x-fuzz: {self._target['name']}/{number}".encode())
        whole = True
        if random.random() < 0.1 and body:
            head.append(b"transfer-encoding: chunked")
            cut = random.randrange(len(body) + 1)
            body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:cut], body[cut:]) if part) + b"0\r\n\r\n"
        elif body or random.random() < 0.5:
            whole = random.random() < 0.98
            head.append(b"content-length: %d" % (len(body) + (0 if whole else random.choice([1, 100, 10**7]))))
        return FuzzRequest(number, route, method, b"\r\n".join(head) + b"\r\n\r\n" + body, answers=whole)

    def _fill(self, text: str, number: int) -> str:
        """Replace placeholders."""
        target, digest = self._target, sha256(self._snapshot).hexdigest()
        text = text.replace("ROLLOUT", self.rollout(number)).replace("NEW", f"new-{number}").replace("DIGEST", digest)
        for name, key in (("COMPLETED", "completed"), ("GRADED", "graded"), ("KEY", "key")):
            text = text.replace(name, target.get(key, name).replace("r-1", "r-2"))
        return text

    def _path(self, path: str, access: str, random: Random) -> str:
        if access == "link" and random.random() < 0.7:
            known = [link for link in self._target["links"] if link.startswith(path.partition("{")[0])]
            path = known[0] if known else path
        for name in re.findall(r"\{(\w+)\}", path):
            value = random.choice(PARAMETERS.get(name, ["x"]))
            if name == "ref" and self._target.get("dataset") and random.random() < 0.1:
                value = self._target["dataset"]
            if random.random() < 0.15:
                value = quote(random.choice(TEXTS).encode("utf-8", "replace"), safe="" if random.random() < 0.8 else "/%")
            path = path.replace(f"{{{name}}}", value, 1)
        kind = random.random()
        if kind < 0.02:
            path = path.replace("/", random.choice(["//", "/./", "/../", "/%2e%2e/", "/v1/", "/ROLLOUT/"]), 1)
        elif kind < 0.03:
            path = random.choice(
                [path + "/", path + "/x", path + "?", path + "#x", path + "%", path + "\x01", path + "é", path + "x" * 20_000]
            )
        elif kind < 0.04:
            path = random.choice(
                [f"http://{self._host}{path}", f"http://evil.example{path}", f"http://me@{self._host}{path}", "*", "http://["]
            )
        elif kind < 0.06 and self._tokens:
            path = f"/ROLLOUT/p{path}"
        query = self._query(random)
        return path + (query.replace("?", "&", 1) if "?" in path else query)

    def _query(self, random: Random) -> str:
        if random.random() < 0.6:
            return ""
        pairs: list[str] = []
        for _ in range(random.choice([1, 1, 2, 3, 8])):
            value = random.choice(QUERY_VALUES)
            pairs.append(f"{random.choice(QUERY)}={value if random.random() < 0.05 else quote(value, safe=',:-')}")
        return "?" + "&".join(pairs)

    def _headers(self, random: Random, number: int, access: str) -> list[tuple[str, str]]:
        headers = list[tuple[str, str]]()
        token = self._token(random, number, access)
        if token:
            headers.append(("x-api-key", token) if random.random() < 0.1 else ("authorization", f"Bearer {token}"))
        for _ in range(random.choice([0, 0, 0, 1, 2])):
            if random.random() < 0.5:
                headers.append((random.choice(HEADERS), self._fill(random.choice(HEADER_VALUES), number)))
            else:
                name = random.choice(list(COMMON_HEADERS))
                headers.append((name, random.choice(COMMON_HEADERS[name])))
        if "device" in self._target and random.random() < 0.3:
            headers.append(("x-osmosis-git", "acme/agents"))
        return headers

    def _token(self, random: Random, number: int, access: str) -> str:
        kind, target = random.random(), self._target
        if kind > 0.9:
            return random.choice(["", "wrong", "x" * 3000, "mk-x.y", "\x7f", "é", "Bearer x", "ck-" + "0" * 40])
        if self._tokens is None:
            own = target.get("key") if access == "key" else target["token"]
            return target["device"] if "device" in target and kind < 0.3 else own
        tokens, rollout = self._tokens, self.rollout(number)
        valid = {
            "model": tokens.model(rollout),
            "flow": tokens.flow(rollout),
            "control": tokens.control,
            "admin": tokens.admin,
            "nothing": "",
        }
        if kind > 0.85:
            other = self.rollout(max(0, number - PER_ROLLOUT))
            return random.choice([*valid.values(), tokens.model(other), tokens.flow(other), tokens.model("nobody"), tokens.control])
        return tokens.control if access == "flow" and kind < 0.4 else valid[access]

    def _body(self, method: str, path: str, random: Random, number: int) -> bytes:
        seeds = BODIES.get(path) or BODIES.get(path.rpartition("/")[2]) or [{}]
        if method in ("GET", "HEAD") and random.random() < 0.95:
            return b""
        if method == "PUT" and random.random() < 0.7:
            return (
                self._snapshot
                if random.random() < 0.5
                else random.choice([b"", b"\n", b'{"prompt": "x"}\n' * 3, random.randbytes(2000)])
            )
        raw = self._fill(encode(mutated(random.choice(seeds), random)), number) if random.random() < 0.97 else ""
        encoded = raw.encode("utf-8", "surrogatepass") if raw else b""
        return distorted(encoded, random) if random.random() < 0.06 else encoded

    def _garbage(self, random: Random, number: int) -> bytes:
        get = f"GET /health HTTP/1.1\r\nhost: {self._host}\r\nx-fuzz: {self._target['name']}/{number}\r\n".encode()
        upgrade = get + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n"
        return random.choice(
            [
                random.randbytes(random.choice([1, 50, 2000])) + b"\r\n\r\n",
                get + b"\r\n" + get + b"\r\n" + get + b"\r\n",
                upgrade * random.choice([1, 3, 300]),
                get + b"host: localhost\r\n\r\n",
                get + b"content-length: 1\r\ncontent-length: 2\r\n\r\nxx",
                get
                + b"transfer-encoding: chunked\r\n\r\n"
                + random.choice([b"zz\r\n", b"-1\r\n", b"f" * 30 + b"\r\n", b"1;" + b"x" * 70_000]),
                get + b"x: y\r\n" * random.choice([10, 250, 20_000]) + b"\r\n",
                get.replace(b"HTTP/1.1", random.choice([b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"http/1.1", b"HTTP/1.1 x"]))
                + b"\r\n",
                get.replace(b"GET", random.choice([b"get", b"G\0T", b"CONNECT", b"PRI", b"M-SEARCH"])) + b"\r\n",
                get[:-2] + b"\n\n",
                get + b": nothing\r\n\r\n",
                get + b"x:\x00\r\n\r\n",
                get + b"expect: 100-continue\r\ncontent-length: 3\r\n\r\nabc",
                get + b"a" * 70_000,
            ]
        )
