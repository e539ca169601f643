"""HTTP, both ways: a server for ASGI apps, a client, server-sent events."""
