"""The HTTP server as its callers meet it, on real sockets."""

import asyncio
import inspect
import json
import logging
import sys
from contextlib import suppress

import pytest
from http_cases import CHUNKED, GET, POST, echo, reply, run, serving, stream, turns

from penstock.http import head, server


def reported(answer):
    assert answer.status == 200
    return json.loads(answer.body)["body"]


def test_one_connection_serves_many_requests():
    async def main():
        async with serving(echo) as site:
            caller = await site.call()
            assert [reported(await caller.ask(request)) for request in (GET, POST, CHUNKED, GET)] == ["", "hello", "hello", ""]

    run(main)


@pytest.mark.parametrize("request_", [GET, POST, CHUNKED])
def test_a_request_is_the_same_wherever_it_is_split(request_):
    async def main():
        async with serving(echo) as site:
            caller = await site.call()
            whole = await caller.ask(request_)
            for place in range(1, len(request_)):
                assert await caller.ask(request_[:place], request_[place:]) == whole

    run(main)


def test_answers_keep_the_order_of_requests_sent_ahead():
    async def main():
        go, seen = asyncio.Event(), []

        async def app(scope, receive, send):
            seen.append(scope["path"])
            if scope["path"] == "/0":
                await go.wait()
            await echo(scope, receive, send)

        async with serving(app) as site:
            caller = await site.call()
            await caller.say(b"".join(POST.replace(b"/path", b"/%d" % i) for i in range(50)))
            assert seen == ["/0"]
            go.set()
            assert [json.loads((await caller.answer()).body)["path"] for _ in range(50)] == [f"/{i}" for i in range(50)]

    run(main)


def test_a_stream_is_chunked():
    async def main():
        async with serving(stream) as site:
            caller = await site.call()
            for _ in range(2):
                answer = await caller.ask(POST)
                assert (answer.body, answer.headers["transfer-encoding"]) == (b"onetwothree", "chunked")

    run(main)


def test_caller_who_asks_first_is_reported_to_continue():
    async def main():
        async with serving(echo) as site:
            caller = await site.call()
            await caller.say(b"POST / HTTP/1.1\r\nHost: here\r\nExpect: 100-Continue\r\nContent-Length: 5\r\n\r\n")
            assert await caller.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            assert reported(await caller.ask(b"hello")) == "hello"
            assert reported(await caller.ask(POST)) == "hello"

    run(main)


def test_caller_rejected_while_sending_can_read_why():
    async def main():
        async def app(scope, receive, send):
            await receive()
            await reply(send, b"no", 413)

        async with serving(app) as site:
            caller = await site.call()
            caller.writer.write(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 20000000\r\n\r\n" + bytes(20_000_000))
            assert (await caller.answer()).status == 413
            assert (await caller.ask(GET)).status == 413

    run(main)


BAD = {
    "garbage": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300), 400, "malformed_request"),
    "both lengths": (
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
        "malformed_request",
    ),
    "both, turned": (
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        400,
        "malformed_request",
    ),
    "two lengths": (b"POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400, "malformed_request"),
    "a list of lengths": (b"POST / HTTP/1.1\r\nContent-Length: 3, 3\r\n\r\nabc", 400, "malformed_request"),
    "a signed length": (b"POST / HTTP/1.1\r\nContent-Length: +3\r\n\r\nabc", 400, "malformed_request"),
    "zipped": (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501, "transfer_encoding"),
    "chunks of old": (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501, "transfer_encoding"),
    "folded": (b"GET / HTTP/1.1\r\nA: b\r\n c\r\n\r\n", 400, "malformed_request"),
    "a space before the colon": (b"POST / HTTP/1.1\r\nContent-Length : 3\r\n\r\nabc", 400, "malformed_request"),
    "bare newlines": (b"GET / HTTP/1.1\nA: b\n\n", 400, "malformed_request"),
    "a null": (b"GET / HTTP/1.1\r\nA: \0\r\n\r\n", 400, "malformed_request"),
    "too new": (b"GET / HTTP/2.0\r\n\r\n", 505, "http_version"),
    "preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "malformed_request"),
    "too old": (b"GET /\r\n\r\n", 505, "http_version"),
    "no method": (b"FETCH / HTTP/1.1\r\n\r\n", 400, "malformed_request"),
    "a tunnel": (b"CONNECT here:80 HTTP/1.1\r\nHost: here:80\r\n\r\n", 400, "invalid_target"),
    "a long target": (b"GET /" + b"x" * head.MAX_TARGET_BYTES + b" HTTP/1.1\r\n\r\n", 414, "target_too_long"),
    "many headers": (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * (head.MAX_HEADERS + 1) + b"\r\n", 431, "headers_too_large"),
    "large headers": (b"GET / HTTP/1.1\r\n" + (b"A: " + b"b" * 1000 + b"\r\n") * 70 + b"\r\n", 431, "headers_too_large"),
    "an endless header": (b"GET / HTTP/1.1\r\nA: " + b"b" * 5_000_000, 431, "headers_too_large"),
    "endless headers": (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 500_000, 431, "headers_too_large"),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400, "invalid_host"),
    "two hosts": (GET[:-2] + b"Host: here\r\n\r\n", 400, "invalid_host"),
    "two hosts of old": (b"GET / HTTP/1.0\r\nHost: here\r\nHost: there\r\n\r\n", 400, "invalid_host"),
    "no chunk": (CHUNKED.replace(b"3;ext=1", b"three"), 400, "malformed_request"),
    "a cut chunk": (CHUNKED.replace(b"hel\r\n", b"helxx"), 400, "malformed_request"),
    "an endless chunk size": (CHUNKED.replace(b"3;ext=1", b"f" * 40), 400, "malformed_request"),
    "an endless trailer": (CHUNKED[:-4] + b"x" * 5_000_000, 431, "headers_too_large"),
    "an endless extension": (CHUNKED.replace(b"ext=1", b"x" * 5_000_000), 431, "headers_too_large"),
}


BAD_HOSTS = [
    "",
    "[",
    "[]",
    "[::1",
    "::1",
    "[:::]",
    "[1.2.3.4]",
    "me@here",
    "me:word@here",
    "here:x",
    "here:99999",
    "here:1:2",
    "here/there",
]
BAD_HOSTS += ["he re", "h\xe9re", "h%65re", "here, there", "http://here", "x" * 256]
BAD |= {f"host {host[:9]!r}": (GET.replace(b"here", host.encode("latin-1")), 400, "invalid_host") for host in BAD_HOSTS}
BAD_TARGETS = [
    "/%",
    "/%4",
    "/%zz",
    "/a?b=%g0",
    "/%00",
    "/a%0d%0aSet-Cookie:x",
    "/%7f",
    "/%ff",
    "/a?b=%c3",
    "*",
    "ftp://here/path",
]
BAD_TARGETS += ["http://there/path", "http://me@here/path", "http://here:80/path", "http://[/path", "http:///path"]
BAD |= {f"target {target}": (GET.replace(b"/path", target.encode("latin-1")), 400, "invalid_target") for target in BAD_TARGETS}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_request_is_refused(kind):
    request, status, code = BAD[kind]

    async def main():
        async with serving(echo) as site:
            neighbour, caller = await site.call(), await site.call()
            await neighbour.say(POST[:-1])
            caller.writer.write(request)
            answer = await caller.answer()
            assert (answer.status, answer.code, answer.headers["connection"]) == (status, code, "close")
            assert (b"\n" in answer.body, await caller.rest()) == (False, b"")
            assert reported(await neighbour.ask(POST[-1:])) == "hello"

    run(main)


async def raises(scope, receive, send):
    raise KeyError("a secret")


async def says_nothing(scope, receive, send):
    await receive()


async def says_no_start(scope, receive, send):
    await send({"type": "http.response.body", "body": b"four"})


async def cancels_itself(scope, receive, send):
    raise asyncio.CancelledError


APPS = [raises, says_nothing, says_no_start, cancels_itself]


@pytest.mark.parametrize("app", APPS, ids=lambda app: app.__name__)
def test_an_app_that_fails_before_it_answers_is_a_500(app, caplog):
    async def main():
        async with serving(app) as site:
            caller = await site.call()
            answer = await caller.ask(POST)
            assert (answer.status, answer.code, await caller.rest()) == (500, "internal_error", b"")
            assert b"secret" not in answer.body

    run(main)
    assert app is cancels_itself or [record.levelno for record in caplog.records] == [logging.ERROR]


async def raises_midway(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"half", "more_body": True})
    await turns()
    raise KeyError("gone")


async def says_too_little(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"30")]})
    await send({"type": "http.response.body", "body": b"half", "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def says_too_much(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
    await send({"type": "http.response.body", "body": b"four"})


@pytest.mark.parametrize("app", [raises_midway, says_too_little, says_too_much])
def test_app_that_fails_midway_leaves_an_incomplete_answer(app, caplog):
    async def main():
        async with serving(app) as site:
            caller = await site.call()
            await caller.say(GET)
            with pytest.raises(asyncio.IncompleteReadError):
                await caller.answer()

    run(main)
    assert caplog.records


def test_parts_arrive_while_the_app_still_works():
    async def main():
        go = asyncio.Event()

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            await send({"type": "http.response.body", "body": b"part", "more_body": True})
            await go.wait()
            await send({"type": "http.response.body", "body": b"end"})

        async with serving(app) as site:
            caller = await site.call()
            await caller.say(GET)
            assert (await caller.reader.readuntil(b"part\r\n")).endswith(b"\r\n4\r\npart\r\n")
            go.set()
            assert await caller.reader.readuntil(b"0\r\n\r\n") == b"3\r\nend\r\n0\r\n\r\n"

    run(main)


def test_pipelined_upgrade_offers_are_declined_in_order(caplog):
    offer = GET[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"

    async def main():
        async with serving(echo) as site:
            caller = await site.call()
            sys.setrecursionlimit(len(inspect.stack()) + 100)
            caller.writer.write(offer * (server.MAX_PIPELINED - 20))
            for _ in range(server.MAX_PIPELINED - 20):
                assert (await caller.answer()).status == 200
            caller.writer.write(offer * 5_000)
            with suppress(ConnectionResetError):  # too far ahead: the rest is not read
                assert (await caller.rest()).count(b"HTTP/1.1 500") == 0

    limit = sys.getrecursionlimit()
    try:
        run(main)
    finally:
        sys.setrecursionlimit(limit)
    assert not caplog.records
