"""What a rollout server's callbacks mean to a controller: the error that an executor raises, or the rewards that it gives."""

from collections.abc import Mapping

from penstock.errors import EngineError, GraderError, WorkflowError
from penstock.records import End
from penstock.rollout.guests import one_line
from penstock.rollout.server.wire import GraderCompleteRequest, RolloutCompleteRequest, RolloutErrorCategory
from penstock.rollout.work import Reward
from penstock.sdk.context import finite_reward
from penstock.sdk.samples import RolloutSample

_BY_CATEGORY = {RolloutErrorCategory.TIMEOUT: End.TIMEOUT, RolloutErrorCategory.HTTP_ERROR: End.ENGINE_ERROR}


def workflow_failure(told: RolloutCompleteRequest) -> Exception:
    """The error of a workflow that failed."""
    end = _end_of(told)
    kind = TimeoutError if end is End.TIMEOUT else EngineError if end is End.ENGINE_ERROR else WorkflowError
    return kind(_words(told.err_message, "the rollout server says that the workflow failed, but not why"))


def grader_failure(told: GraderCompleteRequest) -> Exception:
    """The error of a grader that failed."""
    kind = TimeoutError if _end_of(told) is End.TIMEOUT else GraderError
    return kind(_words(told.err_message, "the rollout server says that the grader failed, but not why"))


def rewards_of(told: GraderCompleteRequest, samples: Mapping[str, RolloutSample]) -> list[Reward]:
    """In the order in which a grader here gives them; GraderError where there is none, or one for a step that never was."""
    known = {index for sample in samples.values() for index in sample.steps}
    steps = sorted((told.step_rewards or {}).items())
    if unknown := [step for step, _ in steps if step not in known]:
        raise GraderError(f"the rollout server rewards steps {unknown}; this rollout has {sorted(known)}")
    whole = [] if told.reward is None else [Reward(None, finite_reward(told.reward))]
    own = {name: each.reward for name, each in told.samples.items() if name not in (told.filled or ())}
    parts = [Reward(name, finite_reward(reward)) for name, reward in own.items() if reward is not None]
    rewards = [*whole, *parts, *(Reward(None, finite_reward(value), step) for step, value in steps)]
    if not rewards:
        raise GraderError("the rollout server gave no reward; call ctx.set_sample_reward for each, or ctx.set_reward once")
    return rewards


def _end_of(told: RolloutCompleteRequest | GraderCompleteRequest) -> End:
    """How the rollout ends: as the server says, else by the category, which every server tells."""
    return told.end or (_BY_CATEGORY.get(told.err_category, End.AGENT_ERROR) if told.err_category else End.AGENT_ERROR)


def _words(message: str | None, otherwise: str) -> str:
    return one_line(WorkflowError(message)) if message else otherwise
