// A prompt and what follows it.

import { h } from "./dom.js";
import { Session } from "./session.js";

export class PromptPane {
  name = "prompt";
  title = "Prompt";
  path = "/v1/completions";
  schema = "completion";

  constructor(context) {
    this.context = context;
    this.session = new Session(context, context.isSeq2seq ? "Answer" : "Continue");
    this.input = h("textarea", { id: "prompt", rows: 4, spellcheck: "false", oninput: context.changed }, "");
    this.output = h("div", { class: "output", role: "log", "aria-label": "Answer" });
    this.form = h(
      "form",
      { onsubmit: (event) => (event.preventDefault(), this.start()) },
      h("label", { for: "prompt", class: "caption" }, context.isSeq2seq ? "Input" : "Prompt"),
      this.input,
      h("div", { class: "row" }, this.session.startButton, this.session.stopButton, h("span", { class: "hint keys" }, "Ctrl + Enter")),
    );
    this.element = h("div", {}, this.form, this.session.problem, this.session.meter.element, this.output, this.session.said);
    this.input.value = context.examples.prompt;
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !event.isComposing) this.form.requestSubmit();
    });
  }

  body() {
    return { model: this.context.model.id, prompt: this.input.value, ...this.context.parameters.values() };
  }

  async start() {
    if (this.session.running) return;
    this.output.replaceChildren();
    const given = this.context.isSeq2seq || this.context.parameters.some(["echo"]).echo ? "" : this.input.value;
    await this.session.run(this.path, () => this.body(), this.output, given);
  }
}
