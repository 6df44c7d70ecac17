// Conversations as files: JSON, and Markdown that reads well and comes back whole.

import { readConversation } from "./conversation.js";

const FORMAT = "octavo-conversations";
const HEADINGS = { system: "System", user: "User", assistant: "Assistant", tool: "Tool result" };
const ROLES = Object.fromEntries(Object.entries(HEADINGS).map(([role, heading]) => [heading, role]));
const HEADING = new RegExp(`^(\\\\*)## (${Object.values(HEADINGS).join("|")})$`, "gm");

export function toJson(conversations) {
  const plain = conversations.map(({ title, system, parameters, messages }) => ({ title, system, parameters, messages }));
  return JSON.stringify({ format: FORMAT, version: 1, conversations: plain }, null, 2);
}

// What Markdown has no place for stands in a comment.
const comment = (rest) => (Object.keys(rest).length ? `<!-- octavo ${JSON.stringify(rest).replaceAll(">", "\\u003e")} -->\n` : "");

export function toMarkdown({ title, system, parameters, messages }) {
  const all = system ? [{ role: "system", content: system }, ...messages] : messages;
  const parts = all.map(({ role, content, ...rest }) => `## ${HEADINGS[role]}\n${comment(rest)}\n${content.replace(HEADING, "\\$&")}\n`);
  return [`# ${title}\n${comment({ parameters })}`, ...parts].join("\n");
}

function fromMarkdown(text) {
  const heads = [...text.matchAll(HEADING)].filter(([, escaped]) => !escaped);
  if (!heads.length) throw new Error(`there is no heading such as "## ${HEADINGS.user}"`);
  const title = /^# (.*)\n/.exec(text);
  const [first] = takeComment(text.slice(title?.[0].length ?? 0, heads[0].index));
  const messages = heads.map((head, place) => {
    const next = heads[place + 1]?.index;
    const [extra, body] = takeComment(text.slice(head.index + head[0].length + 1, next));
    const content = body.replace(/^\n/, "").replace(next ? /\n{0,2}$/ : /\n?$/, "");
    return { ...extra, role: ROLES[head[2]], content: content.replace(HEADING, (line) => line.slice(1)) };
  });
  return { ...first, title: title?.[1], messages };
}

function takeComment(text) {
  const found = /^<!-- octavo (.*) -->\n/.exec(text);
  return found ? [JSON.parse(found[1]), text.slice(found[0].length)] : [{}, text];
}

// The conversations of a file of either kind, or of one request to the chat API. Throws Error with the reason.
export function readFile(name, text) {
  try {
    if (!/^\s*[[{]/.test(text)) return [readConversation(fromMarkdown(text.replaceAll("\r\n", "\n")))];
    const value = JSON.parse(text);
    return [value.conversations ?? value].flat().map(readConversation);
  } catch (error) {
    throw new Error(`${name} cannot be imported: ${error.message}.`);
  }
}

export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  Object.assign(link, { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

export const fileName = (title, ending) => `${title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60) || "conversation"}.${ending}`;
