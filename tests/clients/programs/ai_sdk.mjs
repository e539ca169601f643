// The AI SDK with a tool that it runs itself, over each API.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [mode, way] = process.argv.slice(2);
const baseURL = process.env.OPENAI_BASE_URL, apiKey = process.env.OPENAI_API_KEY;
const models = {
  chat: () => createOpenAI({ baseURL, apiKey }).chat("scripted"),
  responses: () => createOpenAI({ baseURL, apiKey }).responses("scripted"),
  compatible: () => createOpenAICompatible({ name: "penstock", baseURL, apiKey })("scripted"),
  messages: () => createAnthropic({ baseURL, apiKey })("scripted"),
};
const add = tool({
  description: "Add two numbers.",
  inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
  execute: async ({ a, b }) => String(a + b),
});
const asked = {
  model: models[way](),
  system: "You add numbers with the add tool.",
  prompt: "What is 2 plus 3?",
  tools: { add },
  stopWhen: stepCountIs(4),
  maxOutputTokens: 300,
};
if (mode === "stream") {
  let text = "";
  for await (const part of streamText(asked).textStream) text += part;
  console.log(text);
} else {
  console.log((await generateText(asked)).text);
}
