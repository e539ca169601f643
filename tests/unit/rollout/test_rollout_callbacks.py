"""Delivery of callbacks: which answers end it, which are tried again, and after how long."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from penstock.http.listen import bind
from penstock.http.server import HttpServer
from penstock_compat.rollout_server.delivery import CallbackSender, DeliveryPolicy, read_reply


@asynccontextmanager
async def listener(answers):
    """Gives each answer once, a (status, headers) pair, then 200."""
    rest = list(answers)

    async def app(scope, receive, send):
        status, headers = rest.pop(0) if rest else (200, {})
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": b"{}"})

    sock = bind("127.0.0.1", 0)
    async with HttpServer(app, sock, drain_s=1, reader_s=20):
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/"


def deliver(answers, policy=None, url=None):
    """How a delivery to a listener that answers so ends, and how long was waited between attempts."""
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    async def main():
        async with asyncio.timeout(20), listener(answers) as here, CallbackSender(policy, sleep=sleep) as courier:
            return await courier.send(url or here, b"{}", key=None, what="it")

    return asyncio.run(main()), waits


def test_waits_double_up_to_a_bound():
    ended, waits = deliver([(503, {})] * 8)
    assert (ended.reason, waits) == ("", [0.5, 1, 2, 4, 8, 8, 8, 8])


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_status_that_may_pass_is_tried_again(status):
    assert deliver([(status, {})])[0].reason == ""


@pytest.mark.parametrize("status", [301, 307, 400, 401, 404, 410, 422, 501])
def test_status_that_will_not_pass_ends_the_delivery(status):
    ended, waits = deliver([(status, {"location": "/there"})])
    assert (ended.reason, ended.gave_up, waits) == (f"it was refused: the listener answered {status}", False, [])


def test_retry_after_only_lengthens_the_wait():
    assert deliver([(429, {"retry-after": "30"}), (503, {"retry-after": "0"})])[1] == [30, 1]


def test_delivery_ends_at_its_deadline():
    ended, waits = deliver([(503, {})] * 9, DeliveryPolicy(deadline_s=0.4))
    assert (ended.gave_up, waits, ended.reason) == (True, [], "it was not taken within 0.4 s: the listener answered 503")


def test_listener_that_is_not_there_is_tried_again():
    with bind("127.0.0.1", 0) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/"
    ended, _ = deliver([], DeliveryPolicy(deadline_s=0.1), url)
    assert (ended.gave_up, "ClientConnectorError" in ended.reason) == (True, True)


def test_silent_listener_is_given_up():
    async def main():
        async def silent(scope, receive, send):
            await asyncio.Event().wait()

        sock = bind("127.0.0.1", 0)
        policy = DeliveryPolicy(attempt_s=0.05, deadline_s=0.1)
        async with asyncio.timeout(20), HttpServer(silent, sock, drain_s=0, reader_s=20), CallbackSender(policy) as courier:
            url = f"http://127.0.0.1:{sock.getsockname()[1]}/"
            return await courier.send(url, b"{}", key=None, what="it")

    ended = asyncio.run(main())
    assert (ended.gave_up, "TimeoutError" in ended.reason) == (True, True)


@pytest.mark.parametrize("reply", [b"", b" ", b"null", b"[]", b"<html>", b'{"transcripts": {"main": 7}}', b"\xff"])
def test_reply_that_says_nothing_of_use_is_empty(reply):
    assert read_reply(reply, "it").transcripts == {}
