// Vercel's AI SDK with its provider for servers in OpenAI's format, as people use it.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { assert, called, counted, done, getWeather, ifServed, isFreed, LONG, PERSON, refused, SETTINGS, STORY, until, URL, WEATHER } from "./client_side.mjs";

const provider = createOpenAICompatible({ name: "headrace", baseURL: `${URL}/v1`, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true });
const model = provider("tiny");
const tools = { get_weather: tool({ description: "The weather", inputSchema: z.object({ place: z.string() }), execute: getWeather }) };

const settings = { seed: 5, temperature: 0.5, topP: 0.9, maxOutputTokens: 90, stopSequences: ["q", "zz"] };
const asked = await generateText({ model, prompt: SETTINGS, ...settings });
assert.equal(asked.text, "5 0.5 0.9 90 2");
assert.equal(asked.usage.outputTokens, 15);
assert.equal(asked.finishReason, "stop");

const stream = streamText({ model, prompt: "Hello" });
let text = "";
for await (const piece of stream.textStream) text += piece;
assert.deepEqual([text, (await stream.usage).outputTokens], ["Good day.", 10]);

const played = await generateText({ model, prompt: WEATHER, tools, stopWhen: stepCountIs(4) });
assert.equal(played.text, "It rains.");
assert.deepEqual(played.steps.map((step) => step.finishReason), ["tool-calls", "stop"]);
const streamed = streamText({ model, prompt: WEATHER, tools, stopWhen: stepCountIs(4) });
await streamed.consumeStream();
assert.equal((await streamed.steps).at(-1).text, "It rains.");
assert.equal(called.length, 2);

const schema = z.object({ name: z.string(), age: z.number().int() });
const ann = { name: "Ann", age: 30 };
const quiet = { onError: () => {}, maxRetries: 0 };
const found = {
  object: await ifServed(async () => (await generateText({ model, prompt: PERSON, output: Output.object({ schema }), maxRetries: 0 })).output, ann),
  forced: await ifServed(
    async () => (await generateText({ model, prompt: WEATHER, tools, toolChoice: "required", maxRetries: 0 })).toolCalls[0].toolName,
    "get_weather",
  ),
};

await refused("there is no model gpt-5", () => generateText({ model: provider("gpt-5"), prompt: "Hello" }));
await refused("shorten", () => generateText({ model, prompt: LONG }));

await refused("", () => generateText({ model, prompt: STORY, abortSignal: AbortSignal.timeout(1000) }));
await isFreed();
const leaving = new AbortController();
for await (const _ of streamText({ model, prompt: STORY, abortSignal: leaving.signal, ...quiet }).textStream) leaving.abort();
await isFreed();

const streams = [new AbortController(), new AbortController(), new AbortController(), new AbortController()];
for (const one of streams) streamText({ model, prompt: STORY, abortSignal: one.signal, ...quiet }).consumeStream();
await until(async () => (await counted("requests_running")) === 4);
const refusals = await counted("requests_refused_total");
const patient = generateText({ model, prompt: "Hello", maxRetries: 1000 });
await until(async () => (await counted("requests_refused_total")) > refusals);
for (const one of streams) one.abort();
assert.equal((await patient).text, "Good day.");
done(found);
