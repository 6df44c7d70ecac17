// The form of parameters: groups, presets for the three ways to decode, and the values that were set.

import { h } from "./dom.js";
import { Field } from "./fields.js";

// An order for the eye. What the server knows beyond these stands in the last group, which nothing has to name.
const GROUPS = [
  ["Length", ["max_tokens", "min_tokens", "stop", "ignore_eos"]],
  ["Sampling", ["temperature", "top_p", "top_k", "min_p", "seed", "n", "best_of"]],
  ["Beam search", ["num_beams", "length_penalty", "early_stopping", "use_beam_search", "renormalize_logits"]],
  ["Tools and JSON", ["tools", "tool_choice", "parallel_tool_calls", "json_schema"]],
  ["Repetition", ["repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size"]],
  ["More", []],
];

// What a preset sets; it clears what belongs to the others.
const PRESETS = [
  ["Greedy", "always the most probable token", { temperature: 0 }],
  ["Sampling", "tokens drawn by their probability", { temperature: 0.8, top_p: 0.95 }],
  ["Beams", "several continuations, kept while they are the best", { num_beams: 4 }],
];
export const presetNames = PRESETS.map(([name]) => name);
const DECIDING = ["temperature", "top_p", "top_k", "min_p", "num_beams", "use_beam_search", "best_of"];

export class Parameters {
  constructor(form, presets, onChange) {
    this.form = form;
    this.presets = presets;
    this.onChange = onChange;
    this.fields = new Map();
    this.open = new Set(["Length", "Sampling"]);
    this.usual = {}; // what holds where nothing is set
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  // Show these fields; values of those that stay are kept. `usual` has the server's own values, by name.
  show(descriptions, usual) {
    const old = this.fields;
    this.usual = usual;
    const changed = () => {
      this.markPreset();
      this.onChange();
    };
    this.fields = new Map(descriptions.map((item) => [item.name, new Field({ ...item, usual: usual[item.name] }, changed)]));
    for (const [name, field] of this.fields) {
      if (old.has(name)) field.take(old.get(name));
      field.suggested = old.get(name)?.suggested ?? false;
    }
    const rest = new Set(this.fields.keys());
    for (const [, names] of GROUPS) for (const name of names) rest.delete(name);
    const groups = GROUPS.map(([title, names]) => [title, (names.length ? names : [...rest]).filter((name) => this.fields.has(name))]);
    this.buttons = PRESETS.map(([name, meaning]) => this.makePreset(name, meaning));
    this.presets.replaceChildren(...this.buttons);
    this.form.replaceChildren(
      ...groups.filter(([, names]) => names.length).map(([title, names]) => this.makeGroup(title, names)),
      h("button", { type: "button", class: "quiet", onclick: () => this.reset() }, "Back to the defaults"),
    );
    this.markPreset();
  }

  makePreset(name, meaning) {
    const button = h("button", { type: "button", title: meaning, "aria-pressed": "false" }, name);
    button.addEventListener("click", () => this.set({ ...Object.fromEntries(DECIDING.map((key) => [key])), ...this.presetValues(name) }));
    return button;
  }

  // A model that searches by itself has to be told not to.
  presetValues(name) {
    const [, , values] = PRESETS.find(([other]) => other === name);
    return this.usual.num_beams > 1 ? { num_beams: 1, ...values } : values;
  }

  // What was set, but decoded in the way of a preset. Throws FieldError.
  valuesAs(name) {
    const others = Object.entries(this.values()).filter(([key]) => !DECIDING.includes(key));
    return { ...Object.fromEntries(others), ...this.presetValues(name) };
  }

  makeGroup(title, names) {
    const elements = names.map((name) => this.fields.get(name).element);
    const box = h("details", { class: "group", open: this.open.has(title) }, h("summary", {}, title), elements);
    box.addEventListener("toggle", () => this.open[box.open ? "add" : "delete"](title));
    return box;
  }

  // A value to begin with, or none; what somebody typed stays.
  suggest(name, value) {
    const field = this.fields.get(name);
    if (!field || (field.control.value && !field.suggested)) return;
    field.set(value);
    field.suggested = value !== undefined;
  }

  set(values) {
    for (const [name, value] of Object.entries(values)) this.fields.get(name)?.set(value);
    this.markPreset();
    this.onChange();
  }

  reset() {
    this.setAll({});
  }

  // How the next answer is decoded, by the name of a preset.
  get mode() {
    const { temperature, top_k, num_beams, use_beam_search } = { ...this.usual, ...this.some(DECIDING) };
    const set = this.some(["temperature", "top_k", "top_p", "min_p", "num_beams"]);
    const searches = "num_beams" in set || !Object.values(set).some((value) => value > 0);
    if (use_beam_search || (num_beams > 1 && searches)) return "Beams";
    return temperature === 0 || top_k === 1 ? "Greedy" : "Sampling";
  }

  // These values, and no others.
  setAll(values) {
    this.set(Object.fromEntries([...this.fields.keys()].map((name) => [name, values[name] ?? undefined])));
  }

  markPreset() {
    const { mode } = this;
    for (const button of this.buttons) button.setAttribute("aria-pressed", String(button.textContent === mode));
  }

  some(names) {
    const values = {};
    for (const name of names) {
      try {
        const value = this.fields.get(name)?.get();
        if (value !== undefined) values[name] = value;
      } catch {
        values[name] = null; // not a value yet; `values` says so
      }
    }
    return values;
  }

  // What was set. Throws FieldError.
  values() {
    const entries = [...this.fields.values()].map((field) => [field.name, field.get()]);
    return Object.fromEntries(entries.filter(([, value]) => value !== undefined));
  }

  // Take the reader to the field at fault; false where the page has none.
  point(name) {
    const field = this.fields.get(name);
    if (!field) return false;
    for (let box = field.element.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
    field.control.focus();
    return true;
  }
}
