"""Claw-R1's manager, workers and queue of steps, under its names."""

import asyncio
from types import SimpleNamespace

import pytest
from gateway_cases import USER, renderer

from claw_r1.agent_flow.agent_flow import AgentFlowWorkerBase
from claw_r1.data_pool import DataPool, DataPoolConfig, Step
from penstock.testing import ScriptedEngine, workbench

CONFIG = {"actor_rollout_ref": {"rollout": {"temperature": 0.8, "agent": {"num_workers": 2}, "val_kwargs": {"temperature": 0.5}}}}


def row(number, **more):
    return {"raw_prompt": [USER], "uid": f"g{number}", **more}


def columns(*rows):
    return {name: [each[name] for each in rows] for name in rows[0]}


def on_gateway(work, script):
    """Run `work(url, engine)` in a thread, while an open gateway serves."""

    async def main():
        engine = ScriptedEngine(script, renderer().tokenizer)
        async with workbench(engine, renderer(), is_open=True, serves=True) as bench:
            return await asyncio.to_thread(work, bench.gateway.base_url.removesuffix("/v1"), engine)

    return asyncio.run(main())


@pytest.mark.parametrize("validates", [False, True])
def test_failed_row_does_not_fail_its_batch(validates):
    def work(url, engine):
        worker = AgentFlowWorkerBase(config=CONFIG, gateway_url=url)
        rows = [row(1), row(2), row(3) | {"raw_prompt": None}]
        batch = SimpleNamespace(non_tensor_batch=columns(*rows), meta_info={"validate": validates})
        answer = asyncio.run(worker.generate_sequences(batch))
        assert answer["num_steps"] == [1, 1, 0] and "no prompt" in answer["errors"][2]
        assert answer["timing"]["agent_flow/total_time"] > 0
        assert {sampling.temperature for sampling in engine.samplings} == {0.5 if validates else 0.8}

    on_gateway(work, ["a", "b"])


@pytest.mark.slow
def test_manager_splits_a_batch_among_its_actors():
    ray = pytest.importorskip("ray")
    from claw_r1.agent_flow import AgentFlowManager, AgentFlowWorker
    from penstock.scale.cluster import open_cluster

    def work(url, engine):
        manager = AgentFlowManager(config=CONFIG, gateway_url=url)
        try:
            assert len(manager.workers) == 2 and ray.get_actor("agent_flow_worker_1")
            assert manager.generate_sequences([row(1), row(2), row(3)])["num_steps"] == [1, 1, 1]
            worker = AgentFlowWorker.remote(CONFIG, url)
            assert ray.get(worker.generate_sequences.remote([row(4)]))["num_steps"] == [1]
        finally:
            manager.close()

    with open_cluster("", namespace="tests"):  # that of other tests in this process, where there is one
        on_gateway(work, ["a", "b", "c", "d"])


def step(prompt, trajectory, index=0, **more):
    return Step(prompt_ids=[1], response_ids=[2], prompt_uid=prompt, trajectory_uid=trajectory, step_index=index, **more)


async def test_batch_is_fetched_once_enough_groups_are_complete():
    pool = DataPool(DataPoolConfig(n_rollouts=2))
    await pool.submit_steps([step("late", "a"), step("p", "t2", is_last=True), step("p", "t1", 1), step("p", "t1", 0)])
    waiting = asyncio.create_task(pool.fetch_batch(1))
    assert not await pool.complete_trajectory("nobody")
    assert await pool.complete_trajectory("t1", 1.0)
    steps = await waiting
    assert [(each.trajectory_uid, each.step_index, each.reward) for each in steps] == [
        ("t1", 0, 1.0),
        ("t1", 1, None),
        ("t2", 0, None),
    ]
    answer = await pool.get_statistics()
    assert (answer["total_produced"], answer["total_consumed"], answer["queue_size"], answer["total_steps"]) == (4, 1, 1, 1)
    await pool.shutdown()
    assert await pool.fetch_batch(1) is None


async def test_oldest_groups_are_dropped_and_counted_beyond_the_bound():
    pool = DataPool(DataPoolConfig(), SimpleNamespace(convert=len), max_queue_size=2)
    for number in range(3):
        await pool.submit_step(step(f"p{number}", f"t{number}", is_last=True))
    assert (await pool.stats())["total_dropped"] == 1
    assert await pool.fetch_batch(2) == 2
