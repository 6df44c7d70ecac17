// A conversation. The first answer of each turn is what it goes on from; where that calls functions, what is typed next
// are their results.

import { h } from "./dom.js";
import { Follower } from "./follow.js";
import { Meter } from "./meter.js";
import { Session } from "./session.js";

export class ChatPane {
  name = "chat";
  title = "Chat";
  path = "/v1/chat/completions";
  schema = "chat";

  constructor(context) {
    this.context = context;
    this.session = new Session(context, "Send");
    this.meter = new Meter();
    this.messages = [];
    this.calls = []; // that wait for their results
    this.log = h("div", { role: "log", "aria-label": "Conversation" });
    this.area = h("div", { class: "log", tabindex: "0", role: "group", "aria-label": "Conversation, which scrolls" }, this.log);
    this.follower = new Follower(this.area, this.log);
    this.system = h("textarea", { id: "system", rows: 2, oninput: context.changed });
    const keys = "Enter sends, Shift + Enter breaks the line, Esc stops";
    this.input = h("textarea", { id: "message", rows: 2, placeholder: keys, oninput: context.changed });
    this.caption = h("label", { for: "message", class: "caption" }, "Message");
    this.clear = h("button", { type: "button", class: "quiet", onclick: () => this.restart() }, "New conversation");
    this.form = h(
      "form",
      { class: "composer", onsubmit: (event) => (event.preventDefault(), this.start()) },
      this.session.problem,
      this.caption,
      this.input,
      h("div", { class: "row" }, this.session.startButton, this.session.stopButton, this.meter.element, this.clear),
    );
    const system = h(
      "details",
      { class: "system" },
      h("summary", {}, "System message"),
      h("label", { for: "system", class: "unseen" }, "System message"),
      this.system,
    );
    this.element = h("div", {}, system, h("div", { class: "thread" }, this.area, this.follower.button), this.form, this.session.said);
    this.input.value = context.examples.chat;
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.form.requestSubmit();
    });
  }

  showCaption() {
    this.caption.textContent = this.calls.length ? `Result of ${this.calls[0].function.name}` : "Message";
  }

  // What is typed: a message, or the result of the function that was called.
  message(content) {
    const [call] = this.calls;
    return call ? { role: "tool", tool_call_id: call.id, content } : { role: "user", content };
  }

  body(message = this.message(this.input.value)) {
    const system = this.system.value.trim() ? [{ role: "system", content: this.system.value }] : [];
    const messages = [...system, ...this.messages, message];
    return { model: this.context.model.id, messages, ...this.context.parameters.values() };
  }

  fill({ messages }) {
    this.restart();
    const turns = Array.isArray(messages) ? messages.filter((turn) => typeof turn?.content === "string") : [];
    this.system.value = turns[0]?.role === "system" ? turns.shift().content : "";
    this.system.closest("details").open = this.system.value !== "";
    const last = turns.pop();
    this.input.value = last?.content ?? "";
    if (last?.role === "tool") this.calls = [{ id: last.tool_call_id, function: { name: "the call" } }];
    this.showCaption();
    for (const turn of turns) {
      this.messages.push(turn);
      this.log.append(h("p", { class: turn.role === "assistant" ? "tokens given" : "said by-user" }, turn.content));
    }
  }

  async start() {
    const said = this.input.value;
    if (this.session.running || !said.trim()) return;
    const message = this.message(said);
    const place = h("div", { class: "said by-assistant" });
    const turn = h("div", { class: "turn" }, h("p", { class: "said by-user" }, said), place);
    this.log.append(turn);
    this.follower.follow();
    this.input.value = "";
    this.input.focus();
    if (this.calls.length > 1) this.messages.push(message); // the answer waits for the other results
    else {
      const job = { makeBody: () => this.body(message), place, meter: this.meter, beams: this.context.beams };
      const answers = await this.session.run(this.path, [job]);
      if (!turn.isConnected) return; // another conversation has begun
      if (answers === null) {
        turn.remove();
        this.input.value ||= said;
        return;
      }
      this.messages.push(message, answers[0].message());
      this.calls = [null, ...answers[0].calls];
    }
    this.calls.shift();
    this.showCaption();
    this.context.changed();
  }

  restart() {
    this.session.stop();
    this.session.sent = null;
    this.messages = [];
    this.calls = [];
    this.showCaption();
    this.log.replaceChildren();
    this.input.focus();
    this.context.changed();
  }
}
