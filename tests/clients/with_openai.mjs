// The client `openai` for Node, as people use it.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { asking, assert, called, counted, done, getWeather, ifServed, isFreed, LONG, PERSON, refused, SETTINGS, STORY, until, URL, WEATHER } from "./client_side.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none", maxRetries: 0 });
const model = "tiny";
const parameters = { type: "object", properties: { place: { type: "string" } }, required: ["place"] };
const tool = { type: "function", function: { name: "get_weather", description: "The weather", parameters } };

const settings = { seed: 5, temperature: 0.5, top_p: 0.9, max_completion_tokens: 90, stop: ["q", "zz"] };
const asked = await client.chat.completions.create({ model, messages: asking(SETTINGS), ...settings });
assert.equal(asked.choices[0].message.content, "5 0.5 0.9 90 2");
assert.equal(asked.usage.completion_tokens, 15);

let text = "", usage;
const options = { include_usage: true };
for await (const chunk of await client.chat.completions.create({ model, messages: asking("Hello"), stream: true, stream_options: options })) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.deepEqual([text, usage.completion_tokens], ["Good day.", 10]);

const runner = client.chat.completions.runTools({
  model,
  messages: asking(WEATHER),
  tools: [{ type: "function", function: { ...tool.function, parse: JSON.parse, function: getWeather } }],
});
assert.equal(await runner.finalContent(), "It rains.");
const streamed = client.chat.completions.runTools({
  model,
  stream: true,
  messages: asking(WEATHER),
  tools: [{ type: "function", function: { ...tool.function, parse: JSON.parse, function: getWeather } }],
});
assert.equal(await streamed.finalContent(), "It rains.");
assert.equal(called.length, 2);

const response = await client.responses.create({ model, input: "Hello" });
assert.equal(response.output_text, "Good day.");
const events = [];
for await (const event of await client.responses.create({ model, input: WEATHER, previous_response_id: response.id, stream: true })) events.push(event);
assert.equal(events.at(-1).type, "response.completed");
assert.ok(events.at(-1).response.usage.input_tokens > response.usage.total_tokens);

const person = z.object({ name: z.string(), age: z.number().int() });
const ann = { name: "Ann", age: 30 };
const found = {
  chat: await ifServed(async () => {
    const answer = await client.chat.completions.parse({ model, messages: asking(PERSON), response_format: zodResponseFormat(person, "person") });
    return answer.choices[0].message.parsed;
  }, ann),
  forced: await ifServed(async () => {
    const answer = await client.chat.completions.create({ model, messages: asking(WEATHER), tools: [tool], tool_choice: "required" });
    return answer.choices[0].message.tool_calls[0].function.name;
  }, "get_weather"),
};

await refused("there is no model gpt-5", () => client.chat.completions.create({ model: "gpt-5", messages: asking("Hello") }), OpenAI.NotFoundError);
await refused("shorten", () => client.chat.completions.create({ model, messages: asking(LONG) }), OpenAI.BadRequestError);

await refused("timed out", () => client.chat.completions.create({ model, messages: asking(STORY) }, { timeout: 1000 }), OpenAI.APIConnectionTimeoutError);
await isFreed();
for await (const _ of await client.chat.completions.create({ model, messages: asking(STORY), stream: true })) break;
await isFreed();
const leaving = new AbortController();
const left = client.chat.completions.create({ model, messages: asking(STORY) }, { signal: leaving.signal }).catch((error) => error);
await until(async () => (await counted("requests_running")) > 0);
leaving.abort();
assert.ok((await left) instanceof OpenAI.APIUserAbortError);
await isFreed();

const streams = [];
for (let i = 0; i < 4; i++) streams.push(await client.chat.completions.create({ model, messages: asking(STORY), stream: true }));
const refusals = await counted("requests_refused_total");
const patient = client.chat.completions.create({ model, messages: asking("Hello") }, { maxRetries: 1000 });
await until(async () => (await counted("requests_refused_total")) > refusals);
for (const stream of streams) stream.controller.abort();
assert.equal((await patient).choices[0].message.content, "Good day.");
done(found);
