import subprocess
import sys

SCRIPT = """
import gc
bare = gc.get_threshold()
import penstock.cli
print(gc.get_threshold() == bare)
try:
    penstock.cli.main()
finally:
    print(gc.get_threshold())
"""


def test_the_command_looks_for_garbage_seldom_and_importing_it_changes_nothing():
    found = subprocess.run([sys.executable, "-c", SCRIPT, "--version"], capture_output=True, text=True, check=True, timeout=60)
    untouched, *_, thresholds = found.stdout.splitlines()
    assert (untouched, thresholds) == ("True", "(100000, 10, 10)")
