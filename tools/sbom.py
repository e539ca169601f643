"""Writes the bill of materials (CycloneDX) and the licences of the locked set, as installed here.

A licence that is not known to fit is refused.
"""

import json
import os
import re
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from lock import CPU_LOCK, LOCK, pins
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Licences of what we depend on and do not ship: each may be used by a program under Apache-2.0.
FITTING = {
    *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC", "LGPL-3.0-only", "MIT-CMU"),
    *("LLVM-exception", "MIT", "MIT-0", "MPL-2.0", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib"),
}
SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}
"""The words that packages use, where they have no SPDX expression."""


class Package(NamedTuple):
    name: str
    version: str
    licence: str
    needs: list[str]


def locked_packages() -> list[Package]:
    """Those for this platform; torch is the build for the CPU."""
    here = [pin for pin in pins(LOCK.read_text() + CPU_LOCK.read_text()) if not pin.marker or Marker(pin.marker).evaluate()]
    return [_package(metadata.distribution(pin.name)) for pin in here]


def _package(installed: metadata.Distribution) -> Package:
    requirements = [Requirement(one) for one in installed.requires or ()]
    needs = {canonicalize_name(one.name) for one in requirements if not one.marker or one.marker.evaluate({"extra": ""})}
    return Package(canonicalize_name(installed.name), installed.version, licence(installed.metadata.json), sorted(needs))


def licence(declared: dict[str, Any]) -> str:
    """As an SPDX expression, where one can be read from the package's metadata."""
    if expression := declared.get("license_expression"):
        return expression
    first_line = str(declared.get("license", "")).partition("\n")[0]
    classes: list[str] = [one for one in declared.get("classifier", ()) if one.startswith("License :: OSI Approved :: ")]
    names = [name.rsplit(" :: ", 1)[1] for name in classes]
    told = [SPDX.get(first_line, first_line), " AND ".join(SPDX.get(name, name) for name in names)]
    return next((one for one in told if fitting(one)), " ".join(told).strip())


def fitting(expression: str) -> bool:
    """Whether every licence that it names fits, also where one may choose."""
    ids = set(re.findall(r"[^\s()]+", expression)) - {"AND", "OR", "WITH"}
    return bool(ids) and ids <= FITTING


def bill(packages: list[Package], version: str) -> dict[str, Any]:
    """The root has no package URL: on the public index its name is another project's."""
    purl = {one.name: f"pkg:pypi/{one.name}@{one.version}" for one in packages}
    licences = {one.name: [{"expression": one.licence}] for one in packages}
    when = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), UTC)
    root = {"type": "library", "bom-ref": "penstock-rl", "name": "penstock-rl", "version": version}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"timestamp": when.isoformat(), "component": root},
        "components": [
            {
                "type": "library",
                "bom-ref": purl[name],
                "name": name,
                "version": found,
                "purl": purl[name],
                "licenses": licences[name],
            }
            for name, found, _, _ in packages
        ],
        "dependencies": [
            {"ref": "penstock-rl", "dependsOn": list(purl.values())},
            *({"ref": purl[one.name], "dependsOn": [purl[name] for name in one.needs if name in purl]} for one in packages),
        ],
    }


def main(folder: Path) -> None:
    try:
        packages = locked_packages()
    except metadata.PackageNotFoundError as cause:
        sys.exit(f"{cause.name} is locked and not installed; run: make install")
    if refused := [f"{one.name} ({one.licence or 'no licence told'})" for one in packages if not fitting(one.licence)]:
        sys.exit(f"licences that are not known to fit: {', '.join(refused)}; look at them, then add them to tools/sbom.py")
    (folder / "sbom.cdx.json").write_text(json.dumps(bill(packages, metadata.version("penstock-rl")), indent=1) + "\n")
    rows = [f"| {one.name} | {one.version} | {one.licence} |" for one in packages]
    text = ["# Licences of the locked set", "", "| package | version | licence |", "|---|---|---|", *rows]
    (folder / "licences.md").write_text("\n".join(text) + "\n")
    print(f"{len(packages)} packages in {folder}/sbom.cdx.json and {folder}/licences.md")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
