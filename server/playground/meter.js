// How fast an answer comes, as the client sees it.

import { h } from "./dom.js";

const words = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

const duration = (seconds) => (seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(2)} s`);

export class Meter {
  constructor() {
    this.parts = Object.fromEntries(
      ["first", "rate", "count", "cached"].map((name) => [name, h("span", { class: "reading", "data-reading": name })]),
    );
    this.element = h("p", { class: "meter", "aria-label": "Speed" }, Object.values(this.parts));
  }

  start() {
    this.began = performance.now();
    this.first = this.tokens = null;
    for (const part of Object.values(this.parts)) part.textContent = "";
  }

  // The time to the first token counts from the click; the rate from that token on, but of a search, whose tokens are
  // known many at a time, from the click, too.
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
    const seconds = (this.last - (searches ? this.began : this.first.at)) / 1000;
    const since = searches ? tokens : tokens - this.first.tokens;
    this.parts.rate.textContent = since > 0 && seconds > 0 ? `${(since / seconds).toFixed(since / seconds < 10 ? 1 : 0)} tokens/s` : "";
    this.parts.count.textContent = words(tokens, "token");
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    this.parts.cached.textContent = `prompt ${words(usage.prompt_tokens, "token")}${cached ? `, ${cached} found in the cache` : ""}`;
  }
}
