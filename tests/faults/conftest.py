"""The tests of faults start the same servers as the contracts' tests do."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "contracts"))
