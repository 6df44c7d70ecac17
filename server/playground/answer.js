// One answer, token by token. Touch, hover or focus a token to see its card; the arrow keys go from one to the next.

import { describe, hideCard, showCard } from "./card.js";
import { h } from "./dom.js";
import { Aligner } from "./tokens.js";

const ENDS = { length: "max_tokens reached", stop: "complete", tool_calls: "waits for results", abort: "ended by the server", error: "failed" };

export class Answer {
  constructor(label) {
    this.aligner = new Aligner();
    this.spans = new Map();
    this.text = "";
    this.calls = [];
    this.body = h("p", { class: "tokens", role: "group", "aria-label": `${label}, token by token` });
    this.end = h("p", { class: "end hint" });
    this.called = h("ul", { class: "calls", "aria-label": "Functions that are called" });
    this.element = h("div", { class: "answer" }, this.body, this.called, this.end);
    this.body.addEventListener("pointerover", (event) => this.point(event.target));
    this.body.addEventListener("pointerleave", () => this.body.contains(document.activeElement) || hideCard());
    this.body.addEventListener("click", (event) => this.point(event.target));
    this.body.addEventListener("focusin", (event) => this.point(event.target));
    this.body.addEventListener("focusout", hideCard);
    this.body.addEventListener("keydown", (event) => this.move(event));
  }

  feed({ text, tokens, finish, reason, calls }) {
    this.text += text;
    if (calls.length) this.call(calls);
    if (this.calls.length) tokens = this.aligner.tokens = []; // they spell the call
    for (const span of this.aligner.feed(text, tokens, finish != null)) this.body.append(this.draw(span));
    if (finish != null) this.close(finish, reason);
  }

  call(news) {
    for (const { index, id, function: called } of news) {
      const call = (this.calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } });
      call.function.name += called?.name ?? "";
      call.function.arguments += called?.arguments ?? "";
    }
    const items = this.calls.map((call) => h("li", {}, "calls ", h("code", {}, `${call.function.name}(${call.function.arguments})`)));
    this.called.replaceChildren(...items);
  }

  // As it goes on in a conversation.
  message() {
    const said = { role: "assistant", content: this.text };
    return this.calls.length ? { ...said, tool_calls: this.calls } : said;
  }

  // Text that came before the answer, such as the prompt that it continues.
  precede(text) {
    this.body.append(h("span", { class: "given" }, text));
  }

  close(finish, reason) {
    const why = typeof reason === "string" && reason ? ` (${JSON.stringify(reason)})` : "";
    this.end.textContent = finish === "stopped" ? "stopped by you" : `${ENDS[finish] ?? finish}${why}`;
    this.end.dataset.finish = finish;
  }

  draw(span) {
    if (!span.tokens.length) return document.createTextNode(span.text);
    const first = this.spans.size === 0;
    const hidden = span.text === "";
    const probability = Math.exp(Math.min(...span.tokens.map((token) => token.logprob ?? 0)));
    const element = h(
      "span",
      {
        class: hidden ? "token special" : "token", role: "button", tabindex: first ? "0" : "-1",
        "aria-label": `${hidden ? "special token " : ""}${describe(span)}`,
      },
      hidden ? "·" : span.text,
    );
    element.style.setProperty("--doubt", (1 - probability).toFixed(3));
    this.spans.set(element, span);
    return element;
  }

  point(element) {
    const span = this.spans.get(element);
    if (span) showCard(element, span);
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (!step || !this.spans.has(event.target)) return;
    event.preventDefault();
    const all = [...this.spans.keys()];
    const next = all[Math.max(0, Math.min(all.length - 1, all.indexOf(event.target) + step))];
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}
