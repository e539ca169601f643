// The AI SDK's `Output.object`, over each API; the second argument says whether it streams.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText } from "ai";
import { z } from "zod";

const [way, mode] = process.argv.slice(2);
const baseURL = process.env.OPENAI_BASE_URL, apiKey = process.env.OPENAI_API_KEY;
const models = {
  chat: () => createOpenAI({ baseURL, apiKey }).chat("scripted"),
  responses: () => createOpenAI({ baseURL, apiKey }).responses("scripted"),
  compatible: () => createOpenAICompatible({ name: "penstock", baseURL, apiKey, supportsStructuredOutputs: true })("scripted"),
  messages: () => createAnthropic({ baseURL, apiKey })("scripted"),
};
const schema = z.object({ name: z.string(), age: z.number().int() });
const asked = { model: models[way](), output: Output.object({ schema }), prompt: "Who wrote the first program? Name and age.", maxOutputTokens: 300 };
if (mode === "stream") {
  const result = streamText(asked);
  let last;
  for await (const part of result.partialOutputStream) last = part;
  console.log(JSON.stringify(last));
} else {
  console.log(JSON.stringify((await generateText(asked)).output));
}
