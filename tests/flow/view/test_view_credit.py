"""The dashboard shows what each call and token was credited with, whatever the advantage compares."""

import pytest
from view_cases import Screens, make_run, write_scores


def screens_of(tmp_path, advantage: str, *, scores: dict | None = None, settings: dict | None = None, **train) -> Screens:
    """Of a run whose calls are graded each alone: with 0, 1, 0, 1 in the places of a group."""
    section = {"advantage": advantage, "advantage_settings": settings or {}, **train}
    folder = make_run(tmp_path, model="tiny", train=section, by_call=True)
    if scores is None:
        (folder / "scores" / "000001.jsonl").unlink()
    else:
        write_scores(folder, **scores)
    return Screens(folder)


def credits_of(reported: dict) -> dict[str, dict[int, float]]:
    return {each["id"]: {call["call"]: call["mean"] for call in each["credits"]} for each in reported["attempts"]}


def test_credit_by_call_is_shown_with_group_rollout_and_tokens(tmp_path):
    screens = screens_of(tmp_path, "rewards_to_go")
    found = screens.get("group", run="run", group="train-1")
    assert {each["level"] for each in found["attempts"]} == {"call"} and {each["advantage"] for each in found["attempts"]} == {None}
    # to go are 2, 1, 0 where calls earn 1, of which the mean of the turn is taken
    assert credits_of(found)["train-1.1.1"] == {0: 1.0, 1: 0.5, 2: 0.0} and credits_of(found)["train-1.2.1"] == {
        0: -1.0,
        1: -0.5,
        2: 0.0,
    }
    reported = screens.get("rollout", run="run", rollout="train-1.1.1")
    assert (reported["credit"]["level"], [call["advantage"]["mean"] for call in reported["calls"]]) == ("call", [1.0, 0.5, 0.0])
    assert [call["mask"] for call in reported["calls"]] == [None, None, "greedy"]
    assert [screens.get("tokens", run="run", rollout="train-1.1.1", call=call)["advantage"] for call in (0, 1)] == [1.0, 0.5]


def test_call_without_credit_was_not_trained_though_its_neighbours_were(tmp_path):
    screens = screens_of(tmp_path, "turn_grpo", settings={"turn_weight": 1.0})
    reported = screens.get("rollout", run="run", rollout="train-1.1.1")
    assert [round(call["advantage"]["mean"], 3) for call in reported["calls"]] == [1.0, 1.0, 0.0]
    assert [call["trained"] for call in reported["calls"]] == [True, True, False]


def test_credit_by_transcript_is_shown_by_call(tmp_path):
    found = screens_of(tmp_path, "transcript_grpo").get("group", run="run", group="train-1")
    assert {round(value, 3) for value in credits_of(found)["train-1.1.1"].values()} == {1.0}


RECORDED = {"advantages": [[1, 0.5], [2, -0.25], [1, 1.0]], "steps": [[2, 0], [2, 1]]}


def test_credit_by_token_is_what_the_trainer_recorded(tmp_path):
    screens = screens_of(tmp_path, "gae", scores=RECORDED)
    found = {each["id"]: each for each in screens.get("group", run="run", group="train-0")["attempts"]}
    calls = found["train-0.1.1"]["credits"]
    assert (found["train-0.1.1"]["level"], [(each["mean"], each["low"], each["high"]) for each in calls]) == (
        "token",
        [(0.125, -0.25, 0.5), (0.375, -0.25, 1.0)],
    )
    reported = screens.get("tokens", run="run", rollout="train-0.1.1", call=1)
    assert (reported["token_advantages"], reported["advantage"], reported["trained"]) == ([-0.25, 1.0], None, True)


@pytest.mark.parametrize(
    ("advantage", "reason"),
    [("gae", "for each token"), ("reinforce_pp", "over all groups"), ("mine:of_groups", "a function of the run's own")],
)
def test_page_explains_missing_advantages(tmp_path, advantage, reason):
    screens = screens_of(tmp_path, advantage)
    [first, *_] = screens.get("group", run="run", group="train-1")["attempts"]
    assert (first["level"], first["credits"]) == ("", []) and reason in first["unknown"]
    assert reason in screens.get("rollout", run="run", rollout="train-1.0.1")["credit"]["unknown"]


@pytest.mark.parametrize("advantage", ["reinforce_pp", "mine:of_groups"])
def test_one_recorded_number_for_all_calls_is_the_rollouts(tmp_path, advantage):
    screens = screens_of(tmp_path, advantage, scores={"steps": [[2, 0], [2, 1]]})
    reported = screens.get("rollout", run="run", rollout="train-0.1.1")
    assert (reported["credit"]["level"], reported["credit"]["advantage"], reported["credit"]["unknown"]) == ("rollout", 1.5, "")


def test_what_trainer_left_out_was_not_trained_whatever_rewards_say(tmp_path):
    halves = "ADQAuA=="  # two numbers
    scores = {"gap": halves, "entropy": halves, "advantages": [[2, 0.75]], "steps": [[2, 1]]}
    reported = screens_of(tmp_path, "rewards_to_go", scores=scores).get("rollout", run="run", rollout="train-0.1.1")
    assert [call["mask"] for call in reported["calls"]] == ["left_out", None, "greedy"]
    assert reported["calls"][1]["advantage"]["mean"] == 0.75


def test_advantage_weighted_by_length_is_same_on_every_screen(tmp_path):
    screens = screens_of(tmp_path, "opo")
    found = {each["id"]: each["advantage"] for each in screens.get("group", run="run", group="train-1")["attempts"]}
    reported = screens.get("rollout", run="run", rollout="train-1.1.1")
    assert reported["credit"]["advantage"] == found["train-1.1.1"] == 1.0
    assert screens.get("step", run="run", step=1)["groups"][1]["rollouts"][0]["advantage"] is None  # it needs lengths


def test_what_was_taken_off_for_length_is_taken_off_here(tmp_path):
    screens = screens_of(tmp_path, "rewards_to_go", settings={"baseline": "none"}, overlong=[0, 10])
    found = screens.get("group", run="run", group="train-1")  # 5 tokens each: half of the penalty, at the last call
    assert credits_of(found)["train-1.1.1"] == {0: 1.5, 1: 0.5, 2: -0.5}


def test_where_only_trainer_knows_reward_page_reports_it(tmp_path):
    [first, *_] = screens_of(tmp_path, "dr_grpo", kl=0.1, kl_in="reward").get("group", run="run", group="train-1")["attempts"]
    assert first["advantage"] is None and "divergence" in first["unknown"]


def test_columns_that_overstate_their_size_are_left_out(tmp_path):
    screens = screens_of(tmp_path, "gae", scores={"advantages": [[10**12, 1.0]]})
    assert screens.get("tokens", run="run", rollout="train-0.1.1", call=1)["token_advantages"] is None
