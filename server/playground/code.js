// A request as programs: curl, and Python with OpenAI's client.

import { address, getKey } from "./api.js";
import { h, newId } from "./dom.js";
import { linkTo } from "./link.js";
import { Upload, withoutFiles } from "./uploads.js";

// What OpenAI's client takes as arguments; all else goes into extra_body.
const STANDARD = new Set([
  "model", "prompt", "messages", "input", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "presence_penalty",
  "frequency_penalty", "logit_bias", "best_of", "echo", "stream",
]);

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

function curl(path, body) {
  const lines = [`curl ${body.stream ? "-N " : ""}${address(path)}`];
  if (getKey()) lines.push('-H "Authorization: Bearer $OCTAVO_API_KEY"');
  if (isForm(path)) lines.push(...Object.entries(body).map(formField));
  else lines.push("-H 'Content-Type: application/json'", `-d ${data(body)}`);
  return lines.join(" \\\n  ");
}

const formField = ([name, value]) => `-F ${quoted(`${name}=${value instanceof Upload ? `@${value.name}` : value}`)}`;

// A file is read by the shell, within double quotes.
function data(body) {
  const files = [];
  const json = withoutFiles(body, (file) => `${MARK}${files.push(file) - 1}`);
  if (!files.length) return quoted(json);
  const escaped = json.replace(/[\\"`$]/g, "\\$&");
  return `"${escaped.replace(new RegExp(`${MARK}(\\d+)`, "g"), (_, place) => `$(base64 -w0 ${quoted(files[place].name)})`)}"`;
}

const MARK = "\ufdd0file"; // no text has this character
const isForm = (path) => path.startsWith("/v1/audio/");

// A JSON value as Python writes it. A string of JSON is one of Python's, but for characters beyond 16 bits, which stay
// as they are.
function literal(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (value instanceof Upload) return `base64.b64encode(open(${literal(value.name)}, "rb").read()).decode()`;
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
  const reads = !isForm(path) && withoutFiles(body, () => MARK).includes(MARK);
  const imports = [reads && "import base64", getKey() && "import os"].filter(Boolean);
  const head = [...imports, ...(imports.length ? [""] : []), "from openai import OpenAI"];
  head.push("", `client = OpenAI(base_url=${literal(address("v1").href)}, api_key=${key})`);
  if (isForm(path)) {
    const written = (value) => (value instanceof Upload ? `open(${literal(value.name)}, "rb")` : literal(value));
    const fields = Object.entries(body).map(([name, value]) => `${name}=${written(value)}`);
    return [...head, `print(client.audio.transcriptions.create(${fields.join(", ")}).text)`].join("\n");
  }
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
  constructor(place, title, link) {
    Object.assign(this, { title, link });
    link.addEventListener("click", () => this.copy(linkTo(this.path, this.body), link));
    this.listings = [this.listing("curl", curl), this.listing("Python", python)];
    place.append(...this.listings.map((listing) => listing.element));
  }

  listing(title, write) {
    const id = newId("code");
    const text = h("code", { id });
    const copy = h("button", { type: "button", class: "quiet", "aria-describedby": id }, "Copy");
    copy.addEventListener("click", () => this.copy(text.textContent, copy, text));
    const element = h(
      "details",
      { class: "listing", open: title === "curl" },
      h("summary", {}, title),
      h("pre", { tabindex: "0", role: "group", "aria-label": `The request as ${title}` }, text),
      copy,
    );
    return { element, text, write };
  }

  // The request of the answer that is shown, else the one that the forms make; `makeBody` throws where a field holds
  // what cannot be sent.
  show(path, sent, makeBody, streams) {
    this.title.textContent = sent ? "The same request" : "This request";
    Object.assign(this, { path, body: null });
    try {
      this.body = sent ?? makeBody();
    } catch (error) {
      for (const { text } of this.listings) text.textContent = `# ${error.message}`;
    }
    this.link.hidden = !this.body || isForm(path) || withoutFiles(this.body, () => MARK).includes(MARK);
    if (!this.body) return;
    const body = { ...this.body, ...(streams ? { stream: true } : {}) };
    for (const { text, write } of this.listings) text.textContent = write(path, body);
  }

  // Only there on HTTPS and on this machine; elsewhere the text is at least selected, or shown.
  async copy(text, button, element = null) {
    const label = button.textContent;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      if (!element) {
        history.replaceState(null, "", text);
        button.textContent = "It stands in the address";
        return;
      }
      getSelection().selectAllChildren(element);
      if (!document.execCommand("copy")) {
        button.textContent = "Selected: press Ctrl + C";
        return;
      }
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = label), 2000);
  }
}
