// A conversation: {id, title, updated, system, parameters, messages}. Messages are those of the chat API.

const ROLES = new Set(["user", "assistant", "tool"]);
const TITLE = 60; // characters

// Also where crypto.randomUUID is missing: on plain HTTP from another machine.
const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export const fresh = (values = {}) => ({ title: "", system: "", parameters: {}, messages: [], ...values, id: newId(), updated: Date.now() });

export const copyOf = (value) => JSON.parse(JSON.stringify(value));

export function titleFrom(text) {
  const line = text.trim().split("\n")[0];
  return line.length > TITLE ? `${line.slice(0, TITLE - 1).trimEnd()}…` : line;
}

// A new conversation that begins like another one, up to and with the message at `last`.
export function branch(conversation, last) {
  const { title, system, parameters, messages } = copyOf(conversation);
  return fresh({ title: `${title} (branch)`, system, parameters, messages: messages.slice(0, last + 1) });
}

// Where the results at the end begin, which are those of the last answer's calls.
export const resultsAt = (messages) => messages.findLastIndex(({ role }) => role !== "tool") + 1;

// Whether the last answer calls functions whose results are not all there.
export function callsWait(messages) {
  const at = resultsAt(messages);
  return messages.length - at < (messages[at - 1]?.tool_calls?.length ?? 0);
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

// A conversation from a file. Throws Error where that is none; what the page does not know is left out.
export function readConversation(value) {
  if (!isObject(value) || !Array.isArray(value.messages)) throw new Error("a conversation must have a list of messages");
  const messages = value.messages.map(readMessage);
  const system = [value.system, ...messages.filter(({ role }) => role === "system").map(({ content }) => content)];
  const first = messages.find(({ role }) => role === "user");
  return fresh({
    title: String(value.title || titleFrom(first?.content ?? "Imported")),
    system: system.filter((text) => typeof text === "string" && text).join("\n\n"),
    parameters: isObject(value.parameters) ? copyOf(value.parameters) : {},
    messages: messages.filter(({ role }) => role !== "system"),
  });
}

function readMessage(value, place) {
  const role = value?.role === "developer" ? "system" : value?.role;
  const where = `message ${place + 1}`;
  if (role !== "system" && !ROLES.has(role)) throw new Error(`${where} has the role ${JSON.stringify(role)}`);
  const content = value.content ?? "";
  if (typeof content !== "string") throw new Error(`the content of ${where} is not text`);
  const message = { role, content };
  const images = Array.isArray(value.images) ? value.images.filter(({ url } = {}) => /^data:image\//.test(url)) : [];
  if (role === "user" && images.length) message.images = images.map(({ name, url }) => ({ name: String(name), url }));
  if (role === "tool") message.tool_call_id = String(value.tool_call_id);
  const reasoning = value.reasoning_content ?? value.reasoning;
  if (role === "assistant" && typeof reasoning === "string") message.reasoning_content = reasoning;
  if (role === "assistant" && value.tool_calls?.length) message.tool_calls = value.tool_calls.map((call) => readCall(call, where));
  return message;
}

function readCall(value, where) {
  const { name, arguments: given } = value?.function ?? {};
  if (typeof name !== "string" || typeof given !== "string") throw new Error(`${where} has a call without a name or arguments`);
  return { id: String(value.id), type: "function", function: { name, arguments: given } };
}
