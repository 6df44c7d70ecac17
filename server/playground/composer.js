// The field that a message is typed into, with Send or Stop beside it.

import { h } from "./dom.js";

export class Composer {
  constructor(session, meter, changed, send) {
    this.unsaved = h("p", { class: "problem", role: "alert" });
    this.problem = session.problem;
    this.input = h("textarea", { id: "message", rows: 1, "aria-label": "Message", placeholder: "Message", oninput: changed });
    this.element = h(
      "form",
      { class: "composer", onsubmit: (event) => (event.preventDefault(), send()) },
      this.unsaved, this.problem,
      h("div", { class: "line" }, this.input, session.startButton, session.stopButton),
      h("div", { class: "under" }, meter.element, h("span", { class: "hint keys" }, "Enter sends, Shift + Enter breaks the line, Esc stops")),
    );
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.element.requestSubmit();
    });
  }

  clear() {
    for (const part of [this.unsaved, this.problem]) part.replaceChildren();
    this.input.value = "";
  }
}

export function systemField(changed) {
  const field = h("textarea", { id: "system", rows: 2, oninput: changed });
  h("details", { class: "system" }, h("summary", {}, "System message"), h("label", { for: "system", class: "unseen" }, "System message"), field);
  return field;
}
