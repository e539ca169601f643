"""mini-swe-agent, loaded once and forked for each task: a line on stdin has its folder, variables and arguments as JSON.

It is the agent as it is shipped. Loading takes seconds, which a thousand of them need not take each.
"""

import json
import os
import sys

from minisweagent.run.mini import app

print("ready", flush=True)
for line in sys.stdin:
    task = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(task["folder"])
        os.environ.update(task["variables"])
        silence = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(silence, descriptor)
        try:
            app(task["arguments"], standalone_mode=False)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    print("ended", flush=True)
