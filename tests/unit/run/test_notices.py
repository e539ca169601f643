"""What gateways did not do as asked, added up from a run's event log."""

import json

from penstock.run.shortfalls import read_notices


def test_counts_of_all_gateways_are_added(tmp_path):
    events = [
        {"kind": "gateway.notice", "name": "finish:length"},
        {"kind": "gateway.stop", "counts": {"finish:length": 3, "ignored:seed": 1}},
        {"kind": "gateway.notice", "name": "finish:length"},
        {"kind": "gateway.notice", "name": "capped:max_tokens"},  # and here it was killed
        {"kind": "gateway.stop", "counts": {"finish:length": 2}},
        {"kind": "rollout.end", "message": 'says "gateway.stop"', "counts": {"finish:length": 9}},
    ]
    file = tmp_path / "events.jsonl"
    file.write_text("".join(json.dumps(event) + "\n" for event in events) + '{"kind": "gateway.stop", "counts": {"a"')
    assert list(read_notices(file).items()) == [("finish:length", 5), ("ignored:seed", 1), ("capped:max_tokens", 1)]


def test_damaged_counts_and_a_missing_file_are_nothing(tmp_path):
    file = tmp_path / "events.jsonl"
    assert read_notices(file) == {}
    file.write_text('{"kind": "gateway.stop", "counts": ["x"]}\n{"kind": "gateway.stop", "counts": {"x": "y"}}\n["gateway.stop"]\n')
    assert read_notices(file) == {}
