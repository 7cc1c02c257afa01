// npm: openai
// OpenAI's client for Node.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { COLOR, MESSAGES, QUESTION, TOKENS, WEATHER } from "./cases.mjs";
import { checkCity, checkColor, model, run, url } from "./cases.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const asked = { model, messages: MESSAGES, temperature: 0, max_tokens: TOKENS };
const tool = { type: "function", function: { name: "weather", parameters: WEATHER } };

async function plain() {
  const answer = await client.chat.completions.create(asked);
  assert.match(answer.choices[0].message.content, /Paris/);
  const names = [];
  for await (const each of client.models.list()) names.push(each.id);
  assert(names.includes(model));
}

async function stream() {
  const whole = await client.chat.completions.create(asked);
  const parts = client.chat.completions.stream(asked);
  let text = "";
  for await (const part of parts) text += part.choices[0]?.delta?.content ?? "";
  const final = await parts.finalChatCompletion();
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(final.choices[0].message.content, text);
}

async function tools() {
  const options = { ...asked, max_tokens: 60, tools: [tool] };
  const answer = await client.chat.completions.create({
    ...options,
    tool_choice: { type: "function", function: { name: "weather" } },
  });
  const [call] = answer.choices[0].message.tool_calls;
  checkCity(call.function.arguments);
  const runner = client.chat.completions.runTools({
    ...asked,
    max_tokens: 60,
    tool_choice: "required",
    tools: [
      {
        type: "function",
        function: {
          name: "weather",
          description: "Weather of a city.",
          parameters: WEATHER,
          parse: JSON.parse,
          function: ({ city }) => `${city}: sunny`,
        },
      },
    ],
  }, { maxChatCompletions: 2 });
  await runner.done();
  assert(runner.messages.some((each) => each.role === "tool"));
}

async function structured() {
  const json_schema = { name: "color", strict: true, schema: COLOR };
  const response_format = { type: "json_schema", json_schema };
  const answer = await client.chat.completions.create({ ...asked, response_format });
  checkColor(answer.choices[0].message.content);
}

async function responses() {
  const options = { model, input: QUESTION, temperature: 0, max_output_tokens: TOKENS };
  const answer = await client.responses.create(options);
  assert.match(answer.output_text, /Paris/);
  let text = "";
  for await (const event of await client.responses.create({ ...options, stream: true }))
    if (event.type === "response.output_text.delta") text += event.delta;
  assert.equal(text, answer.output_text);
}

async function embeddings() {
  // This client asks for base64 by itself.
  const { data } = await client.embeddings.create({ model, input: ["a", "b"] });
  assert.equal(data[0].embedding.length, data[1].embedding.length);
  assert(data[0].embedding.length > 100);
}

async function errors() {
  await assert.rejects(
    client.chat.completions.create({ ...asked, model: "not-served" }),
    OpenAI.NotFoundError,
  );
}

await run(plain, stream, tools, structured, responses, embeddings, errors);
