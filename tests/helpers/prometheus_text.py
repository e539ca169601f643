"""A strict parser of the Prometheus text format 0.0.4; asserts on anything that the format does not allow."""

import math
import re
from dataclasses import dataclass, field

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = rf'({NAME})="((?:[^"\\\n]|\\["\\n])*)"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (\S+)")
KINDS = {"counter", "gauge", "histogram"}


@dataclass
class Metric:
    kind: str
    values: dict[tuple[tuple[str, str], ...], float] = field(default_factory=dict)


def read(text: str) -> dict[str, Metric]:
    """Every family by its name; of a histogram, each of its three series is one."""
    assert text.endswith("\n") and "\r" not in text
    families: dict[str, Metric] = {}
    reported: set[str] = set()
    current, kind = "", ""
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# HELP "):
            current = line.split(" ")[2]
            assert current not in reported, f"{current} comes twice"
            reported.add(current)
            kind = ""
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == current and kind in KINDS
        else:
            _add(families, line, current, kind)
    for name in reported:
        _check_histogram(families, name)
    return families


def _add(families: dict[str, Metric], line: str, current: str, kind: str) -> None:
    match = SAMPLE.fullmatch(line)
    assert match, f"not a sample: {line!r}"
    name, labels, value = match[1], match[2] or "", match.groups()[-1]
    ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
    assert kind and name in [current + end for end in ends], f"{name} does not belong to {kind} {current}"
    assert kind != "counter" or name.endswith("_total")
    key = tuple((found[0], _plain(found[1])) for found in re.findall(LABEL, labels))
    assert len({label for label, _ in key}) == len(key)
    metric = families.setdefault(name, Metric(kind))
    assert key not in metric.values, f"{line!r} comes twice"
    metric.values[key] = float(value)
    assert kind == "gauge" or metric.values[key] >= 0


def _plain(value: str) -> str:
    return re.sub(r"\\(.)", lambda found: {"n": "\n"}.get(found[1], found[1]), value)


def _check_histogram(families: dict[str, Metric], name: str) -> None:
    if f"{name}_bucket" not in families:
        return
    series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    for key, value in families[f"{name}_bucket"].values.items():
        bound = math.inf if key[-1][1] == "+Inf" else float(key[-1][1])
        assert key[-1][0] == "le"
        series.setdefault(key[:-1], []).append((bound, value))
    for labels, buckets in series.items():
        assert buckets == sorted(buckets) and buckets[-1][0] == math.inf
        assert families[f"{name}_count"].values[labels] == buckets[-1][1]
        assert labels in families[f"{name}_sum"].values
