// A conversation. The first answer of each turn is what it goes on from.

import { h } from "./dom.js";
import { Session } from "./session.js";

export class ChatPane {
  name = "chat";
  title = "Chat";
  path = "/v1/chat/completions";
  schema = "chat";

  constructor(context) {
    this.context = context;
    this.session = new Session(context, "Send");
    this.messages = [];
    this.log = h("div", { class: "log", role: "log", "aria-label": "Conversation" });
    this.system = h("textarea", { id: "system", rows: 2, oninput: context.changed });
    this.input = h("textarea", { id: "message", rows: 2, oninput: context.changed });
    this.clear = h("button", { type: "button", class: "quiet", onclick: () => this.restart() }, "New conversation");
    this.form = h(
      "form",
      { onsubmit: (event) => (event.preventDefault(), this.start()) },
      h(
        "details",
        { class: "system" },
        h("summary", {}, "System message"),
        h("label", { for: "system", class: "unseen" }, "System message"),
        this.system,
      ),
      h("label", { for: "message", class: "caption" }, "Message"),
      this.input,
      h("div", { class: "row" }, this.session.startButton, this.session.stopButton, this.clear, h("span", { class: "hint keys" }, "Enter")),
    );
    this.element = h("div", {}, this.log, this.session.problem, this.session.meter.element, this.form, this.session.said);
    this.input.value = context.examples.chat;
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.form.requestSubmit();
    });
  }

  // With nothing typed it is the last request again.
  body(said = this.input.value) {
    const system = this.system.value.trim() ? [{ role: "system", content: this.system.value }] : [];
    const again = !said.trim() && this.messages.length > 0;
    const turns = again ? this.messages.slice(0, -1) : [...this.messages, { role: "user", content: said }];
    return { model: this.context.model.id, messages: [...system, ...turns], ...this.context.parameters.values() };
  }

  async start() {
    const said = this.input.value;
    if (this.session.running || !said.trim()) return;
    const place = h("div", { class: "said by-assistant" });
    const turn = h("div", { class: "turn" }, h("p", { class: "said by-user" }, said), place);
    this.log.append(turn);
    this.input.value = "";
    const texts = await this.session.run(this.path, () => this.body(said), place);
    if (texts === null) {
      turn.remove();
      this.input.value ||= said;
    } else {
      this.messages.push({ role: "user", content: said }, { role: "assistant", content: texts[0] });
    }
    this.context.changed();
  }

  restart() {
    this.session.stop();
    this.messages = [];
    this.log.replaceChildren();
    this.input.focus();
    this.context.changed();
  }
}
