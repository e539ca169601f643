"""The public names of the rollout API. Each is imported on first use, so that only the Strands classes import Strands."""

from typing import TYPE_CHECKING

from penstock_compat.lazy import lazy_attributes

if TYPE_CHECKING:
    from osmosis_ai.rollout.agent_workflow import AgentWorkflow
    from osmosis_ai.rollout.backend.base import ExecutionBackend
    from osmosis_ai.rollout.backend.local import LocalBackend
    from osmosis_ai.rollout.context import (
        AgentWorkflowContext,
        GraderContext,
        HarborAgentWorkflowContext,
        RolloutContext,
        get_rollout_context,
    )
    from osmosis_ai.rollout.grader import Grader
    from osmosis_ai.rollout.integrations.agents.strands import OsmosisRolloutModel, OsmosisStrandsAgent
    from osmosis_ai.rollout.server import ControllerAuth, create_rollout_server
    from osmosis_ai.rollout.types import (
        AgentWorkflowConfig,
        AgentWorkflowOutput,
        ConcurrencyConfig,
        ExecutionRequest,
        ExecutionResult,
        GraderCompleteRequest,
        GraderConfig,
        GraderStatus,
        MultiTurnMode,
        RolloutCompleteRequest,
        RolloutErrorCategory,
        RolloutInitRequest,
        RolloutInitResponse,
        RolloutSample,
        RolloutStatus,
    )

__all__ = [
    "AgentWorkflow",
    "AgentWorkflowConfig",
    "AgentWorkflowContext",
    "AgentWorkflowOutput",
    "ConcurrencyConfig",
    "ControllerAuth",
    "ExecutionBackend",
    "ExecutionRequest",
    "ExecutionResult",
    "Grader",
    "GraderCompleteRequest",
    "GraderConfig",
    "GraderContext",
    "GraderStatus",
    "HarborAgentWorkflowContext",
    "LocalBackend",
    "MultiTurnMode",
    "OsmosisRolloutModel",
    "OsmosisStrandsAgent",
    "RolloutCompleteRequest",
    "RolloutContext",
    "RolloutErrorCategory",
    "RolloutInitRequest",
    "RolloutInitResponse",
    "RolloutSample",
    "RolloutStatus",
    "create_rollout_server",
    "get_rollout_context",
]

_HERE = "osmosis_ai.rollout"
_CONTEXTS = ("AgentWorkflowContext", "GraderContext", "HarborAgentWorkflowContext", "RolloutContext", "get_rollout_context")
_STRANDS = ("OsmosisRolloutModel", "OsmosisStrandsAgent")

__getattr__ = lazy_attributes(
    _HERE,
    dict.fromkeys(__all__, f"{_HERE}.types")
    | dict.fromkeys(_CONTEXTS, f"{_HERE}.context")
    | dict.fromkeys(_STRANDS, f"{_HERE}.integrations.agents.strands")
    | dict.fromkeys(("ControllerAuth", "create_rollout_server"), f"{_HERE}.server")
    | {
        "AgentWorkflow": f"{_HERE}.agent_workflow",
        "ExecutionBackend": f"{_HERE}.backend.base",
        "Grader": f"{_HERE}.grader",
        "LocalBackend": f"{_HERE}.backend.local",
    },
)
