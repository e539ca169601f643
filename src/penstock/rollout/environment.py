"""The environment variables that lead any client of the OpenAI or the Anthropic API to a rollout's session."""

import os
from urllib.parse import urlsplit


def routes(base_url: str, token: str, rollout_id: str) -> dict[str, str]:
    """To be put over the variables that a process has: they hold none of the tokens that open more than this session."""
    anthropic = base_url.removesuffix("/").removesuffix("/v1")
    known = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    direct = [known, "127.0.0.1", "localhost", "::1", urlsplit(base_url).hostname or ""]
    no_proxy = ",".join(host for host in dict.fromkeys(direct) if host)
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": token,
        "ANTHROPIC_BASE_URL": anthropic,
        "ANTHROPIC_API_KEY": token,
        "ANTHROPIC_AUTH_TOKEN": token,
        "PENSTOCK_ROLLOUT_ID": rollout_id,
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }
