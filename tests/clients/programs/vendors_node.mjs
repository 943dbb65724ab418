// The packages `openai` and `@anthropic-ai/sdk`, with their own loops for tools.

import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

import { TASK, TOOLS } from "./tools.mjs";

const ASK = [{ role: "user", content: TASK }];
const openai = ({ base_url, api_key }) => new OpenAI({ baseURL: base_url, apiKey: api_key, maxRetries: 0 });
const anthropic = ({ base_url, api_key }) =>
  new Anthropic({ baseURL: base_url.replace(/\/v1$/, ""), apiKey: api_key, maxRetries: 0 });

const chatTools = TOOLS.map(({ name, description, parameters, run }) => ({
  type: "function",
  function: { name, description, parameters, parse: JSON.parse, function: run },
}));
const messageTools = TOOLS.map(({ name, description, parameters, run }) => ({
  type: "custom",
  name,
  description,
  input_schema: parameters,
  parse: (input) => input,
  run,
}));

export async function run_tools(given) {
  const runner = openai(given).chat.completions.runTools({ model: "default", messages: ASK, tools: chatTools });
  return await runner.finalContent();
}

export async function run_tools_stream(given) {
  const runner = openai(given).chat.completions.runTools({
    model: "default",
    messages: ASK,
    tools: chatTools,
    stream: true,
  });
  return await runner.finalContent();
}

export async function responses(given) {
  const client = openai(given);
  const tools = TOOLS.map(({ name, description, parameters }) => ({
    type: "function",
    name,
    description,
    parameters,
    strict: true,
  }));
  const input = [...ASK];
  for (;;) {
    const stream = client.responses.stream({ model: "default", input, tools });
    const response = await stream.finalResponse();
    input.push(...response.output);
    const calls = response.output.filter((item) => item.type === "function_call");
    if (!calls.length) return response.output_text;
    for (const call of calls) {
      const output = TOOLS.find((tool) => tool.name === call.name).run(JSON.parse(call.arguments));
      input.push({ type: "function_call_output", call_id: call.call_id, output });
    }
  }
}

export async function tool_runner(given) {
  const runner = anthropic(given).beta.messages.toolRunner({
    model: "default",
    max_tokens: 1000,
    messages: ASK,
    tools: messageTools,
  });
  const message = await runner.runUntilDone();
  return message.content.filter((block) => block.type === "text").map((block) => block.text).join("");
}

export async function tool_runner_stream(given) {
  const runner = anthropic(given).beta.messages.toolRunner({
    model: "default",
    max_tokens: 1000,
    messages: ASK,
    tools: messageTools,
    stream: true,
  });
  let last;
  for await (const stream of runner) last = await stream.finalMessage();
  return last.content.filter((block) => block.type === "text").map((block) => block.text).join("");
}
