"""Numbers as the page writes them."""

import json
import shutil
import subprocess

import pytest

from penstock.view.app import FILES


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_numbers_keep_their_zeros_and_small_ones_their_exponent():
    source = FILES["dom.js"].decode().replace("export ", "")
    values = [0, 120.04, 119.7, 0.5, 1234.5, 4.2e-7, -0.25, 20.0, 1e6, None]
    script = f"{source}\nconsole.log(JSON.stringify({json.dumps(values)}.map((value) => number(value))));"
    done = subprocess.run(
        ["node", "--input-type=module", "-"], input=script, text=True, capture_output=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == ["0", "120", "120", "0.5", "1,235", "4.20e-7", "-0.25", "20", "1,000,000", "\u2013"]
