// The npm package `@anthropic-ai/sdk`: Messages.

import Anthropic from "@anthropic-ai/sdk";
import { INSTRUCTIONS, MODEL, PARAMETERS, QUESTIONS, STREAMS, answer, tell } from "./conversation.mjs";

const client = new Anthropic();
const tools = [{ name: "add", description: "Add two numbers.", input_schema: PARAMETERS }];
const messages = [];
const pieces = [];

async function ask() {
  const body = { model: MODEL, max_tokens: 512, system: INSTRUCTIONS, messages, tools };
  if (!STREAMS) return await client.messages.create(body);
  const stream = client.messages.stream(body);
  let count = 0;
  for await (const event of stream) count += event.type === "content_block_delta";
  pieces.push(count);
  return await stream.finalMessage();
}

for (const question of QUESTIONS) {
  messages.push({ role: "user", content: question });
  for (;;) {
    const { content } = await ask();
    messages.push({ role: "assistant", content });
    const calls = content.filter((block) => block.type === "tool_use");
    if (!calls.length) break;
    const results = calls.map((call) => ({ type: "tool_result", tool_use_id: call.id, content: answer(call.input) }));
    messages.push({ role: "user", content: results });
  }
}

function viewOf({ role, content }) {
  if (typeof content === "string") return [[role, content, []]];
  const results = content.filter((block) => block.type === "tool_result");
  if (results.length) return results.map((block) => ["tool", block.content, []]);
  const calls = content.filter((block) => block.type === "tool_use").map((block) => [block.name, block.input]);
  const text = content.filter((block) => block.type === "text").map((block) => block.text);
  return [[role, text.join(""), calls]];
}

tell([["system", INSTRUCTIONS, []], ...messages.flatMap(viewOf)], pieces);
