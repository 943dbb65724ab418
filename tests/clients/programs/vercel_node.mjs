// The Vercel AI SDK over chat and over responses.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

import { TASK, TOOLS } from "./tools.mjs";

const tools = Object.fromEntries(
  TOOLS.map(({ name, description, parameters, run }) => [
    name,
    tool({ description, inputSchema: jsonSchema(parameters), execute: async (input) => run(input) }),
  ]),
);
const compatible = ({ base_url, api_key }) =>
  createOpenAICompatible({ name: "rollwright", baseURL: base_url, apiKey: api_key })("default");
const openai = ({ base_url, api_key }) => createOpenAI({ baseURL: base_url, apiKey: api_key }).responses("default");
const loop = (model) => ({ model, tools, prompt: TASK, stopWhen: stepCountIs(5), maxRetries: 0 });

export const generate_chat = async (given) => (await generateText(loop(compatible(given)))).text;

export async function stream_chat(given) {
  let kinds = new Set();
  const result = streamText(loop(compatible(given)));
  for await (const part of result.fullStream) kinds.add(part.type);
  return [[...kinds].sort(), await result.text];
}

export const generate_responses = async (given) => (await generateText(loop(openai(given)))).text;

export async function stream_responses(given) {
  let kinds = new Set();
  const result = streamText(loop(openai(given)));
  for await (const part of result.fullStream) kinds.add(part.type);
  return [[...kinds].sort(), await result.text];
}
