"""Environment variables for a program in a rollout: the gateway's address and the rollout's token, and none of our secrets."""

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

OWN_PREFIXES = ("ANTHROPIC_", "AZURE_OPENAI_", "OPENAI_", "PENSTOCK_")
"""Prefixes of variables that a program gets from its rollout or not at all: the user's own keys, and our tokens."""
SECRETS = frozenset(
    {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "PGPASSFILE", "PGPASSWORD", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} | {"WANDB_API_KEY"}
)
"""Further secrets of a run: for models, the pool, the cluster, its reports."""


def rollout_environment(base_url: str, token: str, rollout_id: str) -> dict[str, str]:
    """Returns the variables that lead the usual clients to the rollout's session."""
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


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that an agent's program may inherit."""
    return {name: value for name, value in environment.items() if not name.startswith(OWN_PREFIXES) and name not in SECRETS}
