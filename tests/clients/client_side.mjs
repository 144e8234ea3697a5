// What the programs of Node's clients share. The server's address is their argument.
import assert from "node:assert/strict";

export { assert };
export const URL = process.argv[2];
export const SETTINGS = "What are your settings?";
export const WEATHER = "How is the weather in Paris?";
export const STORY = "Tell me a story.";
export const PERSON = "Who is Ann?";
export const LONG = "x".repeat(200_000);
const NOT_SERVED = "is not served";
const PATIENCE = 300_000;

export const called = [];

export function getWeather({ place }) {
  assert.equal(place, "Paris");
  called.push(place);
  return "rain, 12 degrees";
}

export const asking = (text) => [{ role: "user", content: text }];

// A number of the server's metrics.
export async function counted(name) {
  const lines = (await (await fetch(`${URL}/metrics`)).text()).split("\n");
  return Number(lines.find((line) => line.startsWith(`headrace_${name} `)).split(" ")[1]);
}

export async function until(holds) {
  const deadline = Date.now() + PATIENCE;
  while (!(await holds())) {
    assert.ok(Date.now() < deadline, "it did not happen");
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

// Waits until the server has no request. A story has no end, so its client has left it.
export const isFreed = () => until(async () => (await counted("requests_running")) + (await counted("requests_waiting")) === 0);

// All that an error says: frameworks put the body of an answer into other fields.
const said = (error) => [error.message, error.responseBody, error.cause?.message, error.lastError?.responseBody].join(" ");

// Checks that the client shows the sentence of the refusal.
export async function refused(words, ask, kind = Error) {
  const error = await ask().then((answer) => assert.fail(`${JSON.stringify(answer)} in place of a refusal: ${words}`), (error) => error);
  assert.ok(error instanceof kind, `${error}`);
  assert.ok(said(error).includes(words), said(error));
}

// Checks an answer that needs constrained decoding: the right one, or a refusal that the client shows.
export async function ifServed(ask, expected) {
  let answer;
  try {
    answer = await ask();
  } catch (error) {
    assert.ok(said(error).includes(NOT_SERVED), said(error));
    return "refused";
  }
  assert.deepEqual(answer, expected);
  return "served";
}

// Prints what the test reads.
export const done = (found) => console.log(JSON.stringify(found));
