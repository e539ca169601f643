"""Small chat templates, each with one habit of a real model family, and tokenizers to go with them."""

from pathlib import Path

from penstock.chat.renderer import Renderer
from penstock.testing import CHATML, write_tokenizer

CORPUS = ['What is 6 times 7? It is 42. The user asks, the assistant answers: {"name": "multiply", "arguments": {"a": 6}}\n' * 40]

NATIVE_TOOLS = """
{%- if tools %}{{ '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}
    {{- '<tools>' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}
    {{- '\n</tools> Answer with <tool_call>.<|im_end|>\n' }}
{%- elif messages[0]['role'] == 'system' %}{{ '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
    {%- if message['role'] == 'user' or (message['role'] == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<|im_start|>assistant\n' + message['content'] }}
        {%- for call in message['tool_calls'] or [] %}
            {%- if message['content'] or not loop.first %}{{ '\n' }}{% endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message['role'] == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + message['content'] + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

ALTERNATING = """
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('system is not a role here') }}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

DROPS_REASONING = """
{%- for message in messages %}
    {%- set text = message['content'] %}
    {%- if message['role'] == 'assistant' and not loop.last %}{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\n' + text + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

EMPTY_REASONING = """
{%- for message in messages %}
    {%- set head = '<think>\n\n</think>\n\n' if message['role'] == 'assistant' and loop.last else '' %}
    {{- '<|im_start|>' + message['role'] + '\n' + head + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

MOVES_TOOLS = """
{%- for message in messages %}
    {%- if loop.last and tools %}{{ '<tools>' + tools | tojson + '</tools><tool_call>' }}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

PLAIN_TEXT = """
{%- for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}
"""

TOOLS = (
    {
        "type": "function",
        "function": {"name": "multiply", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
    },
)


def make_renderer(folder: Path, template: str = CHATML, *, merges: bool = True) -> Renderer:
    """A renderer over a fresh tokenizer: with merges, most texts have many tokenizations."""
    return Renderer.load(write_tokenizer(folder, corpus=CORPUS if merges else (), vocab_size=400, template=template))
