// Streaming in JavaScript with nothing but fetch: Node 18 and later, Deno, Bun, and browsers.
//
//     octavo serve
//     node examples/stream.mjs
//
// Another server's URL can be given as the argument. Leaving the loop early, as on Ctrl-C, closes the connection, and the
// server stops computing.

const url = process.argv[2] ?? "http://127.0.0.1:8000";

/** The pieces of a chat's answer, as they come. */
async function* chat(body, { key } = {}) {
  const response = await fetch(`${url}/v1/chat/completions`, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) },
    body: JSON.stringify({ ...body, stream: true }),
  });
  if (!response.ok) {
    throw new Error((await response.json()).error.message);
  }
  for await (const event of events(response.body)) {
    if (event.error) {
      throw new Error(event.error.message);
    }
    const piece = event.choices[0]?.delta.content;
    if (piece) {
      yield piece;
    }
  }
}

/** The JSON of each server-sent event; a chunk of the body may hold half of one, or several. */
async function* events(body) {
  let rest = "";
  for await (const text of body.pipeThrough(new TextDecoderStream())) {
    const blocks = (rest + text).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.startsWith("data: ") ? block.slice(6) : ""; // a comment keeps the connection alive
      if (data === "[DONE]") {
        return;
      }
      if (data) {
        yield JSON.parse(data);
      }
    }
  }
}

const started = performance.now();
let first;
let pieces = 0;
const messages = [{ role: "user", content: "What is a paged cache?" }];
for await (const piece of chat({ messages, max_completion_tokens: 48, temperature: 0 })) {
  first ??= performance.now() - started;
  pieces += 1;
  process.stdout.write(piece);
}
console.log(`\n(${pieces} pieces, the first after ${first.toFixed(0)} ms)`);

try {
  for await (const piece of chat({ messages, temperature: -1 })) {
    process.stdout.write(piece);
  }
} catch (problem) {
  console.log(`A mistake is told: ${problem.message}`);
}
