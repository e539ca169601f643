"""`python -m claw_r1.gateway.gateway`: runs Penstock's gateway with Claw-R1's flags, without a Ray cluster.

On loopback it needs no token, as in Claw-R1. On any other interface every call needs one.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import typer

from claw_r1.keys import model
from penstock.cli.app import exit_code, run
from penstock.errors import ConfigError
from penstock.http.listen import is_loopback

PORT = 8100


class GatewayCommand(NamedTuple):
    """Claw-R1's flags converted to a `penstock gateway` command line."""

    arguments: list[str]
    notices: list[str]
    """Flags that have no effect or a different one, each with the reason."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"claw_r1.gateway.gateway: {message}; see --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until a signal arrives. Returns the exit code of `penstock gateway`."""
    return exit_code(lambda: _serve(list(sys.argv[1:] if arguments is None else arguments)))


def _serve(arguments: list[str]) -> int:
    converted = convert(arguments)
    for notice in converted.notices:
        typer.echo(f"penstock: {notice}", err=True)
    return run(converted.arguments)


def convert(arguments: Sequence[str]) -> GatewayCommand:
    """Returns the equivalent `penstock gateway` command line. Raises ConfigError for a flag that is not supported."""
    flags = _parser().parse_args(arguments)
    if flags.reward_worker_name:
        text = "no reward worker is asked: /compute_reward goes by the rule of the row's data_source; leave it out"
        raise ConfigError(f"--reward-worker-name {flags.reward_worker_name}: {text}")
    command = ["gateway", "--folder", str(_folder(flags.data_pool_name)), "--model", str(model(flags.tokenizer_path))]
    command += ["--host", flags.host, "--port", str(flags.port)]
    addresses = [each.strip() for each in flags.vllm_addresses.split(",") if each.strip()]
    if addresses:
        command += ["--engine", "vllm"]
    for address in addresses:
        command += ["--url", address if "://" in address else f"http://{address}"]
    if flags.response_length:
        command += ["--set", f"sampling.max_tokens={flags.response_length}"]
    if is_loopback(flags.host):
        command.append("--open")
    return GatewayCommand(command, _notices(flags))


def _folder(name: str) -> Path:
    return Path(name) if "/" in name else Path("runs", name)


def _notices(flags: argparse.Namespace) -> list[str]:
    notices: list[str] = []
    if flags.prompt_length:
        notices.append(
            f"no effect here: --prompt-length {flags.prompt_length} (a prompt is never cut; one that does not fit is refused)"
        )
    if flags.ray_address or flags.ray_namespace:
        notices.append("no effect here: --ray-address, --ray-namespace (the pool is a folder of this machine)")
    if not is_loopback(flags.host):
        notices.append(f"every call needs a token on {flags.host}; without --host the gateway is for this machine alone, and open")
    return notices


def _parser() -> _Parser:
    parser = _Parser(prog="python -m claw_r1.gateway.gateway", description="Penstock's gateway, with Claw-R1's flags.")
    parser.add_argument("--data-pool-name", default="data_pool", help="the folder of the pool; a bare name is one under runs/")
    parser.add_argument("--vllm-addresses", default="", help="of vLLM servers, with commas between them; none: the embedded engine")
    parser.add_argument("--tokenizer-path", required=True, help="a model's folder, tiny, smollm2-135m, or ORG/NAME of Hugging Face")
    parser.add_argument("--prompt-length", type=int, default=0, help="no effect: a prompt is never cut")
    parser.add_argument("--response-length", type=int, default=0, help="longest reply, in tokens")
    parser.add_argument("--reward-worker-name", default="", help="refused: there is no reward worker")
    parser.add_argument("--ray-address", default="", help="no effect: no Ray is needed")
    parser.add_argument("--ray-namespace", default="", help="no effect: no Ray is needed")
    parser.add_argument("--host", default="127.0.0.1", help="the interface; any but this machine's own asks for tokens")
    parser.add_argument("--port", type=int, default=PORT)
    return parser


if __name__ == "__main__":
    sys.exit(main())
