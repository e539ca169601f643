"""Callers of the HTTP server that leave, stall, flood or lie; and the server's own end."""

import asyncio
import logging

import pytest
from http_cases import CHUNKED, GET, POST, echo, read, reply, run, serving, turns
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.http import server
from penstock.http.asgi import ON_DISCONNECT

START = {"type": "http.response.start", "status": 200, "headers": []}


class Watched:
    """An app that reports what became of each request, and streams until its caller leaves."""

    def __init__(self):
        self.begun = asyncio.Semaphore(0)
        self.left = asyncio.Semaphore(0)
        self.cancelled = 0

    async def __call__(self, scope, receive, send):
        self.begun.release()
        try:
            _, whole = await read(receive)
            await send(START)
            if whole:
                await send({"type": "http.response.body", "body": b"part", "more_body": True})
                assert (await receive())["type"] == "http.disconnect"
            for _ in range(10):
                await send({"type": "http.response.body", "body": bytes(100_000), "more_body": True})
            self.left.release()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@pytest.mark.parametrize("leave", ["hang_up", "reset"])
@pytest.mark.parametrize("size", range(len(POST) + 1))
def test_a_caller_may_leave_at_any_byte(leave, size):
    async def main():
        app = Watched()
        async with serving(app, drain_s=20) as site:
            caller = await site.call()
            await caller.say(POST[:size])
            if begun := size >= POST.index(b"\r\n\r\n") + 4:
                await app.begun.acquire()
            if size == len(POST):
                await caller.reader.readuntil(b"part")
            getattr(caller, leave)()
            if begun:
                await app.left.acquire()

    run(main)


@pytest.mark.parametrize("leave", ["hang_up", "reset", "half-close"])
@pytest.mark.parametrize("ahead", [b"", GET + GET[:-9]])
def test_an_app_is_called_when_its_caller_leaves(leave, ahead):
    async def main():
        begun, left = asyncio.Event(), asyncio.Event()

        async def app(scope, receive, send):
            await read(receive)
            scope[ON_DISCONNECT](left.set)
            begun.set()
            await left.wait()
            late = asyncio.Event()
            scope[ON_DISCONNECT](late.set)
            assert late.is_set()

        async with serving(app) as site:
            caller = await site.call()
            await caller.say(POST)
            await begun.wait()
            await caller.say(ahead)
            caller.writer.write_eof() if leave == "half-close" else getattr(caller, leave)()
            await left.wait()

    run(main)


def test_a_reader_who_takes_nothing_is_cut_off():
    async def main():
        heard = asyncio.Event()

        async def app(scope, receive, send):
            await read(receive)
            await send(START)
            for _ in range(1000):
                await send({"type": "http.response.body", "body": bytes(100_000), "more_body": True})
            assert (await receive())["type"] == "http.disconnect"
            heard.set()

        async with serving(app, reader_s=0.2) as site:
            caller = await site.call(receive_bytes=4096)
            caller.writer.transport.pause_reading()
            await caller.say(POST)
            await heard.wait()

    run(main)


def test_body_that_app_does_not_take_waits_at_its_sender():
    async def main():
        go, size, most = asyncio.Event(), 20_000_000, 1_000_000

        async def app(scope, receive, send):
            await go.wait()
            sizes, more = [], True
            while more:
                message = await receive()
                sizes.append(len(message["body"]))
                more = message["more_body"]
            assert (sum(sizes), max(sizes) <= most) == (size, True)
            await reply(send, b"taken")

        async with serving(app) as site:
            caller = await site.call()
            caller.writer.write(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % size + bytes(size))
            await turns(200)
            assert caller.writer.transport.get_write_buffer_size() > 0
            go.set()
            assert (await caller.answer()).body == b"taken"

    run(main)


@pytest.mark.parametrize(("said", "limit", "code"), [(POST[:20], "HEAD_S", b"request_timeout"), (POST[:-1], "BODY_S", None)])
def test_caller_who_does_not_continue_is_cut_off(said, limit, code, monkeypatch):
    monkeypatch.setattr(server, limit, 0.05)  # limits are constants, and too long for a test
    monkeypatch.setattr(server, "SWEEP_S", 0.02)

    async def main():
        async with serving(echo) as site:
            caller = await site.call()
            await caller.say(said)
            try:
                rest = await caller.rest()
            except ConnectionResetError:
                rest = b""
            assert (code in rest) if code else (rest == b"")

    run(main)


def test_server_stop_finishes_calls_and_closes_idle_connections():
    async def main():
        go = asyncio.Event()

        async def app(scope, receive, send):
            await go.wait()
            await echo(scope, receive, send)

        async def finish():
            assert await idle.rest() == b""
            with pytest.raises(OSError):
                await site.call()
            go.set()
            answers = [await busy.answer(), await sending.ask(b"o")]
            assert [(answer.status, answer.headers["connection"]) for answer in answers] == [(200, "close")] * 2

        async with asyncio.TaskGroup() as group:
            async with serving(app) as site:
                idle, busy, sending = await site.call(), await site.call(), await site.call()
                await busy.say(POST)
                await sending.say(POST[:-1])
                finishing = group.create_task(finish())
            assert finishing.done() or await finishing is None

    run(main)


def test_calls_that_do_not_end_in_time_are_cancelled(caplog):
    async def main():
        app, stuck = Watched(), asyncio.Event()

        async def silent(scope, receive, send):
            if scope["method"] == "POST":
                return await app(scope, receive, send)
            stuck.set()
            return await asyncio.Event().wait()

        async with serving(silent, drain_s=0.05) as site:
            one, other = await site.call(), await site.call()
            await one.say(POST)
            await other.say(GET)
            await app.begun.acquire()
            await stuck.wait()
        assert app.cancelled == 1
        assert (await other.answer()).code == "stopping"
        assert (await one.rest()).endswith(b"4\r\npart\r\n")

    run(main)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_thousand_connections_leave_nothing_behind():
    said = [b"", POST[:10], POST[:-1], POST, GET * 3, CHUNKED, b"garbage\r\n\r\n", POST + POST[:9]]

    async def main():
        async with serving(echo) as site:
            for start in range(0, 1000, 100):
                callers = [await site.call() for _ in range(100)]
                for place, caller in enumerate(callers):
                    await caller.say(said[(start + place) % len(said)])
                for place, caller in enumerate(callers):
                    caller.reset() if place % 2 else caller.hang_up()
            assert (await (await site.call()).ask(POST)).status == 200

    run(main)


PIECES = [
    GET,
    POST,
    CHUNKED,
    b"\r\n",
    b"0\r\n\r\n",
    b"HTTP/1.1",
    b"Content-Length: ",
    b"Transfer-Encoding: chunked\r\n",
    b"Expect: 100-continue\r\n",
]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.one_of(st.binary(max_size=60), st.sampled_from(PIECES), st.sampled_from(PIECES).map(lambda piece: piece[:-7])),
        max_size=12,
    )
)
def test_no_bytes_kill_the_server_or_leave_it_hanging(parts):
    async def main():
        async with serving(echo) as site:
            caller = await site.call()
            try:
                await caller.say(*parts)
                caller.writer.write_eof()
                rest = await caller.rest()
            except OSError:
                rest = b""
            assert rest == b"" or rest.startswith(b"HTTP/1.1 ")
            assert b"internal_error" not in rest
            assert (await (await site.call()).ask(POST)).status == 200

    run(main)
