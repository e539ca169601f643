"""A Ray cluster of two nodes on this machine, and agents on it: what came of that, as JSON. The environment says how it is kept."""

import asyncio
import json
import sys
from pathlib import Path

from ray.cluster_utils import Cluster
from ray_setup import AGENT, RaySetup

from penstock.config import RolloutSection
from penstock.errors import ConfigError
from penstock.gateway import Gateway
from penstock.records import Sampling, make_rollout
from penstock.rollout.executors.base import read_section
from penstock.rollout.runner import open_runner
from penstock.scale.cluster import live_nodes, open_cluster
from penstock.sdk.discovery import load_agent
from penstock.testing import memory_pool

STORE = {"object_store_memory": 80 << 20, "num_cpus": 1}


async def run(folder: Path, address: str, host: str) -> str:
    """How one rollout ended, with a gateway on `host`."""
    setup, pool, limits = RaySetup(folder), memory_pool(), RolloutSection(executor="ray")
    (task,), rollout = setup.tasks("asks"), make_rollout("train-0", "t0", 0)
    await pool.open_group(task, [rollout], seq=0)
    async with Gateway(setup.engine, setup.renderer, pool, secret=b"a secret for tests only", host=host) as gateway:
        options = {"gateway": gateway, "pool": pool, "events": setup.events, "limits": limits}
        section = read_section("ray", {"workers": 2, "address": address})
        async with open_runner(load_agent(AGENT, {}, {}), section=section, **options) as runner:
            nodes = {place.node_id for place in runner.executor._manager.locations}
            end = await runner.run(rollout, task, Sampling(max_tokens=64))
            return f"{end} over {len(nodes)} nodes"


def tried(folder: Path, address: str, host: str) -> str:
    try:
        return asyncio.run(run(folder, address, host))
    except ConfigError as error:
        return str(error)


def main(folder: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={**STORE, "include_dashboard": False})
    cluster.add_node(**STORE)
    try:
        with open_cluster(cluster.address, namespace="tests"):
            came = {"nodes": len(live_nodes())}
            for host in ("127.0.0.1", "0.0.0.0"):
                came[host] = tried(folder / host, cluster.address, host)
    except ConfigError as error:
        came = {"refused": str(error)}
    finally:
        cluster.shutdown()
    print(json.dumps(came))


main(Path(sys.argv[1]))
