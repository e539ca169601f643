"""The parts of the HTTP server without a socket: a transport that notes what is written stands in for it."""

import asyncio
import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import RequestError
from penstock.http.request_cycle import LEAVING, make_scope, refusal
from penstock.http.server import IDLE_S, Connection, Hub

REQUEST = (
    b"POST /a%20b/%C3%A9?q=%20#f HTTP/1.1\r\nHost: here \r\nX-Empty:\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nhel\r\n2\r\nlo\r\n0\r\nT: x\r\n\r\n"
)


class Wire(asyncio.Transport):
    """Notes what happens to it; `waiting` is what its caller has not taken."""

    def __init__(self):
        super().__init__({"socket": socket.socket(), "peername": ("127.0.0.1", 9), "sockname": ("127.0.0.1", 8)})
        self.writes = []
        self.waiting = 0
        self.end = ""

    def write(self, part):
        self.writes.append(bytes(part))

    def get_write_buffer_size(self):
        return self.waiting

    def can_write_eof(self):
        return True

    def write_eof(self):
        self.end = "eof"

    def close(self):
        self.end = "close"

    def abort(self):
        self.end = "abort"

    def is_closing(self):
        return self.end in ("close", "abort")


class Desk:
    """One connection to an app, fed by hand."""

    def __init__(self, app):
        self.hub = Hub(app, reader_s=10)
        self.wire = Wire()
        self.connection = Connection(self.hub, asyncio.get_running_loop())
        self.connection.connection_made(self.wire)

    async def feed(self, *parts):
        for part in parts:
            self.connection.get_buffer(-1)[: len(part)] = part
            self.connection.buffer_updated(len(part))
        for _ in range(5):
            await asyncio.sleep(0)


def run(app, steps):
    async def main():
        desk = Desk(app)
        await asyncio.wait_for(steps(desk), 10)
        desk.connection.connection_lost(None)
        desk.wire.get_extra_info("socket").close()

    asyncio.run(main())


async def parrot(scope, receive, send):
    """Says what it was asked."""
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message["body"])
        more = message["more_body"]
    told = {key: str(value) for key, value in scope.items() if key not in ("asgi", LEAVING)} | {"body": b"".join(parts).decode()}
    await send({"type": "http.response.start", "status": 200, "headers": [(b"X-Case", b"kept")]})
    await send({"type": "http.response.body", "body": json.dumps(told).encode()})


def test_a_request_is_the_same_wherever_it_is_split():
    async def steps(desk):
        for place in range(1, len(REQUEST)):
            await desk.feed(REQUEST[:place], REQUEST[place:])
        assert len(desk.wire.writes) == len(REQUEST) - 1
        assert len(set(desk.wire.writes)) == 1

    run(parrot, steps)


def test_an_app_is_told_what_asgi_says():
    async def steps(desk):
        await desk.feed(REQUEST)
        told = json.loads(desk.wire.writes[0].split(b"\r\n")[-4])
        assert told == {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/a b/é",
            "raw_path": str(b"/a%20b/%C3%A9"),
            "query_string": str(b"q=%20"),
            "root_path": "",
            "headers": str([(b"host", b"here"), (b"x-empty", b""), (b"transfer-encoding", b"chunked")]),
            "client": str(("127.0.0.1", 9)),
            "server": str(("127.0.0.1", 8)),
            "body": "hello",
        }

    run(parrot, steps)


def test_an_answer_is_one_write():
    async def steps(desk):
        await desk.feed(REQUEST)
        (answer,) = desk.wire.writes
        assert answer.startswith(b"HTTP/1.1 200 OK\r\nx-case: kept\r\ntransfer-encoding: chunked\r\n\r\n")
        assert answer.endswith(b"}\r\n0\r\n\r\n")

    run(parrot, steps)


def test_parts_of_one_turn_are_one_write_and_the_head_goes_with_them():
    wires = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for turn in range(3):
            for part in (b"a", b"b", b"c"):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
            assert len(wires[0].writes) == turn + 1
        await send({"type": "http.response.body", "body": b"d"})

    async def steps(desk):
        wires.append(desk.wire)
        await desk.feed(REQUEST)
        parts = b"1\r\na\r\n1\r\nb\r\n1\r\nc\r\n"
        assert desk.wire.writes[0].endswith(b"chunked\r\n\r\n" + parts)
        assert desk.wire.writes[1:] == [parts, parts, b"1\r\nd\r\n0\r\n\r\n"]

    run(app, steps)


def test_an_app_that_never_yields_is_written_out_and_then_made_to_wait():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": bytes(1000), "more_body": True})
            sent.append(1)

    sent = []

    async def steps(desk):
        desk.wire.write = lambda part: desk.connection.pause_writing()
        await desk.feed(REQUEST)
        assert 60 < len(sent) < 70
        desk.connection.resume_writing()
        await asyncio.sleep(0)
        assert 120 < len(sent) < 140

    run(app, steps)


def test_a_waiting_sender_that_is_cancelled_does_not_cancel_another():
    part = {"type": "http.response.body", "body": b"x", "more_body": True}
    lines, ends = [], []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        lines[0].pause_writing()
        one, other = asyncio.ensure_future(send(part)), asyncio.ensure_future(send(part))
        await asyncio.sleep(0)
        one.cancel()
        await asyncio.wait([one])
        ends.append((one.cancelled(), other.done()))
        lines[0].resume_writing()
        await other
        await send({"type": "http.response.body"})
        ends.append("whole")

    async def steps(desk):
        lines.append(desk.connection)
        await desk.feed(REQUEST)
        await asyncio.wait(desk.hub.tasks)
        assert ends == [(True, False), "whole"]

    run(app, steps)


async def slow(scope, receive, send):
    await asyncio.Event().wait()


@pytest.mark.parametrize(("taken", "end"), [(0, "abort"), (1, "")])
def test_only_a_caller_who_takes_nothing_is_cut(taken, end):
    async def steps(desk):
        await desk.feed(REQUEST)
        desk.connection.write(bytes(1000))
        for now in range(0, 40, 5):
            desk.wire.waiting = 1000 - now * taken
            desk.connection.check(float(now))
        assert desk.wire.end == end

    run(slow, steps)


def test_a_caller_who_takes_something_is_kept_though_more_is_waiting_for_it_each_time():
    async def steps(desk):
        await desk.feed(REQUEST)
        for now in range(0, 100, 5):
            desk.connection.write(bytes(1000))
            desk.wire.waiting += 999
            desk.connection.check(float(now))
        assert desk.wire.end == ""

    run(slow, steps)


def test_the_time_for_the_next_request_starts_with_the_answer_to_the_last():
    async def steps(desk):
        desk.hub.now = 1000.0
        await desk.feed(REQUEST)
        desk.connection.check(1000.0 + IDLE_S - 1)
        assert desk.wire.end == ""
        desk.connection.check(1000.0 + IDLE_S + 1)
        assert desk.wire.end == "close"

    run(parrot, steps)


def test_a_call_has_all_the_time_it_takes_once_it_is_asked():
    async def steps(desk):
        await desk.feed(REQUEST)
        desk.connection.check(1e9)
        assert desk.wire.end == ""
        await desk.feed(REQUEST[:30])
        desk.connection.check(1e9)
        assert (desk.wire.end, desk.wire.writes) == ("", [])  # the 408 waits for the answer that is owed

    run(slow, steps)


def test_the_limit_on_heads_is_for_each_alone():
    async def steps(desk):
        for _ in range(20):
            await desk.feed(b"GET / HTTP/1.1\r\nX: " + b"x" * 60_000, b"\r\n\r\n")
        assert [write[:12] for write in desk.wire.writes] == [b"HTTP/1.1 200"] * 20

    run(parrot, steps)


def test_an_app_that_waits_for_its_caller_hears_when_it_is_answered():
    heard = []

    async def app(scope, receive, send):
        async def wait():
            while (await receive())["type"] != "http.disconnect":
                pass
            heard.append("over")

        waiting = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})
        await waiting

    async def steps(desk):
        await desk.feed(REQUEST)
        assert heard == ["over"]

    run(app, steps)


def test_an_app_that_talks_to_nobody_lets_others_run():
    turns, others = [], []

    async def app(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass
        asyncio.get_running_loop().call_soon(others.append, 1)
        for _ in range(3):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            turns.append(len(others))

    async def steps(desk):
        await desk.feed(REQUEST)
        desk.connection.connection_lost(None)
        await asyncio.wait(desk.hub.tasks)
        assert turns == [1, 1, 1]
        desk.connection.connection_made(desk.wire)

    run(app, steps)


def test_a_caller_who_says_no_more_has_no_time_limit():
    async def steps(desk):
        await desk.feed(REQUEST[:-9])
        assert desk.connection.eof_received()
        desk.connection.check(1e9)
        assert desk.wire.end == ""

    run(slow, steps)


def test_a_request_waits_while_its_caller_does_not_read():
    async def steps(desk):
        desk.connection.pause_writing()
        await desk.feed(REQUEST)
        assert not desk.hub.tasks
        desk.connection.resume_writing()
        assert len(desk.hub.tasks) == 1

    run(slow, steps)


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/", "/", b""),
        (b"/a?b?c", "/a", b"b?c"),
        (b"/%E2%82%AC%ff", "/€\ufffd", b""),
        (b"//double//slash", "//double//slash", b""),
        (b"/a%2Fb%00", "/a/b\0", b""),
        (b"*", "*", b""),
        (b"http://here:80/a%20b?q", "/a b", b"q"),
        (b"http://here", "/", b""),
    ],
)
def test_a_target_is_split_and_decoded(target, path, query):
    scope = make_scope("GET", "1.1", target, [])
    assert (scope["path"], scope["query_string"]) == (path, query)


@given(st.text(min_size=1))
def test_a_refusal_is_one_line_of_json_whatever_it_says(text):
    head, _, body = refusal(RequestError(text, status=414, code="no")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 414 ")
    assert f"content-length: {len(body)}".encode() in head
    assert b"\n" not in body
    assert json.loads(body)["error"] == {"message": text, "type": "invalid_request_error", "param": None, "code": "no"}
