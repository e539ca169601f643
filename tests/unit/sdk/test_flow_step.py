"""A step as a flow hands it in: what is taken as it is, what is made plain, what is refused."""

import array

import pytest

from penstock.errors import GraderError
from penstock_compat.flow import SubmittedStep


class Tensor(list):
    """Numbers that come as a list only when asked, like those of torch and numpy."""

    def tolist(self):
        return [int(number) for number in self]


def test_only_the_ids_are_needed_and_the_rest_says_nothing():
    step = SubmittedStep([1, 2], [3])
    assert (step.reward, step.rollout_log_probs, step.is_last, step.metadata) == (None, None, False, None)
    assert (step.trajectory_uid, step.prompt_uid, step.step_index, step.policy_version) == ("", "", 0, 0)


def test_ids_of_any_sequence_become_lists_of_int():
    reported = SubmittedStep((1, 2), Tensor([3.0]), rollout_log_probs=array.array("f", [-0.5]), reward=1).to_json()
    assert (reported["prompt_ids"], reported["response_ids"], reported["rollout_log_probs"], reported["reward"]) == (
        [1, 2],
        [3],
        [-0.5],
        1.0,
    )


def test_metadata_goes_out_as_plain_values():
    assert SubmittedStep([1], [2], metadata={"seen": {3}}).to_json()["metadata"] == {"seen": [3]}


def test_empty_reply_can_be_handed_in():
    assert SubmittedStep([1], [], rollout_log_probs=[]).to_json()["response_ids"] == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": "12"}, "prompt_ids is str"),
        ({"prompt_ids": 5}, "prompt_ids is int"),
        ({"prompt_ids": [1, -1]}, r"prompt_ids\[1\] is -1"),
        ({"response_ids": [True]}, r"response_ids\[0\] is True"),
        ({"response_ids": [1.5]}, r"response_ids\[0\] is 1.5"),
        ({"response_ids": [2**31]}, r"response_ids\[0\]"),
        ({"rollout_log_probs": [-0.1, -0.2]}, "2 values for 1 response_ids"),
        ({"rollout_log_probs": [float("nan")]}, r"rollout_log_probs\[0\] is nan"),
        ({"multi_modal_data": {"images": [1]}}, "multi_modal_data cannot be trained on"),
        ({"routed_experts": [[1]]}, "routed_experts cannot be trained on"),
    ],
)
def test_what_cannot_be_a_step_is_refused_by_name(fields, words):
    with pytest.raises(ValueError, match=words):
        SubmittedStep(**{"prompt_ids": [1], "response_ids": [2], **fields})


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1", True])
def test_reward_that_is_no_finite_number_is_refused(reward):
    with pytest.raises(GraderError, match="finite"):
        SubmittedStep([1], [2], reward=reward)
