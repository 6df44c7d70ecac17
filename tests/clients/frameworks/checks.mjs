// What programs do with openai-node and the AI SDK: URL of the service as the argument. Prints what was checked as JSON.
import assert from "node:assert/strict";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const baseURL = `${process.argv[2]}/v1`;
const name = "octavo-demo";
const question = "What is 12 * 34?";
const answer = "12 * 34 = 408.";

function calculate({ expression }) {
  const [first, sign, second] = expression.split(" ");
  assert.equal(sign, "*");
  return String(first * second);
}

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const parameters = { type: "object", properties: { expression: { type: "string" } } };
const definition = { name: "calculate", function: calculate, parse: JSON.parse, description: "Calculates.", parameters };
for (const stream of [false, true]) {
  const messages = [{ role: "user", content: question }];
  const tools = [{ type: "function", function: definition }];
  const runner = client.chat.completions.runTools({ model: name, stream, temperature: 0, messages, tools });
  assert.equal(await runner.finalContent(), answer);
}

const model = createOpenAICompatible({ name: "octavo", baseURL, supportsStructuredOutputs: true })(name);
const schema = z.object({
  title: z.string().min(1).max(12),
  kind: z.enum(["novel", "poem"]),
  pages: z.number().int().min(1).max(999),
});
const { object } = await generateObject({ model, schema, prompt: "Name a book.", maxRetries: 0, maxOutputTokens: 150 });
schema.parse(object);

const inputSchema = z.object({ expression: z.string() });
const asked = {
  model,
  temperature: 0,
  tools: { calculate: tool({ description: "Calculates.", inputSchema, execute: calculate }) },
  prompt: question,
  stopWhen: stepCountIs(3),
  maxRetries: 0,
};
const whole = await generateText(asked);
assert.equal(whole.text, answer);
assert.equal(whole.steps.length, 2);
let streamed = "";
for await (const part of streamText(asked).textStream) streamed += part;
assert.equal(streamed, answer);

console.log(JSON.stringify(["runTools", "generateObject", "tools"]));
