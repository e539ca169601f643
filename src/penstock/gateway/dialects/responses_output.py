"""What a Responses answer is made of: the response object, and the items that a reply comes out as."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from penstock.gateway.dialects.base import Answer, Spelling
from penstock.gateway.dialects.chat import logprobs
from penstock.gateway.dialects.responses_input import RESPONSE_ID
from penstock.gateway.dialects.responses_tools import Address, freeform_text
from penstock.records import Finish, Step

Status = Literal["in_progress", "completed", "incomplete", "failed"]
STATUS: dict[Finish, Status] = {"stop": "completed", "length": "incomplete", "cancelled": "failed", "error": "failed"}


def response(answer: Answer, status: Status, output: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """The response object, without usage."""
    sampling = answer.call.sampling
    return {
        "id": RESPONSE_ID + answer.id,
        "object": "response",
        "created_at": int(answer.created),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": answer.model,
        "output": list(output),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "service_tier": "default",
        "usage": None,
        **dict(answer.call.echo),
    }


def finished(answer: Answer, step: Step, output: Sequence[dict[str, Any]], tokenizer: Spelling) -> dict[str, Any]:
    """The response object of an answer that has come to its end."""
    status = STATUS[step.finish]
    whole = response(answer, status, output) | {"usage": usage(answer, step, tokenizer)}
    if status == "completed":
        whole["completed_at"] = int(answer.created + step.seconds)
    return whole


def usage(answer: Answer, step: Step, tokenizer: Spelling) -> dict[str, Any]:
    """Reasoning tokens are those of its text, tokenized again; all other counts are exact."""
    used = answer.usage([step])
    prompt, sampled = used.prompt_tokens, used.completion_tokens
    thought = min(len(tokenizer.encode(tokenizer.shield(step.message.get("reasoning_content") or ""))), sampled)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": prompt + sampled,
    }


def items_of(answer: Answer, step: Step, tools: Mapping[str, Address], tokenizer: Spelling) -> list[dict[str, Any]]:
    """A reply's items: reasoning, message, calls. A reply without calls has a message, were it empty, to be sent back."""
    reply, items = step.message, list[dict[str, Any]]()
    calls = reply.get("tool_calls") or ()
    if reply.get("reasoning_content"):
        items.append(reasoning_item(answer, 0, reply["reasoning_content"]))
    if reply.get("content") or not calls:
        spelt = told(step, tokenizer) if answer.call.logprobs else ()
        items.append(message_item(answer, 0, reply.get("content") or "", spelt))
    for place, call in enumerate(calls):
        named = call["function"]
        items.append(call_item(answer, place, call["id"], tools.get(named["name"]), named["name"], named["arguments"]))
    items[-1] |= ending_status(step)
    return items


def told(step: Step, tokenizer: Spelling) -> list[dict[str, Any]]:
    """The log-probabilities of all tokens of a reply."""
    return logprobs(tokenizer, step.completion_ids, step.full_logprobs or step.logprobs)["content"]


def ending_status(step: Step) -> dict[str, Any]:
    """The status of the last item."""
    return {"status": "completed" if step.finish == "stop" else "incomplete"}


def reasoning_item(answer: Answer, place: int, text: str | None) -> dict[str, Any]:
    """A reasoning item; text of None has not begun."""
    content = [] if text is None else [reasoning_part(text)]
    head = {"id": f"rs_{answer.id}_{place}", "type": "reasoning", "summary": list[Any](), "content": content}
    return head | {"encrypted_content": None, "status": _status(text)}


def message_item(answer: Answer, place: int, text: str | None, spelt: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """A message item; text of None has not begun."""
    content = [] if text is None else [text_part(text, spelt)]
    return {
        "id": f"msg_{answer.id}_{place}",
        "type": "message",
        "role": "assistant",
        "status": _status(text),
        "content": content,
    }


def call_item(
    answer: Answer, place: int, call_id: str, address: Address | None, name: str, arguments: str | None
) -> dict[str, Any]:
    """A call as the client knows the tool; arguments of None have not begun. A tool that it does not know keeps its name."""
    head: dict[str, Any] = {"call_id": call_id, "name": address.name if address else name, "status": _status(arguments)}
    if address and address.namespace:
        head["namespace"] = address.namespace
    if address and address.is_custom:
        text = freeform_text(arguments or "")
        return {"id": f"ctc_{answer.id}_{place}", "type": "custom_tool_call", "input": text, **head}
    return {"id": f"fc_{answer.id}_{place}", "type": "function_call", "arguments": arguments or "", **head}


def reasoning_part(text: str) -> dict[str, Any]:
    """The content of a reasoning item."""
    return {"type": "reasoning_text", "text": text}


def text_part(text: str, spelt: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """The content of a message item; `spelt` are log-probabilities."""
    return {"type": "output_text", "text": text, "annotations": list[Any](), "logprobs": list(spelt)}


def _status(begun: str | None) -> Status:
    return "in_progress" if begun is None else "completed"
