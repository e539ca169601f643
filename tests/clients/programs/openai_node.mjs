// The npm package `openai`: Chat Completions or Responses.

import OpenAI from "openai";
import { DIALECT, INSTRUCTIONS, MODEL, PARAMETERS, QUESTIONS, STREAMS, answer, tell } from "./conversation.mjs";

const client = new OpenAI();
const pieces = [];
const definition = { name: "add", description: "Add two numbers.", parameters: PARAMETERS };

async function whole(stream, final) {
  let count = 0;
  for await (const _ of stream) count += 1;
  pieces.push(count);
  return await final(stream);
}

async function chat() {
  const messages = [{ role: "system", content: INSTRUCTIONS }];
  const ask = async () => {
    const body = { model: MODEL, messages, tools: [{ type: "function", function: definition }] };
    if (!STREAMS) return (await client.chat.completions.create(body)).choices[0].message;
    return await whole(client.chat.completions.stream(body), (stream) => stream.finalMessage());
  };
  for (const question of QUESTIONS) {
    messages.push({ role: "user", content: question });
    for (;;) {
      const message = await ask();
      messages.push(message);
      if (!message.tool_calls?.length) break;
      for (const call of message.tool_calls)
        messages.push({ role: "tool", tool_call_id: call.id, content: answer(call.function.arguments) });
    }
  }
  return messages.map(({ role, content, tool_calls }) => {
    const calls = (tool_calls ?? []).map((call) => [call.function.name, JSON.parse(call.function.arguments)]);
    return [role, content ?? "", calls];
  });
}

async function responses() {
  const items = [];
  const ask = async () => {
    const tools = [{ type: "function", strict: false, ...definition }];
    const body = { model: MODEL, instructions: INSTRUCTIONS, input: items, tools };
    if (!STREAMS) return await client.responses.create(body);
    return await whole(client.responses.stream(body), (stream) => stream.finalResponse());
  };
  for (const question of QUESTIONS) {
    items.push({ role: "user", content: question });
    for (;;) {
      const { output } = await ask();
      items.push(...output);
      const calls = output.filter((item) => item.type === "function_call");
      if (!calls.length) break;
      for (const call of calls)
        items.push({ type: "function_call_output", call_id: call.call_id, output: answer(call.arguments) });
    }
  }
  return viewOf(items);
}

function viewOf(items) {
  const view = [["system", INSTRUCTIONS, []]];
  for (const item of items) {
    if (item.type === "function_call") {
      if (view.at(-1)[0] !== "assistant") view.push(["assistant", "", []]);
      view.at(-1)[2].push([item.name, JSON.parse(item.arguments)]);
    } else if (item.type === "function_call_output") view.push(["tool", item.output, []]);
    else {
      const text = typeof item.content === "string" ? item.content : item.content.map((part) => part.text).join("");
      view.push([item.role, text, []]);
    }
  }
  return view;
}

tell(await (DIALECT === "chat" ? chat() : responses()), pieces);
