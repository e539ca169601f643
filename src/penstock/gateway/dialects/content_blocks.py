"""Content blocks of the Messages dialect as content parts: texts, images, documents, search results, references to tools."""

from collections.abc import Mapping
from typing import Any

import orjson

from penstock.chat.media import decoded_text
from penstock.chat.templates import Tool
from penstock.gateway.dialects import fields
from penstock.gateway.dialects.fields import ContentPart

DROPPED_BLOCKS = frozenset(
    {"redacted_thinking", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"}
    | {"bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "advisor_tool_result", "container_upload"}
    | {"mcp_tool_use", "mcp_tool_result", "mcp_tool_listing", "fallback", "browser_state"}
)
"""Blocks of tools that the vendor's servers ran, or that only they can read. The model is not shown them; they are counted."""


def content_parts(value: Any, name: str, tools: Mapping[str, Tool]) -> list[ContentPart]:
    """The parts of a block. `tools` are the definitions that references stand for, by name."""
    block = fields.as_object(value) or {}
    match block.get("type"):
        case "text":
            return [fields.text_part(fields.string(block.get("text"), f"{name}.text"))]
        case "image":
            return [_image(fields.nested(block, "source", f"{name}.source"), f"{name}.source")]
        case "document":
            return _document(block, name, tools)
        case "search_result":
            head = "\n".join(str(block[key]) for key in ("title", "source") if block.get(key))
            return [fields.text_part(head), *_listed(block.get("content"), f"{name}.content", tools)]
        case "compaction":
            return [fields.text_part(block["content"])] if isinstance(block.get("content"), str) else []
        case "tool_reference":
            return [_definition(block.get("tool_name"), tools)]
        case "tool_search_tool_result":
            found = fields.nested(block, "content", f"{name}.content").get("tool_references")
            return [_definition((fields.as_object(each) or {}).get("tool_name"), tools) for each in fields.as_list(found) or ()]
        case "tool_addition" | "tool_removal" as change:
            return [_tool_change(change, fields.nested(block, "tool", f"{name}.tool"), f"{name}.tool", tools)]
        case kind if isinstance(kind, str) and kind in DROPPED_BLOCKS:
            return []
        case kind:
            known = "text, image, document, search_result or tool_reference"
            raise fields.invalid(name, f"must be a block of type {known} here; {fields.preview(kind)} is not supported")


def tool_of(given: dict[str, Any] | None, name: str) -> Tool:
    """A tool of the caller in the OpenAI form."""
    schema = fields.as_object((given or {}).get("input_schema"))
    if given is None or not isinstance(given.get("name"), str) or schema is None:
        raise fields.invalid(name, "must be a tool with a name and an input_schema")
    about = given.get("description")
    described = {"description": about} if isinstance(about, str) else {}
    return {"type": "function", "function": {"name": given["name"], **described, "parameters": schema}}


def _listed(value: Any, name: str, tools: Mapping[str, Tool]) -> list[ContentPart]:
    if isinstance(value, str):
        return [fields.text_part(value)]
    blocks = fields.as_list([] if value is None else value)
    if blocks is None:
        raise fields.invalid(name, f"must be a string or a list of content blocks, not {fields.preview(value)}")
    return [part for place, block in enumerate(blocks) for part in content_parts(block, f"{name}[{place}]", tools)]


def _image(source: dict[str, Any], name: str) -> ContentPart:
    match source.get("type"):
        case "base64":
            data, media_type = fields.string(source.get("data"), f"{name}.data"), source.get("media_type")
            return fields.image_part(f"data:{media_type};base64,{data}", name)
        case "url":
            return fields.image_part(source.get("url"), f"{name}.url")
        case "file":
            return fields.image_part(f"file:{source.get('file_id')}", name)
        case kind:
            raise fields.invalid(name, f"must be of type base64, url or file, not {fields.preview(kind)}")


def _document(block: dict[str, Any], name: str, tools: Mapping[str, Tool]) -> list[ContentPart]:
    source, title = fields.nested(block, "source", f"{name}.source"), block.get("title")
    head = [fields.text_part(block[key]) for key in ("title", "context") if isinstance(block.get(key), str) and block[key]]
    named = {"filename": title} if isinstance(title, str) and title else {}
    match source.get("type"):
        case "text":
            return [*head, fields.text_part(fields.string(source.get("data"), f"{name}.source.data"))]
        case "content":
            return [*head, *_listed(source.get("content"), f"{name}.source.content", tools)]
        case "base64":
            media_type, data = str(source.get("media_type")), fields.string(source.get("data"), f"{name}.source.data")
            if (text := decoded_text(media_type, data)) is not None:
                return [*head, fields.text_part(text)]
            return [{"type": "file", "file": {"file_data": f"data:{media_type};base64,{data}", **named}}]
        case "url" | "file":
            return [{"type": "file", "file": {"file_id": source.get("url") or source.get("file_id"), **named}}]
        case kind:
            raise fields.invalid(
                f"{name}.source", f"must be of type text, content, base64, url or file, not {fields.preview(kind)}"
            )


def _definition(tool_name: Any, tools: Mapping[str, Tool]) -> ContentPart:
    """A reference to a tool as its definition, in the form in which templates show the tools at the prompt's head."""
    tool = tools.get(tool_name) if isinstance(tool_name, str) else None
    shown = orjson.dumps(tool).decode() if tool else f"{tool_name} is not among the tools"
    return fields.text_part(f"<tools>\n{shown}\n</tools>")


def _tool_change(change: str, tool: dict[str, Any], name: str, tools: Mapping[str, Tool]) -> ContentPart:
    tool_name = tool.get("tool_name") or tool.get("name")
    if change == "tool_removal":
        return fields.text_part(f"The tool {tool_name} is no longer available.")
    definition = fields.as_object(tool.get("definition"))
    if definition is None:
        return _definition(tool_name, tools)
    inline = tool_of(definition, f"{name}.definition")
    return _definition(inline["function"]["name"], {inline["function"]["name"]: inline})
