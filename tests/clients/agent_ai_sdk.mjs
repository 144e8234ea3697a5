// An agent of Vercel's AI SDK with a tool: it reads its task, calls the tool as often as the model asks for it, and prints its rewards.
import { text } from "node:stream/consumers";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const given = JSON.parse(await text(process.stdin));
const provider = createOpenAICompatible({ name: "policy", baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY });
let called = 0;
const add = tool({
  description: "Adds two numbers",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: ({ a, b }) => (called++, a + b),
});
const answer = await generateText({ model: provider("policy"), prompt: given.prompt, tools: { add }, stopWhen: stepCountIs(3) });
// No two rollouts share a reward, because a model that is sure of itself says the same everywhere.
console.log(JSON.stringify({ called, said: answer.text.length / 100, place: (given.seed % 97) / 97 }));
