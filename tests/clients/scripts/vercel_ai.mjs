// npm: ai @ai-sdk/openai-compatible @ai-sdk/openai @ai-sdk/anthropic ollama-ai-provider-v2 zod
// The AI SDK of Vercel, by its providers for OpenAI, its look-alikes, Anthropic, Ollama.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateText, Output, streamText, tool } from "ai";
import { createOllama } from "ollama-ai-provider-v2";
import { z } from "zod";
import { QUESTION, TOKENS, checkCity, checkColor, model, run, url } from "./cases.mjs";

const apiKey = "none";
const compatible = createOpenAICompatible({
  name: "inl",
  baseURL: `${url}/v1`,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey });
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey });
const ollama = createOllama({ baseURL: `${url}/api` });
const MODELS = [
  compatible(model),
  openai.chat(model),
  openai(model), // by /v1/responses
  anthropic(model),
  ollama(model),
];
const FORCING = MODELS.slice(0, 4);
const options = { prompt: QUESTION, temperature: 0, maxOutputTokens: TOKENS, maxRetries: 0 };
const Color = z.object({ name: z.enum(["red", "green", "blue"]), is_warm: z.boolean() });

async function plain() {
  for (const each of MODELS) {
    const { text, usage } = await generateText({ model: each, ...options });
    assert.match(text, /Paris/, each.provider);
    assert(usage.outputTokens > 0, each.provider);
  }
}

async function stream() {
  for (const each of MODELS) {
    const whole = await generateText({ model: each, ...options });
    const parts = streamText({ model: each, ...options });
    let text = "";
    for await (const part of parts.textStream) text += part;
    assert.equal(text, whole.text, each.provider);
    assert((await parts.usage).outputTokens > 0, each.provider);
  }
}

async function tools() {
  const weather = tool({
    description: "Weather of a city.",
    inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }),
    execute: ({ city }) => `${city}: sunny`,
  });
  for (const each of FORCING) {
    const asked = { model: each, ...options, maxOutputTokens: 60, tools: { weather } };
    const { toolCalls, toolResults } = await generateText({
      ...asked,
      toolChoice: "required",
    });
    checkCity(toolCalls[0].input);
    assert.match(toolResults[0].output, /sunny/, each.provider);
    const parts = streamText({
      ...asked,
      toolChoice: { type: "tool", toolName: "weather" },
    });
    checkCity((await parts.toolCalls)[0].input);
  }
}

async function structured() {
  for (const each of MODELS) {
    const output = Output.object({ schema: Color });
    const asked = { model: each, ...options, maxOutputTokens: 60, output };
    checkColor((await generateText(asked)).output);
  }
}

async function embeddings() {
  const { embedding } = await embed({
    model: compatible.textEmbeddingModel(model),
    value: "a",
  });
  assert(embedding.length > 100);
}

await run(plain, stream, tools, structured, embeddings);
