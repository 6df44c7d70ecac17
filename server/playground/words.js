// Texts of the server for the eye: code in them as code, and tokens that stand for no text in words.

import { h } from "./dom.js";

const SHAPE = /^(?:<\|([^<>|]+)\|>|<(\/?s|bos|eos|pad|unk|mask|end_of_turn|start_of_turn)>|\[(CLS|SEP|PAD|UNK|MASK)\])$/;
const ENDS = new Set(["/s", "eos", "endoftext", "end_of_text", "im_end", "eot_id", "eot", "end_of_turn", "end", "SEP"]);

// "end of text" for </s> and its like, another name for other marks; null for a token that is text.
export function markOf(token) {
  const [, ...found] = SHAPE.exec(token.trim()) ?? [];
  const name = found.find(Boolean);
  if (name === undefined) return null;
  return ENDS.has(name) ? "end of text" : name === "s" || name === "bos" ? "start of text" : name.toLowerCase().replaceAll("_", " ");
}

// What stands between backticks is code.
export const prose = (text) => text.split("`").map((part, place) => (place % 2 ? h("code", {}, part) : part));

export const sentence = (text) => prose(text && text[0].toUpperCase() + text.slice(1));
