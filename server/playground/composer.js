// The field that a message is typed into, with Send or Stop beside it.

import { Attachments } from "./attachments.js";
import { h } from "./dom.js";

export { asSent } from "./attachments.js";

export class Composer {
  constructor(session, meter, changed, send, sees) {
    this.unsaved = h("p", { class: "problem", role: "alert" });
    this.problem = session.problem;
    this.input = h("textarea", { id: "message", rows: 1, "aria-label": "Message", placeholder: "Message", oninput: changed });
    this.attached = new Attachments(changed, (text) => (this.problem.textContent = text));
    const { button, input, list, said } = this.attached;
    const keys = h("span", { class: "hint keys" }, "Enter sends, Shift + Enter breaks the line, Esc stops");
    this.element = h(
      "form",
      { class: "composer", onsubmit: (event) => (event.preventDefault(), send()) },
      this.unsaved, this.problem, sees && list, sees && said,
      h("div", { class: "line" }, this.input, session.startButton, session.stopButton),
      h("div", { class: "under" }, sees && h("div", {}, input, button), meter.element, keys),
    );
    if (sees) this.attached.listen(this.input, this.element);
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.element.requestSubmit();
    });
  }

  clear() {
    for (const part of [this.unsaved, this.problem]) part.replaceChildren();
    this.empty();
  }

  // The message that would be sent now.
  get message() {
    const { images } = this.attached;
    return { role: "user", content: this.input.value, ...(images.length ? { images } : {}) };
  }

  empty() {
    this.input.value = "";
    this.attached.set([]);
  }

  // A message that was not sent.
  restore({ content, images = [] }) {
    this.input.value ||= content;
    this.attached.set([...images, ...this.attached.images]);
  }
}

export function systemField(changed) {
  const field = h("textarea", { id: "system", rows: 2, oninput: changed });
  h("details", { class: "system" }, h("summary", {}, "System message"), h("label", { for: "system", class: "unseen" }, "System message"), field);
  return field;
}
