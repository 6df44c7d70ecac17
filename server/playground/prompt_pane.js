// A prompt and what follows it, decoded in one way or in two, side by side.

import { h } from "./dom.js";
import { Meter } from "./meter.js";
import { presetNames } from "./parameters.js";
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
    const options = presetNames.map((name) => h("option", { value: name }, name));
    this.other = h("select", { id: "other" }, h("option", { value: "" }, "nothing"), options);
    this.form = h(
      "form",
      { onsubmit: (event) => (event.preventDefault(), this.start()) },
      h("label", { for: "prompt", class: "caption" }, context.isSeq2seq ? "Input" : "Prompt"),
      this.input,
      h(
        "div", { class: "row" }, this.session.startButton, this.session.stopButton,
        h("label", { class: "hint compare" }, "compare with ", this.other), h("span", { class: "hint keys" }, "Ctrl + Enter"),
      ),
    );
    this.element = h("div", {}, this.form, this.session.problem, this.output, this.session.said);
    this.input.value = context.examples.prompt;
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !event.isComposing) this.form.requestSubmit();
    });
  }

  body(preset = "") {
    const { parameters } = this.context;
    const values = preset ? parameters.valuesAs(preset) : parameters.values();
    return { model: this.context.model.id, prompt: this.input.value, ...values };
  }

  fill({ prompt }) {
    this.input.value = typeof prompt === "string" ? prompt : "";
  }

  async start() {
    if (this.session.running) return;
    const other = this.other.value;
    const { parameters, beams } = this.context;
    this.session.sent = null;
    const jobs = [{ title: other && `${parameters.mode}, as set`, makeBody: () => this.body(), beams }];
    if (other) jobs.push({ title: other, makeBody: () => this.body(other) });
    for (const job of jobs) Object.assign(job, { meter: new Meter(), place: h("div", {}) });
    this.output.classList.toggle("pair", jobs.length > 1);
    this.output.replaceChildren(
      ...jobs.map(({ title, meter, place }) => h("section", {}, title && h("h3", {}, title), meter.element, place)),
    );
    const given = this.context.isSeq2seq || parameters.some(["echo"]).echo ? "" : this.input.value;
    await this.session.run(this.path, jobs, given);
  }
}
