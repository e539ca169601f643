"""Datasets over HTTP, as the platform's command line asks for them."""

import asyncio
from urllib.parse import quote

import pytest
from served_controller import ROWS, served_controller

from penstock_controller.api.links import SignedLinks


def test_a_dataset_goes_up_is_shown_and_comes_down_again(tmp_path):
    async def whole():
        async with served_controller(tmp_path) as caller:
            status, made = await caller.upload("sums", ROWS)
            assert (status, made["status"], made["row_count"], made["file_size"]) == (200, "uploaded", 2, len(ROWS))
            status, page = await caller.ask("GET", "datasets?limit=50&offset=0")
            assert (page["total_count"], page["has_more"], page["next_offset"]) == (1, False, None)
            assert page["datasets"] == [made] and made["file_name"] == "sums" and made["creator_name"] == "owner"
            for ref in ("sums", made["id"]):
                shown = (await caller.ask("GET", f"datasets/{ref}"))[1]
                assert [row["label"] for row in shown["data_preview"]] == ["42", "6"]
            link = (await caller.ask("GET", "datasets/sums/download"))[1]
            assert link["file_name"] == "sums.jsonl" and link["presigned_url"].startswith("http://127.0.0.1:")
            assert await caller.ask("GET", link["presigned_url"], token=False) == (200, ROWS)
            logs = (await caller.ask("GET", "datasets/sums/logs?limit=2&direction=older"))[1]
            assert [entry["step"] for entry in logs["logs"]] == ["upload", "validation"] and logs["next_cursor"]
            older = (await caller.ask("GET", f"datasets/sums/logs?limit=2&direction=older&cursor={logs['next_cursor']}"))[1]
            assert len(older["logs"]) == 1 and older["next_cursor"] is None

    asyncio.run(whole())


def test_name_in_use_is_a_conflict_unless_overwritten(tmp_path):
    async def whole():
        async with served_controller(tmp_path) as caller:
            made = (await caller.upload("sums", ROWS))[1]
            status, refused = await caller.begin("sums", ROWS)
            assert (status, refused["existing_dataset_id"], refused["code"]) == (409, made["id"], "DATASET_EXISTS")
            status, new = await caller.upload("sums", b"prompt\nwhy?\n", "csv", overwrite_dataset_id=made["id"])
            assert (status, new["id"], new["file_format"], new["row_count"]) == (200, made["id"], "csv", 1)

    asyncio.run(whole())


def test_bad_rows_are_refused_with_an_issue_for_each(tmp_path):
    async def whole():
        async with served_controller(tmp_path) as caller:
            status, refused = await caller.upload("sums", ROWS + b'{"label": 3}\n[]\n')
            assert (status, refused["code"]) == (400, "DATASET_INVALID")
            assert [issue["key"] for issue in refused["issues"]] == ["line 3", "line 4"]
            assert str(tmp_path) not in str(refused)
            assert (await caller.ask("GET", "datasets/sums"))[1]["status"] == "error"
            assert (await caller.ask("GET", "datasets/sums/download"))[0] == 409
            logs = (await caller.ask("GET", "datasets/sums/logs"))[1]["logs"]
            assert [entry["details"] for entry in logs if entry["level"] == "error"] == [{"where": "line 3"}, {"where": "line 4"}]

    asyncio.run(whole())


def test_aborted_upload_invalidates_its_link(tmp_path):
    async def whole():
        async with served_controller(tmp_path) as caller:
            begun = (await caller.begin("sums", ROWS))[1]
            for _ in range(2):
                assert (await caller.ask("POST", f"datasets/{begun['id']}/abort", {}))[1]["status"] == "cancelled"
            status, refused = await caller.ask("PUT", begun["upload"]["presigned_url"], ROWS, token=False)
            assert (status, refused["code"]) == (409, "UPLOAD_OVER")

    asyncio.run(whole())


def test_broken_upload_leaves_nothing_and_can_be_retried(tmp_path):
    async def broken(url, size):
        host, port = url.split("/")[2].split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        path = "/" + url.split("/", 3)[3]
        writer.write(f"PUT {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-length: {size}\r\n\r\n".encode() + ROWS[:20])
        await writer.drain()
        return writer

    async def whole():
        async with served_controller(tmp_path) as caller, asyncio.timeout(60):
            begun = (await caller.begin("sums", ROWS))[1]
            url, datasets = begun["upload"]["presigned_url"], caller.controller.datasets
            writer = await broken(url, len(ROWS))
            while datasets.get("sums").status != "uploading":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            writer.close()
            while datasets.get("sums").status != "pending":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert not list(caller.controller.home.datasets.iterdir())
            assert (await caller.ask("PUT", url, ROWS, token=False))[0] == 204

    asyncio.run(whole())


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "datasets", {"file_name": "x", "file_size": "5", "extension": "csv"}, 400, "BODY_INVALID"),
        ("POST", "datasets", {"file_name": "x", "file_size": True, "extension": "csv"}, 400, "BODY_INVALID"),
        ("POST", "datasets", {"file_size": 5, "extension": "csv"}, 400, "BODY_INVALID"),
        ("POST", "datasets", {"file_name": "../x", "file_size": 5, "extension": "csv"}, 400, "DATASET_INVALID"),
        ("POST", "datasets", {"file_name": "x", "file_size": 3_000_000, "extension": "csv"}, 400, "DATASET_INVALID"),
        (
            "POST",
            "datasets",
            {"file_name": "x", "file_size": 5, "extension": "csv", "overwrite_dataset_id": "y"},
            400,
            "DATASET_INVALID",
        ),
        ("POST", "datasets", b"[1]", 400, "BODY_INVALID"),
        ("POST", "datasets/none/complete", {"file_extension": "csv"}, 404, "DATASET_NOT_FOUND"),
        ("POST", "datasets/none/abort", {}, 404, "DATASET_NOT_FOUND"),
        ("GET", "datasets/none", None, 404, "DATASET_NOT_FOUND"),
        ("GET", "datasets/none/download", None, 404, "DATASET_NOT_FOUND"),
        ("GET", "datasets/none/logs", None, 404, "DATASET_NOT_FOUND"),
        ("GET", "datasets?limit=51", None, 400, "QUERY_INVALID"),
    ],
)
def test_bad_dataset_request_has_a_code(tmp_path, method, path, body, status, code):
    async def whole():
        async with served_controller(tmp_path, dataset_mb=2) as caller:
            answered, refused = await caller.ask(method, path, body)
            assert (answered, refused["code"]) == (status, code) and "\n" not in refused["error"]
            assert (await caller.ask("GET", "datasets"))[1]["total_count"] == 0

    asyncio.run(whole())


def test_invalid_links_are_forbidden(tmp_path):
    async def whole():
        async with served_controller(tmp_path) as caller:
            begun = (await caller.begin("sums", ROWS))[1]
            url = begun["upload"]["presigned_url"]
            old = SignedLinks(caller.controller.home.key("links"), caller.url, lifetime_s=-1).create(
                "dataset-upload", dataset="x", key="y"
            )
            wrong = [(old, "LINK_EXPIRED"), (url[:-1] + ("0" if url[-1] != "0" else "1"), "LINK_INVALID")]
            for link, code in wrong:
                status, refused = await caller.ask("PUT", link, ROWS, token=False)
                assert (status, refused["code"]) == (403, code)
            down = url.replace("/dataset-upload/", "/dataset/")
            assert (await caller.ask("GET", down, token=False))[0] == 403
            assert (await caller.ask("GET", "datasets", token=False))[0] == 401

    asyncio.run(whole())


def test_unicode_name_is_found_and_downloaded(tmp_path):
    async def whole():
        async with served_controller(tmp_path) as caller:
            name = 'Summen ü "1" 100%'
            made = (await caller.upload(name, ROWS))[1]
            shown = (await caller.ask("GET", f"datasets/{quote(name, safe='')}"))[1]
            assert shown["id"] == made["id"] and shown["file_name"] == name
            link = (await caller.ask("GET", f"datasets/{made['id']}/download"))[1]
            assert await caller.ask("GET", link["presigned_url"], token=False) == (200, ROWS)

    asyncio.run(whole())
