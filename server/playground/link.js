// A request in the page's address, behind the #, which no browser sends to a server. A key is never in it, and opening
// one sends nothing: it fills the forms in.

import { withoutFiles } from "./uploads.js";

const MARK = "#request=";
const CHAT = "#chat=";

export const conversationLink = (id) => CHAT + id;

export const linkedConversation = () => (location.hash.startsWith(CHAT) ? location.hash.slice(CHAT.length) : null);

export function linkTo(path, body) {
  const { model, stream, ...rest } = JSON.parse(withoutFiles(body, () => undefined));
  const here = new URL(location.href);
  here.hash = MARK.slice(1) + encodeURIComponent(JSON.stringify({ path, body: rest }));
  return here.href;
}

// {path, body}; null where the address carries none that can be read.
export function linkedRequest() {
  if (!location.hash.startsWith(MARK)) return null;
  try {
    const { path, body } = JSON.parse(decodeURIComponent(location.hash.slice(MARK.length)));
    return typeof path === "string" && body && typeof body === "object" && !Array.isArray(body) ? { path, body } : null;
  } catch {
    return null;
  }
}
