// One request for text: its events, in one shape for prompts and for chats.

import { ApiError, ask } from "./api.js";
import { events } from "./sse.js";

// Yields {pieces, usage, beams, id}; a piece is {index, text, reasoning, tokens, finish}.
export async function* generate(path, body, signal) {
  const response = await ask(path, { body, signal });
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(200, chunk.error);
    yield { id: chunk.id, usage: chunk.usage, beams: chunk.beams, pieces: chunk.choices.map(readPiece) };
  }
  throw new ApiError(200, { message: "The stream ended before the answer was complete." });
}

function readPiece(choice) {
  const { index, logprobs, finish_reason: finish } = choice;
  const text = choice.text ?? choice.delta.content ?? "";
  const reasoning = choice.delta?.reasoning_content ?? "";
  const calls = choice.delta?.tool_calls ?? [];
  return { index, text, reasoning, finish, calls, reason: choice.stop_reason, tokens: logprobs ? readTokens(logprobs) : [] };
}

// A token is {text, logprob, top}; `top` has the most probable ones, best first.
function readTokens(logprobs) {
  if (logprobs.content) {
    return logprobs.content.map((entry) => ({ text: entry.token, logprob: entry.logprob, top: ranked(
      entry.top_logprobs.map((other) => [other.token, other.logprob]),
    ) }));
  }
  return logprobs.tokens.map((text, place) => ({
    text, logprob: logprobs.token_logprobs[place], top: ranked(Object.entries(logprobs.top_logprobs[place] ?? {})),
  }));
}

const ranked = (pairs) => pairs.map(([text, logprob]) => ({ text, logprob })).sort((a, b) => b.logprob - a.logprob);
