"""The environment of a program whose model calls belong to a rollout: the variables that lead there, and none of our secrets."""

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

OWN_PREFIXES = ("ANTHROPIC_", "AZURE_OPENAI_", "OPENAI_", "PENSTOCK_")
"""How the names of variables begin that a program gets from its rollout or not at all: keys of the user's own, and our tokens."""
SECRETS = frozenset(
    {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "PGPASSFILE", "PGPASSWORD", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} | {"WANDB_API_KEY"}
)
"""Others that open what a run uses: models, the pool, the cluster, its reports."""


def rollout_environment(base_url: str, token: str, rollout_id: str) -> dict[str, str]:
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


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """What a program may inherit that must open nothing but its own session."""
    return {name: value for name, value in environment.items() if not name.startswith(OWN_PREFIXES) and name not in SECRETS}
