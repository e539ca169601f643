// An agent that multiplies with a tool, in Node.js: the model calls `multiply`, is told the product, and answers with the number.
// It knows nothing of penstock. Its task comes on stdin, its model by OPENAI_BASE_URL and OPENAI_API_KEY.

import { readFileSync } from "node:fs";
import OpenAI from "openai";

const MULTIPLY = {
  type: "function",
  function: {
    name: "multiply",
    description: "Multiply two integers.",
    parameters: {
      type: "object",
      properties: { a: { type: "integer" }, b: { type: "integer" } },
      required: ["a", "b"],
    },
  },
};

// A whole exchange as the agent should have it: question, call, result, answer.
function worked(a, b) {
  const id = `call_${a}_${b}`;
  const call = { id, type: "function", function: { name: "multiply", arguments: JSON.stringify({ a, b }) } };
  return [
    { role: "user", content: `What is ${a} times ${b}?` },
    { role: "assistant", content: null, tool_calls: [call] },
    { role: "tool", tool_call_id: id, content: String(a * b) },
    { role: "assistant", content: String(a * b) },
  ];
}

// What the tool gives; undefined for another tool or arguments that it does not take.
function product({ type, function: made }) {
  if (type !== "function" || made.name !== "multiply") return undefined;
  try {
    const { a, b } = JSON.parse(made.arguments);
    return Number.isInteger(a) && Number.isInteger(b) ? a * b : undefined;
  } catch {
    return undefined;
  }
}

const { prompt, config } = JSON.parse(readFileSync(0, "utf8"));
const client = new OpenAI();
const messages = [...worked(7, 8), ...worked(23, 41), ...prompt];

for (let turn = 0; turn < (config.max_turns ?? 2); turn += 1) {
  const body = { model: "policy", messages, tools: [MULTIPLY], max_tokens: config.max_tokens ?? 40 };
  const reply = (await client.chat.completions.create(body)).choices[0].message;
  const results = (reply.tool_calls ?? []).map((call) => [call.id, product(call)]);
  // No call, or one that cannot be carried out, is the policy's last word: the grader judges it.
  if (results.length === 0 || results.some(([, result]) => result === undefined)) break;
  messages.push(reply, ...results.map(([id, result]) => ({ role: "tool", tool_call_id: id, content: String(result) })));
}
