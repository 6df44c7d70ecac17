// One answer, token by token. Touch, hover or focus a token to see its card; the arrow keys go from one to the next.

import { Calls } from "./calls.js";
import { describe, hideCard, showCard } from "./card.js";
import { h, notTooOften } from "./dom.js";
import { showMarkdown } from "./markdown.js";
import { Aligner } from "./tokens.js";

const ENDS = { length: "max_tokens reached", stop: "complete", tool_calls: "waits for results", abort: "ended by the server", error: "failed" };

export class Answer {
  // A `rich` one is shown as Markdown, and token by token where that is chosen.
  constructor(label, rich = false) {
    this.rich = rich;
    this.aligner = new Aligner();
    this.spans = new Map();
    this.text = "";
    this.reasoning = "";
    this.calls = new Calls();
    this.body = h("p", { class: "tokens", role: "group", "aria-label": `${label}, token by token` });
    this.end = h("p", { class: "end hint" });
    this.prose = h("div", { class: "prose" });
    this.thoughts = h("div", { class: "prose" });
    this.fold = h("details", { class: "reasoning", hidden: true }, h("summary", {}, "Reasoning"), this.thoughts);
    const parts = rich ? [this.fold, this.prose] : [];
    this.element = h("div", { class: rich ? "answer rich" : "answer" }, parts, this.body, this.calls.element, this.end);
    this.showSoon = notTooOften(() => this.show());
    this.body.addEventListener("pointerover", (event) => this.point(event.target));
    this.body.addEventListener("pointerleave", () => this.body.contains(document.activeElement) || hideCard());
    this.body.addEventListener("click", (event) => this.point(event.target));
    this.body.addEventListener("focusin", (event) => this.point(event.target));
    this.body.addEventListener("focusout", hideCard);
    this.body.addEventListener("keydown", (event) => this.move(event));
  }

  feed({ text, reasoning = "", tokens, finish, reason, calls }) {
    this.text += text;
    this.reasoning += reasoning;
    if (calls.length) this.calls.feed(calls);
    if (this.calls.length) tokens = this.aligner.tokens = []; // they spell the call
    for (const span of this.aligner.feed(reasoning + text, tokens, finish != null)) this.body.append(this.draw(span));
    this.showSoon();
    if (finish != null) this.close(finish, reason);
  }

  get isEmpty() {
    return !this.text && !this.reasoning && !this.calls.length;
  }

  // As it goes on in a conversation.
  message() {
    const said = { role: "assistant", content: this.text };
    if (this.reasoning) said.reasoning_content = this.reasoning;
    return this.calls.length ? { ...said, tool_calls: this.calls.list } : said;
  }

  // An answer of before, whose tokens nobody has kept.
  static of({ content, reasoning_content: reasoning = "", tool_calls: calls = [] }) {
    const answer = new Answer("Answer", true);
    answer.text = content;
    answer.reasoning = reasoning;
    answer.show();
    answer.calls.feed(calls.map((call, index) => ({ index, ...call })));
    return answer;
  }

  show() {
    if (!this.rich) return;
    showMarkdown(this.prose, this.text);
    showMarkdown(this.thoughts, this.reasoning);
    this.fold.hidden = !this.reasoning;
  }

  // Text that came before the answer, such as the prompt that it continues.
  precede(text) {
    this.body.append(h("span", { class: "given" }, text));
  }

  close(finish, reason) {
    const why = typeof reason === "string" && reason ? ` (${JSON.stringify(reason)})` : "";
    this.end.textContent = finish === "stopped" ? "stopped by you" : `${ENDS[finish] ?? finish}${why}`;
    this.end.dataset.finish = finish;
    this.show();
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
    this.element.classList.add("scored");
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
