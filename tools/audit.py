"""Asks OSV whether a locked version has a known vulnerability. Without a network it says so and passes."""

import json
import os
import signal
import sys
import tomllib
import urllib.request
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from lock import CUDA_LOCK, LOCK, Pin, pins

OSV = os.environ.get("PENSTOCK_OSV", "https://api.osv.dev/v1")
DEADLINE_S = 60
EXCEPTIONS = Path(os.environ.get("PENSTOCK_AUDIT_EXCEPTIONS", Path(__file__).with_name("audit.toml")))


def main() -> None:
    locked = [pin for file in (LOCK, CUDA_LOCK) for pin in pins(file.read_text())]
    signal.signal(signal.SIGALRM, _too_late)
    signal.alarm(DEADLINE_S)
    try:
        found = vulnerabilities(locked)
    except (OSError, ValueError) as cause:
        print(f"audit: {OSV} not reachable: skipped ({cause})")
        return
    excepted = exceptions(date.today())
    reasons = [next((excepted[one] for one in vulnerability.ids if one in excepted), "") for vulnerability in found]
    for vulnerability, reason in zip(found, reasons, strict=True):
        pin = vulnerability.pin
        line = f"audit: {pin.name} {pin.version}: {', '.join(vulnerability.ids)}: {vulnerability.summary}"
        print(f"{line}; excepted: {reason}" if reason else line)
    if open_ := reasons.count(""):
        sys.exit(f"audit: {open_} known vulnerabilities; run: make lock ARGS=--upgrade, or except them in tools/audit.toml")
    print(f"audit: {len(locked)} locked versions, no known vulnerability that is not excepted")


class Vulnerability(NamedTuple):
    pin: Pin
    ids: list[str]
    summary: str


def vulnerabilities(locked: list[Pin]) -> list[Vulnerability]:
    queries = [{"package": {"name": pin.name, "ecosystem": "PyPI"}, "version": pin.version} for pin in locked]
    results = ask("/querybatch", {"queries": queries})["results"]
    found = list[Vulnerability]()
    for pin, result in zip(locked, results, strict=True):
        for one in result.get("vulns", ()):
            told = ask(f"/vulns/{one['id']}")
            if "withdrawn" not in told:
                found.append(Vulnerability(pin, [one["id"], *told.get("aliases", ())], told.get("summary", "no summary")))
    return found


def exceptions(today: date) -> dict[str, str]:
    """Reasons by id. An exception ends with its date: then somebody looks again."""
    told = tomllib.loads(EXCEPTIONS.read_text()).get("exception", [])
    return {one["id"]: f"{one['reason']} (until {one['until']})" for one in told if today <= one["until"]}


def ask(path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(OSV + path, data=data), timeout=10) as answer:
        return json.load(answer)


def _too_late(*_: object) -> None:
    raise TimeoutError(f"no answer in {DEADLINE_S} s")


if __name__ == "__main__":
    main()
