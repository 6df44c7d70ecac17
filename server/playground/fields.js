// A control for one parameter: its name, what it means, and its value, or undefined for the server's own default.

import { h, newId } from "./dom.js";
import { rangeInWords } from "./schema.js";
import { sentence } from "./words.js";

export class FieldError extends Error {
  constructor(name, message) {
    super(`${name} ${message}`);
    this.param = name;
  }
}

export class Field {
  constructor(description, onChange) {
    this.name = description.name;
    this.description = description;
    this.control = makeControl(description);
    const id = (this.control.id = newId("field"));
    this.control.setAttribute("aria-describedby", `${id}-meaning`);
    this.control.name = this.name;
    this.suggested = false; // its value is the page's idea
    this.control.addEventListener("input", () => {
      this.suggested = false;
      this.element.classList.toggle("is-set", this.control.value.trim() !== "");
      onChange(this);
    });
    const range = rangeInWords(description);
    this.element = h(
      "div",
      { class: `field field-${description.kind}` },
      h("label", { for: id }, h("code", {}, this.name), range && h("span", { class: "range" }, range)),
      this.control,
      h("p", { class: "meaning", id: `${id}-meaning` }, ...sentence(description.meaning)),
    );
  }

  set(value) {
    this.control.value = value === undefined ? "" : written(value, this.description.kind);
    this.element.classList.toggle("is-set", value !== undefined);
  }

  // What another one of this name holds.
  take(other) {
    this.control.value = other.control.value;
    this.element.classList.toggle("is-set", other.control.value.trim() !== "");
  }

  // Throws FieldError where what was typed cannot be sent.
  get() {
    const typed = this.control.value;
    if (typed.trim() === "") {
      if (this.control.validity.badInput) throw new FieldError(this.name, "must be a number.");
      return undefined;
    }
    return readers[this.description.kind](typed, this.name, this.description);
  }
}

const readers = {
  number: (typed) => Number(typed),
  integer(typed, name) {
    const value = Number(typed);
    if (Number.isSafeInteger(value)) return value;
    throw new FieldError(name, "must be an integer; this page can send up to 16 digits.");
  },
  choice: (typed) => (typed === "true" ? true : typed === "false" ? false : typed),
  text: (typed) => typed,
  texts: (typed) => typed.split("\n").filter((line) => line !== "").map((line) => line.replaceAll("\\n", "\n")),
  ids(typed, name) {
    const ids = typed.split(/[\s,]+/).filter(Boolean).map(Number);
    if (ids.every((id) => Number.isSafeInteger(id) && id >= 0)) return ids;
    throw new FieldError(name, "must be token ids, such as 5, 17.");
  },
  json(typed, name, { words }) {
    if (words.includes(typed.trim())) return typed.trim();
    try {
      return JSON.parse(typed);
    } catch {
      throw new FieldError(name, `must be JSON${EXAMPLES[name] ? `, such as ${EXAMPLES[name]}` : ""}.`);
    }
  },
};

const SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}';
const EXAMPLES = {
  bad_words_ids: "[[5, 17]]",
  json_schema: SCHEMA,
  logit_bias: '{"17": -5}',
  response_format: '{"type": "json_object"}',
  tools: `[{"type": "function", "function": {"name": "look_up", "parameters": ${SCHEMA}}}]`,
};

// A value as one would type it.
function written(value, kind) {
  if (kind === "texts") return [value].flat().map((text) => String(text).replaceAll("\n", "\\n")).join("\n");
  if (kind === "ids") return [value].flat().join(", ");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

// Where nothing is chosen the control shows what holds then, if the server tells.
function makeControl({ name, kind, low, openLow, high, choices, words, usual }) {
  if (kind === "choice") {
    const options = choices.map((choice) => h("option", { value: String(choice) }, String(choice)));
    return h("select", {}, h("option", { value: "" }, usual === undefined ? "default" : `default: ${usual}`), options);
  }
  if (kind === "number" || kind === "integer") {
    return h("input", {
      type: "number",
      inputmode: low < 0 ? "text" : kind === "integer" ? "numeric" : "decimal",
      placeholder: usual ?? "default",
      min: Math.abs(low) < 2 ** 31 && !openLow ? low : null,
      max: Math.abs(high) < 2 ** 31 - 1 ? high : null,
      step: kind === "integer" ? 1 : stepOf(low, high),
    });
  }
  if (kind === "texts") return h("textarea", { rows: 2, placeholder: "one a line; \\n for a line break", spellcheck: "false" });
  if (kind === "json") {
    const placeholder = EXAMPLES[name] ?? (words.join(", ") || "JSON");
    return h("textarea", { rows: placeholder.length > 40 ? 4 : 1, placeholder, spellcheck: "false", autocapitalize: "off" });
  }
  const placeholder = { ids: "5, 17, …", text: usual ?? "default" }[kind];
  return h("input", { type: "text", placeholder, spellcheck: "false", autocapitalize: "off" });
}

// What the arrow keys add; any number may be typed.
const stepOf = (low, high) => (Math.abs(high - low) <= 1 ? 0.05 : 0.1);
