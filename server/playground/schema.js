// What a request may hold, read from the server's own description, so that the page cannot say anything else.

import { askJson } from "./api.js";

// Filled in by the page itself, or no way of decoding.
const OWN = new Set([
  "model", "prompt", "messages", "stream", "stream_options", "suffix", "stream_beams", "logprobs", "top_logprobs",
  "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "max_completion_tokens",
]);

export async function loadSchemas() {
  const document = await askJson("openapi.json");
  const schemas = document.components.schemas;
  return {
    completion: readFields(schemas.CompletionRequest),
    chat: readFields(schemas.ChatCompletionRequest),
  };
}

function readFields(schema) {
  return Object.entries(schema.properties)
    .filter(([name]) => !OWN.has(name))
    .map(([name, property]) => ({ name, meaning: property.description ?? "", ...readKind(property) }))
    .filter((field) => field.kind);
}

function readKind(property) {
  const options = (property.anyOf ?? [property]).filter((option) => option.type !== "null");
  const types = options.map((option) => option.type);
  const [first] = options;
  if (types.includes("object") || options.some((option) => option.$ref)) return { kind: "json", words: wordsOf(options) };
  if (options.length > 1 && types.includes("boolean")) return { kind: "choice", choices: choicesOf(options) };
  if (options.length > 1 && types.includes("array") && types.includes("string")) {
    const list = options.find((option) => option.type === "array");
    return { kind: list.items.type === "string" ? "texts" : "text" };
  }
  if (options.length > 1) return { kind: types.includes("string") ? "text" : null };
  if (first.type === "boolean") return { kind: "choice", choices: [true, false] };
  if (first.type === "integer" || first.type === "number") return { kind: first.type, ...readRange(first) };
  if (first.type === "array") return { kind: first.items.type === "integer" ? "ids" : "json", words: [] };
  return { kind: first.type === "string" ? "text" : null };
}

// What may stand there beside JSON, such as "auto".
const wordsOf = (options) => options.flatMap((option) => option.enum ?? []);

const choicesOf = (options) =>
  options.flatMap((option) => (option.type === "boolean" ? [true, false] : [option.const ?? option.enum].flat()));

function readRange(option) {
  return { low: option.minimum ?? option.exclusiveMinimum, openLow: "exclusiveMinimum" in option, high: option.maximum };
}

// "0 to 1", "above 0", "1 and more"; nothing where everything is allowed.
export function rangeInWords({ low, openLow, high }) {
  const [hasLow, hasHigh] = [Math.abs(low) < 2 ** 31 - 1, Math.abs(high) < 2 ** 31 - 1];
  if (hasLow && hasHigh) return openLow ? `above ${low}, up to ${high}` : `${low} to ${high}`;
  if (hasLow) return openLow ? `above ${low}` : `${low} and more`;
  return hasHigh ? `up to ${high}` : "";
}
