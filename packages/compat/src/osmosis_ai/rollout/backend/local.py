"""The back end that runs rollouts in the server's own process."""

from typing import Any

from osmosis_ai.rollout.context import RolloutContext
from penstock.sdk.workflow import AgentWorkflow, AgentWorkflowConfig, Grader, GraderConfig
from penstock_compat.rollout_server import backend

__all__ = ["LocalBackend"]


class LocalBackend(backend.LocalBackend):
    """Penstock's back end. Outside a rollout it reads the policy's address and key from the OSMOSIS_ variables."""

    def __init__(
        self,
        *,
        workflow: type[AgentWorkflow[Any]] | str,
        workflow_config: AgentWorkflowConfig | str | None = None,
        grader: type[Grader] | str | None = None,
        grader_config: GraderConfig | str | None = None,
    ) -> None:
        super().__init__(
            workflow=workflow,
            workflow_config=workflow_config,
            grader=grader,
            grader_config=grader_config,
            context=RolloutContext,
        )
