"""An agent with three tools, of which a question needs one: a calculator, a price list, a converter of units.

A rollout earns a quarter for a call of the right tool, a quarter if its result holds the answer, and half for the answer in few
words. Six worked examples are in the prompt, two for each tool: with one for each, SmolLM2-135M never makes a call.
"""

import json
from typing import Any

from penstock import AgentWorkflow, AgentWorkflowContext, Grader, GraderContext

MAX_TOKENS, MAX_WORDS, NOTHING = 40, 6, "not possible"
PRICES = {
    "lamp": 34, "chair": 58, "kettle": 27, "ladder": 83, "bucket": 9, "carpet": 140, "mirror": 62, "basket": 18, "hammer": 22,
    "candle": 4, "blanket": 45, "clock": 71, "shovel": 31, "teapot": 26, "bench": 95, "broom": 13,
}  # fmt: skip
UNITS = {("m", "cm"): 100, ("km", "m"): 1000, ("kg", "g"): 1000, ("h", "min"): 60, ("l", "ml"): 1000, ("min", "s"): 60}


def tool(name: str, description: str, **arguments: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("calculate", "Add, subtract or multiply.", a="integer", operator="string", b="integer"),
    tool("price", "What a thing costs.", thing="string"),
    tool("convert", "Convert an amount to another unit.", amount="integer", unit="string", to="string"),
]


def carry_out(name: str, arguments: str) -> str:
    """What a tool says; a call that cannot be carried out is told so."""
    try:
        given = json.loads(arguments)
        if name == "calculate":
            a, b = int(given["a"]), int(given["b"])
            return str({"+": a + b, "-": a - b, "*": a * b}[given["operator"]])
        if name == "price":
            return f"{PRICES[given['thing']]} coins"
        return f"{int(given['amount']) * UNITS[given['unit'], given['to']]} {given['to']}"
    except (ValueError, TypeError, KeyError):
        return NOTHING


def worked(question: str, name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    written = json.dumps(arguments)
    call = {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": written}}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": carry_out(name, written)},
        {"role": "assistant", "content": carry_out(name, written)},
    ]


EXAMPLES = [
    *worked("What is 14 * 3?", "calculate", {"a": 14, "operator": "*", "b": 3}),
    *worked("What does a broom cost?", "price", {"thing": "broom"}),
    *worked("How many cm are 7 m?", "convert", {"amount": 7, "unit": "m", "to": "cm"}),
    *worked("How much is a hammer?", "price", {"thing": "hammer"}),
    *worked("How many g are 12 kg?", "convert", {"amount": 12, "unit": "kg", "to": "g"}),
    *worked("What is 31 + 45?", "calculate", {"a": 31, "operator": "+", "b": 45}),
]


class ThreeTools(AgentWorkflow[Any]):
    async def run(self, ctx: AgentWorkflowContext[Any]) -> None:
        client, tools, messages = ctx.openai(), list[Any](TOOLS), list[Any]([*EXAMPLES, *ctx.prompt])
        for _ in range(2):
            made = await client.chat.completions.create(model="policy", messages=messages, tools=tools, max_tokens=MAX_TOKENS)
            reply: Any = made.choices[0].message
            if not reply.tool_calls:
                return
            messages.append(reply.model_dump(exclude_none=True))
            for call in reply.tool_calls:
                found = carry_out(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})


class ThreeToolsGrader(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        wanted, answer = str((ctx.metadata or {})["tool"]), str(ctx.label)
        own = ctx.sample.transcript[len(EXAMPLES) :]
        called = [call["function"]["name"] for message in own for call in message.get("tool_calls") or ()]
        found = any(message["role"] == "tool" and answer in str(message["content"]).split() for message in own)
        words = str(own[-1].get("content") or "").split() if own[-1]["role"] == "assistant" else []
        right = found and answer in [word.strip(".,") for word in words] and len(words) <= MAX_WORDS
        ctx.set_reward(0.25 * (wanted in called) + 0.25 * found + 0.5 * right)
