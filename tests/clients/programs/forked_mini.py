"""mini-swe-agent, loaded once and forked for each task: a line on stdin has its folder, variables and arguments as JSON.

It is the agent as it is shipped. Loading takes seconds, which a thousand of them need not take each.
"""

import gc
import json
import os
import sys
from importlib import import_module

from minisweagent.run.mini import app

LATER = (
    "minisweagent.models.litellm_model",
    "minisweagent.environments.local",
    "minisweagent.agents.interactive",
    "litellm.responses.mcp.chat_completions_handler",
    "litellm.proxy._types",
    "openai.resources.chat",
    "openai.lib.streaming.chat",
    "httpcore",
    "mcp",
)
"""What it imports when it is first needed, which takes most of the time of a short task."""

for name in LATER:
    import_module(name)
gc.freeze()

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
