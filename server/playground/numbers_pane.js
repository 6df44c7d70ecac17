// Models that answer with numbers: a text or an image in, and a vector, classes, or words for a mask out.

import { askJson } from "./api.js";
import { h } from "./dom.js";
import { Session } from "./session.js";
import { Upload, filePicker } from "./uploads.js";

const SHOWN = 256; // features of a vector

const KINDS = {
  "/v1/fill-mask": ["Fill the mask", "A text with the model's mask token, such as [MASK] or <mask>", showMasks],
  "/v1/classify": ["Classify", "A text", showClasses],
  "/v1/embeddings": ["Embed", "A text", showVector],
};

export const numberPaths = Object.keys(KINDS);

export class NumbersPane {
  constructor(context, path) {
    const [title, caption, show] = KINDS[path];
    Object.assign(this, { context, path, title, show, name: path.split("/").pop(), schema: null });
    this.session = new Session(context, title);
    const id = `input-${this.name}`;
    const { inputs } = context.model;
    this.image = null;
    this.input = h("textarea", { id, rows: 3, spellcheck: "false", oninput: context.changed });
    this.picker = filePicker(inputs.includes("text") ? "or an image, in its place" : "An image", "image/*", () => this.read());
    this.output = h("div", { class: "output", role: "status", "aria-label": "Answer" });
    const text = h("div", {}, h("label", { for: id, class: "caption" }, caption), this.input);
    this.form = h(
      "form",
      { onsubmit: (event) => (event.preventDefault(), this.start()) },
      inputs.includes("text") && text,
      inputs.includes("image") && this.picker.element,
      h("div", { class: "row" }, this.session.startButton),
    );
    this.element = h("div", {}, this.form, this.session.problem, this.output);
    this.input.value = path === "/v1/fill-mask" ? "The cat sat on the [MASK]." : context.examples.prompt;
  }

  async read() {
    const [file] = this.picker.input.files;
    this.image = file ? await Upload.read(file) : null;
    this.context.changed();
  }

  body() {
    return { model: this.context.model.id, input: this.image ? { image: this.image } : this.input.value };
  }

  fill({ input }) {
    this.picker.input.value = "";
    this.image = null;
    this.input.value = typeof input === "string" ? input : "";
  }

  async start() {
    this.session.problem.replaceChildren();
    try {
      const body = this.body();
      const answer = await askJson(this.path, { body });
      this.output.replaceChildren(...answer.data.map(this.show));
      this.session.sent = body;
    } catch (error) {
      this.session.explain(error);
    }
    this.context.changed();
  }
}

const bars = (pairs) =>
  h("table", { class: "bars" }, h("tbody", {}, pairs.map(([name, share]) => {
    const bar = h("span", { class: "bar" });
    bar.style.setProperty("--share", Math.max(0, Math.min(1, share)));
    return h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, share.toFixed(4), bar));
  })));

function showMasks(item) {
  return h("div", {}, item.masks.map((words) => bars(words.map((word) => [word.token_str, word.score]))));
}

function showClasses(item) {
  if (item.entities) return bars(item.entities.map((entity) => [`${entity.text} (${entity.label})`, entity.score]));
  return bars(item.scores.map((entry) => [entry.label, entry.score]));
}

function showVector(item) {
  const values = item.embedding;
  const most = Math.max(...values.map(Math.abs)) || 1;
  const cells = values.slice(0, SHOWN).map((value) => {
    const cell = h("span", { class: value < 0 ? "feature below" : "feature" });
    cell.style.setProperty("--share", Math.abs(value) / most);
    return cell;
  });
  const first = values.slice(0, 4).map((value) => value.toFixed(4)).join(", ");
  const words = `${values.length} features, from ${first}, …`;
  return h("figure", { class: "vector" }, h("div", { "aria-hidden": "true" }, cells), h("figcaption", { class: "hint" }, words));
}
