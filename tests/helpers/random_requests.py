"""Requests with random fields, documented or unknown, in every dialect."""

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
NAMED = {"name": "s", "schema": SCHEMA}
FUNCTION = {"name": "f", "description": "F.", "parameters": SCHEMA}
PNG = "iVBORw0KGgo="
LABEL = ("x", "ann")

CHAT_TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "custom", "custom": {"name": "g"}}, {"type": "web_search"}]
CHAT = {
    "frequency_penalty": (0, 0.5, -2),
    "presence_penalty": (0, 1.5),
    "logit_bias": ({}, {"7": 5}, {"7": -100}, {"7": 100, "8": 100}),
    "logprobs": (True, False),
    "top_logprobs": (0, 3),
    "max_tokens": (5,),
    "max_completion_tokens": (7,),
    "metadata": ({"a": "b"},),
    "modalities": (["text"], ["text", "audio"]),
    "audio": ({"voice": "alloy", "format": "wav"},),
    "n": (1, 2),
    "parallel_tool_calls": (True, False),
    "prediction": ({"type": "content", "content": "Hi"},),
    "prompt_cache_key": LABEL,
    "prompt_cache_retention": ("24h",),
    "prompt_cache_options": ({"mode": "implicit"},),
    "reasoning_effort": ("low", "none"),
    "response_format": (
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    ),
    "safety_identifier": LABEL,
    "seed": (3,),
    "service_tier": ("auto", "flex"),
    "stop": ("END", ["a", "b"]),
    "store": (True, False),
    "stream_options": ({"include_usage": True, "include_obfuscation": False},),
    "temperature": (0, 0.7, 2),
    "tool_choice": ("auto", "none"),
    "top_p": (0.5, 1),
    "user": LABEL,
    "verbosity": ("low",),
    "web_search_options": ({"search_context_size": "low"},),
    "functions": ([FUNCTION], [{"name": "f"}]),
    "function_call": ("auto", "none"),
    "moderation": ({"model": "m"},),
}
RESPONSES = {
    "background": (False, True),
    "context_management": ([{"type": "compaction"}],),
    "conversation": ("conv_1",),
    "include": (["reasoning.encrypted_content"], ["message.output_text.logprobs"]),
    "instructions": ("Be brief.",),
    "max_output_tokens": (9,),
    "max_tool_calls": (3,),
    "metadata": ({"a": "b"},),
    "moderation": ({"model": "m"},),
    "parallel_tool_calls": (True, False),
    "prompt": ({"id": "pmpt_1"},),
    "prompt_cache_key": LABEL,
    "prompt_cache_options": ({"mode": "implicit"},),
    "prompt_cache_retention": ("24h",),
    "reasoning": ({"effort": "low", "summary": "auto"},),
    "safety_identifier": LABEL,
    "service_tier": ("auto",),
    "store": (True, False),
    "stream_options": ({"include_obfuscation": False},),
    "temperature": (0, 0.7),
    "text": ({"verbosity": "low"}, {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}}),
    "tool_choice": ("auto", "none", {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}),
    "top_logprobs": (0, 4),
    "top_p": (0.5,),
    "truncation": ("auto", "disabled"),
    "user": LABEL,
}
MESSAGES = {
    "cache_control": ({"type": "ephemeral"},),
    "container": ("c_1",),
    "context_management": ({"edits": []}, {"edits": [{"type": "clear_tool_uses_20250919"}]}),
    "compaction": ({"type": "auto"},),
    "diagnostics": ({"a": 1},),
    "fallbacks": ([{"model": "m"}],),
    "inference_geo": ("eu",),
    "mcp_servers": ([{"type": "url", "name": "m", "url": "http://x"}],),
    "metadata": ({"user_id": "u"},),
    "output_config": ({"effort": "low"}, {"format": {"type": "json_schema", "schema": SCHEMA}}),
    "service_tier": ("auto",),
    "speed": ("fast",),
    "stop_sequences": (["END"],),
    "system": ("Be brief.", [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]),
    "temperature": (0, 0.7),
    "thinking": ({"type": "enabled", "budget_tokens": 2000}, {"type": "adaptive"}, {"type": "disabled"}),
    "tool_choice": ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": True}, {"type": "none"}),
    "top_k": (5,),
    "top_p": (0.5,),
    "user_profile_id": LABEL,
    "workspace_id": LABEL,
}
COMPLETIONS = {
    "best_of": (1,),
    "echo": (True, False),
    "frequency_penalty": (0, 0.5),
    "logit_bias": ({}, {"7": 5}, {"7": -100}, {"7": 100, "8": 100}),
    "logprobs": (0, 2),
    "max_tokens": (5,),
    "n": (1, 2),
    "presence_penalty": (0, 0.5),
    "seed": (3,),
    "stop": ("END",),
    "stream_options": ({"include_usage": True},),
    "suffix": ("", "end"),
    "temperature": (0, 1),
    "top_p": (0.5,),
    "user": LABEL,
}
MESSAGES_CONTENT = (
    "Hello",
    [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}],
    [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}],
    [{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Hello"}}],
    [{"type": "search_result", "title": "t", "source": "s", "content": [{"type": "text", "text": "Hello"}]}],
)
CHAT_CONTENT = (
    "Hello",
    [{"type": "text", "text": "Hello"}],
    [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}", "detail": "low"}}],
    [{"type": "file", "file": {"file_id": "f_1"}}],
    [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
)
RESPONSES_CONTENT = (
    "Hello",
    [{"type": "input_text", "text": "Hello"}],
    [{"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "auto"}],
    [{"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,SGVsbG8="}],
)


def chat(dice):
    return {"messages": [{"role": "user", "content": dice.choice(CHAT_CONTENT)}], "tools": CHAT_TOOLS}


def responses(dice):
    tools = [{"type": "function", **FUNCTION}, {"type": "web_search"}]
    return {"input": [{"role": "user", "content": dice.choice(RESPONSES_CONTENT)}], "tools": tools}


def messages(dice):
    tools = [{"name": "f", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}]
    return {"max_tokens": 9, "messages": [{"role": "user", "content": dice.choice(MESSAGES_CONTENT)}], "tools": tools}


DIALECTS = {
    "/v1/chat/completions": ("Chat Completions", chat, CHAT),
    "/v1/responses": ("Responses", responses, RESPONSES),
    "/v1/messages": ("Messages", messages, MESSAGES),
    "/v1/completions": ("Completions", lambda dice: {"prompt": dice.choice(["Hello", [1, 2, 3]])}, COMPLETIONS),
}


def random_request(dice, path):
    _, base, fields = DIALECTS[path]
    chosen = {name: dice.choice(fields[name]) for name in dice.sample(sorted(fields), dice.randint(0, 6))}
    unknown = {f"field_{dice.randint(0, 99)}": dice.choice([1, "x", None, [], {"a": [True]}]) for _ in range(dice.randint(0, 2))}
    body = {"model": "any", "stream": dice.random() < 0.4, **base(dice), **chosen, **unknown}
    return {name: value for name, value in body.items() if name != "tools" or "functions" not in body}
