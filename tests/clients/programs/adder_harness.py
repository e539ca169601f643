"""A harness of verifiers that runs a program of the vendors' packages against the address that it is given."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import verifiers.v1 as vf
from conversation import DIALECT

PROGRAMS = {"chat": "openai_chat", "responses": "openai_responses", "messages": "anthropic_messages", "train": "openai_text"}


class AdderHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        root = endpoint.removesuffix("/v1")
        reported = {"OPENAI_BASE_URL": f"{root}/v1", "OPENAI_API_KEY": secret}
        reported |= {"ANTHROPIC_BASE_URL": root, "ANTHROPIC_API_KEY": secret}
        command = [sys.executable, str(Path(__file__).with_name(f"{PROGRAMS[DIALECT]}.py")), *sys.argv[1:]]
        process = await asyncio.create_subprocess_exec(*command, env=os.environ | reported, stdout=subprocess.PIPE)
        output, _ = await process.communicate()
        print(output.decode().strip())
        return vf.ProgramResult(process.returncode, output.decode(), "")


__all__ = ["AdderHarness"]
