"""The stage on which code written for another API is run stands with the seeds' tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "seeds"))
