"""`penstock gateway --open` in its own process: the unauthenticated protocol, on this machine only."""

from cli_cases import USER, called, served


def test_open_gateway_takes_flow_whole_way_without_token(tmp_path):
    with served(tmp_path, "--open") as gateway:
        assert gateway.ready["mode"] == "open"
        assert gateway.get("/ready", "") == (200, {"status": "ready"})
        status, reported = gateway.post("/generate", "", {"trajectory_uid": "t1", "prompt_uid": "p1", "messages": [USER]})
        assert status == 200
        fields = {"data_source": "openai/gsm8k", "ground_truth": "42"}
        said = [{"role": "assistant", "content": "#### 42"}]
        status, reward = gateway.post("/compute_reward", "", {"messages": said, "dataset_fields": fields})
        assert (status, reward["reward"]) == (200, 1.0)
        step = {
            "prompt_ids": reported["prompt_ids"],
            "response_ids": reported["response_ids"],
            "trajectory_uid": "t1",
            "is_last": True,
        }
        assert gateway.post("/submit_steps", "", {"steps": [step | {"reward": reward["reward"]}]}) == (200, {"accepted": 1})
        assert gateway.get("/api/stats", "")[1]["complete_trajectories"] == 1
        assert gateway.post("/rollouts", "")[0] == 401
        code, err = gateway.stop()
    assert code == 0 and "it is open" in err


def test_gateway_asks_for_tokens_unless_it_is_reported_otherwise(tmp_path):
    with served(tmp_path) as gateway:
        assert gateway.ready["mode"] == "token"
        assert gateway.post("/generate", "", {"trajectory_uid": "t1", "messages": [USER]})[0] == 401
        assert gateway.get("/api/stats", "")[0] == 401
        assert gateway.post("/init_trajectory", gateway.tokens["control"])[0] == 200
        fields = {"data_source": "nowhere", "ground_truth": "42"}
        answer = gateway.post("/compute_reward", gateway.tokens["control"], {"messages": [USER], "dataset_fields": fields})
        assert answer[0] == 422 and "nowhere" in answer[1]["detail"]


def test_open_gateway_on_another_interface_is_rejected_in_one_line(tmp_path):
    result = called(tmp_path, "gateway", "--open", "--host", "0.0.0.0")
    assert result.returncode == 2 and result.stdout == ""
    assert "this machine only" in result.stderr and len(result.stderr.strip().splitlines()) == 1
