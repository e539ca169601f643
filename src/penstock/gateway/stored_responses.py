"""`GET /v1/responses/{id}`: an answer of the caller's rollout as a response object, made of the recorded step."""

from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import RequestError
from penstock.gateway.call import ModelCall, Prompt
from penstock.gateway.call_pipeline import CallPipeline
from penstock.gateway.client_sessions import ANY_SESSION, SESSION_PROMPT, session_rollout
from penstock.gateway.dialects.base import ModelAnswer
from penstock.gateway.dialects.responses import ECHOED, RESPONSE_ID, ResponsesDialect
from penstock.gateway.model_routes import PROMPT_UID, FindSession
from penstock.pool.base import Pool


class StoredResponses:
    """Fields of the request that were not recorded, such as its metadata, have their defaults."""

    def __init__(self, pipeline: CallPipeline, find: FindSession, pool: Pool) -> None:
        self._pipeline = pipeline
        self._find = find
        self._pool = pool

    async def get(self, request: Request) -> Response:
        rollout_id, prompt_uid = request.scope["rollout_id"], request.scope[PROMPT_UID]
        if rollout_id == ANY_SESSION:
            rollout_id, prompt_uid = session_rollout(request.scope["headers"], b""), SESSION_PROMPT
        session = await self._find(rollout_id, prompt_uid)
        graph = await session.graph(self._pool)
        name = request.path_params.get("response", "")
        steps = graph.answer(name.removeprefix(RESPONSE_ID))
        if not name.startswith(RESPONSE_ID) or not steps:
            text = f"response {name[:200]!r} is none of this rollout"
            raise RequestError(text, status=404, code="response_not_found", param="response_id")
        step = steps[0]
        node = graph.nodes[step.node]
        prompt = Prompt(ids=graph.path(step.node), parent=node.parent, added=(), messages=(), tools=(), chain=node.chain)
        source = self._pipeline.policies.by_name[step.policy]
        call = ModelCall(model="", messages=(), sampling=step.sampling, echo=tuple(ECHOED.items()))
        model = step.policy or source.engine.model
        answer = ModelAnswer(step.answer, step.created, model, call, prompt, [step])
        return Response(ResponsesDialect(source.tokenizer).json_body(answer), media_type="application/json")
