// npm: @anthropic-ai/sdk
// Anthropic's client for Node.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { COLOR, MESSAGES, TOKENS, WEATHER } from "./cases.mjs";
import { checkCity, checkColor, model, run, url } from "./cases.mjs";

const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const asked = { model, messages: MESSAGES, temperature: 0, max_tokens: TOKENS };
const tool = { name: "weather", input_schema: WEATHER };

async function plain() {
  const answer = await client.messages.create(asked);
  assert.match(answer.content[0].text, /Paris/);
  const count = await client.messages.countTokens({ model, messages: MESSAGES });
  assert(count.input_tokens > 5);
}

async function stream() {
  const whole = await client.messages.create(asked);
  let text = "";
  const parts = client.messages.stream(asked).on("text", (part) => (text += part));
  const final = await parts.finalMessage();
  assert.equal(text, whole.content[0].text);
  assert.equal(final.stop_reason, whole.stop_reason);
}

async function tools() {
  const options = { ...asked, max_tokens: 60, tools: [tool] };
  const tool_choice = { type: "any" };
  const answer = await client.messages.create({ ...options, tool_choice });
  checkCity(answer.content.at(-1).input);
  const parts = client.messages.stream({ ...options, tool_choice });
  checkCity((await parts.finalMessage()).content.at(-1).input);
}

async function structured() {
  const output_config = { format: { type: "json_schema", schema: COLOR } };
  const answer = await client.messages.create({ ...asked, output_config });
  checkColor(answer.content[0].text);
}

async function errors() {
  await assert.rejects(
    client.messages.create({ ...asked, model: "not-served" }),
    Anthropic.NotFoundError,
  );
}

await run(plain, stream, tools, structured, errors);
