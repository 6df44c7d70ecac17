// The present settings as programs: curl, and Python with OpenAI's client.

import { address, getKey } from "./api.js";
import { h, newId } from "./dom.js";

// What OpenAI's client takes as arguments; all else goes into extra_body.
const STANDARD = new Set([
  "model", "prompt", "messages", "input", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "presence_penalty",
  "frequency_penalty", "logit_bias", "best_of", "echo", "stream",
]);

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

function curl(path, body) {
  const lines = [`curl ${body.stream ? "-N " : ""}${address(path)}`, "-H 'Content-Type: application/json'"];
  if (getKey()) lines.push('-H "Authorization: Bearer $OCTAVO_API_KEY"');
  lines.push(`-d ${quoted(JSON.stringify(body))}`);
  return lines.join(" \\\n  ");
}

// A JSON value as Python writes it. A string of JSON is one of Python's, but for characters beyond 16 bits, which stay
// as they are.
function literal(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, item]) => `${literal(name)}: ${literal(item)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}

const CALLS = {
  "/v1/completions": ["completions.create", "chunk.choices[0].text"],
  "/v1/chat/completions": ["chat.completions.create", 'chunk.choices[0].delta.content or ""'],
};

function python(path, body) {
  const key = getKey() ? 'os.environ["OCTAVO_API_KEY"]' : '"none"';
  const head = getKey() ? ["import os", "", "from openai import OpenAI"] : ["from openai import OpenAI"];
  head.push("", `client = OpenAI(base_url=${literal(address("v1").href)}, api_key=${key})`);
  if (!CALLS[path]) {
    const call = path === "/v1/embeddings" ? [
      `answer = client.embeddings.create(model=${literal(body.model)}, input=${literal(body.input)})`,
      "print(answer.data[0].embedding)",
    ] : [`answer = client.post(${literal(path.slice(3))}, body=${literal(body)}, cast_to=object)`, "print(answer)"];
    return [...head, ...call].join("\n");
  }
  const [call, text] = CALLS[path];
  const entries = Object.entries(body);
  const extra = Object.fromEntries(entries.filter(([name]) => !STANDARD.has(name)));
  const lines = entries.filter(([name]) => STANDARD.has(name)).map(([name, value]) => `    ${name}=${literal(value)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra)},`);
  return [
    ...head, `stream = client.${call}(`, ...lines, ")", "for chunk in stream:", "    if chunk.choices:",
    `        print(${text}, end="", flush=True)`,
  ].join("\n");
}

export class Code {
  constructor(place) {
    this.listings = [this.listing("curl", curl), this.listing("Python", python)];
    place.append(...this.listings.map((listing) => listing.element));
  }

  listing(title, write) {
    const id = newId("code");
    const text = h("code", { id });
    const copy = h("button", { type: "button", class: "quiet", "aria-describedby": id }, "Copy");
    copy.addEventListener("click", () => this.copy(text, copy));
    const element = h(
      "details",
      { class: "listing", open: title === "curl" },
      h("summary", {}, title),
      h("pre", { tabindex: "0", "aria-label": `${title} for the present settings` }, text),
      copy,
    );
    return { element, text, write };
  }

  // `makeBody` throws where a field holds what cannot be sent.
  show(path, makeBody, streams) {
    let body;
    try {
      body = { ...makeBody(), ...(streams ? { stream: true } : {}) };
    } catch (error) {
      for (const { text } of this.listings) text.textContent = `# ${error.message}`;
      return;
    }
    for (const { text, write } of this.listings) text.textContent = write(path, body);
  }

  async copy(text, button) {
    try {
      await navigator.clipboard.writeText(text.textContent);
    } catch {
      // Only there on HTTPS and on this machine; elsewhere the text is at least selected.
      getSelection().selectAllChildren(text);
      if (!document.execCommand("copy")) {
        button.textContent = "Selected: press Ctrl + C";
        return;
      }
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  }
}
