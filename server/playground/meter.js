// How fast an answer comes, as the client sees it.

import { h } from "./dom.js";

const words = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

const duration = (seconds) => (seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(2)} s`);

const SHORT = 100; // milliseconds

export class Meter {
  constructor() {
    this.parts = Object.fromEntries(
      ["first", "rate", "count", "cached"].map((name) => [name, h("span", { class: "reading", "data-reading": name })]),
    );
    this.element = h("p", { class: "meter", role: "group", "aria-label": "Speed" }, Object.values(this.parts));
  }

  start() {
    this.began = performance.now();
    this.first = this.tokens = null;
    for (const part of Object.values(this.parts)) part.textContent = "";
  }

  // The time to the first token counts from the click; the rate from that token on. Where tokens come many at a time, as
  // of a search, or all within a moment, that would be a fiction: then the rate, too, counts from the click.
  feed(usage, searches) {
    if (!usage?.completion_tokens) return;
    const now = performance.now();
    const tokens = usage.completion_tokens;
    if (this.first == null) {
      this.first = { at: now, tokens };
      this.parts.first.textContent = `first token after ${duration((now - this.began) / 1000)}`;
    }
    if (tokens !== this.tokens) this.last = now;
    this.tokens = tokens;
    const whole = searches || this.last - this.first.at < SHORT;
    const seconds = (this.last - (whole ? this.began : this.first.at)) / 1000;
    const since = whole ? tokens : tokens - this.first.tokens;
    this.parts.rate.textContent = since > 0 && seconds > 0 ? `${(since / seconds).toFixed(since / seconds < 10 ? 1 : 0)} tokens/s` : "";
    this.parts.count.textContent = words(tokens, "token");
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    this.parts.cached.textContent = `prompt ${words(usage.prompt_tokens, "token")}${cached ? `, ${cached} of them from the cache` : ""}`;
  }
}
